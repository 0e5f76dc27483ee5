"""When a prompt ends in ComfyUI, and whether it came to its end.

ComfyUI tells providers of caches about the end of every prompt, also of one that failed or was
interrupted. A provider that caches nothing hears of it; while there is none, nothing is heard. What
is said of ComfyUI here was read off execution.py and comfy_execution/ of 0.33.
"""

from collections.abc import Callable

from comfy_execution import cache_provider, progress


class PromptEnds(cache_provider.CacheProvider):
    """Calls back at the end of every prompt while it listens, and caches nothing.

    `callback` gets the id of a prompt that has ended, in the thread that ran it. ComfyUI also calls
    `should_cache` before every node that runs, which takes microseconds.
    """

    def __init__(self, callback: Callable[[str], None]) -> None:
        self._callback = callback

    def start(self) -> None:
        """Begin to listen; not twice."""
        cache_provider.register_cache_provider(self)

    def stop(self) -> None:
        """Listen no more; only after `start`."""
        cache_provider.unregister_cache_provider(self)

    def should_cache(self, context: object, value: object = None) -> bool:
        """Never."""
        return False

    async def on_lookup(self, context: object) -> None:
        """There is nothing to find."""

    async def on_store(self, context: object, value: object) -> None:
        """Not called."""

    def on_prompt_end(self, prompt_id: str) -> None:
        """Call back."""
        self._callback(prompt_id)


def stopped_early(prompt: str) -> bool | None:
    """Whether the latest prompt has ended in the middle of a node.

    None: ComfyUI does not say, or has gone on to another prompt than this id's.
    """
    state = progress.get_progress_state()
    if getattr(state, "prompt_id", None) != prompt:
        return None
    running = progress.NodeState.Running
    return any(node["state"] == running for node in state.nodes.values())
