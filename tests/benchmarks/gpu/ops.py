"""Section `ops`: each memory-bound op on each backend, against the copy bandwidth of the run."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fast_video_vae.kernels import autotune, measure, sample_inputs, use_backend
from fast_video_vae.kernels.backends import ORDER
from fast_video_vae.kernels.dispatch import ask
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.sample_inputs import row, video

from .rows import Case, Missing, Results
from .session import Session

# Elements of the activation: 256 MiB in 16 bits, larger than any cache.
_ELEMENTS = 1 << 27
_SMALL_ELEMENTS = 1 << 13

_FRAMES = 4

# Channels of Wan 2.1, and of Wan 2.2's encoder (160 to 640) and decoder.
_WIDTHS = (96, 192, 384)
_MORE_WIDTHS = (160, 256, 512, 640, 1024)

_GPU = {"triton": "Triton", "cuda": "CUDA C++"}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Call:
    """A call of an op with the arguments that the VAEs use."""

    op: str
    note: str  # widths and arguments, for the name of the row
    channels: int  # of the input activation
    given: Mapping[str, Any] = field(compare=False)  # as for `sample_inputs.call`
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.op} {self.note}, {_SHORT[self.dtype]}"


def calls() -> list[Call]:
    """Return every op except attention, at the widths of the VAEs."""
    found = [_norm(width) for width in (*_WIDTHS, *_MORE_WIDTHS)]
    found += [_bias_residual(width) for width in (*_WIDTHS, *_MORE_WIDTHS)]
    found += [_merge(width, None, 1) for width in _WIDTHS]
    found += [_merge(512, 1024, 1), _merge(1024, 1024, 2)]  # of Wan 2.2
    for width in (*_WIDTHS, 1024):
        given = {"x": video(2 * width), "phases": 2}
        found += [Call("interleave_time", f"2 x {width}", 2 * width, given)]
    for width, out in ((160, 320), (320, 640)):
        given = {"x": video(width), "channels": out, "times": 2, "size": 2}
        found += [Call("average_down", f"{width} to {out}", width, given)]
    found += [_images(3, 1, dtype) for dtype in (torch.float32, torch.uint8, torch.uint16)]
    found += [_images(12, 2, torch.float32)]
    given = {"x": video(12), "size": (1, 2, 2), "order": "ctwh"}
    found += [Call("pixel_shuffle_3d", "12 to 3", 12, given)]
    for width in (128, 256, 512):  # of SeedVR2
        found += [_group_norm(width), _group_norm(width, measured=True)]
        given = {"x": video(width), "groups": 32}
        found += [Call("group_norm_statistics", f"{width}", width, given)]
    for width in _WIDTHS:
        found += [Call("silu_mul", f"{width}", width, {"x": row(width), "gate": row(width)})]
    for dtype in (torch.float16, torch.float32):
        found += [_norm(96, dtype), _bias_residual(96, dtype), _merge(96, None, 1, dtype)]
    return found


def cases(session: Session) -> list[Case]:
    """Return one case per call, with a row per backend."""
    backends = tuple(name for name in ORDER if name != "native" or not session.cuda)
    return [
        Case(call.name, backends, functools.partial(_measure, session, call, backends))
        for call in calls()
    ]


def forced(backend: str, device: torch.device, op: str, *args: Any, **kwargs: Any) -> Tensor:
    """Run `op` with `args` and `kwargs` on `backend`, without fallback to another one."""
    if device.type != "cuda" and backend in _GPU:
        raise Missing(f"{_GPU[backend]} is for GPUs")
    with use_backend(backend):
        return ask(backend, op, *args, **kwargs)


def _measure(session: Session, call: Call, backends: tuple[str, ...]) -> Results:
    make = functools.partial(
        sample_inputs.call, call.op, _size(session, call), call.dtype, session.device, call.given
    )
    arguments = make()
    with torch.no_grad():
        expected = ask("reference", call.op, **make())
        nbytes = sample_inputs.moved_bytes(arguments, expected)
        timed: dict[str, Callable[[], object]] = {}
        apart: dict[str, float] = {}
        for name in backends:
            try:
                result = forced(name, session.device, call.op, **make())
                apart[name] = _difference(result, expected)
                del result
            except (Missing, Refusal, RuntimeError) as error:
                yield name, error
                continue
            timed[name] = functools.partial(forced, name, session.device, call.op, **arguments)
        del expected
        ranked = _ranked(session, call.op, arguments, list(timed))
        seconds = measure.seconds(timed, session.device, launches=False)
    for name in timed:
        rate = nbytes / seconds[name]
        values = {
            "ms": 1e3 * seconds[name],
            "gb_per_s": rate / 1e9,
            "copy_percent": 100 * rate / session.copy_bytes_per_s,
            "rank": ranked.index(name) + 1 if name in ranked else "wrong",
            "apart": apart[name],
        }
        yield name, values


def _ranked(
    session: Session, op: str, arguments: Mapping[str, Any], takers: list[str]
) -> tuple[str, ...] | list[str]:
    """Return `takers` in the order of dispatch; on a GPU, the trial determines it."""
    if not session.cuda:
        return takers
    first, *rest = arguments
    others = {name: arguments[name] for name in rest}
    order = autotune.order(ask, op, (arguments[first],), others)
    return [name for name in order if name in takers]


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value of `expected`."""
    largest = worst = 0.0
    for one, other in zip(_pieces(actual), _pieces(expected), strict=True):
        wide = other.float()
        largest = max(largest, float(wide.abs().max()))
        worst = max(worst, float((one.float() - wide).abs().max()))
    return worst / largest if largest else worst


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Split along the longest dimension, so that little memory is needed in float32."""
    longest = max(range(x.ndim), key=lambda dim: x.shape[dim])
    return x.chunk(8, dim=longest)


def _size(session: Session, call: Call) -> tuple[int, int, int]:
    elements = session.pick(_ELEMENTS, _SMALL_ELEMENTS)
    side = max(8, math.isqrt(elements // (_FRAMES * call.channels)) // 8 * 8)
    return _FRAMES, side, side


def _norm(width: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Return the call between two convolutions of a residual block, with bias and tail."""
    numbers = {"gamma": row(width), "bias": row(width)}
    given = {"x": video(width), **numbers, "tail": video(width, 2)}
    return Call("rms_norm_silu", f"{width}, bias, tail", width, given, dtype)


