"""Fast Video VAE, a node pack for ComfyUI: the door.

ComfyUI imports this file when it scans `custom_nodes`, pytest imports it when it collects, and
Python imports it before any of the folders below. It imports nothing, so that none of them pays
for what it does not use; the nodes are imported when ComfyUI asks for them.
"""

# Help pages, where ComfyUI's frontend looks for them: web/docs/<node id>.md.
WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> object:
    """The extension: what ComfyUI calls to learn which nodes there are."""
    from .nodes import FastVideoVAEExtension  # noqa: PLC0415, imported when it is asked for

    return FastVideoVAEExtension()
