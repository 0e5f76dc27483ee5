"""One video on several devices of this process; imported through its files."""
