"""The pack in ComfyUI's frontend, in a browser: workflows and blueprints, in two languages."""

import itertools
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
from fast_video_vae.tests.nodes.server import PromptError
from fast_video_vae.tests.nodes.test_examples import (
    BLUEPRINTS,
    CORE,
    INPUT_FILES,
    OURS,
    WORKFLOWS,
    models_of,
    nodes_of,
    read,
)
from fast_video_vae.tests.tools.locales import written
from fast_video_vae.tests.videos import stacked, write_clip
from fast_video_vae.vae import media

pytestmark = [pytest.mark.browser, pytest.mark.comfyui]

# Language, renderer and size of the window: every pair of two of them once.
LARGE, SMALL = (1920, 1080), (1366, 768)
LOOKS = [
    ("en", "canvas", LARGE),
    ("en", "vue", SMALL),
    ("zh", "canvas", SMALL),
    ("zh", "vue", LARGE),
]

# Mean difference of 8-bit values between the clip and its reconstruction by the bundled VAE, which
# loses fine detail. A black frame or another clip is above 40.
CLIP_DIFFERENCE = 10

UNKNOWN = "app.graph.nodes.filter(n => !LiteGraph.registered_node_types[n.type]).map(n => n.type)"
OPEN = "async workflow => { await app.loadGraphData(workflow, true, true, 'opened') }"
EMPTY = {"nodes": [], "links": [], "version": 0.4}

TITLES = "Object.fromEntries(app.graph.nodes.map(n => [n.id, n.title]))"
TYPES = "app.graph.nodes.map(n => n.type)"

# Left, top, right, bottom; the title is above the position of a node.
BOXES = """app.graph.nodes.map(n => [n.title || n.type,
    n.pos[0], n.pos[1] - LiteGraph.NODE_TITLE_HEIGHT, n.pos[0] + n.size[0], n.pos[1] + n.size[1]])
"""

# Scale and offset of the view, and the pixels at its left and top that the frontend's bars cover.
VIEW = "[app.canvas.ds.scale, ...app.canvas.ds.offset]"
SIDEBAR, MENU = 60, 92

LIBRARY = "app.extensionManager.command.execute('Workspace.ToggleSidebarTab.node-library')"
SEARCH = ".comfy-vue-side-bar-body input[role=combobox]"

