"""Keeping `torch.compile` out: a stream is no graph for a compiler.

A chunk is cut into parts by the memory that there is, its state is written in place, and the first
frame takes a path of its own. TorchDynamo would break the graph at every layer, and compile each
again for every length and size; what Inductor would fuse between the convolutions is fused here.
Qwen-Image's VAE became half as fast when it was compiled (unslothai/unsloth#10889). So a compiled
`encode` or `decode` runs as it does without: nothing of it is compiled, and nothing compiled again.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """Run a function outside of whatever `torch.compile` is at work.

    `torch.compiler.disable` does that, and importing what it is made of takes seconds. So it is
    asked only where somebody else has imported it, which who compiles has.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, those of the function
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return run  # type: ignore[return-value]
