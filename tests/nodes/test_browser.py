"""The pack in ComfyUI's frontend, in a browser: workflows and blueprints."""

import itertools
import json
import os
import re
import shutil

import numpy as np
import pytest
import torch.nn.functional as F

from fast_video_vae import vae as library
from fast_video_vae.tests.nodes import test_examples as examples
from fast_video_vae.tests.nodes.server import PromptError
from fast_video_vae.tests.tools.locales import written
from fast_video_vae.tests.videos import stacked, write_clip
from fast_video_vae.vae import media

pytestmark = [pytest.mark.browser, pytest.mark.comfyui]

WIDTH, HEIGHT = 1366, 768  # of the window
# A new user gets the dialog of templates, which keeps the others from opening.
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": True}

# Mean difference of 8-bit values between the clip and its reconstruction by the bundled VAE, which
# loses fine detail. A black frame or another clip is above 40.
CLIP_DIFFERENCE = 10
HALF = 128  # of the height and width of the clip

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]

# No sandbox: it does not start for root. The rest keeps the browser off the network.
FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

READY = "window.app?.graph && Object.keys(LiteGraph.registered_node_types).length > 100"
SET = """async settings => {
  for (const [key, value] of Object.entries(settings))
    await app.extensionManager.setting.set(key, value);
}"""
LOAD = "async workflow => { await app.loadGraphData(workflow) }"
PROMPT = "async () => (await app.graphToPrompt()).output"
QUEUE = "async () => { await app.queuePrompt(0, 1) }"
EMPTY = {"nodes": [], "links": [], "version": 0.4}
OPEN = "async workflow => { await app.loadGraphData(workflow, true, true, 'opened') }"
UNKNOWN = "app.graph.nodes.filter(n => !LiteGraph.registered_node_types[n.type]).map(n => n.type)"
TITLES = "Object.fromEntries(app.graph.nodes.map(n => [n.id, n.title]))"
TYPES = "app.graph.nodes.map(n => n.type)"
# Title; and left, top, right, bottom in pixels of the window. The title is above the position.
BOXES = """(({scale, offset: [x, y]}) => app.graph.nodes.map(n => [n.title || n.type,
    (n.pos[0] + x) * scale, (n.pos[1] + y - LiteGraph.NODE_TITLE_HEIGHT) * scale,
    (n.pos[0] + n.size[0] + x) * scale, (n.pos[1] + n.size[1] + y) * scale]))(app.canvas.ds)"""
# Until the sizes of the nodes and the view have not changed for 30 pictures of the screen.
SETTLED = f"""async () => {{
  for (let last = '', same = 0; same < 30;) {{
    await new Promise(requestAnimationFrame);
    const boxes = JSON.stringify({BOXES});
    same = boxes === last ? same + 1 : 0;
    last = boxes;
  }}
}}"""
SIDEBAR, MENU = 60, 92  # pixels at the left and top that the frontend's bars cover

LIBRARY = "app.extensionManager.command.execute('Workspace.ToggleSidebarTab.node-library')"
SEARCH = ".comfy-vue-side-bar-body input[role=combobox]"

# One of each kind of file.
CODECS = {media.codec_named(each).suffix: each for each in media.CODECS}.values()

SIDE = 64  # the width of a black picture, whose height is 512

# The node, its output and its first widget that give a blueprint what its inputs take.
SOURCES = {
    "AUDIO": ["EmptyAudio", 0, 1],
    "CLIP": ["CLIPLoader", 0, None],
    "CONDITIONING": ["CLIPTextEncode", 0, None],
    "IMAGE": ["EmptyImage", 0, SIDE],
    "LATENT": ["FastVAE_Encode", 0, None],
    "MODEL": ["UNETLoader", 0, None],
    "VAE": ["FastVAE_Load", 0, "bundled demo"],
    "VIDEO": ["FastVAE_DemoClip", 1, None],
}
CONNECT = """sources => {
  const add = kind => { const node = LiteGraph.createNode(kind); app.graph.add(node); return node };
  const feed = (node, all) => node.inputs.forEach((input, at) => {
    if (input.widget || (input.shape === 7 && !all)) return;
    const [kind, slot, value] = sources[input.type], source = add(kind);
    if (value !== null) source.widgets[0].value = value;
    feed(source, false);
    source.connect(slot, node, at);
  });
  const [blueprint] = app.graph.nodes;
  feed(blueprint, true);
  blueprint.outputs.forEach(({type}, at) =>
    blueprint.connect(at, add(type === 'IMAGE' ? 'PreviewImage' : 'PreviewAny'), 0));
}"""


