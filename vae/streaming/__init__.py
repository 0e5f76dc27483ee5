"""A video on its way through a network, step by step."""
