"""Inputs of a trial: a call with the shapes and strides of a given one, in memory of its own.

Activations are `silu` of normally distributed numbers, as after the norms of the VAEs, and weights
have the deviation that keeps the size of the results. The numbers are the same in every run.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shapes
from ..devices import memory_bytes
from .compose import joined
from .fused import Fused
from .weight import ConvWeight, channels_last

# Sizes of a trial, the next one if memory is short: everything, one frame of the result, and a band
# of rows of that.
SIZES = ("whole", "frame", "band")
_BAND = 64

# Tensors of the size of the result in a trial: the expected one, that of a candidate, residual and
# buffer; and of the size of the input: a joined window for each of two candidates in turn.
_RESULTS = 4
_WINDOWS = 3


class Sample(NamedTuple):
    """A call in memory of its own.

    Attributes:
        op: `conv2d` or `conv3d`.
        x: `[B, C, T, H, W]` or `[N, C, H, W]`.
        weight: `[C_out, C, ...]`.
        terms: Arguments `bias`, `residual_bias` and `gamma`.
        residual: Shape of the result, or None.
        out: Shape of the result; `residual` itself for a call in place; None: new memory.
        tail: `[B, C, K, H, W]`, or None.
        stride: Stride of each dimension of the kernel.
        padding: Padding of height and width.
    """

    op: str
    x: Tensor
    weight: ConvWeight
    terms: dict[str, Tensor | None]
    residual: Tensor | None
    out: Tensor | None
    tail: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, int]

    def laid_out(self, fused: Fused) -> dict[str, Any]:
        """Return the arguments in the layout that a caller makes for a candidate.

        A caller writes the frames where they cost nothing: a joined window for a candidate that
        does not read the tail, and frames with a border for one that wants them.

        Args:
            fused: What the candidate does.

        Returns:
            Arguments of the op by name, without `out`.
        """
        x, tail, padding = self.x, self.tail, self.padding
        if tail is not None and not fused.tail:
            x, tail = joined(x, tail), None
        if fused.border and any(padding):
            tail = None if tail is None else joined(tail, None, padding)
            x = joined(x, None, padding)
            padding = (0, 0)
        made = {"x": x, "weight": self.weight, "stride": self.stride, "padding": padding}
        made |= {"residual": self.residual, **self.terms}
        return made if self.op == "conv2d" else made | {"tail": tail}

    def refill(self) -> None:
        """Write the first numbers into the residual again, after a call in place."""
        if self.residual is not None:
            _fill(self.residual, "residual")


def like(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], size: str) -> Sample:
    """Return a sample of a call.

    Args:
        op: `conv2d` or `conv3d`.
        args: `x`, the weight and perhaps the bias.
        kwargs: The other arguments of the op. A question for `Fused` has no `out`; it stands for a
            call with a bias, and with `gamma` True for one with a norm.
        size: One of `SIZES`.

    Returns:
        The sample, with the strides of the call if the size is `whole`.
    """
    x, weight = args[:2]
    asks, channels = "out" not in kwargs, weight.shape[0]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    vectors = {"bias": bias, **{name: kwargs.get(name) for name in ("residual_bias", "gamma")}}
    if asks:
        wide = torch.empty(channels, dtype=torch.float32, device=x.device)
        vectors |= {"bias": wide, "gamma": wide if vectors["gamma"] is not None else None}
    tail, taps = kwargs.get("tail"), weight.shape[2]
    if asks and op == "conv3d" and x.shape[2] < taps:
        tail = x.new_empty(1).expand(x.shape[0], x.shape[1], taps - 1, *x.shape[3:])
    stride, padding = tuple(kwargs["stride"]), tuple(kwargs["padding"])
    made, before = _cut(op, x, tail, weight, stride, size)
    pads = padding if op == "conv2d" else (0, *padding)
    shape = shapes.convolved(made, weight.shape, stride, pads, before)
    residual, out = kwargs.get("residual"), kwargs.get("out")
    added = None if residual is None else _result(residual, x, shape, size)
    into = None
    if out is not None:
        in_place = residual is not None and out.data_ptr() == residual.data_ptr()
        into = added if in_place else _result(out, x, shape, size)
    return Sample(
        op, _activation(made, "x", size), _weight(weight),
        {name: None if each is None else _vector(each, name) for name, each in vectors.items()},
        None if added is None else _fill(added, "residual"), into,
        None if before is None else _activation(before, "tail", size), stride, padding,
    )  # fmt: skip


def with_terms(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call in place with a residual, both biases and a tail, to make a sample of.

    Args:
        op: `conv2d` or `conv3d`.
        args: As for `like`.
        kwargs: As for `like`.

    Returns:
        `args` and `kwargs` for `like` with another size than `whole`: the shapes of their terms are
        not those of the call.
    """
    x, weight = args[:2]
    vector = torch.empty(weight.shape[0], dtype=torch.float32, device=x.device)
    made = {**kwargs, "residual": x, "out": x, "residual_bias": vector, "gamma": None}
    if op == "conv3d" and weight.shape[2] > 1 and kwargs.get("tail") is None:
        made["tail"] = x[:, :, :1].expand(-1, -1, weight.shape[2] - 1, -1, -1)
    return (x, weight, vector), made


