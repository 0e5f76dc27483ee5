"""The nodes that load, encode and decode."""
