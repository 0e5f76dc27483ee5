"""Seconds of ComfyUI's VAE nodes in a real server, with the stock VAE and with this pack's.

`python tests/benchmarks/bench_comfyui.py` boots ComfyUI with this pack, loads one file of random
full-width Wan 2.1 weights with `VAELoader` and with `FastVAE_Load`, and runs ComfyUI's `VAEDecode`
and `VAEEncode` on both in turn for `--rounds` rounds, each with new input. A node's time runs from
its `executing` message on the websocket to that of the next node, so it includes loading to the
device, casts and the IMAGE. Medians are printed and appended to `results.jsonl` as JSON rows. Run
it on an idle machine.
"""

import logging
import runpy
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record, timing  # noqa: E402
from fast_video_vae.tests.builders import random_state_dict  # noqa: E402
from fast_video_vae.tests.nodes.checkout import why_unavailable  # noqa: E402
from fast_video_vae.tests.nodes.server import Server, Workflow  # noqa: E402

_VAE = "random.safetensors"
_LOADERS = {
    "ours": ("FastVAE_Load", {"dtype": "auto", "encode_dtype": "auto", "chunk": 0}),
    "comfyui": ("VAELoader", {}),
}
_NODES = {"decode": "VAEDecode", "encode": "VAEEncode"}


@dataclass(frozen=True)
class Size:
    """Frames, height and width of the images."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"

    def write_latent(self, path: Path, seed: int) -> None:
        """Write a random latent in the format of LoadLatent."""
        shape = (1, 16, (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8)
        latent = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        save_file({"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}, path)

    def write_frames(self, path: Path, seed: int) -> None:
        """Write random frames in the format of LoadImage: a PNG, animated for a video."""
        shape = (self.frames, self.height, self.width, 3)
        noise = torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))
        first, *others = [Image.fromarray(frame) for frame in noise.to(torch.uint8).numpy()]
        first.save(path, save_all=bool(others), append_images=others)


_SIZES = {
    "cpu": [Size(1, 512, 512), Size(17, 192, 192)],
    "cuda": [Size(1, 1024, 1024), Size(81, 480, 832)],
}


def measure(server: Server, size: Size, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round by direction and implementation, after a warm-up round."""
    seconds = {task: {name: [] for name in _LOADERS} for task in _NODES}
    for count in range(rounds + 1):
        stem = f"{size}-{count}"  # new files, so that ComfyUI caches no result
        size.write_latent(server.input / f"{stem}.latent", seed=count)
        size.write_frames(server.input / f"{stem}.png", seed=count)
        for name in sorted(_LOADERS, reverse=bool(count % 2)):  # the first one is slower
            times = _run(server, stem, name)
            for task in _NODES if count else ():
                seconds[task][name].append(times[task])
    return seconds


def main() -> None:
    """Run the cases that the command line names."""
    parser = record.parser(__doc__)
    parser.add_argument("--width", type=int, default=96, help="base width of the random weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--only", help="FRAMESxHEIGHTxWIDTH, one size instead of the usual ones")
    args = parser.parse_args()
    reason = why_unavailable()
    if reason is not None:
        parser.error(reason)
    cuda = torch.cuda.is_available()
    sizes = _SIZES["cuda" if cuda else "cpu"]
    if args.only:
        sizes = [Size(*map(int, args.only.split("x")))]
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder), f"--{args.dtype}-vae", cpu=not cuda) as server,
    ):
        save_file(random_state_dict(args.width), server.models("vae") / _VAE)
        version = server.get("/system_stats")["system"]["comfyui_version"]
        logging.info("%-34s%12s%12s%12s", "case", "ours s", "comfyui s", "x comfyui")
        for size in sizes:
            for task, times in measure(server, size, args.rounds).items():
                case = f"{task} {size} {args.dtype}"
                versions = {"ours": record.commit(), "comfyui": version}
                medians, ratios = timing.append(
                    args.out, "bench_comfyui", case, times, args.width, versions
                )
                cells = (case, medians["ours"], medians["comfyui"], ratios["comfyui"])
                logging.info("%-34s%12.3f%12.3f%12.2f", *cells)


def _run(server: Server, stem: str, name: str) -> dict[str, float]:
    """Decode a latent and encode frames; return the seconds of each."""
    kind, options = _LOADERS[name]
    workflow = Workflow()
    vae = workflow.add(kind, vae_name=_VAE, **options)
    latent = workflow.add("LoadLatent", latent=f"{stem}.latent")
    frames = workflow.add("LoadImage", image=f"{stem}.png")
    decoded = workflow.add(_NODES["decode"], samples=latent, vae=vae)
    encoded = workflow.add(_NODES["encode"], pixels=frames, vae=vae)
    # Output nodes that take almost no time.
    first = workflow.add("ImageFromBatch", image=decoded, batch_index=0, length=1)
    workflow.add("PreviewImage", images=first)
    workflow.add("SaveLatent", samples=encoded, filename_prefix="bench")
    events = server.events
    prompt_id = server.queue(workflow)
    server.wait(prompt_id, timeout_s=3600)
    times = events.node_seconds(prompt_id)
    return {"decode": times[decoded[0]], "encode": times[encoded[0]]}


if __name__ == "__main__":
    main()
