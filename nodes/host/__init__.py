"""What all nodes need of ComfyUI: widgets, progress, memory, timing."""
