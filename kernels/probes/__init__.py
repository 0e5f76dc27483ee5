"""Properties of devices that are measured once and kept on disk for later processes."""
