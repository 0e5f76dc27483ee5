"""Fast Video VAE, a node pack for ComfyUI: the door.

ComfyUI imports this file when it scans `custom_nodes`, pytest imports it when it collects, and
Python imports it before any of the folders below. It imports nothing, so that none of them pays
for what it does not use.
"""

# ComfyUI's older way to list nodes; none yet.
NODE_CLASS_MAPPINGS: dict[str, type] = {}