@pytest.fixture(scope="module")
def page(server, tmp_path_factory):
    """A page of a fresh browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = [os.environ.get("CHROMIUM"), *BROWSERS]
    found = [path for name in names if name and (path := shutil.which(name))]
    if not found:
        pytest.skip(f"no browser: CHROMIUM is no program, nor is {', '.join(BROWSERS)} on PATH")
    options = {"executable_path": found[0], "args": FLAGS.split()}
    with playwright.sync_playwright() as driver:
        folder = tmp_path_factory.mktemp("browser")
        context = driver.chromium.launch_persistent_context(folder, **options)
        page = context.pages[0]
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        opened(page, server)
        page.evaluate(SET, SETTINGS)
        opened(page, server)
        yield page
        context.close()


def opened(page, server):
    """Open ComfyUI's frontend, which translates and loads blueprints once."""
    page.goto(server.url, wait_until="networkidle")
    page.wait_for_function(READY, timeout=60_000)


@pytest.fixture
def complaints(page, server):
    """Uncaught exceptions, and errors in the console that name the pack, a node or its address."""
    seen = []
    ours = re.compile(rf"FastVAE_|fast.?(video.?)?vae|/{re.escape(server.name)}/", re.IGNORECASE)

    def message(entry):
        if entry.type == "error" and ours.search(f"{entry.text} {entry.location.get('url')}"):
            seen.append(entry.text)

    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("console", message)
    return seen


@pytest.mark.parametrize("file", examples.WORKFLOWS, ids=lambda file: file.stem)
def test_an_example_opens_unchanged_in_full_and_runs(server, page, file, complaints):
    """It runs if it needs no download."""
    example = examples.read(file)
    page.evaluate(OPEN, example)
    page.evaluate(SETTLED)
    known = examples.nodes_of(example, examples.CORE, examples.OURS)
    unknown = {*page.evaluate(UNKNOWN)}  # other packs may be missing
    assert not unknown & {node["type"] for node in known}
    assert overlaps(page) == []
    for _, left, top, right, bottom in page.evaluate(BOXES):
        assert SIDEBAR <= left <= right <= WIDTH
        assert MENU <= top <= bottom <= HEIGHT
    prompt, titles = page.evaluate(PROMPT), page.evaluate(TITLES)
    for node in examples.nodes_of(example, examples.OURS):
        inputs, saved = prompt[str(node["id"])]["inputs"], node.get("widgets_values_named", {})
        assert {each["name"] for each in node["inputs"] if each["link"]} <= inputs.keys()
        for name, value in inputs.items():
            if not isinstance(value, list):  # a link
                assert saved.get(name, value) == value, name
        name = written("en")[node["type"]]["display_name"]
        assert titles[str(node["id"])] == node.get("title", name)
    if not unknown:
        clip = stacked(library.CLIP_PATH).float()
        halved = F.avg_pool2d(clip.movedim(-1, 1), 2).movedim(1, -1)
        page.route("**/prompt", with_halved_frames)
        runs(server, page, example, clip.numpy(), halved.numpy())
        page.unroute("**/prompt")
    if not examples.models_of(example):
        page.wait_for_selector("video", state="attached")
        page.evaluate(SETTLED)  # the nodes grow to show what they made
        assert overlaps(page) == []
    assert complaints == []


