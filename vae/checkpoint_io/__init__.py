"""Checkpoint files, read as data: no code in them is executed."""
