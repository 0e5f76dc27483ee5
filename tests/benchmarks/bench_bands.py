"""Seconds of one device, and of several that share the video in bands or shards, in turn.

`python tests/benchmarks/bench_bands.py` gives each of two logical devices of the CPU one core, and
compares with one device on one core. `--devices cuda:0 cuda:1` compares with the first alone,
`--ranks 2` times processes that share it in shards; those on GPUs are timed by `torchrun`. It
prints the median seconds and the median of the rounds' ratios, and appends one JSON row per case to
`results.jsonl`. Run it on an idle machine.
"""

import argparse
import atexit
import logging
import runpy
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record, timing  # noqa: E402
from fast_video_vae.tests.benchmarks.weights import WIDTHS, random_input, random_weights  # noqa: E402
from fast_video_vae.tests.vae.sharding import tasks  # noqa: E402
from fast_video_vae.tests.vae.sharding.pool import Pool  # noqa: E402
from fast_video_vae.vae import VideoVAE, load_vae  # noqa: E402

# Cores that other processes may take in a round, and tries for each round.
_MOST_OTHERS = 0.1
_TRIES = 4


def in_pairs(
    vae: VideoVAE, direction: str, x: Tensor, devices: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of rounds of one device and several, in turn: "one" and "bands".

    The VAE is on the first device; logical devices of the CPU have a core each. A round in which
    other processes took more than a tenth of a core is repeated.
    """
    before, run = torch.get_num_threads(), getattr(vae, direction)
    results: dict[str, Tensor] = {}

    def on(names: Sequence[str]) -> Tensor:
        if vae.device.type == "cpu":
            torch.set_num_threads(max(1, len(names)))
        if vae.devices != [torch.device(name) for name in names]:
            vae.devices = names
        return run(x)

    runs = {"one": lambda: on([]), "bands": lambda: on(devices)}
    pairs: list[dict[str, float]] = []
    try:
        with torch.inference_mode():
            for tries in range(_TRIES * rounds):
                others, start = _others_s(), time.perf_counter()
                pair = timing.in_turn(runs, int(tries == 0), look=results.__setitem__)
                share = (_others_s() - others) / (time.perf_counter() - start)
                if share < _MOST_OTHERS or tries + rounds >= _TRIES * rounds + len(pairs):
                    pairs.append({name: each[-1] for name, each in pair.items()})
                if len(pairs) == rounds:
                    break
    finally:
        vae.devices = []
        torch.set_num_threads(before)
    error = (results["one"].double() - results["bands"].double()).abs().max().item()
    if error > 1e-4 * results["one"].double().abs().max().item() and vae.dtype == torch.float32:
        raise ValueError(f"the results differ by {error}; expected rounding")
    return {name: [pair[name] for pair in pairs] for name in runs}


def _others_s() -> float:
    """Return the seconds of processors that other processes took so far."""
    spent = psutil.cpu_times()
    return spent.user + spent.system + getattr(spent, "nice", 0.0) - time.process_time()


def main() -> None:
    """Run the cases that the command line names."""
    args = _arguments()
    width, many = args.width or WIDTHS["wan2.1"], "shards" if args.ranks else "bands"
    if args.ranks:
        pool = Pool(args.ranks)
        atexit.register(pool.close)
    else:
        dtype = getattr(torch, args.dtype)
        vae = load_vae(random_weights("wan2.1", width), dtype=dtype, device=args.devices[0])
    logging.info("%s", f"{'case':44}{'one s':>9}{many + ' s':>10}{'x one':>8}")
    for direction in args.direction:
        x = random_input(direction, "wan2.1", *map(int, args.size.split("x")))
        if args.ranks:
            options = {"family": "wan2.1", "width": width, "x": x, "rounds": args.rounds}
            seconds = pool.run(tasks.in_pairs, **options, encode=direction == "encode")[0]
            case = f"{direction} {args.size}, {args.ranks} ranks"
        else:
            seconds = in_pairs(vae, direction, x.to(vae.device, dtype), args.devices, args.rounds)
            case = f"{direction} {args.size} {args.dtype}, {', '.join(args.devices)}"
        faster = timing.ratio(seconds, "one", many)
        rounded = {f"{name}_s": [round(s, 4) for s in each] for name, each in seconds.items()}
        rounded |= {f"{many}_are_faster_by": round(faster, 3)}
        record.append(args.out, f"bench_{many}", case, base_width=width, **rounded)
        medians = [statistics.median(seconds[name]) for name in ("one", many)]
        logging.info("%-44s%9.3f%10.3f%8.2f", case, *medians, faster)


def _arguments() -> argparse.Namespace:
    parser = record.parser(__doc__)
    add = parser.add_argument
    add("--devices", nargs="+", default=["cpu", "cpu"])
    add("--ranks", type=int, help="processes of the CPU, a core each, in place of devices")
    add("--direction", nargs="+", default=["decode", "encode"])
    add("--dtype", default="float32")
    add("--size", default="17x192x192", help="FRAMESxHEIGHTxWIDTH")
    add("--rounds", type=int, default=5)
    add("--width", type=int, help="base width of the random weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
