"""Fast Video VAE, a node pack for ComfyUI.

ComfyUI imports this file when it scans `custom_nodes`, pytest when it collects, and Python before
any of the folders below. It imports nothing itself; the nodes are imported when ComfyUI requests
them.
"""

# Help pages for ComfyUI's frontend: web/docs/<node id>.md.
WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> object:
    """Return the extension; ComfyUI calls this to get the nodes."""
    from .nodes import FastVideoVAEExtension  # noqa: PLC0415, imported on request

    return FastVideoVAEExtension()
