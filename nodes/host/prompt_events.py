"""The end of a prompt in ComfyUI, and whether it was completed.

ComfyUI notifies cache providers at the end of every prompt, also of one that failed or was
interrupted. A provider that caches nothing receives these calls while it is registered. Facts about
ComfyUI here are from execution.py and comfy_execution/ of 0.33.
"""

from collections.abc import Callable

from comfy_execution import cache_provider, progress


class PromptEnds(cache_provider.CacheProvider):
    """Calls back with the id of every prompt at its end, while it is registered."""

    def __init__(self, callback: Callable[[str], None]) -> None:
        self._callback = callback

    def start(self) -> None:
        """Register; not twice."""
        cache_provider.register_cache_provider(self)

    def stop(self) -> None:
        """Unregister; only after `start`."""
        cache_provider.unregister_cache_provider(self)

    def should_cache(self, context: object, value: object = None) -> bool:
        """Return False for any `context` and `value`."""
        return False

    async def on_lookup(self, context: object) -> None:
        """Find nothing for any `context`."""

    async def on_store(self, context: object, value: object) -> None:
        """Ignore `context` and `value`; not called."""

    def on_prompt_end(self, prompt_id: str) -> None:
        """Call back with `prompt_id`."""
        self._callback(prompt_id)


def stopped_early(prompt: str) -> bool | None:
    """Return whether `prompt`, an id, has ended within a node; None: it is unknown."""
    state = progress.get_progress_state()
    if getattr(state, "prompt_id", None) != prompt:
        return None
    running = progress.NodeState.Running
    return any(node["state"] == running for node in state.nodes.values())
