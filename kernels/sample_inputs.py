"""Calls of the ops as the VAEs make them, of any size: for the matrix, trials and benchmarks."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Of the activations where a call does not say. Attention has a head for all of them.
CHANNELS = 96
HEAD = 384


@dataclass
class _Maker:
    """Makes the tensors of a call, of `size` frames, height and width; see `call`.

    Of what another call has `given`, tensors stand for their presence and their channels.
    """

    size: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    given: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(0)

    def option(self, name: str, default: Any) -> Any:  # noqa: ANN401, whatever the op takes
        return self.given.get(name, default)

    def channels(self, name: str, default: int) -> int:
        """Of a tensor of the other call: behind the batch of a video, else at the end of a row."""
        x = self.given.get(name)
        if x is None:
            return default
        return x.shape[1] if x.ndim == 5 else x.shape[-1]

    def has(self, name: str) -> bool:
        """Whether a tensor that may be left out belongs to the call; where nobody says, it does."""
        return not self.given or self.given.get(name) is not None

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.empty(shape, dtype=torch.float32, device=self.device)
        return x.normal_(generator=self._generator).to(dtype or self.dtype)

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        """Parameters that may be left out."""
        return self.numbers(*shape, dtype=torch.float32) if self.has(name) else None

    def video(self, channels: int, frames: int | None = None, *, border: int = 0) -> Tensor:
        """Channels-last, with so many pixels more in height and width."""
        length, height, width = self.size
        length = length if frames is None else frames
        return self.numbers(1, length, height + border, width + border, channels).movedim(-1, 1)

    def tail(self, channels: int) -> Tensor | None:
        """Two frames, or as many as that of the other call has."""
        given = self.option("tail", None)
        known = 2 if given is None else given.shape[2]
        return self.video(channels, known) if self.has("tail") else None

    def groups(self, channels: int) -> int:
        """Of a group norm."""
        return self.option("groups", next(n for n in (32, 4, 1) if channels % n == 0))

    def statistics(self, groups: int) -> Tensor:
        """Of a group norm of `video`: what is not negative may be a factor too."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return self.numbers(1, self.size[0], 2, groups, dtype=wide).abs_()

    def rows(self, channels: int) -> Tensor:
        frames, height, width = self.size
        return self.numbers(frames * height * width, channels)


def _rms_norm_silu(make: _Maker) -> dict[str, Any]:
    channels = make.channels("x", CHANNELS)
    return {
        "x": make.video(channels),
        "gamma": make.numbers(channels, dtype=torch.float32),
        "silu": make.option("silu", True),
        "bias": make.maybe("bias", channels),
        "tail": make.tail(channels),
    }


def _group_norm_silu(make: _Maker) -> dict[str, Any]:
    channels = make.channels("x", CHANNELS)
    options = ("eps", "silu")
    given = make.option("statistics", None)
    return {
        "x": make.video(channels),
        "weight": make.numbers(channels, dtype=torch.float32),
        "bias": make.numbers(channels, dtype=torch.float32),
        "groups": make.groups(channels),
        "statistics": None if given is None else make.statistics(given.shape[-1]),
        "tail": make.tail(channels),
        **{name: make.given[name] for name in options if name in make.given},
    }


def _group_norm_statistics(make: _Maker) -> dict[str, Any]:
    channels = make.channels("x", CHANNELS)
    return {
        "x": make.video(channels),
        "groups": make.groups(channels),
        "eps": make.option("eps", 1e-6),
    }


def _silu_mul(make: _Maker) -> dict[str, Any]:
    channels = make.channels("x", CHANNELS)
    return {"x": make.rows(channels), "gate": make.rows(channels)}


def _bias_residual(make: _Maker) -> dict[str, Any]:
    channels = make.channels("x", CHANNELS)
    return {
        "x": make.video(channels),
        "bias": make.maybe("bias", channels),
        "residual": make.video(channels) if make.has("residual") else None,
        "residual_bias": make.maybe("residual_bias", channels),
    }


def _attention(make: _Maker) -> dict[str, Any]:
    head = make.channels("q", HEAD)
    frames, height, width = make.size
    return {name: make.numbers(frames, height * width, head) for name in "qkv"}


def _interleave_time(make: _Maker) -> dict[str, Any]:
    return {
        "x": make.video(make.channels("x", 2 * CHANNELS)),
        "phases": make.option("phases", 2),
    }


def _merge_phases(make: _Maker) -> dict[str, Any]:
    channels = make.channels("grid", 4 * CHANNELS)
    times = make.option("times", 2)
    frames = max(1, make.size[0] // times) * times
    source = make.channels("source", CHANNELS)
    return {
        "grid": make.video(channels, frames, border=1),
        "source": make.video(source, frames // times) if make.has("source") else None,
        "times": times,
        "bias": make.maybe("bias", channels // 4),
    }


def _pixel_shuffle_3d(make: _Maker) -> dict[str, Any]:
    return {
        "x": make.video(make.channels("x", 12)),
        "size": make.option("size", (1, 2, 2)),
        "order": make.option("order", "ctwh"),
    }


def _average_down(make: _Maker) -> dict[str, Any]:
    channels = make.channels("x", CHANNELS)
    size = make.option("size", 2)
    frames, height, width = make.size
    x = make.numbers(1, frames, height // size * size, width // size * size, channels)
    return {
        "x": x.movedim(-1, 1),
        "channels": make.option("channels", 2 * channels),
        "times": make.option("times", 2),
        "size": size,
    }


def _frames_to_images(make: _Maker) -> dict[str, Any]:
    out = make.option("out", None)
    return {
        "frames": make.video(make.channels("frames", 12)),
        "patch": make.option("patch", 1 if make.given else 2),
        "order": make.option("order", "cthw"),
        "dtype": make.option("dtype", torch.float32) if out is None else out.dtype,
    }


_CALLS: dict[str, Callable[[_Maker], dict[str, Any]]] = {
    "rms_norm_silu": _rms_norm_silu,
    "group_norm_silu": _group_norm_silu,
    "group_norm_statistics": _group_norm_statistics,
    "silu_mul": _silu_mul,
    "bias_residual": _bias_residual,
    "attention": _attention,
    "interleave_time": _interleave_time,
    "merge_phases": _merge_phases,
    "pixel_shuffle_3d": _pixel_shuffle_3d,
    "average_down": _average_down,
    "frames_to_images": _frames_to_images,
}

OPS = tuple(_CALLS)


def call(
    op: str,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the arguments of one of `OPS`, by name, the same ones each time.

    Tensors are normal numbers in channels-last memory; the activations have `size`, frames, height
    and width, and `dtype`. `given` are the arguments of another call by name, which this one is to
    be like but for its size; None: what the VAEs do most.
    """
    return _CALLS[op](_Maker(size, dtype, device, given or {}))


def names(function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The arguments of a call by name."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def moved_bytes(arguments: Mapping[str, Any], result: Tensor) -> int:
    """What a call has to move at least: every argument read once, every result written once.

    A tail is read and written; the statistics of a norm over frames need a second read of `x` where
    no cache holds it, which is not counted.
    """
    tail = arguments.get("tail")
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    tensors += [result] if tail is None else [result, tail]
    return sum(x.numel() * x.element_size() for x in tensors)
