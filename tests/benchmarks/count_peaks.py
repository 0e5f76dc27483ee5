"""Peak memory of Wan 2.1 in bfloat16 on a GPU of sm_90, counted next to ComfyUI's own class.

`python tests/benchmarks/count_peaks.py` runs both on `meta` tensors and adds up what is alive, the
result included and the weights not. `gb` is what all launches read and write. The last columns are
this pack's within the peak of ComfyUI's class: what less memory would cost. The workspaces of cuDNN
and blocks that the allocator keeps are not counted; no number is computed.
"""

import os
import runpy
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "0", "FAST_VIDEO_VAE_NATIVE": "0"}  # as next to a GPU
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))

import torch
from torch import Tensor, nn

from fast_video_vae.tests.benchmarks import bench_host, count_bytes, peers, record
from fast_video_vae.tests.kernels import launches
from fast_video_vae.tests.vae.planning.live_bytes import LiveBytes
from fast_video_vae.vae import VideoVAE

_CASES = ("decode 81 480 832", "encode 81 480 832", "decode 81 720 1280", "encode 81 720 1280")
_MIB = 1 << 20


class Traffic(bench_host.Launches):
    """Counts the bytes of launches too."""

    counter: count_bytes.ByteCounter

    def launch(self, kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        """Stand in for the function that launches a kernel of Triton."""
        if "conv" in kernel.__name__:
            count_bytes.launched(self.counter, kernel, grid, *args, **constants)
        else:
            self.counter.count(*launches.of_triton(kernel, grid, *args, **constants))


def counted(traffic: Traffic, module: nn.Module, direction: str, x: Tensor) -> tuple[int, float]:
    """Return the peak of `module.decode(x)` or `encode` in MiB, and the GB that it moves."""
    live, traffic.names, traffic.counter = LiveBytes(), Counter(), count_bytes.ByteCounter()
    for tensor in (x, *module.parameters()):
        live.ignore(tensor)
    attends = count_bytes.FusedAttention(traffic.counter)
    with torch.no_grad(), attends, traffic, traffic.counter, live:  # the last one sees results
        getattr(module, direction)(x)
    return live.peak // _MIB, round(traffic.counter.total / 1e9, 1)


def measure(vae: VideoVAE, other: nn.Module, traffic: Traffic, case: str) -> dict[str, float]:
    """Return the figures of a case, as of `bench_host.py`."""
    direction, x = bench_host.input_of(case)
    most, _ = counted(traffic, other, direction, x)
    counted(traffic, vae, direction, x)  # derives weights, which stay
    mib, moved = counted(traffic, vae, direction, x)
    row = {"mib": mib, "gb": moved, "comfyui_mib": most}
    limits = iter(range(most, 0, -32))  # of the plan, which leaves the result out
    while mib > most:
        vae.limit_bytes = next(limits) * _MIB
        mib, moved = counted(traffic, vae, direction, x)
    vae.limit_bytes = None
    return row | {"within_mib": mib, "within_gb": moved}


def main() -> None:
    """Print and save a row for each case."""
    parser = record.parser(__doc__)
    parser.add_argument("--case", nargs="+", default=_CASES, help='default: "decode 81 480 832" …')
    args, vae, traffic = parser.parse_args(), bench_host.meta_vae(), Traffic()
    other = peers.comfyui_vae(vae.state_dict(), dtype=torch.bfloat16, device="meta").module
    from comfy.ldm.modules.diffusionmodules import model

    for module in other.modules():
        if hasattr(module, "optimized_attention"):  # the one of a GPU
            module.optimized_attention = model.pytorch_attention
    bench_host.play(traffic)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAST_VIDEO_VAE_CACHE"] = folder
        for case in args.case:
            values = measure(vae, other, traffic, case)
            record.append(args.out, "count_peaks", f"{case} bfloat16 wan2.1", **values)
            print(f"{case:24}" + "".join(f"{key} {value:<10}" for key, value in values.items()))


if __name__ == "__main__":
    main()
