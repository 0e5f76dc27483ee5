"""Memory and seconds of one ComfyUI server over 500 mixed prompts.

`python tests/benchmarks/bench_server.py` boots ComfyUI with this pack and runs ten rounds of the
fifty prompts of `tests/nodes/prompts.py`: all nodes, sizes in turn, errors and stops among them.
It prints the seconds of each round and the server's memory after it, and appends one JSON row to
`results.jsonl`: the last fifty prompts next to the first hundred. With `--keep FOLDER` the output
files are kept, to compare those of two commits.
"""

import logging
import runpy
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.nodes import prompts  # noqa: E402
from fast_video_vae.tests.nodes.checkout import PACK, import_comfyui, why_unavailable  # noqa: E402
from fast_video_vae.tests.nodes.server import PromptError, Server  # noqa: E402

_log = logging.getLogger(__name__)


def run(server: Server, prompt: prompts.Prompt) -> float:
    """Run a prompt to the end that it should have, and return its seconds."""
    if prompt.ends == prompts.STOPS:
        error, _ = server.interrupted(prompt)
        if not error.interrupted:
            raise error
        return 0.0  # the moment of the stop is chosen, not measured
    start, failed = time.monotonic(), False
    try:
        server.run(prompt)
    except PromptError as error:
        if prompt.ends == prompts.RUNS:
            raise RuntimeError(f"{prompt.name} failed") from error
        failed = True
    if failed != (prompt.ends == prompts.FAILS):
        raise RuntimeError(f"{prompt.name} ran; expected an error")
    return time.monotonic() - start


def main() -> None:
    """Run all rounds and write the row."""
    parser = record.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pack", type=Path, default=PACK, help="folder of the pack to run")
    parser.add_argument("--keep", type=Path, help="folder for the output files")
    given = parser.parse_args()
    if reason := why_unavailable():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "server"
        import_comfyui(Path(folder) / "here")
        prompts.give_nodes(base)
        cpu = not torch.cuda.is_available()
        pack = given.pack.resolve()
        with Server(base, "--fp32-vae", pack=pack, cpu=cpu, threads=1) as server:
            prompts.give_models(server)
            seconds, mib = [], []
            for number in range(given.rounds):
                seconds.append(sum(run(server, each) for each in prompts.mixed(number)))
                mib.append(server.memory().rss / 2**20)
                _log.info("round %d: %.1f s, %.0f MiB", number, seconds[-1], mib[-1])
        if given.keep:
            shutil.copytree(base / "output", given.keep)
    if given.rounds > 2:
        first, last = statistics.mean(seconds[:2]), seconds[-1]
        record.append(
            given.out,
            "server",
            f"{50 * given.rounds} mixed prompts",
            seconds_first_hundred=round(2 * first, 1),
            seconds_last_fifty=round(last, 1),
            ratio=round(last / first, 3),
            mib=[round(each) for each in mib],
        )


if __name__ == "__main__":
    main()
