"""Bytes that one steady step of a VAE reads and writes, counted op by op; nothing is timed.

`python tests/benchmarks/count_bytes.py` prints them for a 720 x 1280 video next to the bytes that a
step needs if each norm is one pass into the convolution's input and bias and residual are one pass
after it. The convolutions are those of the library, then those of our own kernel, which reads the
tail where it is and adds, and applies a norm, while it writes. The tensors are on the `meta`
device, so it needs no memory and no GPU. The other ops are those of the CPU backend, one launch
each and one for each parameter that it converts.
"""

import contextlib
import dataclasses
import functools
import itertools
import runpy
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))


from fast_video_vae.kernels import ConvWeight, routes
from fast_video_vae.kernels.backends import Kernel
from fast_video_vae.kernels.convolution.fused import WIDEST
from fast_video_vae.kernels.ready import serving
from fast_video_vae.kernels.triton_ops import convolution
from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.vae import read_checkpoint
from fast_video_vae.vae.layers.temporal_cache import TemporalCache, canonical
from fast_video_vae.vae.models.base import Network
from fast_video_vae.vae.models.build import make_decoder, make_encoder
from fast_video_vae.vae.models.config import VAEConfig
from fast_video_vae.vae.models.executor import advance
from fast_video_vae.vae.planning.job import StreamJob
from fast_video_vae.vae.planning.plan import make_plan

# GB per latent of 720 x 1280 in 16 bits, in the steady middle of a video. Per causal convolution of
# x (the input) to y: the norm reads x and writes x with its tail, the convolution reads that and
# writes y; bias and residual read two and write one y; the input of a 1x1 shortcut is read, and its
# result written. A chunk is 4 latents. At T frames per chunk a convolution reads (T + 2) / T of x:
# T is 4 in the layers with the latent's frames, and 8 in those with twice as many frames and above.
# Upsampling writes the large frames and reads them; resampling in time writes its frames again.
NEEDED_GB = {
    ("wan2.1", "decode"): 51.39,
    ("wan2.1", "encode"): 30.82,
    ("wan2.2", "decode"): 44.58,
    ("wan2.2", "encode"): 13.55,
}

_VIEWS = {"_unsafe_view", "_reshape_alias"}
_ALLOCATES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_WRITES_ONLY = {"copy_", "zero_", "fill_", "zeros", "new_zeros"}


