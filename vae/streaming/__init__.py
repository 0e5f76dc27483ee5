"""The run of a video through a network, step by step."""