# The node, its output and its first widget that give a blueprint what its inputs take.
SOURCES = {
    "AUDIO": ["EmptyAudio", 0, 1],
    "CLIP": ["CLIPLoader", 0, None],
    "CONDITIONING": ["CLIPTextEncode", 0, None],
    "IMAGE": ["FastVAE_DemoClip", 0, None],
    "LATENT": ["FastVAE_Encode", 0, None],
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
    """ComfyUI's frontend in a fresh browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if find_browser() is None:
        pytest.skip(f"no browser: CHROMIUM is no program, nor is {', '.join(BROWSERS)} on PATH")
    with playwright.sync_playwright() as driver:
        context = open_browser(driver, tmp_path_factory.mktemp("browser"))
        page = context.pages[0]
        page.goto(server.url)
        page.wait_for_function(READY, timeout=60_000)
        yield page
        context.close()


@pytest.fixture(scope="module", params=LOOKS, ids=str)
def look(request, page, server):
    """A language, a renderer of the frontend, and a usual size of the window."""
    language, renderer, (width, height) = request.param
    page.set_viewport_size({"width": width, "height": height})
    vue = {"Comfy.VueNodes.Enabled": renderer == "vue"}
    # A new user gets the dialog of templates, which keeps the others from opening.
    page.evaluate(SET, {"Comfy.Locale": language, "Comfy.TutorialCompleted": True, **vue})
    page.goto(server.url, wait_until="networkidle")  # it translates and loads blueprints once
    page.wait_for_function(READY, timeout=60_000)
    page.evaluate(LOAD, EMPTY)
    return request.param


@pytest.fixture
def complaints(page, server):
    """Errors of the browser about this pack or its workflows.

    Uncaught exceptions, and errors in the console that name the pack, one of its nodes or a file
    below its address. Missing files of the server, such as settings of a new user, do not count.
    """
    seen = []
    ours = re.compile(rf"FastVAE_|fast.?(video.?)?vae|/{re.escape(server.name)}/", re.IGNORECASE)

    def message(entry):
        if entry.type == "error" and ours.search(f"{entry.text} {entry.location.get('url')}"):
            seen.append(entry.text)

    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("console", message)
    return seen


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_an_example_opens_unchanged_in_full_and_runs(server, page, look, file, complaints):
    """It runs if it needs no download."""
    language, _, size = look
    example = read(file)
    page.evaluate(OPEN, example)
    page.wait_for_timeout(1000)  # nodes get their sizes, and the view moves after the first frame
    # Other packs may be missing; the frontend offers to install them.
    assert not {*page.evaluate(UNKNOWN)} & {node["type"] for node in nodes_of(example, CORE, OURS)}
    assert overlaps(page) == []
    scale, *offset = page.evaluate(VIEW)
    for _, *corners in page.evaluate(BOXES):
        left, top, right, bottom = (
            (at + offset[axis % 2]) * scale for axis, at in enumerate(corners)
        )
        assert left >= SIDEBAR
        assert top >= MENU
        assert right <= size[0]
        assert bottom <= size[1]
    prompt, titles = page.evaluate(PROMPT), page.evaluate(TITLES)
    ours = nodes_of(example, OURS)
    assert ours
    for node in ours:
        inputs, saved = prompt[str(node["id"])]["inputs"], node.get("widgets_values_named", {})
        assert {each["name"] for each in node["inputs"] if each["link"]} <= inputs.keys()
        for name, value in inputs.items():
            if not isinstance(value, list):  # a link
                assert saved.get(name, value) == value, name
        name = written(language)[node["type"]]["display_name"]
        assert titles[str(node["id"])] == node.get("title", name)
    if not models_of(example):
        shows_the_clip(server, page)
        page.wait_for_selector("video", state="attached")
        page.wait_for_timeout(1000)  # the nodes grow to show what they made
        assert overlaps(page) == []
    elif not page.evaluate(UNKNOWN):
        is_refused_for_files(server, page, example)
    assert complaints == []


@pytest.mark.parametrize("file", BLUEPRINTS, ids=lambda file: file.stem)
def test_a_blueprint_comes_from_the_library_and_runs(server, page, look, file, complaints):
    """One that needs a download is valid but for its files."""
    page.evaluate(LOAD, EMPTY)
    page.evaluate(LIBRARY)
    page.locator(SEARCH).fill(file.stem)
    page.get_by_text(file.stem, exact=True).click()
    width, height = look[2]
    page.mouse.click(width * 2 // 3, height // 2)  # it hangs on the pointer until then
    page.evaluate(LIBRARY)
    page.evaluate(CONNECT, SOURCES)
    assert file.stem in page.evaluate(TITLES).values()
    if models_of(read(file)):
        is_refused_for_files(server, page, read(file))
    else:
        shows_the_clip(server, page)
    assert complaints == []


@pytest.mark.parametrize("codec", media.CODECS)
def test_the_workflow_of_a_file_opens_as_the_help_page_says(page, comfyui, tmp_path, codec):
    from comfy_api.latest import io

    from fast_video_vae.nodes.video.target import workflow_tags

    note = {"id": 1, "type": "Note", "pos": [0, 0], "size": [200, 100], "widgets_values": [":-{"]}
    hidden = io.HiddenHolder.from_dict(
        {io.Hidden.extra_pnginfo: {"workflow": EMPTY | {"nodes": [note]}}}
    )
    path = tmp_path / f"a{media.codec_named(codec).suffix}"
    write_clip(path, 2, 64, 64, codec=codec, metadata=workflow_tags(hidden))
    file = path if path.exists() else path.with_suffix("") / f"frame_00000{path.suffix}"
    page.evaluate(LOAD, EMPTY)
    page.set_input_files("#comfy-file-input", file)
    page.wait_for_function(f"{TYPES}.length == 1")
    expected = {".mkv": ["LoadVideo"], ".exr": ["LoadImage"]}.get(path.suffix, ["Note"])
    assert page.evaluate(TYPES) == expected


def is_refused_for_files(server, page, workflow):
    """The server finds nothing wrong in the open workflow but files that the user has to add."""
    files = INPUT_FILES | {model["name"] for model in models_of(workflow)}
    files |= {"clip_name: None"}  # of `SOURCES`
    with pytest.raises(PromptError) as refused:
        server.queue(page.evaluate(PROMPT))
    found = [each for node in refused.value.node_errors.values() for each in node["errors"]]
    details = [each["details"] for each in found]
    assert [text for text in details if not any(name in text for name in files)] == []


def shows_the_clip(server, page):
    """Run the open workflow: every file that it shows is the clip."""
    before = server.get("/history").keys()
    page.evaluate(QUEUE)
    shown = server.wait(server.queued(before), timeout_s=60).values()
    clip, found = stacked(library.CLIP_PATH).float(), 0
    for results in shown:
        files = server.files(results)
        for file in [each for each in files if each.suffix == ".mp4"]:
            video, found = stacked(file).float(), found + 1
            assert video.shape == clip.shape
            assert (video - clip).abs().mean() < CLIP_DIFFERENCE
        if files and files[0].suffix == ".png":
            found += 1
            assert abs(server.pictures(results) - clip.numpy()).mean() < CLIP_DIFFERENCE
        assert all(file.stat().st_size for file in files)
    assert found


def overlaps(page):
    """Return pairs of nodes that overlap."""
    boxes = page.evaluate(BOXES)
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(boxes, 2)
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]
