"""The pack in ComfyUI's frontend, in a browser: the example workflows and the help pages."""

import functools
import itertools
import json
import os
import re
import shutil
import time

import pytest

from fast_video_vae.tests.nodes.host import PACK

pytestmark = [pytest.mark.browser, pytest.mark.comfyui]

EXAMPLES = sorted((PACK / "example_workflows").glob("*.json"))

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

# What the examples set; the inputs that are links are left out.
WIDGETS = {
    "FastVAE_Load": {
        "vae_name": "bundled demo",
        "dtype": "auto",
        "encode_dtype": "auto",
        "chunk": 0,
        "quality": "fast",
    },
    "FastVAE_Accelerate": {
        "dtype": "auto",
        "encode_dtype": "auto",
        "chunk": 0,
        "quality": "fast",
    },
    "FastVAE_Encode": {"batch": "video", "dtype": "auto", "chunk": 0},
    "FastVAE_Decode": {"dtype": "auto", "chunk": 0},
    "FastVAE_EncodeVideo": {
        "fps": 0,
        "width": 0,
        "height": 0,
        "max_frames": 0,
        "dtype": "auto",
        "chunk": 0,
    },
    "FastVAE_DecodeVideo": {
        "codec": "h264",
        "quality": 70,
        "filename_prefix": "video/fast_vae_long",
        "save_to": "output",
        "hardware": False,
        "frames": "",
        "dtype": "auto",
        "chunk": 0,
    },
    "FastVAE_DemoClip": {},
}

CLIP_FRAMES = 33

READY = "window.app?.graph && Object.keys(LiteGraph.registered_node_types).length > 100"
LOAD = "async workflow => { await app.loadGraphData(workflow) }"
UNKNOWN = "app.graph.nodes.map(n => n.type).filter(t => !LiteGraph.registered_node_types[t])"
PROMPT = "async () => (await app.graphToPrompt()).output"
QUEUE = "async () => { await app.queuePrompt(0, 1) }"
SET = "async ([key, value]) => { await app.extensionManager.setting.set(key, value) }"

# Left, top, right, bottom; the title is above the position of a node.
BOXES = """app.graph.nodes.map(n => [n.title || n.type,
    n.pos[0], n.pos[1] - LiteGraph.NODE_TITLE_HEIGHT, n.pos[0] + n.size[0], n.pos[1] + n.size[1]])
"""


@pytest.fixture(scope="module")
def browser():
    """Starts a browser with a given folder for its profile."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = [os.environ.get("CHROMIUM"), *BROWSERS]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: CHROMIUM is no program, nor is {', '.join(BROWSERS)} on PATH")
    with playwright.sync_playwright() as driver:
        yield functools.partial(
            driver.chromium.launch_persistent_context,
            executable_path=found,
            args=FLAGS,
            viewport={"width": 1920, "height": 1080},
        )


@pytest.fixture(scope="module")
def page(browser, server, tmp_path_factory):
    """ComfyUI's frontend in a browser that nobody has used before."""
    context = browser(tmp_path_factory.mktemp("browser"))
    page = context.pages[0]
    page.goto(server.url)
    page.wait_for_function(READY, timeout=60_000)
    yield page
    context.close()


@pytest.fixture(params=["canvas", "vue"])
def renderer(request, page):
    """Both ways in which the frontend draws nodes; their sizes differ."""
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", request.param == "vue"])
    return request.param


@pytest.fixture(params=EXAMPLES, ids=lambda file: file.stem)
def example(request, page, renderer):
    """An example workflow, as its file has it, open in the browser."""
    workflow = json.loads(request.param.read_text(encoding="utf-8"))
    page.evaluate(LOAD, workflow)
    page.wait_for_timeout(1000)  # the nodes take their sizes
    return workflow


def test_an_example_opens_as_it_was_saved(page, example):
    assert page.evaluate(UNKNOWN) == []
    assert overlaps(page) == []
    nodes = page.evaluate(PROMPT).values()
    ours = [node for node in nodes if node["class_type"].startswith("FastVAE_")]
    assert ours
    for node in ours:
        values = {key: value for key, value in node["inputs"].items() if not is_link(value)}
        assert values == WIDGETS[node["class_type"]]
    for node in example["nodes"]:
        if node["type"].startswith("FastVAE_"):  # what an installer of missing nodes goes by
            assert node["properties"]["cnr_id"] == "fast-video-vae"
            assert node["properties"]["Node name for S&R"] == node["type"]


def test_a_workflow_without_the_last_widget_opens_with_its_default(page, example):
    for node in example["nodes"]:
        if [*WIDGETS.get(node["type"], {})][-1:] == ["quality"]:
            assert node["widgets_values"].pop() == node["widgets_values_named"].pop("quality")
    page.evaluate(LOAD, example)
    nodes = page.evaluate(PROMPT).values()
    (load,) = [node for node in nodes if node["class_type"] == "FastVAE_Load"]
    assert load["inputs"] == WIDGETS["FastVAE_Load"]


def test_an_example_runs_from_the_browser(server, page, example):
    before = server.get("/history").keys()
    page.evaluate(QUEUE)
    shown = server.wait(queued(server, before), timeout_s=60)
    files = [file for results in shown.values() for file in server.files(results)]
    assert files
    assert all(file.stat().st_size for file in files)
    videos = [file for file in files if file.suffix == ".mp4"]
    assert videos
    assert {frame_count(file) for file in videos} == {CLIP_FRAMES}
    page.wait_for_selector("video", state="attached")
    page.wait_for_timeout(1000)  # the nodes grow to show what they made
    assert overlaps(page) == []


# In help pages: those of inputs and outputs, and the names in them.
TABLE = re.compile(r"^\| (?:Input|Output) \|.*\n((?:\|.*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def test_every_node_has_a_help_page(server):
    module = f"custom_nodes.{server.name}"
    nodes = server.get("/object_info")
    ours = {name: node for name, node in nodes.items() if node["python_module"] == module}
    assert ours
    for name, node in ours.items():
        text = server.get(f"/extensions/{server.name}/docs/{name}.md").decode()
        assert text.startswith(f"# {node['display_name']}\n")
        required, optional = (node["input"].get(kind, {}) for kind in ("required", "optional"))
        inputs = (required | optional).items()
        labels = {key: (options or [{}])[0].get("display_name") for key, (_, *options) in inputs}
        expected = [label or key for key, label in labels.items()] + node["output_name"]
        assert [name for table in TABLE.findall(text) for name in ROW.findall(table)] == expected


def overlaps(page):
    """Pairs of nodes that lie on each other."""
    boxes = page.evaluate(BOXES)
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(boxes, 2)
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]


def is_link(value):
    return isinstance(value, list)


def queued(server, before):
    """The prompt that the browser has queued, whether it waits, runs, or is done."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        queue = server.get("/queue")
        waiting = [entry[1] for entry in queue["queue_running"] + queue["queue_pending"]]
        new = [*waiting, *(server.get("/history").keys() - before)]
        if new:
            return new[0]
        time.sleep(0.1)
    raise TimeoutError("the browser has queued nothing")


def frame_count(file):
    import av

    with av.open(str(file)) as container:
        return sum(1 for _ in container.decode(video=0))
