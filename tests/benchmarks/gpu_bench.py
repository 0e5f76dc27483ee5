"""The device of a run of `bench_gpu.py`, and a convolution on it, timed and compared."""

import contextlib
import functools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fast_video_vae.kernels import BackendError, conv3d, synchronize, use_backend
from fast_video_vae.kernels.convolution.weight import ConvWeight
from fast_video_vae.kernels.errors import Refusal, first_line, is_out_of_memory
from fast_video_vae.kernels.triton_ops.convolution_tiles import ConvTile
from fast_video_vae.tests.benchmarks import peers
from fast_video_vae.tests.benchmarks.routed import kernel_of, route_by, routed
from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.vae import load_vae

try:
    from fast_video_vae.kernels.triton_ops import convolution
except ImportError:  # without Triton, as its rows say
    convolution = SimpleNamespace(tile_of=None, launch=None)
_listed = convolution.tile_of

Values = dict[str, Any]
Cases = Iterator[tuple[str, Callable[[], Values]]]

_asked = threading.local()  # its tile replaces those of the table, for a thread
HOPPER = (9, 0)  # the chip whose tiles run without a GPU
NARROW = (torch.bfloat16, torch.float16)

# Convolutions of Wan 2.1 as `[C_out, C_in, ...]` and frames, height, width of the result: of 480 x
# 832, of 720 x 1280, of a picture of 1024 x 1024, folded upsamplings, one in time, and both ends.
CONVS = (
    ((96, 96, 3, 3, 3), (4, 480, 832)), ((192, 192, 3, 3, 3), (4, 240, 416)),
    ((384, 384, 3, 3, 3), (4, 120, 208)), ((96, 96, 3, 3, 3), (4, 720, 1280)),
    ((192, 192, 3, 3, 3), (4, 360, 640)), ((384, 384, 3, 3, 3), (4, 180, 320)),
    ((96, 96, 3, 3), (1, 1024, 1024)), ((192, 192, 3, 3), (1, 512, 512)),
    ((384, 384, 3, 3), (1, 256, 256)), ((768, 384, 2, 2), (4, 180, 320)),
    ((384, 192, 2, 2), (4, 360, 640)), ((768, 384, 3, 1, 1), (4, 180, 320)),
    ((96, 3, 3, 3, 3), (4, 720, 1280)), ((3, 96, 3, 3, 3), (4, 720, 1280)),
)  # fmt: skip
SMALL_CONVS = (((32, 32, 3, 3, 3), (1, 4, 16)), ((8, 16, 2, 2), (1, 4, 8)))
SMALL_SIZE = ((2, 16, 32), (1, 4, 16))  # where results are compared with float64
TERMS = ("bare", "bias + residual", "bias + norm", "bare in fp16")

WRONG = 0.01  # error of a result that no rounding explains


