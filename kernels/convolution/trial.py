"""Trial of a candidate of a convolution: is it right and precise enough, and how fast.

The plain op is a candidate that calls the library: `aten`, or `sliced` where the library's `conv3d`
is poor. A trial runs on a `Sample`, at the shape of the call.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import measure
from ..autotune import agree, log_failure, log_incorrect
from ..devices import device_kind
from ..errors import Refusal, is_out_of_memory
from .compose import joined
from .fused import Fused
from .sample import Sample
from .weight import ConvWeight

_logger = logging.getLogger(__name__)

# Runs an op on a candidate, or raises its `Refusal`: `dispatch.ask`. The op `fuses` returns a
# `Fused`.
Ask = Callable[..., Any]

# Allowed difference from the plain op as a share of the largest value, in addition to roundings of
# the value itself: both round the products, and their sum with the residual, which can cancel them.
# In float32 they add thousands of products in another order.
_SHARE, _WIDE_SHARE = 2 * torch.finfo(torch.bfloat16).eps, 1e-4

# Rows and columns of the result that are compared with exact numbers, at a corner, where padding
# counts; and output channels at a time, for the memory of the weight in float64.
_SIDE = 16
_CHANNELS = 128

# Two errors of equal size differ by about 1 / sqrt(2 n) when measured on n numbers: by 2.5 % on the
# 768 numbers of the crop of a picture. In float32 the order of the sum decides the error.
_SLACK, _WIDE_SLACK = 1.025, 2.0

# Kinds of GPUs that compute the exact numbers; elsewhere the CPU does. MIOpen would search for
# their shape.
_EXACT_ON = ("nvidia",)

# The candidates that call the library.
_LIBRARY = ("aten", "sliced")

# Calls per round, if the plain op is shorter than this.
_SHORT_S, _CALLS = 1e-3, 5


def is_precise_enough(result: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """Return whether a candidate may serve: its error is at most that of the plain op in bfloat16.

    This is the precision policy of the convolutions. Sums of products in float16 pass; products in
    8 bits do not. In float32 only the order of a sum differs, so the error may be twice that of the
    plain op in float32.

    Args:
        result: `[...]`, numbers of the candidate, in any dtype.
        plain: Shape of `result`: the plain op in bfloat16 (float32 for that), of the same inputs.
        exact: Shape of `result`: the formula in float64, of the same inputs.

    Returns:
        False for NaN.
    """
    near = (each.to(exact.device).double() - exact for each in (result, plain))
    error, allowed = (each.square().mean().sqrt() for each in near)
    slack = _WIDE_SLACK if result.dtype == torch.float32 else _SLACK
    return bool(error <= slack * allowed)


class Trial:
    """Trials of candidates on one sample.

    Args:
        ask: Runs an op on a candidate.
        sample: The call.
        plain: Name of the plain op.
    """

    def __init__(self, ask: Ask, sample: Sample, plain: str) -> None:
        self._ask, self._sample, self.plain = ask, sample, plain
        call = self._call(plain, sample.out)
        self._expected = self._call(plain, None)()
        self._largest = max((each.abs().max() for each in self._frames(self._expected)), key=float)
        self._exact, self._plain = _references(ask, sample, self._corner, plain)
        taken = measure.seconds({plain: call}, sample.x.device, launches=False, repeats=1)[plain]
        self._repeats = _CALLS if taken < _SHORT_S else 1

    def plain_seconds(self) -> float:
        """Return the seconds of the plain op."""
        return self._seconds({self.plain: self._call(self.plain, self._sample.out)})[self.plain]

    def serves(self, name: str) -> bool:
        """Run a candidate once.

        Args:
            name: Name of the candidate.

        Returns:
            Whether it is right and precise enough.

        Raises:
            Exception: Memory ran out.
        """
        return self._share(name, timed=False) is not None

    def share(self, name: str) -> float | None:
        """Run a candidate.

        Args:
            name: Name of the candidate.

        Returns:
            Its time divided by that of the plain op, timed in turn; None: it does not serve.

        Raises:
            Exception: Memory ran out.
        """
        return self._share(name, timed=True)

    def _share(self, name: str, *, timed: bool) -> float | None:
        """Return what `share` does, or 1 for a candidate that serves and is not timed."""
        sample = self._sample
        try:
            call = self._call(name, sample.out)
            self._spoil()
            if not self._is_right(name, call()):
                return None
            if not timed:
                return 1.0
            times = self._seconds({self.plain: self._call(self.plain, sample.out), name: call})
        except Refusal as refusal:
            _logger.debug("%s refuses %s: %s", name, sample.op, refusal)
            return None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _logger.debug("%s failed", name, exc_info=True)
            if name not in _LIBRARY:  # the other of the two runs such calls
                log_failure(_family(name), sample.op, sample.x, error)
            return None
        return times[name] / times[self.plain]

    def _spoil(self) -> None:
        """Fill the memory of the next result with NaN, or with the residual of a call in place.

        The results of an earlier call there would make a kernel right that writes nothing. New
        memory is probably what was freed last.
        """
        out = self._sample.out
        if out is not None and out is self._sample.residual:
            self._sample.refill()
        else:
            (torch.empty_like(self._expected) if out is None else out).fill_(math.nan)

    def _seconds(self, calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
        device = self._sample.x.device
        return measure.seconds(calls, device, launches=False, repeats=self._repeats)

    def _call(self, name: str, out: Tensor | None) -> Callable[[], Tensor]:
        """Return a call of a candidate in the layout that a caller makes for it."""
        sample, norm = self._sample, self._sample.terms["gamma"] is not None
        fused: Fused = self._ask(
            name, "fuses", sample.x, sample.weight, sample.stride, sample.padding, norm=norm
        )
        made = sample.laid_out(fused)
        x, weight, bias = (made.pop(each) for each in ("x", "weight", "bias"))
        return functools.partial(self._ask, name, sample.op, x, weight, bias, **made, out=out)

    def _is_right(self, name: str, result: Tensor) -> bool:
        sample = self._sample
        pairs = zip(self._frames(result), self._frames(self._expected), strict=True)
        share = _WIDE_SHARE if result.dtype == torch.float32 else _SHARE
        near = functools.partial(agree, largest=self._largest.float(), share=share)
        if result.shape != self._expected.shape or not all(near(*pair) for pair in pairs):
            log_incorrect(_family(name), sample.op, sample.x)
            return False
        if is_precise_enough(result[self._corner], self._plain, self._exact):
            return True
        _logger.debug("%s is not precise enough for %s", name, sample.op)
        return False

    def _frames(self, result: Tensor) -> tuple[Tensor, ...]:
        """Return the frames of a result, which are compared one after the other to save memory."""
        return result.unbind(2 if self._sample.op == "conv3d" else 0)

    @property
    def _corner(self) -> tuple[slice, ...]:
        """The part of a result that is compared with exact numbers, of the last frame."""
        time = (slice(-1, None),) if self._sample.op == "conv3d" else ()
        return slice(-1, None), slice(None), *time, slice(_SIDE), slice(_SIDE)


def _family(name: str) -> str:
    """Return the name of a candidate without its variant, so that the log has one line for all."""
    return name.partition(":")[0]


def _references(
    ask: Ask, sample: Sample, corner: tuple[slice, ...], name: str
) -> tuple[Tensor, Tensor]:
    """Return the corner of the result in float64, and by the plain op `name` in bfloat16.

    Some GPUs lack one of these dtypes, so their numbers are computed on the CPU.
    """
    on_device = device_kind(sample.x.device) in _EXACT_ON
    here = sample.x.device if on_device else torch.device("cpu")
    inputs, weight = _inputs(sample).to(here), sample.weight.plain().to(here)
    residual = None if sample.residual is None else sample.residual[corner].to(here, copy=True)
    terms = {key: None if each is None else each.to(here) for key, each in sample.terms.items()}
    narrow = torch.float32 if inputs.dtype == torch.float32 else torch.bfloat16
    plain = ask(
        name if on_device else "aten", sample.op, inputs.to(narrow),
        ConvWeight.of(weight.to(narrow)), terms["bias"], stride=sample.stride, padding=(0, 0),
        out=None, residual=None if residual is None else residual.to(narrow),
        residual_bias=terms["residual_bias"], gamma=terms["gamma"],
    )  # fmt: skip
    parts = [_products(inputs, part, sample.stride) for part in weight.split(_CHANNELS)]
    exact = torch.cat(parts, dim=1)
    shape = (-1, *[1] * (exact.ndim - 2))
    for vector in (terms["bias"], terms["residual_bias"]):
        exact = exact if vector is None else exact + vector.double().view(shape)
    exact = exact if residual is None else exact + residual.double()
    if (gamma := terms["gamma"]) is not None:
        exact = F.normalize(exact, dim=1, eps=1e-12) * exact.shape[1] ** 0.5
        exact = F.silu(exact * gamma.double().view(shape))
    return exact, plain


def _inputs(sample: Sample) -> Tensor:
    """Return the padded inputs `[1, C, ...]` of the corner of the result."""
    _, _, *taps = sample.weight.shape
    x, tail = sample.x[-1:], sample.tail
    sizes: list[int] = []
    for axis in (-2, -1):
        pad, step, count = sample.padding[axis], sample.stride[axis], taps[axis]
        outputs = (x.shape[axis] + 2 * pad - count) // step + 1
        sizes.append((min(_SIDE, outputs) - 1) * step + count)
    ends = [size - pad for size, pad in zip(sizes, sample.padding, strict=True)]
    part = (..., slice(ends[0]), slice(ends[1]))
    x = x[part]
    if sample.op == "conv3d":
        x = joined(x, None if tail is None else tail[-1:][part])
        last = (x.shape[2] - taps[0]) // sample.stride[0] * sample.stride[0]
        x = x[:, :, last : last + taps[0]]
    (high, wide), (rows, columns) = sample.padding, x.shape[-2:]
    rest = sizes[0] - high - rows, sizes[1] - wide - columns
    x = F.pad(x.movedim(1, -1), (0, 0, wide, rest[1], high, rest[0]))
    return x.movedim(-1, 1)


def _products(x: Tensor, taps: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the convolution of `x` `[B, C, ...]` with `taps` `[C_out, C, ...]` in float64."""
    for axis, (length, step) in enumerate(zip(taps.shape[2:], stride, strict=True), 2):
        x = x.unfold(axis, length, step)
    count = taps.ndim - 2
    sizes = x.shape[0], *x.shape[2 : 2 + count]
    rows = x.movedim(1, 1 + count).reshape(math.prod(sizes), -1).double()
    return (rows @ taps.flatten(1).double().T).view(*sizes, -1).movedim(-1, 1)
