"""One video on several devices, of this process or of others; imported through its files."""
