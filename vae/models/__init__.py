"""The networks of each family, and their names in checkpoints."""
