"""The texts of the nodes as ComfyUI's frontend translates them: `locales/<language>/nodeDefs.json`.

`python tests/tools/locales.py` writes the English file from the schemas, where every text is
written first. The other languages are written by hand; test_texts.py lists what they lack.
"""

import asyncio
import json
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Binds the checkout to its import name.
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))

import pytest

from fast_video_vae.tests.nodes.cards import machine
from fast_video_vae.tests.nodes.checkout import PACK, import_comfyui

LOCALES = PACK / "locales"

# The widget that the frontend puts below a seed, which is in no schema.
_CONTROL = "control_after_generate"


def node_infos() -> list[dict[str, Any]]:
    """Return the server's information about each node, in menu order; ComfyUI must be imported."""
    from fast_video_vae import comfy_entrypoint

    async def nodes() -> list[Any]:
        return await (await comfy_entrypoint()).get_node_list()

    with pytest.MonkeyPatch.context() as patch:
        machine(patch, 2)  # with two devices the nodes have every input
        return [node.GET_NODE_INFO_V1() for node in asyncio.run(nodes())]


def inputs(info: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, type and options of each input; a choice has its list in `options`."""
    for group in ("required", "optional"):
        for name, (kind, *more) in info["input"].get(group, {}).items():
            yield name, kind, more[0] if more else {}


def english(infos: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the English texts in the frontend's layout: node id, then what it shows."""
    texts = {}
    for info in infos:
        text: dict[str, Any] = {key: info[key] for key in ("display_name", "description")}
        text["inputs"] = {}
        for key, _, options in inputs(info):
            entry = {"name": options.get("display_name") or key}
            entry |= {"tooltip": options["tooltip"]} if options.get("tooltip") else {}
            text["inputs"][key.replace(".", "_")] = entry  # as in the frontend's keys
            if options.get(_CONTROL):
                text["inputs"][_CONTROL] = {"name": _CONTROL.replace("_", " ")}
        text["outputs"] = {}
        columns = (info["output"], info["output_name"], info["output_tooltips"])
        for at, (kind, name, tooltip) in enumerate(zip(*columns, strict=True)):
            entry = {"name": name} if name != kind else {}  # ComfyUI translates its types
            entry |= {"tooltip": tooltip} if tooltip else {}
            text["outputs"] |= {str(at): entry} if entry else {}
        texts[info["name"]] = {key: value for key, value in text.items() if value}
    return texts


def written(language: str, name: str = "nodeDefs") -> dict[str, Any]:
    """Return the content of a language's file."""
    return json.loads((LOCALES / language / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as base:
        import_comfyui(Path(base))
        text = json.dumps(english(node_infos()), indent=2, ensure_ascii=False)
    (LOCALES / "en" / "nodeDefs.json").write_text(f"{text}\n", encoding="utf-8")