def _group_norm(width: int, *, measured: bool = False) -> Call:
    """Return the call for whole frames, or with given statistics, as for a band of rows."""
    numbers = {"weight": row(width), "bias": row(width), "groups": 32}
    given = {"x": video(width), **numbers, "tail": video(width, 2)}
    if measured:
        given["statistics"] = torch.empty(1, 1, 2, 32, device="meta")
    note = f"{width}, tail" + (", statistics" if measured else "")
    return Call("group_norm_silu", note, width, given)


def _bias_residual(width: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    given = {"x": video(width), "bias": row(width), "residual": video(width)}
    return Call("bias_residual", f"{width}, bias, residual", width, given, dtype)


def _merge(width: int, source: int | None, times: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    given = {"grid": video(4 * width), "bias": row(width), "times": times}
    if source is not None:
        given["source"] = video(source)
    note = f"{width}, bias" + ("" if source is None else f", source of {source}")
    return Call("merge_phases", note, 4 * width, given, dtype)


def _images(channels: int, patch: int, dtype: torch.dtype) -> Call:
    order = "ctwh" if patch > 1 else "cthw"  # of Wan 2.2; one pixel has no order
    given = {"frames": video(channels), "patch": patch, "order": order, "dtype": dtype}
    note = f"{channels} to 3, {str(dtype).removeprefix('torch.')}"
    return Call("frames_to_images", note, channels, given)
