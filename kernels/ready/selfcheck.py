"""Whether a kernel is right on a device: the rule, and the check of one variant on small samples.

The oracle is the reference in float64 on the CPU. A result of 16 bits is rounded where the plain
op's is, so its error may be that of the plain op. Attention rounds its weights too, in another
order, so single values can differ by more than their rounding while the error as a whole is not
larger: the rule compares root mean squares, of few enough rows that one wrong block is found.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import SIGNATURES
from ..codes import zero_of
from ..convolution.weight import ConvWeight
from ..devices import device_kind, device_name
from ..errors import Refusal, is_out_of_memory, log_failure, log_once
from ..modules import ask, backend
from ..shapes import white
from . import facts

_logger = logging.getLogger(__name__)

# Rows (pixels, queries) of a result whose errors are compared together.
_ROWS = 128

# Allowed error as a multiple of that of the plain op. Two errors of equal size, measured on the
# 12,288 values of 96 channels in a block, differ by less than 2.5 %. In float32 the order of a sum
# decides the error.
_SLACK, _WIDE_SLACK = 1.025, 2.0

# Allowed error of single values in units of half a step of the dtype.
_HALVES = 2

# Error of float32 arithmetic in front of the rounding to an integer, as a share of the range of
# the integers.
_BEFORE_ROUNDING = 16 * torch.finfo(torch.float32).eps

# Generates the arguments of the launches of an op, the same numbers in new memory each time.
Sample = Callable[[], Sequence[Any]]


def is_right(result: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """Return whether a result `[rows, C]` may replace that of the plain op; not with a NaN."""
    # Copies must be exact. Otherwise, in each block of 128 rows, the root mean square of the error
    # is at most 1.025 times that of the plain op (2.0 times in float32), or every value is within
    # two half steps of its dtype.
    wide, nearby, exact = (each.cpu().double() for each in (result, plain, exact))
    if torch.equal(nearby, exact):
        return torch.equal(wide, exact)
    slack = _WIDE_SLACK if result.dtype == torch.float32 else _SLACK
    near = _HALVES / 2 * torch.finfo(result.dtype).eps
    blocks = max(1, exact.shape[0] // _ROWS)
    parts = zip(*(each.tensor_split(blocks) for each in (wide, nearby, exact)), strict=True)
    for actual, other, right in parts:
        error, allowed = actual - right, other - right
        small = error.square().mean() <= slack**2 * allowed.square().mean()
        if not (small or bool((error.abs() <= near * right.abs()).all())):
            return False
    return True


def are_codes_right(codes: Tensor, exact: Tensor, lowest: int, highest: int) -> bool:
    """Return whether integers are those to which `exact`, clamped, rounds to nearest."""
    distance = (codes.cpu().double() - exact.clamp(lowest, highest)).abs()
    return bool((distance <= 0.5 + _BEFORE_ROUNDING * (highest - lowest)).all())


def checked(names: Sequence[str], op: str, sample: Sample) -> tuple[str, ...]:
    """Return the first of some backends that computes a sample rightly; empty: none does."""
    case = _Case(op, sample)
    right = (n for n in names if _answer(n, op, case.device, lambda n=n: case.is_right(n)))
    return tuple(itertools.islice(right, 1))


def running(name: str, op: str, sample: Sample) -> tuple[str, ...]:
    """Return the backend `name` if it runs the sample of `op`, without a comparison."""
    args = sample()
    runs = _answer(name, op, args[0].device, lambda: ask(name, op, *args) is not None)
    return (name,) if runs else ()


def _answer(name: str, op: str, device: torch.device, question: Callable[[], bool]) -> bool:
    """Return the answer to a question for a backend; False, in the log, if it cannot run."""
    try:
        if question():
            return True
        log_once(
            f"{device_name(device)}: wrong results of {name} in {op}; PyTorch instead; "
            f"{facts.report(device)}"
        )
    except Refusal as refusal:
        _logger.debug("%s refuses %s: %s", name, op, refusal)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        log_failure(name, op, device_name(device), error)
    return False


class _Case:
    """One call, with its results in float64 and by the plain op."""

    def __init__(self, op: str, sample: Sample) -> None:
        self._op, self._sample = op, sample
        self.device = sample()[0].device

    def is_right(self, name: str) -> bool:
        """Run the call on the backend `name`, and compare all that it writes."""
        given = self._given()
        y = ask(name, self._op, *given.values())
        if self._op == "int8_conv3d":  # its sums are exact, and its terms have an order
            here = _moved(self._given(), torch.device("cpu"), None)
            return torch.equal(y.cpu(), self._run("reference", here))
        if given.get("codes") is not None:
            return self._has_right_codes(y, given)
        if not y.dtype.is_floating_point:
            return self._has_right_levels(y)
        pairs = zip(_written(y, given), self._plain(), self._exact(), strict=True)
        return all(is_right(*map(_rows, each)) for each in pairs)

    def _given(self) -> dict[str, Any]:
        return dict(zip(SIGNATURES[self._op], self._sample(), strict=True))

    def _run(self, name: str, given: dict[str, Any]) -> Tensor:
        """Run the call on the library or the reference, with the passes of the reference."""
        launches = backend("reference").launches()
        if self._op != "conv3d":
            return launches[self._op](*given.values())
        x, weight, *terms, gamma, tail, _, stride, padding, _ = given.values()
        sums, none = backend(name).fuses(weight).sums, (None,) * 3
        convolve = backend(name).launches()["conv3d"]
        y = convolve(x, weight, *(terms if sums else none), None, tail, None, stride, padding, 0)
        y = y if sums else launches["bias_residual"](y, *terms, y)
        if gamma is None:
            return y
        return launches["rms_norm_silu"](y, gamma, None, None, y, None, None, True, 0)

    def _plain(self) -> list[Tensor]:
        """Return what the plain op writes: convolutions in bfloat16, other ops in their dtype."""
        given = self._given()
        if self._op != "conv3d":
            return _written(self._run("reference", given), given)
        # The limit of a convolution in float16, whose products may be summed in float16, is the
        # plain op in bfloat16.
        narrow = torch.float32 if given["x"].dtype == torch.float32 else torch.bfloat16
        here = self.device if device_kind(self.device) == "nvidia" else torch.device("cpu")
        given = _moved(given, here, narrow)
        return _written(self._run("aten", given), given)

    def _exact(self) -> list[Tensor]:
        given = _moved(self._given(), torch.device("cpu"), torch.float64)
        return _written(self._run("reference", given), given)

    def _has_right_codes(self, y: Tensor, given: dict[str, Any]) -> bool:
        """Compare codes, their border, the tail, and the counts of values without a code."""
        again = self._given()
        info, border = torch.iinfo(y.dtype), given["border"]
        tail, before = given["tail"], again["tail"]
        plain = _moved(again, torch.device("cpu"), torch.float64)
        plain |= dict.fromkeys(("codes", "saturated", "tail")) | {"border": 0}
        plain["out"] = torch.empty_like(plain["x"])
        values = self._run("reference", plain)
        steps = given["codes"].cpu().double().view(-1, 1, 1, 1)
        exact = values * steps + zero_of(y.dtype)
        inner = y[..., border : y.shape[3] - border, border : y.shape[4] - border].cpu()
        known = y.shape[2] - exact.shape[2]
        rim = y.cpu().clone()
        rim[..., border : y.shape[3] - border, border : y.shape[4] - border] = zero_of(y.dtype)
        right = bool((rim == zero_of(y.dtype)).all())
        right &= are_codes_right(inner[:, :, known:], exact, info.min, info.max)
        if tail is not None:
            right &= torch.equal(inner[:, :, :known], before.cpu())
            right &= torch.equal(tail.cpu(), inner[:, :, y.shape[2] - tail.shape[2] :])
        expected = self._given()
        self._run("reference", expected)
        counts = zip(given["saturated"].tolist(), expected["saturated"].tolist(), strict=True)
        # Rounding decides whether a value at the last half has a code.
        return right and all(abs(a - b) <= 2 + 1e-3 * b for a, b in counts)

    def _has_right_levels(self, y: Tensor) -> bool:
        """Compare images in uint8, which are rounded down, or uint16, rounded to nearest."""
        given = self._given()
        most = white(y.dtype)
        given["out"] = y.new_empty(y.shape, dtype=torch.float32)
        wide = self._run("reference", given)
        exact = wide.cpu().double() * most - (0.5 if y.dtype == torch.uint8 else 0)
        return are_codes_right(y.cpu().to(torch.int64).view(exact.shape), exact, 0, most)


def _written(y: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """Return what a call has written: its result `[...]`, and the tail that it was given."""
    # The tail of a convolution is read only.
    tail = None if "stride" in given else given.get("tail")
    return [y] if tail is None else [y, tail]


def _rows(x: Tensor) -> Tensor:
    """Return `[..., C]`, or `[N, C, ...]` of videos and frames, as `[rows, C]`."""
    return (x.movedim(1, -1) if x.ndim >= 4 and x.stride(-1) != 1 else x).flatten(0, -2)


def _moved(
    given: dict[str, Any], device: torch.device, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Return the arguments on another device, with numbers in another dtype, if one is given."""
    # A result in the memory of the residual stays so.
    moved: dict[str, Any] = {}
    for name, value in given.items():
        if name == "out" and value is not None and given.get("residual") is value:
            value = moved["residual"]
        elif isinstance(value, ConvWeight):
            value = ConvWeight.of(value.plain().to(device, dtype))
        elif isinstance(value, Tensor):
            value = value.to(device, dtype if value.is_floating_point() else None, copy=True)
        moved[name] = value
    return moved
