"""Write `example_workflows/` again: `python tests/tools/workflows/write.py [NAME...]`.

Run it after a change of a node's inputs or outputs. It needs ComfyUI, its requirements, Playwright
and Chromium, like the browser tests. Each workflow is drawn by ComfyUI's frontend,
checked by the server and saved as the frontend saves it; its thumbnail shows its main nodes.
"""

import importlib.metadata
import io
import json
import runpy
import tempfile
import uuid
from pathlib import Path

from PIL import Image

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parents[1] / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.nodes.checkout import PACK  # noqa: E402
from fast_video_vae.tests.nodes.server import Server  # noqa: E402
from fast_video_vae.tests.tools.workflows.catalogue import catalogue  # noqa: E402
from fast_video_vae.tests.tools.workflows.command import chosen  # noqa: E402
from fast_video_vae.tests.tools.workflows.frontend import Frontend, open_browser  # noqa: E402
from fast_video_vae.tests.tools.workflows.furnish import furnish  # noqa: E402
from fast_video_vae.tests.tools.workflows.packs import properties  # noqa: E402
from fast_video_vae.tests.tools.workflows.picture import picture as blocks  # noqa: E402

_WIDTH = 1024  # pixels of a thumbnail
_LARGEST_BYTES = 200_000
_NAMESPACE = uuid.UUID("9f6a1c1e-6d0e-4c0f-9a3e-2f1f0f7b9a51")


def main() -> None:
    """Draw the workflows that were named, or all."""
    graphs = catalogue()
    names, folder = chosen(__doc__, graphs, PACK / "example_workflows")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        base = Path(scratch)
        furnish(base / "server", graphs.values())
        with (
            Server(base / "server", threads=1) as server,
            Server(base / "bare", threads=1) as other,
        ):
            modules = {
                kind: node["python_module"] for kind, node in server.get("/object_info").items()
            }
            version = server.get("/system_stats")["system"]["comfyui_version"]
            context = open_browser(driver, base / "browser")
            frontend = Frontend(context.pages[0], server.url)
            bare = Frontend(context.new_page(), other.url)
            for name in names:
                graph = graphs[name]
                drawn = frontend.draw(graph, properties(graph, modules, version), bare)
                server.queue(frontend.prompt())  # refused, were anything wrong but the empty files
                _save(folder / name, _tidy(drawn, name))
                _save_picture(folder / f"{name}.jpg", blocks(graph.blocks))
            context.close()


def _tidy(workflow: dict, name: str) -> dict:
    """A saved workflow without what differs from one run to the next."""
    workflow["id"] = str(uuid.uuid5(_NAMESPACE, name))
    # Without a place and a scale of the view: the frontend then fits the graph to any window.
    workflow["extra"] = {
        "frontendVersion": importlib.metadata.version("comfyui-frontend-package"),
    }
    return workflow


def _save(stem: Path, workflow: dict) -> None:
    text = json.dumps(workflow, indent=2, ensure_ascii=False)
    stem.with_name(f"{stem.name}.json").write_text(f"{text}\n", encoding="utf-8")


def _save_picture(file: Path, picture: Image.Image) -> None:
    height = round(picture.height * _WIDTH / picture.width)
    small = picture.resize((_WIDTH, height), Image.Resampling.LANCZOS)
    for quality in range(92, 40, -4):
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=quality, optimize=True, progressive=True)
        if len(buffer.getvalue()) < _LARGEST_BYTES:
            break
    file.write_bytes(buffer.getvalue())


if __name__ == "__main__":
    main()
