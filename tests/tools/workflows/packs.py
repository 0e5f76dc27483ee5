"""The packs of the nodes of a workflow, which ComfyUI offers to install if they are missing."""

import re
from collections.abc import Mapping
from typing import Any

from ...nodes.checkout import PACK
from . import wrapper
from .graph import Graph, Node


def project() -> dict[str, str]:
    """Name and version of this pack."""
    text = (PACK / "pyproject.toml").read_text(encoding="utf-8")
    _, _, section = text.partition("[project]\n")
    return {key: re.search(rf'^{key} = "(.+)"$', section, re.M)[1] for key in ("name", "version")}


def properties(graph: Graph, modules: Mapping[str, str], version: str) -> list[dict[str, Any]]:
    """The properties of all nodes of a graph.

    Args:
        graph: The workflow.
        modules: Where the server has each kind of node from.
        version: ComfyUI's.
    """
    return [_of(node, modules.get(node.kind), version) for node in graph.nodes]


def _of(node: Node, module: str | None, version: str) -> dict[str, Any]:
    if module is None:  # the frontend's own
        return {}
    own = {"Node name for S&R": node.kind}
    if node.kind in wrapper.NODES:
        own["cnr_id"] = wrapper.NAME
    elif module.startswith("custom_nodes."):
        own |= {"cnr_id": project()["name"], "ver": project()["version"]}
    else:
        own |= {"cnr_id": "comfy-core", "ver": version}
    if node.models:
        own["models"] = [
            {"name": model.name, "url": model.url, "directory": model.directory}
            for model in node.models
        ]
    return own
