"""The layers of the networks, and the state and memory that a video takes through them."""
