"""Modules that are imported when they are first used, so that ComfyUI starts without them."""

from importlib import import_module


class Later:
    """A module of this folder.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        return getattr(import_module(f".{self._name}", __package__), attribute)
