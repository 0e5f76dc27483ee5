"""Comparison of VAEs on the same weights and input: seconds, memory and difference of the results.

They run in the order A B, then B A, so that heat and other load affect all equally. A warm-up, in
which kernels are selected and results compared, is not counted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import device_name, is_out_of_memory, processor, release_cached
from .measure import measured
from .report import DECODE, Comparison, ContestantResult


@dataclass(frozen=True)
class Contestant:
    """An implementation; a decode returns images `[..., T, H, W, C]` in [0, 1]."""

    name: str
    run: Callable[[], Tensor]
    prepare: Callable[[], None] = lambda: None  # called before each run, not counted


def compare(
    task: str,
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    dtype: str,
    device: torch.device,
    passed: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run contestants on the same work in turn; the first is the baseline of the others.

    One that runs out of memory is left out of later rounds.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected at least 1")
    entries = [(each, ContestantResult(each.name)) for each in contestants]
    expected: Tensor | None = None
    for contestant, result in entries:  # the warm-up
        made = _call(contestant, result, device)
        result.seconds, result.peak_bytes = (), None
        if made is not None and result is entries[0][1]:
            expected = made.cpu()
        elif made is not None and expected is not None:
            _describe(task, result, made, entries[0][0].name, expected)
        del made
        passed()
    del expected
    for index in range(rounds):
        for contestant, result in entries[:: -1 if index % 2 else 1]:
            if result.failure is None:
                _call(contestant, result, device)
            passed()
    return Comparison(task, dtype, tuple(result for _, result in entries))


def _call(contestant: Contestant, result: ContestantResult, device: torch.device) -> Tensor | None:
    """Run a contestant once, and add the cost to its result; None: memory ran out."""
    try:
        contestant.prepare()
        made, seconds, peak_bytes = measured(device, contestant.run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    else:
        result.seconds = (*result.seconds, seconds)
        if peak_bytes is not None:
            result.peak_bytes = max(result.peak_bytes or 0, peak_bytes)
        return made
    # Outside of the handler, which keeps the error and its tensors alive.
    result.seconds, result.peak_bytes, result.failure = (), None, "out of memory"
    release_cached(device)
    return None


def _describe(
    task: str, result: ContestantResult, made: Tensor, first: str, expected: Tensor
) -> None:
    """Note how much `made` differs from what the `first` contestant has made."""
    if made.shape != expected.shape:
        raise ValueError(
            f"{result.name} gives {list(made.shape)}; expected {list(expected.shape)} as {first} "
            "does"
        )
    if task == DECODE:
        result.psnr = psnr(made, expected)
    else:
        result.relative_error = relative_error(made, expected)


def psnr(images: Tensor, expected: Tensor) -> float:
    """Compute the PSNR of `[..., T, H, W, C]` in [0, 1] in dB, summed in float64 per frame."""
    error, count = 0.0, 0
    for one, other in zip(_frames(images), _frames(expected), strict=True):
        # On the host, because some devices lack float64.
        difference = one.cpu().double() - other.cpu().double()
        error += float(difference.square_().sum())
        count += difference.numel()
    if error == 0:
        return math.inf
    return math.nan if not math.isfinite(error) else 10 * math.log10(count / error)


def relative_error(latent: Tensor, expected: Tensor) -> float:
    """Return the norm of `latent - expected` over that of `expected`, both `[...]`, in float64."""
    one, other = latent.cpu().double(), expected.cpu().double()
    norm = float(other.norm())
    difference = float((one - other).norm())
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def device_label(device: torch.device) -> str:
    """Return the name of `device`: "NVIDIA H200", or that of the CPU with its thread count."""
    if device.type != "cpu":
        return device_name(device)
    name = processor() or "CPU"
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'' if threads == 1 else 's'}"


def _frames(images: Tensor) -> Tensor:
    """Return the frames as `[N, H, W, C]`, for one video without a copy."""
    return images.flatten(0, -4)
