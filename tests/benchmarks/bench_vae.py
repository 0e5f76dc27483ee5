"""Seconds of this pack's VAE, ComfyUI's and diffusers', on the same weights and input, in one run.

`python tests/benchmarks/bench_vae.py` runs every case with all implementations in turn for
`--rounds` rounds, prints the median seconds and the median of the rounds' ratios, and appends one
JSON row per case and implementation to `results.jsonl`. `--dtype default` is each implementation's
own: this pack's that `load_vae` chooses, float32 of the peers on a CPU. `--static` encodes a
picture and grey frames, also without skipping them (`every`). Run it on an idle machine: other
processes double the times.
"""

import functools
import itertools
import logging
from collections.abc import Callable

import bind  # noqa: F401
import torch
from torch import Tensor

from fast_video_vae.tests.benchmarks import peers, record
from fast_video_vae.tests.benchmarks.weights import WIDTHS, random_input, random_weights
from fast_video_vae.vae import VideoVAE, load_vae

Run = Callable[[Tensor], Tensor]

_SIZES = {
    "wan2.1": {
        "cpu": ["1x256x256", "1x512x512", "17x192x192"],
        "cuda": ["1x1024x1024", "81x480x832", "81x720x1280"],
    },
    "wan2.2": {"cpu": ["17x128x128"], "cuda": ["1x1024x1024", "121x704x1280"]},
    "seedvr2": {"cpu": ["5x128x128"], "cuda": ["1x1024x1024", "33x720x1280"]},
}
_PEERS = {"comfyui": peers.comfyui_vae, "diffusers": peers.diffusers_vae}


def implementations(
    state: dict[str, Tensor], dtype: torch.dtype | None, names: list[str]
) -> dict[str, tuple[str, Run, Run]]:
    """Return version, encode and decode by name; an unavailable peer is logged and left out."""
    device = record.best_device()
    ours = load_vae(state, dtype=dtype, device=device)
    built: dict[str, tuple[str, Run, Run]] = {"ours": (record.commit(), ours.encode, ours.decode)}
    for name in names:
        if name == "every":
            built[name] = record.commit(), functools.partial(every_frame, ours), ours.decode
            continue
        try:
            peer = _PEERS[name](state, dtype=dtype or torch.float32, device=device)
        except peers.PeerUnavailableError as error:
            logging.warning("left out: %s", error)
        else:
            built[name] = peer.version, peer.encode, peer.decode
    return built


def every_frame(vae: VideoVAE, frames: Tensor) -> Tensor:
    """Encode `frames` `[B, C, T, H, W]` without skipping static frames."""
    vae.skips_static = False
    try:
        return vae.encode(frames)
    finally:
        vae.skips_static = True


def main() -> None:
    """Run the cases that the command line names."""
    parser = record.parser(
        __doc__, width=None, rounds=3, dtype=["bfloat16", "float32"],
        direction=["decode", "encode"], static=False,
    )  # fmt: skip
    parser.add_argument("--family", choices=_SIZES, default="wan2.1")
    parser.add_argument(
        "--size", nargs="+", help="FRAMESxHEIGHTxWIDTH instead of the default sizes"
    )
    parser.add_argument("--peers", nargs="*", choices=["every", *_PEERS], help="default: all")
    args = parser.parse_args()
    device, width = record.best_device(), args.width or WIDTHS[args.family]
    state = random_weights(args.family, width)
    names = [*_PEERS, *["every"][: args.static]] if args.peers is None else args.peers
    for named in args.dtype:
        dtype = None if named == "default" else getattr(torch, named)
        built = implementations(state, dtype, names)
        sizes = args.size or _SIZES[args.family][device.type]
        for size, direction in itertools.product(sizes, args.direction):
            x = random_input(direction, args.family, *record.size_of(size))
            if args.static and direction == "encode":
                x[:, :, 1:] = 0
            x = x.to(device, dtype or torch.float32)
            pick = 1 if direction == "encode" else 2
            runs = {name: functools.partial(entry[pick], x) for name, entry in built.items()}
            with torch.inference_mode():
                seconds = record.after_first(record.in_turn(runs, args.rounds))
            case = f"{direction} {size} {named.replace('default', 'defaults')}"
            case += "" if args.family == "wan2.1" else f" {args.family}"
            case += ", static" if args.static else ""
            versions = {name: entry[0] for name, entry in built.items()}
            record.append_each(args.out, "bench_vae", case, seconds, width, versions)
        del built


if __name__ == "__main__":
    main()