class Bench:
    """The device, the sizes, and the rows of this run so far."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.chip = torch.cuda.get_device_capability() if self.cuda else HOPPER
        self.rows: list[Values] = []
        self.until = self.case_s = math.inf  # the end of the running part, and most for a case
        convolution.tile_of = lambda *given: getattr(_asked, "tile", None) or _listed(*given)
        if not self.cuda:
            torch.set_num_threads(1)
            os.environ["FAST_VIDEO_VAE_NATIVE"] = "0"  # nothing for CPUs is compiled

    def pick(self, full: Any, small: Any) -> Any:
        """Return the size for a GPU, or the one that only checks the script."""
        return full if self.cuda else small

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normally distributed values of a fixed seed, `[*shape]`."""
        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.empty(shape, dtype=torch.float32, device=self.device)
        return x.normal_(generator=generator).to(dtype)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of a call, synchronised."""
        synchronize(self.device)
        start = time.perf_counter()
        call()
        synchronize(self.device)
        return time.perf_counter() - start

    def ms(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds of a call on the device, the median of three rounds."""
        if not self.cuda:
            return 1e3 * self.seconds(call)
        repeats = 5 if self.seconds(call) < 0.02 else 1
        return statistics.median(self._queued_ms(call, repeats) for _ in range(3))

    def _queued_ms(self, call: Callable[[], Any], repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(5_000_000)  # cycles, in which the calls are queued
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    @functools.cache  # noqa: B019, there is one
    def vae(self, maker: str = "ours") -> Any:
        """Return Wan 2.1's VAE of this pack or of a peer, in bf16, on the same random weights."""
        make = {"ours": load_vae, "comfyui": peers.comfyui_vae, "diffusers": peers.diffusers_vae}
        state = random_weights("wan2.1", self.pick(None, 8))
        return make[maker](state, dtype=torch.bfloat16, device=self.device)

    def found(self, *parts: str) -> list[Values]:
        """Return the rows of `parts` that have values."""
        return [row for row in self.rows if row["part"] in parts and "why" not in row]

    def reason(self, error: Exception) -> str:
        """Return why a case has no values."""
        kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
        return f"{kind}: {first_line(error)[:160]}"

    def works(self) -> bool:
        """Return whether the device works, which a faulty kernel ends."""
        with contextlib.suppress(RuntimeError):
            return bool(torch.ones(1, device=self.device).sum() == 1)
        return False


class Call:
    """A convolution with some terms, on inputs of a fixed seed, by a tile or by a candidate."""

    def __init__(self, bench: Bench, taps: tuple[int, ...], size: tuple[int, ...], terms: str):
        out, into, *kernel = taps
        self.past = kernel[0] - 1 if len(kernel) == 3 else 0
        normal = functools.partial(bench.normal, dtype=NARROW["fp16" in terms])
        self.x = normal(1, size[0] + self.past, *size[1:], into).movedim(-1, 1)
        self.before = self.past * ("no tail" not in terms)
        self.tail = self.x[:, :, : self.before].clone() if self.before else None
        order = torch.channels_last_3d if len(kernel) == 3 else torch.channels_last
        weight = normal(*taps) / math.sqrt(math.prod(taps[1:]))
        self.taps = weight.contiguous(memory_format=order)
        self.weight = ConvWeight(taps, weight.dtype, bench.device, lambda: self.taps)
        self.options: Values = {"padding": tuple(side // 2 for side in kernel[-2:])}
        self.options["bias"] = normal(out) if "bias" in terms else None
        if "residual" in terms:
            self.options["residual"] = torch.randn_like(self.run(None))
        if "norm" in terms:
            self.options["gamma"] = normal(2, out)[1]
        if "biases" in terms:
            self.options["residual_bias"] = normal(3, out)[2]

    def run(self, way: ConvTile | str | None) -> Tensor:
        """Return the result of a tile or candidate, which reads the tail; None: of the library."""
        if way is None:
            return self._convolved("aten", self.x)
        x = self.x if self.tail is None else self.x[:, :, self.before :]
        if isinstance(way, str):
            return self._convolved(way, x, tail=self.tail)
        with use_backend("triton"), mock.patch.object(_asked, "tile", way, create=True):
            return self._convolved("triton", x, tail=self.tail)

    def _convolved(self, way: str, x: Tensor, **options: Any) -> Tensor:
        route = route_by(self.weight, (1, 1, 1), kernel_of(way))
        try:
            return conv3d(x, self.weight, route=route, **self.options, **options)
        except BackendError as error:  # of the only candidate
            raise Refusal(*error.reasons.values()) from None

    def exact(self) -> Tensor:
        """Return the result in float64."""
        wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        with use_backend("reference"):
            return conv3d(self.x.double(), self.taps.double(), **wide)


def named(taps: tuple[int, ...], size: tuple[int, ...], terms: str) -> str:
    kernel, sides = ("x".join(map(str, each)) for each in (taps[2:], size))
    return f"{kernel} {taps[1]} to {taps[0]} at {sides}, {terms}"


def timed_case(
    bench: Bench, taps: Any, size: Any, terms: str, name: str, route: str | None, way: Any
) -> tuple[str, Callable[[], Values]]:
    """Return a case that times a convolution, unless its result is wrong."""

    def run() -> Values:
        kernels: list[Any] = []
        search = torch.backends.cudnn.flags(enabled=True, benchmark="search" in name)
        keep = mock.patch.object(convolution, "launch", functools.partial(_launch, kernels))
        with routed(), search, keep, torch.no_grad():
            small = Call(bench, taps, bench.pick(*SMALL_SIZE), terms)
            error, call = error_of(small.run(way), small.exact()), Call(bench, taps, size, terms)
            apart = error_of(*(call.run(each)[..., ::7, :].double() for each in (way, None)))
            if not (error <= WRONG and apart <= WRONG):  # also NaN
                raise ValueError(f"error {error:.2g}, apart {apart:.2g}; expected {WRONG} at most")
            ms = bench.ms(lambda: call.run(way))
        rate = 2e-9 * math.prod((*taps, *size)) / ms
        values = {"ms": ms, "TFLOP/s": rate, "error": error, "apart": apart}
        values |= {key: getattr([*kernels, 0][0], f"n_{key}", 0) for key in ("regs", "spills")}
        return values | {"taps": taps, "size": size, "terms": terms, "by": name, "route": route}

    # PyTorch keeps cuDNN's plan of a shape per thread, with or without a search.
    case = f"{named(taps, size, terms)}: {name}"
    return case, lambda: ThreadPoolExecutor(1).submit(run).result()


def _launch(kernels: list[Any], kernel: Any, grid: Any, *args: Any, warps: int = 4, **more: Any):
    """Launch a kernel of Triton, and add what was compiled to `kernels`."""
    options = {"num_warps": warps, "enable_fp_fusion": True, **more}
    kernels.append(kernel[tuple(grid)](*args, **options))


def error_of(result: Tensor, exact: Tensor) -> float:
    """Return the rms of the difference over the rms of `exact`, which has the same shape."""
    return float(((result.double() - exact).square().mean() / exact.square().mean()).sqrt())
