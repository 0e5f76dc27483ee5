"""Seconds from nothing to the first clip, with the published archive, as for a new user.

`python tests/benchmarks/bench_install.py` makes a new virtual environment with torch and ComfyUI's
requirements, unpacks the archive of the pack into the `custom_nodes` of an empty base folder,
installs its requirements, boots the server, opens the template in the frontend in a browser and
runs it twice, until the video is there. pip's cache is off and the cache of the kernels is empty,
so the first run builds the CPU kernels. It prints the seconds of each stage and appends a JSON row
to `results.jsonl`. It needs a ComfyUI checkout, Playwright, Chromium and 5 GB of disk space. How
long pip takes depends on where it gets its packages from.
"""

import json
import logging
import os
import runpy
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.nodes.browser import (  # noqa: E402
    LOAD,
    QUEUE,
    READY,
    find_browser,
    open_browser,
)
from fast_video_vae.tests.nodes.checkout import find_comfyui, where_looked  # noqa: E402
from fast_video_vae.tests.nodes.server import Server  # noqa: E402
from fast_video_vae.tests.tools import environments  # noqa: E402
from fast_video_vae.tests.tools.publish import publish_zip  # noqa: E402

_TEMPLATE = "1 No download - encode and decode a clip"
_VIDEO = "video/fast_vae_0*.mp4"  # what the template's Save Video writes, below `output`

_TIMEOUT_S = 600

_MIB = 2**20


def main() -> None:
    """Install, boot, run twice, and append the row."""
    parser = record.parser(__doc__)
    args = parser.parse_args()
    if find_comfyui() is None:
        parser.error(where_looked())
    if find_browser() is None:
        parser.error("there is no Chromium on PATH or in $CHROMIUM")
    os.environ["PIP_NO_CACHE_DIR"] = "1"  # a new user's is empty
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        os.environ["FAST_VIDEO_VAE_CACHE"] = str(base / "kernels")
        archive = Path(folder) / "pack.zip"
        publish_zip(archive)
        python, pack = _install(Path(folder), archive, seconds)
        sizes = {
            "archive_mib": round(archive.stat().st_size / _MIB, 1),
            "pack_mib": round(_bytes_in(pack) / _MIB, 1),
        }
        cpu = not torch.cuda.is_available()
        server = Server(base, python=python, pack=None, name=environments.FOLDER, cpu=cpu)
        try:
            with _timed("boot_s", seconds):
                server.start()
            _run_template(server, Path(folder) / "browser", seconds)
        finally:
            server.stop()
    logging.info("archive %(archive_mib).1f MiB, unpacked %(pack_mib).1f MiB", sizes)
    case = "first workflow from the published archive"
    record.append(args.out, "bench_install", case, **seconds, **sizes)


def _install(folder: Path, archive: Path, seconds: dict[str, float]) -> tuple[Path, Path]:
    """Install everything below `folder`; return the Python and the folder of the pack."""
    with _timed("torch_s", seconds):
        python = environments.new_environment(folder / "venv")
        environments.pip(python, f"torch=={torch.__version__.partition('+')[0]}")
    with _timed("comfyui_s", seconds):
        environments.install_comfyui(python, find_comfyui())
    with _timed("pack_s", seconds):
        pack = folder / "base" / "custom_nodes" / environments.FOLDER
        shutil.unpack_archive(archive, pack)
        environments.pip(python, "-r", pack / "requirements.txt")
    return python, pack


def _run_template(server: Server, profile: Path, seconds: dict[str, float]) -> None:
    """Open the template in a new browser and run it twice."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        context = open_browser(driver, profile)
        page = context.pages[0]
        page.goto(server.url)
        page.wait_for_function(READY, timeout=60_000)
        page.evaluate(LOAD, _template(server))
        for name in ("first_clip_s", "second_clip_s"):
            before, start = server.get("/history").keys(), time.time()
            page.evaluate(QUEUE)
            video = _wait_for_video(server, before)
            seconds[name] = _logged(name, video.stat().st_mtime - start)
            video.unlink()
            # Every node runs again, but the process keeps its kernels.
            server.post("/free", free_memory=True)
            time.sleep(1)  # until the thread that runs workflows has done it
        context.close()


def _template(server: Server) -> Any:
    """Return the workflow from the address that the Templates dialog fetches it from."""
    names = server.get("/api/workflow_templates")[environments.FOLDER]
    if _TEMPLATE not in names:
        raise ValueError(f"the server offers {names}; expected {_TEMPLATE!r} among them")
    name = urllib.parse.quote(f"{_TEMPLATE}.json")
    return server.get(f"/api/workflow_templates/{environments.FOLDER}/{name}")


def _wait_for_video(server: Server, before: Collection[str]) -> Path:
    """Wait for the end of the run, in which every node has run, and return its video."""
    prompt_id = server.queued(before)
    server.wait(prompt_id, _TIMEOUT_S)
    status = server.get(f"/history/{prompt_id}")[prompt_id]["status"]
    if dict(status["messages"])["execution_cached"]["nodes"]:
        raise RuntimeError(json.dumps(status, indent=1))
    (video,) = server.output.glob(_VIDEO)
    return video


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Log the seconds of a stage, and keep them in `seconds`."""
    start = time.monotonic()
    yield
    seconds[name] = _logged(name, time.monotonic() - start)


def _logged(name: str, seconds: float) -> float:
    logging.info("%-16s%7.1f", name, seconds)
    return round(seconds, 1)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
