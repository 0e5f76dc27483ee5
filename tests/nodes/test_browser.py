"""The pack in ComfyUI's frontend, in a browser: the example workflows."""

import itertools
import json
import re

import pytest

from fast_video_vae import vae as library
from fast_video_vae.tests.nodes.browser import (
    BROWSERS,
    LOAD,
    PROMPT,
    QUEUE,
    READY,
    SET,
    find_browser,
    open_browser,
)
from fast_video_vae.tests.nodes.checkout import PACK
from fast_video_vae.tests.videos import stacked, write_clip
from fast_video_vae.vae import media

pytestmark = [pytest.mark.browser, pytest.mark.comfyui]

EXAMPLES = sorted((PACK / "example_workflows").glob("*.json"))

# Workflows that run without downloads; the others need models.
DEMOS = [file for file in EXAMPLES if '"models": [' not in file.read_text(encoding="utf-8")]

# The pack of a node, in its properties.
OURS, CORE = "fast-video-vae", "comfy-core"

# Mean difference of 8-bit values between the clip and its reconstruction by the bundled VAE, which
# loses fine detail. A black frame or another clip is above 40.
CLIP_DIFFERENCE = 10

UNKNOWN = "app.graph.nodes.filter(n => !LiteGraph.registered_node_types[n.type]).map(n => n.type)"
OPEN = "async workflow => { await app.loadGraphData(workflow, true, true, 'opened') }"

TYPES = "app.graph.nodes.map(n => n.type)"

# Left, top, right, bottom; the title is above the position of a node.
BOXES = """app.graph.nodes.map(n => [n.title || n.type,
    n.pos[0], n.pos[1] - LiteGraph.NODE_TITLE_HEIGHT, n.pos[0] + n.size[0], n.pos[1] + n.size[1]])
"""


# Corners of the nodes in the window.
SHOWN = """app.graph.nodes.map(n => {
  const {scale, offset} = app.canvas.ds;
  const left = n.pos[0] + offset[0], top = n.pos[1] - LiteGraph.NODE_TITLE_HEIGHT + offset[1];
  const corners = [left, top, left + n.size[0], n.pos[1] + n.size[1] + offset[1]];
  return corners.map(at => at * scale);
})"""

# Pixels at the left and at the top that the frontend's bars cover.
SIDEBAR, MENU = 60, 92


@pytest.fixture(scope="module")
def page(server, tmp_path_factory):
    """ComfyUI's frontend in a fresh browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if find_browser() is None:
        pytest.skip(f"no browser: CHROMIUM is no program, nor is {', '.join(BROWSERS)} on PATH")
    with playwright.sync_playwright() as driver:
        size = {"width": 1920, "height": 1080}
        context = open_browser(driver, tmp_path_factory.mktemp("browser"), viewport=size)
        page = context.pages[0]
        page.goto(server.url)
        page.wait_for_function(READY, timeout=60_000)
        yield page
        context.close()


@pytest.fixture(params=["canvas", "vue"])
def renderer(request, page):
    """Both renderers of the frontend; their node sizes differ."""
    page.evaluate(SET, {"Comfy.VueNodes.Enabled": request.param == "vue"})
    return request.param


@pytest.fixture
def complaints(page, server):
    """Errors of the browser about this pack or its workflows.

    Uncaught exceptions, and errors in the console that name the pack, one of its nodes or a file
    below its address. Missing files of the server, such as settings of a new user, do not count.
    """
    seen = []
    ours = re.compile(rf"FastVAE_|fast.?video.?vae|/{re.escape(server.name)}/", re.IGNORECASE)

    def exception(error):
        seen.append(str(error))

    def message(entry):
        if entry.type == "error" and ours.search(f"{entry.text} {entry.location.get('url')}"):
            seen.append(entry.text)

    page.on("pageerror", exception)
    page.on("console", message)
    yield seen
    page.remove_listener("pageerror", exception)
    page.remove_listener("console", message)


def opened(page, file):
    """A workflow, as its file has it, open in the browser."""
    workflow = json.loads(file.read_text(encoding="utf-8"))
    page.evaluate(LOAD, workflow)
    page.wait_for_timeout(1000)  # until the nodes have their sizes
    return workflow


@pytest.fixture(params=DEMOS, ids=lambda file: file.stem)
def demo(request, page, renderer):
    """A workflow that needs no download."""
    return opened(page, request.param)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_opens_unchanged(page, renderer, file, complaints):
    example = opened(page, file)
    # Other packs may be missing; the frontend offers to install them.
    assert not {*page.evaluate(UNKNOWN)} & {node["type"] for node in nodes_of(example, CORE, OURS)}
    assert overlaps(page) == []
    prompt = page.evaluate(PROMPT)
    ours = nodes_of(example, OURS)
    assert ours
    for node in ours:
        inputs, saved = prompt[str(node["id"])]["inputs"], node.get("widgets_values_named", {})
        assert {each["name"] for each in node["inputs"] if each["link"]} <= inputs.keys()
        for name, value in inputs.items():
            if not isinstance(value, list):  # a link
                assert saved.get(name, value) == value, name
    assert complaints == []


@pytest.fixture(params=[(1920, 1080), (1366, 768)], ids=str)
def window(request, page):
    """A usual size of the browser's window."""
    before = page.viewport_size
    width, height = request.param
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_timeout(500)
    yield width, height
    page.set_viewport_size(before)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_workflow_opens_in_full_next_to_the_menus(page, window, file):
    page.evaluate(OPEN, json.loads(file.read_text(encoding="utf-8")))
    page.wait_for_timeout(1000)  # the view moves after the first frame
    width, height = window
    for left, top, right, bottom in page.evaluate(SHOWN):
        assert left >= SIDEBAR
        assert top >= MENU
        assert right <= width
        assert bottom <= height


