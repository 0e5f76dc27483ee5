"""Planning of a video: whole frames or tiles, the length of steps, and memory."""
