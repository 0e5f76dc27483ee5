"""The parts of ComfyUI that all nodes use: widgets, progress, memory, timing."""
