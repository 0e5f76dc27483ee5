"""The layers of the networks, and the state and memory of a video within them."""
