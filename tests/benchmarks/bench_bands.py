"""Seconds of one device, and of several that share the video in bands, in turn.

`python tests/benchmarks/bench_bands.py` gives each of two logical devices of the CPU one core, and
compares with one device on one core. `--devices cuda:0 cuda:1` compares with the first alone. It
prints the median seconds and the median of the rounds' ratios, and appends one JSON row per case to
`results.jsonl`. Run it on an idle machine.
"""

import logging
import statistics

import bind  # noqa: F401
import torch
from torch import Tensor

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.benchmarks.weights import WIDTHS, random_input, random_weights
from fast_video_vae.vae import VideoVAE, load_vae
from fast_video_vae.vae.streaming.bands.team import Team


def in_turn(vae: VideoVAE, direction: str, x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of rounds of the first device and of all, in turn: "one", "bands".

    On a CPU each device has one core.
    """
    before, run = torch.get_num_threads(), getattr(vae, direction)
    own, team, cores = Team(vae.replicas), vae.team, len(vae.devices)
    results: dict[str, Tensor] = {}

    def by(team: Team, cores: int) -> Tensor:
        if vae.device.type == "cpu":
            torch.set_num_threads(cores)
        vae.team = team
        return run(x)

    runs = {"one": lambda: by(own, 1), "bands": lambda: by(team, cores)}
    try:
        with torch.inference_mode():
            seconds = record.in_turn(runs, rounds, look=results.__setitem__)
    finally:
        vae.team = team
        torch.set_num_threads(before)
    error = (results["one"].double() - results["bands"].double()).abs().max().item()
    if error > 1e-4 * results["one"].double().abs().max().item() and vae.dtype == torch.float32:
        raise ValueError(f"the results differ by {error}; expected rounding")
    return record.after_first(seconds)


def main() -> None:
    """Run the cases that the command line names."""
    args = record.parser(
        __doc__, devices=["cpu", "cpu"], direction=["decode", "encode"], dtype="float32",
        size="17x192x192", rounds=5, width=WIDTHS["wan2.1"],
    ).parse_args()  # fmt: skip
    state, dtype = random_weights("wan2.1", args.width), getattr(torch, args.dtype)
    vae = load_vae(state, dtype=dtype, device=args.devices[0])
    vae.devices = args.devices
    logging.info("%s", f"{'case':44}{'one s':>9}{'bands s':>10}{'x one':>8}")
    for direction in args.direction:
        x = random_input(direction, "wan2.1", *record.size_of(args.size))
        seconds = in_turn(vae, direction, x.to(vae.device, vae.dtype), args.rounds)
        case = f"{direction} {args.size} {args.dtype}, {', '.join(args.devices)}"
        faster = record.ratio(seconds, "one", "bands")
        fields = {f"{name}_s": [round(one, 4) for one in each] for name, each in seconds.items()}
        fields["bands_are_faster_by"] = round(faster, 3)
        record.append(args.out, "bench_bands", case, base_width=args.width, **fields)
        medians = [statistics.median(each) for each in seconds.values()]
        logging.info("%-44s%9.3f%10.3f%8.2f", case, *medians, faster)


if __name__ == "__main__":
    main()
