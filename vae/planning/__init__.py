"""How a video runs: whole or in tiles, in which steps, within which memory."""
