"""Kernels that are built in the background, checked once per device, and then serve."""
