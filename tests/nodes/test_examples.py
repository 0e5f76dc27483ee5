"""The files of `example_workflows/`, which are edited in ComfyUI, without a browser."""

import json
from urllib.parse import urlparse

import pytest
from PIL import Image

from fast_video_vae.tests.nodes.checkout import PACK
from fast_video_vae.tests.tools.locales import inputs

FILES = sorted((PACK / "example_workflows").glob("*.json"))
NO_DOWNLOAD = 2  # the first files, which need no models

NOTES = ("MarkdownNote", "Note")  # the frontend's own
OURS, CORE, WRAPPER = "fast-video-vae", "comfy-core", "ComfyUI-WanVideoWrapper"
# Below this scale the frontend draws no text on nodes.
READABLE = 0.575

# Inputs whose values are files of a folder.
LOADERS = {
    "CheckpointLoaderSimple", "UNETLoader", "CLIPLoader", "VAELoader", "LoraLoaderModelOnly",
    "ModelPatchLoader", "AudioEncoderLoader", "FastVAE_Load", "FastVAE_LoraStack",
    "WanVideoModelLoader", "LoadWanVideoT5TextEncoder",
}  # fmt: skip
INPUT_FILES = {"example.png", "video.mp4", "speech.wav"}  # of the user
# What the frontend adds to the widgets of a definition.
ADDED = {"control_after_generate", "upload", "audioUI"}

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def definitions(server):
    """The nodes as ComfyUI's server describes them."""
    return server.get("/object_info")


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def named(node):
    """The values of the widgets by name."""
    return node.get("widgets_values_named", {})


def wrong_nodes(workflow, definitions):
    """What ComfyUI would not accept in a workflow, without the nodes of another pack."""
    for node in workflow["nodes"]:
        kind, pack = node["type"], node["properties"].get("cnr_id")
        if kind in NOTES or pack == WRAPPER:
            continue
        if kind not in definitions:
            yield f"{kind} is no node"
            continue
        required = definitions[kind]["input"].get("required", {})
        entries = {name: entry for name, *entry in inputs(definitions[kind])}
        saved = {key: value for key, value in named(node).items() if key not in ADDED}
        linked = {each["name"].partition(".")[0] for each in node["inputs"] if each["link"]}
        models = {model["name"] for model in node["properties"].get("models", [])}
        for name in required.keys() - saved.keys() - linked:
            yield f"{kind}.{name} has no value"
        for name in ({each["name"] for each in node["inputs"]} - ADDED) | saved.keys():
            if name.partition(".")[0] not in entries:
                yield f"{kind}.{name} is no input"
        for name in saved.keys() & entries.keys():
            if not fits(*entries[name], saved[name], models | INPUT_FILES):
                yield f"{kind}.{name} is {saved[name]!r}"
        # The frontend reads the values by position, so widgets may only be appended.
        widgets = [name for name, entry in entries.items() if has_widget(*entry)]
        order = [name for name in saved if "." not in name]
        if order != widgets[: len(order)]:
            yield f"{kind} has the widgets {order}; expected {widgets}"
        for each, output in zip(node["outputs"], definitions[kind]["output"], strict=False):
            if output not in (each["type"], "COMFY_MATCHTYPE_V3"):
                yield f"{kind} gives {each['type']}; expected {output}"


def has_widget(kind, options):
    widgets = {"COMBO", "INT", "FLOAT", "STRING", "BOOLEAN", "COMFY_DYNAMICCOMBO_V3"}
    return isinstance(kind, list) or (kind in widgets and not options.get("forceInput"))


def fits(kind, options, value, files):
    """Whether a widget of this definition accepts a value; `files` are in the user's folders."""
    if kind == "COMFY_DYNAMICCOMBO_V3":
        return value in [each["key"] for each in options["options"]]
    if kind == "COMBO" or isinstance(kind, list):
        return value in files or value in (options["options"] if kind == "COMBO" else kind)
    if kind in ("INT", "FLOAT"):
        whole = kind == "FLOAT" or isinstance(value, int)
        return whole and options["min"] <= value <= options["max"]
    return isinstance(value, {"STRING": str, "BOOLEAN": bool}[kind])


