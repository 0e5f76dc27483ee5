"""The node that samples with one or two experts of Wan."""