class ByteCounter(TorchDispatchMode):
    """Sums the bytes that ops read and write, each tensor once per op."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0
        self.launches = 0  # ops that touch memory
        self.by_op: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.read + self.written

    def count(self, name: str, read: int, written: int) -> None:
        """Add one op."""
        self.read += read
        self.written += written
        self.launches += 1
        self.by_op[name] += read + written

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _VIEWS | _ALLOCATES:
            return result
        if name == "convolution":
            # cuDNN returns channels-last for channels-last input; `meta` does not.
            result = channels_last(result)
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
        given |= kwargs
        read = written = 0
        for argument in func._schema.arguments:
            nbytes = sum(map(_nbytes, _tensors(given.get(argument.name))))
            info = argument.alias_info
            if info is None or not info.is_write:
                read += nbytes
                continue
            written += nbytes
            # A tail is read before it is replaced; `out` is only written.
            if argument.name != "out" and name not in _WRITES_ONLY:
                read += nbytes
        for returned, value in zip(func._schema.returns, _as_list(result), strict=False):
            if returned.alias_info is None:
                written += sum(map(_nbytes, _tensors(value)))
        if read + written:
            self.count(name, read, written)
        return result


class FusedAttention(TorchFunctionMode):
    """Counts attention as one fused kernel, as on a GPU; `meta` decomposes it."""

    def __init__(self, counter: ByteCounter | None = None) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        read = sum(map(_nbytes, args[:3]))
        result = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        if self._counter is not None:
            self._counter.count("attention", read, _nbytes(result))
        return result


@contextlib.contextmanager
def counted(*, own: bool = False) -> Iterator[ByteCounter]:
    """Yield a counter of the ops in the `with` block.

    With `own` the convolutions are those of our Triton kernel, whose code runs up to the launch.
    """
    with contextlib.ExitStack() as stack:
        counter = stack.enter_context(ByteCounter())
        stack.enter_context(FusedAttention(counter))
        if own:
            for owner, name, value in (
                (routes, "_chosen", lambda weight, *_, **__: (_tile_for(weight), None)),
                (serving, "ours", lambda *_: ("triton",)),
                (convolution, "launch", functools.partial(launched, counter)),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
        yield counter


def _tile_for(weight: ConvWeight) -> Kernel | None:
    """Return our Triton kernel for a convolution that a tile holds."""
    return Kernel("triton", 0) if weight.shape[0] <= WIDEST else None


def launched(
    counter: ByteCounter,
    kernel: Any,
    grid: Any,
    x: Tensor,
    tail: Tensor,
    *others: Any,
    NORM: bool,  # noqa: N803, a constant of the kernel
    **_: Any,
) -> None:
    """Count in `counter` a launch of the kernel of the convolutions: each given tensor once."""
    weight, bias, residual, residual_bias, gamma, out, _, known, *_, given = others[:13]
    terms = [term for at, term in enumerate((bias, residual, residual_bias)) if given >> at & 1]
    read = [x, weight, *terms, *([tail] if known else ()), *([gamma] if NORM else ())]
    counter.count("own convolution", sum(map(_nbytes, read)), _nbytes(out))


def meta_network(config: VAEConfig, direction: str) -> Network:
    """Return the encoder or decoder of `config`, for `direction`, in bfloat16 on `meta`."""
    make = make_decoder if direction == "decode" else make_encoder
    return make(config).to("meta", torch.bfloat16).requires_grad_(False)


def meta_input(
    config: VAEConfig, direction: str, latents: int, height: int, width: int, *, first: bool
) -> Tensor:
    """Return the input of a step, `[B, C, T, H, W]`, for frames of `height` x `width` pixels."""
    if direction == "decode":
        step = config.spatial_compression
        shape = (1, latents, height // step, width // step, config.latent_channels)
    else:
        patch = config.patch_size
        count = latents if first else latents * config.temporal_compression
        channels = config.image_channels * patch * patch
        shape = (1, count, height // patch, width // patch, channels)
    return canonical(torch.empty(shape, dtype=torch.bfloat16, device="meta").movedim(-1, 1))


def steady_step(
    config: VAEConfig,
    direction: str,
    height: int,
    width: int,
    limit_bytes: int,
    chunk: int | None = None,
    **options: Any,
) -> tuple[ByteCounter, int]:
    """Count the second step after the first frame, in bfloat16; return its latents too.

    It has `chunk` latents; None: those of the plan.
    """
    network, step = meta_network(config, direction), config.spatial_compression
    size = 1, height // step, width // step
    job = StreamJob(network, size, torch.bfloat16, torch.device("meta"))
    chosen = make_plan(job, limit_bytes, chunk=chunk, cuts=False)
    cache = TemporalCache()

    def run(latents: int) -> None:
        x = meta_input(config, direction, latents, height, width, first=cache.first)
        for _ in advance(network.chains(), x, cache, chosen.part_bytes):
            pass

    with torch.no_grad():
        with counted(**options):
            run(1)
            cache.first = False
            run(chosen.chunk)
        with counted(**options) as counter:
            run(chosen.chunk)
    return counter, chosen.chunk


def main() -> None:
    """Print and append a row for each family and direction, and for both convolutions."""
    args = record.parser(__doc__, limit_gb=16.0).parse_args()
    for own, (family, direction) in itertools.product((False, True), NEEDED_GB):
        given = configs()[family], direction, 720, 1280, int(args.limit_gb * 2**30)
        counter, latents = steady_step(*given, own=own)
        fields = {
            "gigabytes_per_latent": round(counter.total / latents / 1e9, 2),
            "needed": NEEDED_GB[family, direction],
            "launches_per_latent": round(counter.launches / latents, 1),
        }
        case = f"{direction} step 720x1280 bfloat16 {family}{', own kernel' if own else ''}"
        print(case, fields)
        record.append(args.out, "count_bytes", case, **fields)


@functools.cache
def configs() -> Mapping[str, VAEConfig]:
    """Return the configurations of the published VAEs by family."""
    small = read_checkpoint(random_state_dict(8)).config
    wan21 = dataclasses.replace(
        small, encoder_widths=(96, 96, 192, 384, 384), decoder_widths=(384, 384, 384, 192, 96)
    )
    return {
        "wan2.1": wan21,
        "wan2.2": dataclasses.replace(small, family="wan2.2").standard(),
        "seedvr2": read_checkpoint(random_seedvr2()).config.standard(),
    }


def channels_last(x: Tensor) -> Tensor:
    """Return an empty channels-last tensor with the shape of `x`."""
    memory = torch.empty_like(x.movedim(1, -1), memory_format=torch.contiguous_format)
    return memory.movedim(-1, 1)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of `tensor`; expanded dimensions count once."""
    distinct = prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return distinct * tensor.element_size() if tensor.numel() else 0


def _tensors(value: object) -> list[Tensor]:
    return [each for each in _as_list(value) if isinstance(each, Tensor)]


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


if __name__ == "__main__":
    main()
