"""Comparison of VAEs on the same weights and input: seconds, memory and difference of the results.

They run in the order A B, then B A, so that heat and other load affect all equally. A warm-up, in
which kernels are selected and results compared, is not counted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels import default_device, device_name, is_out_of_memory, processor, release_cached
from .measure import Taken
from .report import DECODE, Comparison, ContestantResult

OUT_OF_MEMORY = "out of memory"

Measure = Callable[[Callable[[], Tensor]], tuple[Tensor, Taken]]


@dataclass(frozen=True)
class Contestant:
    """An implementation; a decode returns images `[..., T, H, W, C]` in [0, 1]."""

    name: str
    run: Callable[[], Tensor]
    prepare: Callable[[], None] | None = None  # called before each run, not counted


@dataclass
class _Entry:
    """A contestant and its measurements so far."""

    contestant: Contestant
    seconds: list[float] = field(default_factory=list)
    peaks: list[int | None] = field(default_factory=list)
    difference: float | None = None
    failure: str | None = None

    def call(self, measure: Measure) -> tuple[Tensor, Taken] | None:
        """Run it once; None: memory ran out."""
        try:
            if self.contestant.prepare is not None:
                self.contestant.prepare()
            return measure(self.contestant.run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler, which keeps the error and its tensors alive.
        self.failure = OUT_OF_MEMORY
        release_cached(default_device())
        return None

    def result(self, task: str) -> ContestantResult:
        """Return the measurements."""
        decodes = task == DECODE
        known = [peak for peak in self.peaks if peak is not None]
        return ContestantResult(
            self.contestant.name,
            () if self.failure else tuple(self.seconds),
            max(known) if known and not self.failure else None,
            psnr=self.difference if decodes else None,
            relative_error=None if decodes else self.difference,
            failure=self.failure,
        )


def compare(
    task: str,
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    dtype: str,
    measure: Measure,
    passed: Callable[[], None] | None = None,
) -> Comparison:
    """Run contestants on the same work in turn; the first is the baseline of the others.

    One that runs out of memory is left out of later rounds.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected at least 1")
    entries = [_Entry(each) for each in contestants]
    _warm_up(task, entries, measure, passed)
    for index in range(rounds):
        for entry in entries[:: -1 if index % 2 else 1]:
            if entry.failure is None:
                done = entry.call(measure)
                if done is not None:
                    entry.seconds.append(done[1].seconds)
                    entry.peaks.append(done[1].peak_bytes)
                # Freed before the next contestant runs.
                del done
            if passed is not None:
                passed()
    return Comparison(task, dtype, tuple(entry.result(task) for entry in entries))


def _warm_up(
    task: str, entries: Sequence[_Entry], measure: Measure, passed: Callable[[], None] | None
) -> None:
    """Run each contestant once and compare its result with that of the first."""
    expected: Tensor | None = None
    for entry in entries:
        done = entry.call(measure)
        if done is not None and entry is entries[0]:
            expected = done[0].cpu()
        elif done is not None and expected is not None:
            if done[0].shape != expected.shape:
                raise ValueError(
                    f"{entry.contestant.name} gives {list(done[0].shape)}; expected "
                    f"{list(expected.shape)} as {entries[0].contestant.name} does"
                )
            figure = psnr if task == DECODE else relative_error
            entry.difference = figure(done[0], expected)
        del done
        if passed is not None:
            passed()


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
