"""A race between VAEs on the same weights and content: seconds, memory, and what they differ by.

They go in turn, A B and then B A, so that what heats up or slows down the machine meets all alike,
after a warm-up in which kernels are chosen and results are compared; it does not count.
"""

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...kernels import is_out_of_memory
from .measure import Taken
from .report import DECODE, Comparison, ContestantResult

OUT_OF_MEMORY = "out of memory"

_CPU_NAMES = Path("/proc/cpuinfo")

Measure = Callable[[Callable[[], Tensor]], tuple[Tensor, Taken]]


@dataclass(frozen=True)
class Contestant:
    """One of those that are compared.

    Attributes:
        name: What the results call it.
        run: Does the work once. A decode gives images `[..., T, H, W, C]` in [0, 1], an encode a
            latent.
        prepare: What is done before every call and not counted; None: nothing.
    """

    name: str
    run: Callable[[], Tensor]
    prepare: Callable[[], None] | None = None


@dataclass
class _Entry:
    """A contestant, and what is known of it so far."""

    contestant: Contestant
    seconds: list[float] = field(default_factory=list)
    peaks: list[int | None] = field(default_factory=list)
    difference: float | None = None
    failure: str | None = None

    def call(self, measure: Measure) -> tuple[Tensor, Taken] | None:
        """Let it work once; None: there was no memory for it."""
        try:
            if self.contestant.prepare is not None:
                self.contestant.prepare()
            return measure(self.contestant.run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Here, where the error and the tensors of its frames are gone.
        self.failure = OUT_OF_MEMORY
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def result(self, task: str) -> ContestantResult:
        """What was measured."""
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
    """Let contestants do the same work in turn.

    Args:
        task: "encode" or "decode": whether latents or images are compared.
        contestants: The first is what the others are compared with.
        rounds: How often each is measured, at least once; after a warm-up.
        dtype: Of the computation, as in "bf16".
        measure: Measures a call: a `Gauge`.
        passed: Called after each call.

    Returns:
        What was measured. One that ran out of memory is left out of the rounds after.

    Raises:
        ValueError: `rounds` is less than 1, or results have other shapes than the first's.
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
                # The next is not to find it there.
                del done
            if passed is not None:
                passed()
    return Comparison(task, dtype, tuple(entry.result(task) for entry in entries))


def _warm_up(
    task: str, entries: Sequence[_Entry], measure: Measure, passed: Callable[[], None] | None
) -> None:
    """Run each once, and compare what they give with what the first gives."""
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
    """Peak signal-to-noise ratio in dB of images `[..., T, H, W, C]` in [0, 1].

    Summed in float64, a frame at a time. Infinite where all is equal, NaN where a value is not
    finite.
    """
    error, count = 0.0, 0
    for one, other in zip(_frames(images), _frames(expected), strict=True):
        # The device of the work has its precision; the difference is taken on the host.
        difference = one.cpu().double() - other.cpu().double()
        error += float(difference.square_().sum())
        count += difference.numel()
    if error == 0:
        return math.inf
    return math.nan if not math.isfinite(error) else 10 * math.log10(count / error)


def relative_error(latent: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in float64."""
    one, other = latent.cpu().double(), expected.cpu().double()
    norm = float(other.norm())
    difference = float((one - other).norm())
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def device_label(device: torch.device) -> str:
    """What a device is called: "NVIDIA H200", or the CPU and how many threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    name = platform.processor() or platform.machine() or "CPU"
    if _CPU_NAMES.exists():
        lines = _CPU_NAMES.read_text(encoding="utf-8", errors="replace").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        name = next(names, name)
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'' if threads == 1 else 's'}"


def _frames(images: Tensor) -> Tensor:
    """`[N, H, W, C]` without a copy where there is one video."""
    return images.flatten(0, -4)
