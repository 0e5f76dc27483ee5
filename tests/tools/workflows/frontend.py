"""ComfyUI's frontend in a browser, which determines the sizes of nodes and saves workflows."""

import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from .graph import README, Graph, Model, Node, Output, links
from .layout import Box, layout, node_widths

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]

# No sandbox: it does not start for root. The rest keeps the browser off the network.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

READY = "window.app?.graph && Object.keys(LiteGraph.registered_node_types).length > 100"

SET = """async settings => {
  for (const [key, value] of Object.entries(settings))
    await app.extensionManager.setting.set(key, value);
}"""

LOAD = "async workflow => { await app.loadGraphData(workflow) }"
PROMPT = "async () => (await app.graphToPrompt()).output"
QUEUE = "async () => { await app.queuePrompt(0, 1) }"

# Show nothing but the nodes.
_PLAIN = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.NodeBadge.NodeSourceBadgeMode": "None",
    "Comfy.NodeBadge.NodeIdBadgeMode": "None",
    "Comfy.NodeBadge.NodeLifeCycleBadgeMode": "None",
}

# Borders of the window in pixels that the frontend's bars cover.
_LEFT, _TOP, _RIGHT, _BOTTOM = 80, 100, 60, 100

_MARGIN = 4  # around the groups, in a picture

_SETTLE_MS = 1500  # until images are loaded and nodes have their sizes

_BUILD = """async ({nodes, links}) => {
  app.graph.clear();
  const made = nodes.map(spec => {
    const node = LiteGraph.createNode(spec.kind);
    if (!node) throw new Error(`no node ${spec.kind}`);
    app.graph.add(node);
    if (spec.title) node.title = spec.title;
    for (const [name, label] of Object.entries(spec.labels)) {
      const named = [...node.inputs, ...(node.widgets ?? [])].filter(each => each.name === name);
      if (!named.length) throw new Error(`${spec.kind}: no input ${name}`);
      for (const each of named) each.label = label;
    }
    if (spec.color) { node.color = spec.color; node.bgcolor = spec.bgcolor; }
    for (const [name, value] of Object.entries(spec.widgets)) {
      const widget = node.widgets?.find(w => w.name === name);
      if (!widget) throw new Error(`${spec.kind}: no widget ${name}`);
      widget.value = value;
      widget.callback?.(value);
    }
    return node;
  });
  for (const [from, output, to, input] of links) {
    const source = made[from], target = made[to];
    const out = output ? source.findOutputSlot(output) : 0;
    const into = target.findInputSlot(input);
    if (out < 0) throw new Error(`${source.type}: no output ${output}`);
    if (into < 0) throw new Error(`${target.type}: no input ${input}`);
    if (!source.connect(out, target, into))
      throw new Error(`${source.type} does not go to ${target.type}.${input}`);
  }
  made.forEach((node, i) => {
    const spec = nodes[i];
    node.properties = spec.properties;
    node.pos = [0, 3000 * i];
    node.setSize([spec.width, Math.max(spec.height, node.computeSize()[1])]);
  });
}"""

_HEIGHTS = "app.graph.nodes.map(n => Math.max(n.computeSize()[1], n.size[1]))"

_PLACE = """({nodes, groups}) => {
  app.graph.nodes.forEach((node, i) => {
    node.pos = nodes[i].slice(0, 2);
    node.setSize(nodes[i].slice(2));
  });
  for (const group of [...app.graph.groups]) app.graph.remove(group);
  for (const {title, color, box} of groups) {
    const group = new LiteGraph.LGraphGroup(title);
    group.color = color;
    group.pos = box.slice(0, 2);
    group.size = box.slice(2);
    app.graph.add(group);
  }
}"""

_SAVE = "JSON.parse(JSON.stringify(app.graph.serialize()))"  # as when saved to a file

_SHOW = """([x, y]) => {
  app.canvas.ds.scale = 1;
  app.canvas.ds.offset = [x, y];
  app.canvas.background_image = null;  // a grid
  app.canvas.setDirty(true, true);
}"""


def find_browser() -> str | None:
    """The browser of this machine: `$CHROMIUM`, or one of `BROWSERS`."""
    names = [os.environ.get("CHROMIUM"), *BROWSERS]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def open_browser(driver: Any, folder: Path, **options: object) -> Any:
    """Open the browser, whose profile is kept in a folder.

    Args:
        driver: Of Playwright.
        folder: Created if it is not there.
        options: Of Playwright, such as `viewport` and `device_scale_factor`.

    Returns:
        Its context, of Playwright, with one page.
    """
    return driver.chromium.launch_persistent_context(
        folder, executable_path=find_browser(), args=FLAGS, **options
    )