def fits(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], size: str) -> bool:
    """Return whether the free memory is enough for a trial.

    On Windows the driver uses the host's memory instead of an error, which would be measured.

    Args:
        op: `conv2d` or `conv3d`.
        args: As for `like`.
        kwargs: As for `like`.
        size: One of `SIZES`.

    Returns:
        True on devices without a count.
    """
    x, weight = args[:2]
    memory = memory_bytes(x.device)
    if memory is None:
        return True
    made, before = _cut(op, x, kwargs.get("tail"), weight, tuple(kwargs["stride"]), size)
    pads = kwargs["padding"] if op == "conv2d" else (0, *kwargs["padding"])
    outputs = shapes.convolved(made, weight.shape, kwargs["stride"], pads, before)
    inputs = made.numel() + (0 if before is None else before.numel())
    count = _WINDOWS * inputs + _RESULTS * torch.Size(outputs).numel()
    # One frame of the results at a time is compared in float32.
    return count * x.element_size() <= memory[0]


def _cut(
    op: str, x: Tensor, tail: Tensor | None, weight: ConvWeight, stride: tuple[int, ...], size: str
) -> tuple[Tensor, Tensor | None]:
    """Return the part of `x` and `tail` that a trial of this size imitates."""
    if size == "whole":
        return x, tail
    if op == "conv2d":
        x = x[:1]
    else:
        known = 0 if tail is None else tail.shape[2]
        x = x[:1, :, : max(1, weight.shape[2] - known)]
        tail = None if tail is None else tail[:1]
    if size == "band":
        rows = max(_BAND, weight.shape[-2] * stride[-2])
        x, tail = x[..., :rows, :], None if tail is None else tail[..., :rows, :]
    return x, tail


def _result(given: Tensor, x: Tensor, shape: shapes.Shape, size: str) -> Tensor:
    """Return memory for a result of `shape`, with the strides of `given` if it is whole."""
    if size == "whole" and not _overlaps(given):
        return torch.empty_strided(shape, given.stride(), dtype=x.dtype, device=x.device)
    return shapes.new_video(x, shape)


def _activation(given: Tensor, name: str, size: str) -> Tensor:
    shape = tuple(given.shape)
    return F.silu(_fill(_result(given, given, shape, size), name), inplace=True)


def _overlaps(x: Tensor) -> bool:
    """Return whether elements of `x` share memory, as in an expanded tensor."""
    return any(not step and length > 1 for length, step in zip(x.shape, x.stride(), strict=True))


def _weight(given: ConvWeight) -> ConvWeight:
    """Return a weight with random numbers; the given one would keep the layouts of a trial."""
    taps = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    taps = channels_last(_fill(taps, "weight").mul_(taps[0].numel() ** -0.5))
    return ConvWeight(given.shape, given.dtype, given.device, lambda: taps)


def _vector(given: Tensor, name: str) -> Tensor:
    vector = _fill(torch.empty(given.shape, dtype=torch.float32, device=given.device), name)
    # Scales are about 1.
    vector = 1 + 0.1 * vector if name == "gamma" else 0.1 * vector
    return vector.to(given.dtype)


# A stream of numbers for each tensor, so that `refill` repeats that of the residual.
_SEEDS = {"x": 0, "tail": 1, "weight": 2, "bias": 3, "residual": 4, "residual_bias": 5, "gamma": 6}


def _fill(x: Tensor, name: str) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(_SEEDS[name])
    return x.normal_(generator=generator)
