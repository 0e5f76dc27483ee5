"""When a prompt ends in ComfyUI, and whether it came to its end.

ComfyUI tells providers of caches about the end of every prompt, also of one that failed or was
interrupted. A provider that caches nothing hears of it; while there is none, and where a ComfyUI
has no providers, nothing is heard. What is said of ComfyUI here was read off execution.py and
comfy_execution/ of 0.33.
"""

from collections.abc import Callable
from typing import Protocol

from comfy_execution import progress

try:
    from comfy_execution import cache_provider
except ImportError:  # an older ComfyUI
    cache_provider = None


class Ends(Protocol):
    """Hears of the ends of prompts while it is asked to."""

    def start(self) -> None:
        """Begin to listen; not twice."""
        ...

    def stop(self) -> None:
        """Listen no more; only after `start`."""
        ...


def ends(told: Callable[[str], None]) -> Ends:
    """What hears of the ends of prompts in this ComfyUI.

    Args:
        told: Called with the id of a prompt that has ended, in the thread that ran it.
    """
    if cache_provider is None:
        return _Silence()

    class Provider(cache_provider.CacheProvider):
        """Caches nothing; asked before every node that runs, which takes it microseconds."""

        def start(self) -> None:
            cache_provider.register_cache_provider(self)

        def stop(self) -> None:
            cache_provider.unregister_cache_provider(self)

        def should_cache(self, context: object, value: object = None) -> bool:
            return False

        async def on_lookup(self, context: object) -> None:
            return None

        async def on_store(self, context: object, value: object) -> None:
            return None

        def on_prompt_end(self, prompt_id: str) -> None:
            told(prompt_id)

    return Provider()


def stopped_early(prompt: str) -> bool | None:
    """Whether the latest prompt has ended in the middle of a node.

    Args:
        prompt: Its id.

    Returns:
        None: ComfyUI does not say, or has gone on to another prompt.
    """
    state = progress.get_progress_state()
    if getattr(state, "prompt_id", None) != prompt:
        return None
    running = progress.NodeState.Running
    return any(node["state"] == running for node in state.nodes.values())


class _Silence:
    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass
