"""The nodes that read and write video files."""
