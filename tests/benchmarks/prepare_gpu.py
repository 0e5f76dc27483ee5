"""Make the folder from which `bench_gpu.py` measures the peers on a machine without a network.

`python tests/benchmarks/prepare_gpu.py` copies ComfyUI's `comfy/` from its checkout, diffusers, and
what both need, to `.gpu/`, which is not committed. A small module stands in for comfy-kitchen,
whose kernels are too large to carry. Then both are imported from there.
"""

import argparse
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / ".gpu"

# What the peers need, next to torch, transformers and the like.
_PACKAGES = ("diffusers", "importlib_metadata", "zipp", "einops", "comfy_aimdo")
_COMFYUI = ("comfy", "comfyui_version.py", "node_helpers.py")
_KITCHEN = "int8_attention_is_available = flash_attention_decode_is_available = lambda *_: False\n"

_LEFT = shutil.ignore_patterns("__pycache__", "*_tokenizer")  # 11 of the 19 MB of `comfy/`

_CHECK = """
import sys
folder, nodes = sys.argv[1:]
sys.path[:0] = [folder + "/packages", folder + "/comfyui", nodes]
import boot; boot.stand_ins()
from comfy.cli_args import args; args.cpu = True
import comfy.ldm.seedvr.vae, comfy.ldm.wan.vae, comfy.ldm.wan.vae2_2, comfyui_version
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
"""


def main() -> None:
    """Make the folder, and import the peers from it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    comfyui = parser.parse_args().comfyui
    if not (comfyui / "comfy" / "sd.py").is_file():
        sys.exit(f"{comfyui} has no comfy/sd.py; expected a checkout of ComfyUI")
    shutil.rmtree(_FOLDER, ignore_errors=True)
    homes = importlib.metadata.packages_distributions()
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            sys.exit(f"{name} is not installed; expected it next to this Python")
        _copy(Path(next(iter(spec.submodule_search_locations))), _FOLDER / "packages")
        for home in homes[name]:  # packages ask for each other's versions
            _copy(Path(importlib.metadata.distribution(home)._path), _FOLDER / "packages")
    for name in _COMFYUI:
        _copy(comfyui / name, _FOLDER / "comfyui")
    kitchen = _FOLDER / "packages" / "comfy_kitchen" / "__init__.py"
    kitchen.parent.mkdir()
    kitchen.write_text(_KITCHEN, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-c", _CHECK, _FOLDER, _ROOT / "tests/nodes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the peers do not import from {_FOLDER}: {done.stderr.strip()[-300:]}")
    print(f"{_FOLDER} is ready; next: python tests/benchmarks/bench_gpu.py")


def _copy(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target / source.name, ignore=_LEFT)
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    main()
