"""Peak memory of loading a full-size VAE from a file and decoding, with this pack and ComfyUI.

`python tests/benchmarks/bench_peak.py` writes random weights of Wan 2.2 (705 M parameters), or of
another family, in the dtype. Each implementation loads the file and decodes a clip three times in a
separate process (Linux). The peak and the memory afterwards are printed and appended to
`results.jsonl`.
"""

import argparse
import json
import logging
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.benchmarks.weights import random_weights  # noqa: E402
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402

# Shape of the latent and the name of the decoded clip, by family.
_FAMILIES = {
    "wan2.2": ((1, 48, 5, 8, 8), "17x128x128"),
    "seedvr2": ((1, 16, 2, 16, 16), "5x128x128"),
}


def measure(
    name: str, path: str, dtype: torch.dtype, base: Path, shape: tuple[int, ...]
) -> dict[str, float]:
    """Load and decode in this process; return `peak_mib` and `stays_mib`."""
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if name == "ours":
        decode = load_vae(path, dtype=dtype).decode
    else:
        import_comfyui(base)
        import comfy.sd
        import comfy.utils

        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(path), dtype=dtype)
        decode = vae.first_stage_model.decode
    with torch.inference_mode():
        for _ in range(3):
            decode(latent.to(dtype))
    fields = {"peak_mib": "VmHWM", "stays_mib": "VmRSS"}
    return {name: round(record.process_mib(field), 1) for name, field in fields.items()}


def main() -> None:
    """Run both implementations, or the one of `--case` in this process."""
    parser = record.parser(__doc__)
    parser.add_argument("--family", choices=_FAMILIES, default="wan2.2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    shape, clip = _FAMILIES[args.family]
    if args.case:
        name, path, base = args.case
        print(json.dumps(measure(name, path, dtype, Path(base), shape)))
        return
    names = ["ours"] if why_unavailable() else ["ours", "comfyui"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vae.safetensors"
        save_file(random_weights(args.family, dtype=dtype), path)
        for name in names:
            command = [sys.executable, __file__, "--family", args.family, "--dtype", args.dtype]
            command += ["--case", name, str(path), folder]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            result = json.loads(output.splitlines()[-1])
            label = f"load and decode {clip} {args.dtype} {args.family}"
            logging.info("%-48s %-8s %s", label, name, result)
            record.append(args.out, "bench_peak", label, implementation=name, **result)


if __name__ == "__main__":
    main()
