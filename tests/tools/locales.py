"""The texts of the nodes as ComfyUI's frontend translates them: `locales/<language>/nodeDefs.json`.

`python tests/tools/locales.py` writes the English file from the schemas, where every text is
written first. The other languages are written by hand; test_locales.py lists what they lack.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Binds the checkout to its import name.
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))

import pytest

from fast_video_vae.tests.nodes.checkout import PACK, import_comfyui
from fast_video_vae.tests.nodes.vae.machines import machine

LOCALES = PACK / "locales"

# The widget that the frontend puts below a seed, which is in no schema.
_CONTROL = "control_after_generate"


def node_infos() -> list[dict[str, Any]]:
    """Return the server's information about each node, in menu order; ComfyUI must be imported.

    The machine has two devices, so that the nodes have every input.
    """
    import asyncio

    from fast_video_vae import comfy_entrypoint

    async def nodes() -> list[Any]:
        return await (await comfy_entrypoint()).get_node_list()

    with pytest.MonkeyPatch.context() as patch:
        machine(patch, 2)
        return [node.GET_NODE_INFO_V1() for node in asyncio.run(nodes())]


def english(infos: list[dict[str, Any]]) -> dict[str, Any]:
    """The English texts, in the frontend's layout: node id, then what it shows of the node."""
    texts = {}
    for info in infos:
        text: dict[str, Any] = {key: info[key] for key in ("display_name", "description")}
        text["inputs"] = dict(_inputs(info))
        text["outputs"] = {key: entry for key, entry in _outputs(info) if entry}
        texts[info["name"]] = {key: value for key, value in text.items() if value}
    return texts


def written(language: str, name: str = "nodeDefs") -> dict[str, Any]:
    """Return the content of a language's file."""
    return json.loads((LOCALES / language / f"{name}.json").read_text(encoding="utf-8"))


def _inputs(info: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """For each input its label and tooltip."""
    entries = []
    for group in ("required", "optional"):
        for key, (_, *more) in info["input"].get(group, {}).items():
            options = more[0] if more else {}
            entry = {"name": options.get("display_name") or key}
            if options.get("tooltip"):
                entry["tooltip"] = options["tooltip"]
            entries.append((key.replace(".", "_"), entry))  # as in the frontend's keys
            if options.get(_CONTROL):
                entries.append((_CONTROL, {"name": _CONTROL.replace("_", " ")}))
    return entries


def _outputs(info: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """For each output its label, unless that is its type, which ComfyUI translates; and tooltip."""
    entries = []
    columns = (info["output"], info["output_name"], info["output_tooltips"])
    for index, (kind, name, tooltip) in enumerate(zip(*columns, strict=True)):
        entry = {"name": name} if name != kind else {}
        if tooltip:
            entry["tooltip"] = tooltip
        entries.append((str(index), entry))
    return entries


def _write() -> None:
    with tempfile.TemporaryDirectory() as base:
        import_comfyui(Path(base))
        text = json.dumps(english(node_infos()), indent=2, ensure_ascii=False)
    (LOCALES / "en" / "nodeDefs.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(_write())
