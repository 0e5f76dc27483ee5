"""Seconds of one device, and of several that share the video in bands, in turn.

`python tests/benchmarks/bench_bands.py` gives each of two logical devices of the CPU one core, and
compares with one device on one core. `--devices cuda:0 cuda:1` compares with the first alone,
`--ranks 2` times processes of one core each; those on GPUs are timed by `torchrun`. It prints the
median seconds and the median of the rounds' ratios, and appends one JSON row per case to
`results.jsonl`. Run it on an idle machine.
"""

import argparse
import contextlib
import logging
import statistics
from collections.abc import Iterator

import bind  # noqa: F401
import torch
from torch import Tensor

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.benchmarks.weights import WIDTHS, random_input, random_vae
from fast_video_vae.tests.vae.streaming.processes import Processes
from fast_video_vae.vae import VideoVAE
from fast_video_vae.vae.streaming.bands.team import Team


def in_turn(
    vae: VideoVAE, direction: str, x: Tensor, rounds: int, cores: int
) -> dict[str, list[float]]:
    """Return the seconds of rounds of the VAE's own device and its team, in turn: "one", "all".

    On a CPU the former has one core, and the devices of this process have `cores`.
    """
    before, run = torch.get_num_threads(), getattr(vae, direction)
    own, team = Team(vae.replicas), vae.team
    results: dict[str, Tensor] = {}

    def by(team: Team, cores: int) -> Tensor:
        if vae.device.type == "cpu":
            torch.set_num_threads(cores)
        vae.team = team
        return run(x)

    runs = {"one": lambda: by(own, 1), "all": lambda: by(team, cores)}
    try:
        with torch.inference_mode():
            seconds = record.in_turn(runs, rounds, look=results.__setitem__)
    finally:
        vae.team = team
        torch.set_num_threads(before)
    error = (results["one"].double() - results["all"].double()).abs().max().item()
    if error > 1e-4 * results["one"].double().abs().max().item() and vae.dtype == torch.float32:
        raise ValueError(f"the results differ by {error}; expected rounding")
    return record.after_first(seconds)


def main() -> None:
    """Run the cases that the command line names."""
    args = _arguments()
    kind = "ranks" if args.ranks else "bands"
    where = f"{args.ranks} ranks" if args.ranks else ", ".join(args.devices)
    logging.info("%s", f"{'case':44}{'one s':>9}{kind + ' s':>10}{'x one':>8}")
    with _shared(args) as vae:
        for direction in args.direction:
            x = random_input(direction, "wan2.1", *record.size_of(args.size))
            cores = 1 if args.ranks else len(args.devices)
            seconds = in_turn(vae, direction, x.to(vae.device, vae.dtype), args.rounds, cores)
            case = f"{direction} {args.size} {args.dtype}, {where}"
            faster = record.ratio(seconds, "one", "all")
            fields = {
                f"{name}_s": [round(each, 4) for each in seconds[key]]
                for name, key in (("one", "one"), (kind, "all"))
            }
            fields |= {f"{kind}_are_faster_by": round(faster, 3)}
            record.append(args.out, f"bench_{kind}", case, base_width=args.width, **fields)
            medians = [statistics.median(each) for each in seconds.values()]
            logging.info("%-44s%9.3f%10.3f%8.2f", case, *medians, faster)


@contextlib.contextmanager
def _shared(args: argparse.Namespace) -> Iterator[VideoVAE]:
    """A VAE whose videos the devices or ranks of the command line share."""
    given = "wan2.1", args.width, getattr(torch, args.dtype)
    if not args.ranks:
        vae = random_vae(*given, device=args.devices[0])
        vae.devices = args.devices
        yield vae
        return
    processes = Processes(args.ranks)
    try:
        vae = random_vae(*given)
        with processes.shared(vae, args.ranks, None, random_vae, *given):
            yield vae
    finally:
        processes.close()


def _arguments() -> argparse.Namespace:
    return record.parser(
        __doc__, devices=["cpu", "cpu"], ranks=None, direction=["decode", "encode"],
        dtype="float32", size="17x192x192", rounds=5, width=WIDTHS["wan2.1"],
    ).parse_args()  # fmt: skip


if __name__ == "__main__":
    main()