def test_a_workflow_with_the_removed_quality_widget_opens_without_it(page, demo):
    """Its value comes to the place of the precision, where it means auto."""
    (load,) = [node for node in demo["nodes"] if node["type"] == "FastVAE_Load"]
    expected = load["widgets_values_named"] | {"precision": "exact"}
    load["widgets_values"][-1] = "exact"
    del load["widgets_values_named"]["precision"]
    load["widgets_values_named"]["quality"] = "exact"
    load["inputs"][-1] |= {
        "localized_name": "quality", "name": "quality", "widget": {"name": "quality"}
    }  # fmt: skip
    page.evaluate(LOAD, demo)
    assert page.evaluate(PROMPT)[str(load["id"])]["inputs"] == expected


def test_an_example_runs_from_the_browser(server, page, demo):
    before = server.get("/history").keys()
    page.evaluate(QUEUE)
    shown = server.wait(server.queued(before), timeout_s=60)
    files = [file for results in shown.values() for file in server.files(results)]
    assert files
    assert all(file.stat().st_size for file in files)
    videos = [stacked(file).float() for file in files if file.suffix == ".mp4"]
    assert videos
    clip = stacked(library.CLIP_PATH).float()
    for video in videos:
        assert video.shape == clip.shape
        assert (video - clip).abs().mean() < CLIP_DIFFERENCE
    page.wait_for_selector("video", state="attached")
    page.wait_for_timeout(1000)  # the nodes grow to show what they made
    assert overlaps(page) == []


@pytest.mark.parametrize("codec", media.CODECS)
def test_the_workflow_of_a_file_opens_as_the_help_page_says(page, comfyui, tmp_path, codec):
    from comfy_api.latest import io

    from fast_video_vae.nodes.video.target import workflow_tags

    note = {"id": 1, "type": "Note", "pos": [0, 0], "size": [200, 100], "widgets_values": [":-{"]}
    opened = {"nodes": [note], "links": [], "version": 0.4}
    hidden = io.HiddenHolder.from_dict({io.Hidden.extra_pnginfo: {"workflow": opened}})
    path = tmp_path / f"a{media.codec_named(codec).suffix}"
    write_clip(path, 2, 64, 64, codec=codec, metadata=workflow_tags(hidden))
    file = path if path.exists() else path.with_suffix("") / f"frame_00000{path.suffix}"
    page.evaluate(LOAD, opened | {"nodes": []})
    page.set_input_files("#comfy-file-input", file)
    page.wait_for_function(f"{TYPES}.length == 1")
    expected = {".mkv": ["LoadVideo"], ".exr": ["LoadImage"]}.get(path.suffix, ["Note"])
    assert page.evaluate(TYPES) == expected


def overlaps(page):
    """Return pairs of nodes that overlap."""
    boxes = page.evaluate(BOXES)
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(boxes, 2)
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]


def nodes_of(workflow, *packs):
    """Return the nodes of the workflow from these packs."""
    return [node for node in workflow["nodes"] if node["properties"].get("cnr_id") in packs]
