"""Milliseconds of the host in a decode or an encode on an NVIDIA GPU, which a CPU plays.

`python tests/benchmarks/bench_host.py` runs this pack on `meta` tensors as on a card of sm_90 with
24 GiB. PyTorch's ops and Triton's kernels are recorded, not run. `ms` is a whole call without the
recording, which must be faster than the GPU; `own_ms` is without the time within PyTorch's ops too,
some of which take longer on `meta`. `waits` are reads of a result, for which the host waits. The
kernels of the family are there; runs repeat until two launch the same, and the medians of five are
reported.
"""

import importlib
import os
import runpy
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "0", "FAST_VIDEO_VAE_NATIVE": "0"}  # as next to a GPU
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.kernels import shapes, triton_ops
from fast_video_vae.kernels.devices import kinds
from fast_video_vae.kernels.ready import background, selfcheck
from fast_video_vae.tests.benchmarks import count_bytes, record
from fast_video_vae.tests.played_devices import functions_of
from fast_video_vae.vae import VideoVAE

_CASES = ("decode 1 1024 1024", "decode 81 480 832", "decode 81 720 1280", "encode 81 480 832")
_NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach"}


class Launches(TorchDispatchMode):
    """Records what would be launched, and the seconds within it."""

    names: Counter[str]
    waits, inside_s, recording_s = 0, 0.0, 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch's wrapper for that takes longer than most ops

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start, name, kwargs = time.perf_counter(), func._schema.name[6:], kwargs or {}
        reads = name == "_local_scalar_dense" or str(kwargs.get("device")) == "cpu"
        if reads and isinstance(args[0], Tensor) and args[0].is_meta:
            self.waits += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype")) if kwargs else 1
        run = _RESULTS.get(name, func)
        before = time.perf_counter()
        result = run(*args, **kwargs)
        after = time.perf_counter()
        if isinstance(result, Tensor) and not func.is_view and name not in _NO_LAUNCH:
            self.names[name] += 1
        self.inside_s += after - before
        self.recording_s += time.perf_counter() - after + before - start
        return result

    def launch(self, kernel: Any, *_: object, **__: object) -> None:
        """Stand in for the function that launches a kernel of Triton."""
        self.names[kernel.__name__] += 1


def _convolved(
    x: Tensor, weight: Tensor, _: object, stride: list[int], pads: list[int], *__: object
) -> Tensor:
    return shapes.new_video(x, shapes.convolved_size(x.shape, weight.shape, stride, pads))


def _stacked(each: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(each[0].unsqueeze(dim).shape)
    shape[dim] = len(each)
    return each[0].new_empty(shape)


# Results that PyTorch describes on `meta` in Python: 50 to 400 us for which no GPU waits.
_RESULTS = {
    "addmm": lambda _, x, weight: x.new_empty(x.shape[0], weight.shape[1]),
    "convolution": _convolved,
    "mm": lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]),
    "stack": _stacked,
}


def _built(name: str, work: Any) -> background.Job:
    """Stand in for the thread that builds kernels."""
    job = background.Job(name, work)
    job.run()
    return job


def play(launches: Launches) -> None:
    """Let `meta` be an NVIDIA GPU, from here on in this process."""
    autocast, kinds._KINDS["meta"] = torch.autocast, "nvidia"
    torch.autocast = lambda _, **options: autocast("cpu", **options)
    torch.meta = SimpleNamespace(**functions_of("nvidia"))
    torch.meta.mem_get_info = lambda *_: (22 << 30, 24 << 30)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    background.submit, selfcheck.checked = _built, lambda *_: ("triton",)
    torch.Generator, Tensor.normal_ = mock.MagicMock(), lambda x, **_: x  # there are no numbers
    for path in Path(triton_ops.__file__).parent.glob("[a-z]*.py"):
        module = importlib.import_module(f"{triton_ops.__name__}.{path.stem}")
        for name, new in (("launch", launches.launch), ("_try", lambda _: "")):
            if hasattr(module, name):
                setattr(module, name, new)


def meta_vae() -> VideoVAE:
    """Return Wan 2.1 of the published widths in bfloat16, without numbers."""
    config, dtype = count_bytes.configs()["wan2.1"], torch.bfloat16
    with torch.device("meta"):
        return VideoVAE(config, dtype, dtype).to(dtype).requires_grad_(False)


def input_of(case: str) -> tuple[str, Tensor]:
    """Return "decode" or "encode" and the input of a case, "decode 81 480 832"."""
    direction, (frames, height, width) = case.split()[0], map(int, case.split()[1:])
    shape = (1, 3, frames, height, width)
    if direction == "decode":
        shape = (1, 16, frames // 4 + 1, height // 8, width // 8)
    return direction, torch.empty(shape, dtype=torch.bfloat16, device="meta")


def measure(vae: VideoVAE, launches: Launches, case: str) -> dict[str, Any]:
    """Return the figures of a case."""
    (direction, x), last, times = input_of(case), None, []
    for _ in range(14):
        launches.names, launches.waits = Counter(), 0
        launches.inside_s = launches.recording_s = 0.0
        start = time.perf_counter()
        with launches, torch.no_grad():
            getattr(vae, direction)(x)
        seconds = time.perf_counter() - start - launches.recording_s
        times = [*times, (seconds, seconds - launches.inside_s)] if launches.names == last else []
        last = launches.names
        if len(times) == 5:
            break
    ms, own = (round(1e3 * statistics.median(each), 2) for each in zip(*times, strict=True))
    count, waits = launches.names.total(), launches.waits
    each = round(1e3 * ms / count, 1)
    return {"ms": ms, "own_ms": own, "us_per_launch": each, "launches": count, "waits": waits}


def main() -> None:
    """Print and save a row for each case."""
    parser = record.parser(__doc__)
    parser.add_argument("--case", nargs="+", default=_CASES, help='default: "decode 81 480 832" …')
    args, vae, launches = parser.parse_args(), meta_vae(), Launches()
    play(launches)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAST_VIDEO_VAE_CACHE"] = folder
        for case in args.case:
            values = measure(vae, launches, case)
            record.append(args.out, "bench_host", f"{case} bfloat16 wan2.1", **values)
            print(f"{case:24}" + "".join(f"{key} {value:<12}" for key, value in values.items()))


if __name__ == "__main__":
    main()
