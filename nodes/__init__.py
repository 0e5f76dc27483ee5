"""ComfyUI's nodes: the only folder that imports ComfyUI."""
