"""Seconds of ComfyUI's VAE nodes in a real server, with the stock VAE and with this pack's.

`python tests/benchmarks/bench_comfyui.py` boots ComfyUI with this pack, loads one file of random
full-width Wan 2.1 weights with `VAELoader` and with `FastVAE_Load`, and runs ComfyUI's `VAEDecode`
and `VAEEncode` on both in turn for `--rounds` rounds, each with new input. A node's time runs from
its `executing` message on the websocket to that of the next node, so it includes loading to the
device, casts and the IMAGE. Medians are printed and appended to `results.jsonl` as JSON rows. Run
it on an idle machine.
"""

import tempfile
from pathlib import Path

import bind  # noqa: F401
import torch
from PIL import Image
from safetensors.torch import save_file

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.benchmarks.weights import random_input, random_weights
from fast_video_vae.tests.nodes.checkout import why_unavailable
from fast_video_vae.tests.nodes.server import Server, Workflow

_VAE = "random.safetensors"
_LOADERS = {
    "ours": ("FastVAE_Load", {"dtype": "auto", "encode_dtype": "auto", "chunk": 0}),
    "comfyui": ("VAELoader", {}),
}
_NODES = {"decode": "VAEDecode", "encode": "VAEEncode"}


_SIZES = {"cpu": ["1x512x512", "17x192x192"], "cuda": ["1x1024x1024", "81x480x832"]}


def write_inputs(folder: Path, stem: str, size: str, seed: int) -> None:
    """Write a random latent for LoadLatent, and frames for LoadImage: a PNG or an animated one."""
    latent = random_input("decode", "wan2.1", *record.size_of(size), seed=seed)
    tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, folder / f"{stem}.latent")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(256, (*record.size_of(size), 3), generator=generator)
    first, *others = [Image.fromarray(frame) for frame in noise.to(torch.uint8).numpy()]
    first.save(folder / f"{stem}.png", save_all=bool(others), append_images=others)


def measure(server: Server, size: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round by direction and implementation, after a warm-up round."""
    seconds = {task: {name: [] for name in _LOADERS} for task in _NODES}
    for count in range(rounds + 1):
        stem = f"{size}-{count}"  # new files, so that ComfyUI caches no result
        write_inputs(server.input, stem, size, count)
        for name in sorted(_LOADERS, reverse=bool(count % 2)):  # the first one is slower
            times = _run(server, stem, name)
            for task in _NODES if count else ():
                seconds[task][name].append(times[task])
    return seconds


def main() -> None:
    """Run the cases that the command line names."""
    parser = record.parser(__doc__, width=96, rounds=5)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--only", help="FRAMESxHEIGHTxWIDTH, one size instead of the usual ones")
    args = parser.parse_args()
    if reason := why_unavailable():
        parser.error(reason)
    device = record.best_device().type
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder), f"--{args.dtype}-vae", cpu=device == "cpu") as server,
    ):
        save_file(random_weights("wan2.1", args.width), server.models("vae") / _VAE)
        version = server.get("/system_stats")["system"]["comfyui_version"]
        versions = {"ours": record.commit(), "comfyui": version}
        for size in [args.only] if args.only else _SIZES[device]:
            for task, times in measure(server, size, args.rounds).items():
                case = f"{task} {size} {args.dtype}"
                record.append_each(args.out, "bench_comfyui", case, times, args.width, versions)


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