@every_file
@pytest.mark.comfyui
def test_saved_nodes_match_their_definitions(definitions, file):
    assert [*wrong_nodes(read(file), definitions)] == []


@every_file
def test_links_join_an_output_to_an_input_of_its_type(file):
    workflow = read(file)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    known = {number for number, *_ in workflow["links"]}
    for number, source, out, target, into, kind in workflow["links"]:
        output, entry = nodes[source]["outputs"][out], nodes[target]["inputs"][into]
        assert number in output["links"]
        assert entry["link"] == number
        assert output["type"] == kind
        # An input can accept several types; the frontend converts FLOAT to INT.
        assert kind in entry["type"].split(",") or entry["type"] == "*"
    for node in nodes.values():
        joined = {entry["link"] for entry in node["inputs"]} - {None}
        joined |= {link for output in node["outputs"] for link in output["links"] or []}
        assert joined <= known
        if node["type"] != "LoadAudio":  # its last widgets have no names
            assert node.get("widgets_values", []) == [*named(node).values()]
    assert workflow["last_node_id"] >= max(nodes)
    assert workflow["last_link_id"] >= max(known)


@every_file
def test_every_node_names_its_pack(file):
    project = (PACK / "pyproject.toml").read_text(encoding="utf-8")
    for node in read(file)["nodes"]:
        if node["type"] in NOTES:
            continue
        properties = node["properties"]
        assert properties["Node name for S&R"] == node["type"]
        if node["type"].startswith("FastVAE_"):
            assert properties["cnr_id"] == OURS
            assert f'\nname = "{OURS}"\nversion = "{properties["ver"]}"\n' in project
        else:
            wrapped = "WanVideo" in node["type"]
            assert properties["cnr_id"] == (WRAPPER if wrapped else CORE)


@every_file
@pytest.mark.comfyui
def test_every_loader_has_the_address_of_its_file_as_the_note_does(comfyui, file):
    import folder_paths

    nodes = read(file)["nodes"]
    (note,) = [node for node in nodes if node["type"] == "MarkdownNote"]
    text = note["widgets_values"][0]
    assert text.startswith("## ")
    for node in nodes:
        values = named(node).values()
        models = node["properties"].get("models", [])
        for model in models:
            assert model["name"] in values
            address = urlparse(model["url"])
            assert (address.scheme, address.netloc) == ("https", "huggingface.co")
            assert address.path.partition("/resolve/main/")[2].rpartition("/")[2] == model["name"]
            assert model["directory"] in folder_paths.folder_names_and_paths
            assert f"[{model['name']}]({model['url']}) in `models/{model['directory']}`" in text
        if node["type"] in LOADERS and "bundled demo" not in values:
            assert models, node["type"]
        elif node["type"] not in LOADERS:
            assert not any(str(value).endswith(".safetensors") for value in values)


@pytest.mark.parametrize("at", range(len(FILES)))
def test_file_names_are_titles_and_mention_no_download(at):
    """The Templates dialog shows the file name, in the order of the file system."""
    number, _, title = FILES[at].stem.partition(" ")
    assert number == str(at + 1)
    assert title[0].isupper()
    assert "_" not in title
    assert len(title) <= 40
    models = any(node["properties"].get("models") for node in read(FILES[at])["nodes"])
    assert title.startswith("No download - ") is (at < NO_DOWNLOAD) is (not models)


@every_file
def test_a_workflow_opens_readable_and_has_a_small_thumbnail(file):
    """A file that names no view is fitted to three quarters of the window, of any size."""
    workflow = read(file)
    assert "ds" not in workflow["extra"]
    nodes = workflow["nodes"]
    width, height = (
        max(node["pos"][axis] + node["size"][axis] for node in nodes)
        - min(node["pos"][axis] for node in nodes)
        for axis in (0, 1)
    )
    assert 0.75 * min(1920 / width, 1080 / height) >= READABLE
    picture = file.with_suffix(".jpg")
    assert picture.stat().st_size < 200_000
    with Image.open(picture) as image:
        assert image.format == "JPEG"
        assert 600 <= image.width <= 1100
        assert image.height >= 480
