"""Streams without `torch.compile`.

`torch.compile` is disabled, because a stream does not suit a compiler. Chunks are divided by
the available memory, state is written in place, and the first frame takes a separate path.
TorchDynamo would break the graph at every layer and recompile each one for every length and size,
and what Inductor would fuse between the convolutions is already fused. Qwen-Image's VAE became half
as fast when compiled (unslothai/unsloth#10889). So a compiled `encode` or `decode` runs without
compilation.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """Run `function` without `torch.compile`, like `torch.compiler.disable`.

    `torch.compiler.disable` imports TorchDynamo, which takes seconds. So it is only called after
    other code has imported TorchDynamo, as every compilation does.

    Args:
        function: The function to wrap.

    Returns:
        The wrapped function.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, arguments of any function
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return run  # type: ignore[return-value]
