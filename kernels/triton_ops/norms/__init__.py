"""Norms over channels and over groups."""