@pytest.mark.parametrize("file", examples.BLUEPRINTS, ids=lambda file: file.stem)
def test_a_blueprint_comes_from_the_library_and_runs(server, page, file, complaints):
    """One that needs a download is valid but for its files."""
    page.evaluate(LOAD, EMPTY)
    page.evaluate(LIBRARY)
    page.locator(SEARCH).fill(file.stem)
    page.get_by_text(file.stem, exact=True).click()
    page.mouse.click(WIDTH * 2 // 3, HEIGHT // 2)  # it hangs on the pointer until then
    page.evaluate(LIBRARY)
    page.evaluate(CONNECT, SOURCES)
    assert file.stem in page.evaluate(TITLES).values()
    runs(server, page, examples.read(file), np.zeros((1, 512, SIDE, 3)))
    assert complaints == []


@pytest.mark.parametrize("codec", CODECS)
def test_the_workflow_of_a_file_opens_as_the_help_page_says(page, comfyui, tmp_path, codec):
    from comfy_api.latest import io

    from fast_video_vae.nodes.video.target import workflow_tags

    note = {"id": 1, "type": "Note", "pos": [0, 0], "size": [200, 100], "widgets_values": [":-{"]}
    saved = {"workflow": EMPTY | {"nodes": [note]}}
    hidden = io.HiddenHolder.from_dict({io.Hidden.extra_pnginfo: saved})
    path = tmp_path / f"a{media.codec_named(codec).suffix}"
    write_clip(path, 2, 64, 64, codec=codec, metadata=workflow_tags(hidden))
    file = path if path.exists() else path.with_suffix("") / f"frame_00000{path.suffix}"
    page.evaluate(LOAD, EMPTY)
    page.set_input_files("#comfy-file-input", file)
    page.wait_for_function(f"{TYPES}.length == 1")
    expected = {".mkv": ["LoadVideo"], ".exr": ["LoadImage"]}.get(path.suffix, ["Note"])
    assert page.evaluate(TYPES) == expected


def with_halved_frames(route):
    """Let a queued prompt encode the clip at half its height and width, which takes a quarter."""
    if route.request.method == "POST":
        body, size = route.request.post_data_json, {"width": HALF, "height": HALF}
        for node in body["prompt"].values():
            if node["class_type"] == "FastVAE_EncodeVideo":
                node["inputs"].update(size)
            elif node["class_type"] == "FastVAE_Encode":
                size |= {"image": node["inputs"]["pixels"], "upscale_method": "area"}
                node["inputs"]["pixels"] = ["halved", 0]
        if "image" in size:
            scale = {"class_type": "ImageScale", "inputs": {**size, "crop": "disabled"}}
            body["prompt"]["halved"] = scale
        route.continue_(post_data=json.dumps(body))
    else:
        route.continue_()


def runs(server, page, workflow, *clips):
    """The open workflow shows a clip; or the server refuses it for files that the user adds."""
    missing = {model["name"] for model in examples.models_of(workflow)}
    if missing or any(each["type"] == "MODEL" for each in workflow["nodes"][0]["inputs"]):
        # Those of the workflow, and of the sources of a blueprint.
        files = examples.INPUT_FILES | missing | {"clip_name: None", "unet_name: None"}
        with pytest.raises(PromptError) as refused:
            server.queue(page.evaluate(PROMPT))
        found = [each for node in refused.value.node_errors.values() for each in node["errors"]]
        details = [each["details"] for each in found]
        assert [text for text in details if not any(name in text for name in files)] == []
        return
    before = server.get("/history").keys()
    page.evaluate(QUEUE)
    found = 0
    for results in server.wait(server.queued(before), timeout_s=60).values():
        files = server.files(results)
        assert all(file.stat().st_size for file in files)
        for file in [each for each in files[:1] if each.suffix in (".mp4", ".png")]:
            is_video, found = file.suffix == ".mp4", found + 1
            shown = stacked(file).float().numpy() if is_video else server.pictures(results)
            (expected,) = [clip for clip in clips if clip.shape == shown.shape]
            assert abs(shown - expected).mean() < CLIP_DIFFERENCE
    assert found


def overlaps(page):
    """Return pairs of nodes that overlap."""
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(page.evaluate(BOXES), 2)
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]
