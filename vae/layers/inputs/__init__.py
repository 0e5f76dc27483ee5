"""What a convolution reads: the fill of its buffer, and 8-bit codes with their weights."""
