"""Modules that are imported when they are first used, so that ComfyUI starts without them."""

from importlib import import_module


class Later:
    """A module of this folder, or a folder beside it.

    Args:
        name: Its name.
        above: It is a folder beside this one.
    """

    def __init__(self, name: str, *, above: bool = False) -> None:
        self._name = f"..{name}" if above else f".{name}"

    def __getattr__(self, attribute: str) -> object:
        return getattr(import_module(self._name, __package__), attribute)
