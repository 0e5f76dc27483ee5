"""The one-time work of a first decode or encode on a GPU: trials, and kernels that are compiled.

`python -m fast_video_vae.tests.kernels.first_run` prints both for the published VAEs, with Triton
and with the CUDA backend. The streams run on the `meta` device, so full widths and sizes cost
neither memory nor arithmetic. Every op goes through the trial, and a launch is recorded instead of
run.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.kernels import autotune, backends, dispatch, measure
from fast_video_vae.tests.benchmarks import count_bytes
from fast_video_vae.tests.kernels import launches
from fast_video_vae.vae import StreamOptions, VideoVAE, validation
from fast_video_vae.vae.streaming import session

_META = torch.device("meta")


@dataclasses.dataclass(frozen=True)
class Run:
    """A stream of `frames` of `height` x `width` pixels."""

    frames: int
    height: int
    width: int
    encode: bool = False

    def __str__(self) -> str:
        name = "encode" if self.encode else "decode"
        return f"{name} of {self.frames} frames of {self.width}x{self.height}"


class Process:
    """The trials and compilations of a process whose ops all run on one GPU backend.

    Triton compiles variants of a kernel, and the CUDA backend those of a source, which has one or
    more kernels.

    Attributes:
        trials: Ops of the trials.
        compiled: Variants that were launched in trials and outside.
        used: Those that were launched outside of trials.
    """

    def __init__(self, backend: str = "triton") -> None:
        self._backend = backend
        self.trials: list[str] = []
        self.compiled: set[tuple] = set()
        self.used: set[tuple] = set()
        self._orders: dict = {}
        self._is_trial = False

    def run(self, vae: VideoVAE, run: Run) -> tuple[Counter[str], Counter[str]]:
        """Run a stream; return the trials by op and the compilations by name that it added."""
        trials, compiled = len(self.trials), set(self.compiled)
        with self._recorded():
            stream(vae, run)
        return Counter(self.trials[trials:]), Counter(each[0] for each in self.compiled - compiled)

    def _launch(self, *args: Any, **options: Any) -> None:
        variant = _VARIANTS[self._backend](*args, **options)
        self.compiled.add(variant)
        if not self._is_trial:
            self.used.add(variant)

    def _ranked(self, *call):
        self.trials.append(call[1])
        self._is_trial = True
        try:
            return _ranked(*call)
        finally:
            self._is_trial = False

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Send all ops through the trial, to the backend, and record the launches."""
        patches = [
            (autotune, "ORDER", (self._backend, "reference")),
            (autotune, "_orders", self._orders),
            (autotune, "_ranked", self._ranked),
            (autotune, "agree", lambda *_: True),
            (dispatch, "_order", _order),
            (
                measure,
                "seconds",
                lambda calls, *_, **__: {name: name != self._backend for name in calls},
            ),
            # `meta` has no numbers, and no generator of them.
            (torch, "Generator", mock.MagicMock()),
            (torch.Tensor, "normal_", lambda x, **_: x),
            (validation, "check_finite", lambda *_: None),
            (session, "drop_stale_forms", lambda *_: None),
            (torch, "autocast", lambda *_, **__: contextlib.nullcontext()),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(mock.patch.object(*patch))
            stack.enter_context(launches.recorded(self._backend, self._launch))
            stack.enter_context(ChannelsLast())
            yield


def _order(op: str, args: Any, kwargs: Any) -> tuple[str, ...]:
    """Try ops as on a GPU, but convolve with the library."""
    if op.startswith("conv"):
        return backends.CONVOLUTION_ORDER
    return autotune.order(dispatch.ask, op, args, kwargs)


class ChannelsLast(TorchDispatchMode):
    """Returns the results of convolutions in channels-last memory, as cuDNN does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::convolution":
            return count_bytes.channels_last(result)
        return result


def stream(vae: VideoVAE, run: Run) -> None:
    """Encode frames to a latent, or decode a latent to images, on `meta`."""
    options, config = StreamOptions(limit_bytes=16 << 30), vae.config
    if run.encode:
        frames = torch.empty(1, 3, run.frames, run.height, run.width, device=_META, dtype=vae.dtype)
        made = vae.encode_stream(frames, options)
    else:
        height, width = (side // config.spatial_compression for side in (run.height, run.width))
        shape = 1, config.latent_channels, config.latent_frames(run.frames), height, width
        images = torch.empty(1, run.frames, run.height, run.width, 3, device=_META)
        latent = torch.empty(shape, device=_META, dtype=vae.dtype)
        made = vae.decode_stream(latent, options, images=images)
    for _ in made:
        pass


def meta_vae(family: str) -> VideoVAE:
    """Return the published VAE of `family` in bfloat16, without weights."""
    config = count_bytes.configs()[family]
    with _META:
        vae = VideoVAE(config, torch.float32, torch.float32).to(torch.bfloat16)
    vae.skips_static = False
    return vae


def _triton_variant(kernel, grid, *args, warps=4, num_stages=None, **constants) -> tuple:
    del grid
    return kernel.__name__, variant_of(kernel, args), warps, num_stages, *constants.items()


def _cuda_variant(source, kernel, like, items, threads, arguments, **constants) -> tuple:
    """Return what a binary is compiled for: it has all kernels of its source."""
    del kernel, items, threads, arguments
    return source, like.dtype, *constants.items()


def variant_of(kernel, args) -> tuple:
    """Return what Triton compiles in of each argument: type, multiple of 16, and 1 or None."""
    # The interpreter has them in its options, in Triton 3.2 in those of its rewriter.
    kept = kernel if hasattr(kernel, "kwargs") else getattr(kernel, "rewriter", None)
    plain = getattr(kept, "kwargs", {}).get("do_not_specialize")
    plain = plain or getattr(kernel, "do_not_specialize", None) or ()
    found = []
    for name, value in zip(kernel.arg_names, args, strict=False):
        if value is None or isinstance(value, float):
            found.append(type(value))
        elif isinstance(value, torch.Tensor):
            found.append((value.dtype, value.storage_offset() * value.element_size() % 16 == 0))
        elif value == 1 and name not in plain:
            found.append(1)
        else:
            found.append((value < 2**31, name in plain or value % 16 == 0))
    return tuple(found)


_VARIANTS = {"triton": _triton_variant, "cuda": _cuda_variant}
_ranked = autotune._ranked


def main() -> None:
    """Print the table."""
    decode = Run(17, 480, 832)
    longer = dataclasses.replace(decode, frames=81), Run(33, 720, 1280)
    both = (decode, *longer), (dataclasses.replace(decode, encode=True),)
    families = ("wan2.1", "wan2.2", "seedvr2")
    for backend, family, runs in itertools.product(_VARIANTS, families, both):
        vae, process = meta_vae(family), Process(backend)
        for run in runs:
            trials, compiled = process.run(vae, run)
            sys.stdout.write(
                f"{backend} {family} {run}: {trials.total()} trials {dict(trials)}, "
                f"{compiled.total()} compiled {dict(compiled)}\n"
            )


if __name__ == "__main__":
    main()
