"""When a prompt ends in ComfyUI, and whether it came to its end.

ComfyUI tells providers of caches about the end of every prompt, also of one that failed or was
interrupted. A provider that caches nothing hears of it; while there is none, and where a ComfyUI
has no providers, nothing is heard. What is said of ComfyUI here was read off execution.py and
comfy_execution/ of 0.33.
"""

from collections.abc import Callable

from comfy_execution import progress

try:
    from comfy_execution import cache_provider
except ImportError:  # an older ComfyUI
    cache_provider = None


class PromptEnds:
    """Calls back at the end of every prompt while it listens; never where ComfyUI has no providers.

    `told` gets the id of a prompt that has ended, in the thread that ran it.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self._provider = None if cache_provider is None else _provider(told)

    def start(self) -> None:
        """Begin to listen; not twice."""
        if self._provider is not None:
            cache_provider.register_cache_provider(self._provider)

    def stop(self) -> None:
        """Listen no more; only after `start`."""
        if self._provider is not None:
            cache_provider.unregister_cache_provider(self._provider)


def stopped_early(prompt: str) -> bool | None:
    """Whether the latest prompt has ended in the middle of a node.

    None: ComfyUI does not say, or has gone on to another prompt than this id's.
    """
    state = progress.get_progress_state()
    if getattr(state, "prompt_id", None) != prompt:
        return None
    running = progress.NodeState.Running
    return any(node["state"] == running for node in state.nodes.values())


def _provider(told: Callable[[str], None]) -> object:
    """What caches nothing; asked before every node that runs, which takes it microseconds."""

    class Provider(cache_provider.CacheProvider):
        def should_cache(self, context: object, value: object = None) -> bool:
            return False

        async def on_lookup(self, context: object) -> None:
            return None

        async def on_store(self, context: object, value: object) -> None:
            return None

        def on_prompt_end(self, prompt_id: str) -> None:
            told(prompt_id)

    return Provider()
