"""Modules that are imported on first use, so that ComfyUI starts without them."""

from importlib import import_module


class Later:
    """A module of this pack by its name from the pack's folder on: "nodes.vae.comfy_vae"."""

    def __init__(self, name: str) -> None:
        self._name = f"...{name}"

    def __getattr__(self, attribute: str) -> object:
        return getattr(import_module(self._name, __package__), attribute)