class Frontend:
    """The frontend in a page of a browser.

    Args:
        page: Of Playwright.
        url: Of the server.
    """

    def __init__(self, page: Any, url: str) -> None:
        self.page, self._url = page, url
        self._open()
        self._set(_PLAIN)

    def draw(self, graph: Graph, properties: list[dict], bare: "Frontend") -> dict:
        """Draw a graph.

        Args:
            graph: The graph; the server has its node types.
            properties: Properties of each node.
            bare: Frontend of a server without the files and packs that the graph needs.

        Returns:
            The workflow as the frontend saves it.
        """
        self._build(graph, properties)
        heights = self._heights()
        self._place(graph, heights, heights)
        drawn = self.page.evaluate(_SAVE)
        others = self._vue_heights(drawn), bare._vue_heights(drawn)
        slots = [max(all_of_it) for all_of_it in zip(heights, *others, strict=True)]
        self._vue(False)
        self.page.evaluate(LOAD, drawn)
        self._place(graph, heights, slots)
        self.page.wait_for_timeout(_SETTLE_MS)
        self._check(graph)
        return self.page.evaluate(_SAVE)

    def picture(self, graph: Graph) -> Image.Image:
        """Draw a graph, its nodes as close as they may be, and return a picture at scale 1.

        Args:
            graph: The graph; the server has its node types.
        """
        self._build(graph, [{}] * len(graph.nodes))
        heights = self._heights()
        groups = self._place(graph, heights, heights)
        self._check(graph)
        return self._picture(groups)

    def prompt(self) -> dict:
        """Return the prompt for the server."""
        return self.page.evaluate(PROMPT)

    def _build(self, graph: Graph, properties: list[dict]) -> None:
        """Create the nodes and links, far from each other."""
        self._open()  # node ids keep images and values of the previous graph
        self._vue(False)
        self.page.evaluate(_BUILD, _specification(graph, properties))

    def _open(self) -> None:
        self.page.goto(self._url)
        self.page.wait_for_function(READY, timeout=60_000)
        self.page.wait_for_timeout(_SETTLE_MS)

    def _set(self, settings: Mapping[str, object]) -> None:
        self.page.evaluate(SET, dict(settings))

    def _vue(self, on: bool) -> None:
        self._set({"Comfy.VueNodes.Enabled": on})

    def _heights(self) -> list[float]:
        """Return the heights of the nodes when they no longer change."""
        before, heights = [], [0.0]
        while heights != before:
            self.page.wait_for_timeout(_SETTLE_MS)
            before, heights = heights, self.page.evaluate(_HEIGHTS)
        return heights

    def _vue_heights(self, workflow: dict) -> list[float]:
        """Return the heights of the nodes as drawn by Vue, which differ."""
        self._vue(True)
        self.page.evaluate(LOAD, workflow)
        return self._heights()

    def _place(self, graph: Graph, heights: list[float], slots: list[float]) -> list[Box]:
        """Place the nodes, redraw the groups, and return the boxes of the groups."""
        nodes, boxes = layout(graph, heights, slots)
        drawn = [group for column in graph.columns for group in column.groups]
        groups = [
            {"title": group.title, "color": group.color, "box": box}
            for group, box in zip(drawn, boxes, strict=True)
        ]
        self.page.evaluate(_PLACE, {"nodes": nodes, "groups": groups})
        return boxes

    def _check(self, graph: Graph) -> None:
        """Raise where a node would not run with the values of the graph."""
        prompt = self.prompt()
        for number, node in enumerate(graph.nodes, start=1):
            inputs = prompt.get(str(number), {"inputs": _widgets(graph, node)})["inputs"]
            for name, value in _widgets(graph, node).items():
                if name in inputs and inputs[name] != value:
                    raise ValueError(f"{node.kind}.{name}: {inputs[name]!r}; expected {value!r}")

    def _picture(self, groups: list[Box]) -> Image.Image:
        left = min(box.left for box in groups) - _MARGIN
        top = min(box.top for box in groups) - _MARGIN
        width = max(box.left + box.width for box in groups) + _MARGIN - left
        height = max(box.top + box.height for box in groups) + _MARGIN - top
        size = {"width": int(width + _LEFT + _RIGHT), "height": int(height + _TOP + _BOTTOM)}
        self.page.set_viewport_size(size)
        self.page.wait_for_timeout(_SETTLE_MS)
        self.page.evaluate(_SHOW, [_LEFT - left, _TOP - top])
        self.page.wait_for_timeout(_SETTLE_MS)
        clip = {"x": _LEFT, "y": _TOP, "width": width, "height": height}
        return Image.open(io.BytesIO(self.page.screenshot(clip=clip))).convert("RGB")


def _specification(graph: Graph, properties: list[dict]) -> dict:
    """Return the argument of `_BUILD`."""
    numbers = {id(node): number for number, node in enumerate(graph.nodes)}
    widths = [
        width
        for column in graph.columns
        for group in column.groups
        for width in node_widths(graph, column, group)
    ]
    nodes = [
        {
            "kind": node.kind,
            "title": node.title,
            "labels": node.labels,
            "color": node.color,
            "bgcolor": node.bgcolor,
            "widgets": _widgets(graph, node),
            "properties": own,
            "width": width,
            "height": node.least,
        }
        for node, own, width in zip(graph.nodes, properties, widths, strict=True)
    ]
    ends = [
        [numbers[id(source.node)], source.name, numbers[id(node)], name]
        for source, node, name in links(graph)
    ]
    return {"nodes": nodes, "links": ends}


def _widgets(graph: Graph, node: Node) -> dict[str, object]:
    values = {}
    for name, value in node.inputs.items():
        if value is README:
            values[name] = graph.markdown()
        elif isinstance(value, Model):
            values[name] = value.name
        elif not isinstance(value, Node | Output):
            values[name] = value
    return values
