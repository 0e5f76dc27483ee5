"""Seconds of one process, and of several that share the video in shards, in turn.

`python tests/benchmarks/bench_shards.py` gives each process one core of the CPU, and compares with
one process on one core. It prints the median seconds and the median of the rounds' ratios, and
appends one JSON row per case to `results.jsonl`. Run it on an idle machine. Processes on GPUs are
timed by `torchrun` with the command line.
"""

import argparse
import logging
import runpy
import statistics
from pathlib import Path

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.benchmarks.weights import WIDTHS, random_input  # noqa: E402
from fast_video_vae.tests.vae.sharding import tasks  # noqa: E402
from fast_video_vae.tests.vae.sharding.pool import Pool  # noqa: E402


def main() -> None:
    """Run the cases that the command line names."""
    args = _arguments()
    width = args.width or WIDTHS["wan2.1"]
    pool = Pool(args.ranks)
    logging.info("%s", f"{'case':36}{'one s':>9}{'shards s':>10}{'x one':>8}{'error':>10}")
    try:
        for direction in args.direction:
            x = random_input(direction, "wan2.1", *map(int, args.size.split("x")))
            options = {"family": "wan2.1", "width": width, "x": x, "rounds": args.rounds}
            seconds, error = pool.run(tasks.in_pairs, **options, encode=direction == "encode")[0]
            pairs = zip(seconds["one"], seconds["shards"], strict=True)
            faster = statistics.median(one / shards for one, shards in pairs)
            medians = {name: statistics.median(each) for name, each in seconds.items()}
            case = f"{direction} {args.size}, {args.ranks} ranks"
            record.append(
                args.out,
                "bench_shards",
                case,
                base_width=width,
                one_s=[round(each, 4) for each in seconds["one"]],
                shards_s=[round(each, 4) for each in seconds["shards"]],
                shards_are_faster_by=round(faster, 3),
            )
            line = f"{case:36}{medians['one']:9.3f}{medians['shards']:10.3f}"
            logging.info("%s", f"{line}{faster:8.2f}{error:10.1e}")
    finally:
        pool.close()


def _arguments() -> argparse.Namespace:
    parser = record.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--direction", nargs="+", default=["decode", "encode"])
    add("--size", default="17x192x192", help="FRAMESxHEIGHTxWIDTH")
    add("--rounds", type=int, default=5)
    add("--width", type=int, help="base width of the random weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
