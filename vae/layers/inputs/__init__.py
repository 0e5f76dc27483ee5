"""What a convolution can read: 8-bit codes with their weights."""
