"""Pictures of latents: a node, and the animated preview of the sampler node."""
