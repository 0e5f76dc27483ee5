"""The node that upscales a video from file to file with SeedVR2."""
