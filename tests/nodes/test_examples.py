"""The files of `example_workflows/` and `subgraphs/`, made in ComfyUI, without a browser."""

import json
import re
from urllib.parse import quote, urlparse

import pytest
from PIL import Image

from fast_video_vae.tests.nodes.checkout import PACK

WORKFLOWS = sorted(
    (PACK / "example_workflows").glob("*.json"), key=lambda file: int(file.stem.split()[0])
)
BLUEPRINTS = sorted((PACK / "subgraphs").glob("*.json"))

OURS, CORE, WRAPPER = "fast-video-vae", "comfy-core", "ComfyUI-WanVideoWrapper"
READABLE = 0.575  # below this scale the frontend draws no text on nodes
SEARCHED = 32  # the search of the node library compares no longer names

INPUT_FILES = {"example.png", "video.mp4", "speech.wav"}  # of the user

pytestmark = pytest.mark.comfyui


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def nodes_of(workflow, *packs):
    """The nodes of a workflow and its subgraphs, those of these packs if any are given."""
    inner = workflow.get("definitions", {}).get("subgraphs", [])
    kinds = {graph["id"] for graph in inner}
    nodes = [each for graph in [workflow, *inner] for each in graph["nodes"]]
    nodes = [each for each in nodes if each["type"] not in kinds]
    return [each for each in nodes if not packs or each["properties"].get("cnr_id") in packs]


def models_of(workflow):
    """The files that a workflow asks the user to download."""
    return [each for node in nodes_of(workflow) for each in node["properties"].get("models", [])]


@pytest.mark.parametrize("file", WORKFLOWS + BLUEPRINTS, ids=lambda file: file.stem)
def test_every_node_names_its_pack_and_its_files_as_the_note_does(comfyui, file):
    import folder_paths

    project = (PACK / "pyproject.toml").read_text(encoding="utf-8")
    nodes = nodes_of(read(file))
    notes = [node["widgets_values"][0] for node in nodes if node["type"] == "MarkdownNote"]
    assert len(notes) == (file in WORKFLOWS)
    assert all(text.startswith("## ") for text in notes)
    for node in [each for each in nodes if each["type"] not in ("MarkdownNote", "Note")]:
        kind, properties = node["type"], node["properties"]
        wrapped = WRAPPER if "WanVideo" in kind and "FastVAE" not in kind else CORE
        assert properties["Node name for S&R"] == kind
        assert properties["cnr_id"] == (OURS if kind.startswith("FastVAE_") else wrapped)
        if properties["cnr_id"] == OURS:
            assert f'\nname = "{OURS}"\nversion = "{properties["ver"]}"\n' in project
        models = {model["name"]: model for model in properties.get("models", [])}
        values = map(str, node.get("widgets_values_named", {}).values())
        files = {each for each in values if each.endswith(".safetensors")}
        assert files == models.keys(), kind
        for name, model in models.items():
            address = urlparse(model["url"])
            assert (address.scheme, address.netloc) == ("https", "huggingface.co")
            assert address.path.partition("/resolve/main/")[2].rpartition("/")[2] == name
            assert model["directory"] in folder_paths.folder_names_and_paths
            line = f"[{name}]({model['url']}) in `models/{model['directory']}`"
            assert all(line in text for text in notes)


@pytest.mark.parametrize("at", range(len(WORKFLOWS)))
def test_a_workflow_is_offered_with_a_title_a_readable_view_and_a_small_thumbnail(server, at):
    """The Templates dialog shows the file name, in the order of the file system."""
    file, offered = WORKFLOWS[at], "/api/workflow_templates"
    assert {*server.get(offered)[server.name]} == {each.stem for each in WORKFLOWS}
    workflow = server.get(quote(f"{offered}/{server.name}/{file.name}"))
    assert workflow == read(file)
    assert nodes_of(workflow, OURS)
    number, _, title = file.stem.partition(" ")
    assert [each.stem.split()[0] for each in WORKFLOWS].count(number) == 1
    assert re.fullmatch("[A-Z][^_]{,39}", title)
    assert title.startswith("No download - ") is (not models_of(workflow))
    assert "ds" not in workflow["extra"]  # so it is fitted to three quarters of the window
    for axis, pixels in enumerate((1920, 1080)):
        ends = [(node["pos"][axis], node["size"][axis]) for node in workflow["nodes"]]
        length = max(map(sum, ends)) - min(ends)[0]
        assert 0.75 * pixels / length >= READABLE
    picture = file.with_suffix(".jpg")
    assert picture.stat().st_size < 200_000
    with Image.open(picture) as image:
        assert image.format == "JPEG"
        assert 600 <= image.width <= 1100
        assert image.height >= 480


@pytest.mark.parametrize("file", BLUEPRINTS, ids=lambda file: file.stem)
def test_a_blueprint_is_one_subgraph_of_its_name_that_the_server_offers(server, file):
    """The library shows the file name, and has one blueprint of a name."""
    offered = server.get("/global_subgraphs")
    (found,) = [key for key, each in offered.items() if each["name"] == file.stem]
    workflow = json.loads(server.get(f"/global_subgraphs/{found}")["data"])
    assert workflow == read(file)
    assert len(file.stem) <= SEARCHED
    (node,), (graph,) = workflow["nodes"], workflow["definitions"]["subgraphs"]
    assert (graph["id"], graph["name"], graph["category"]) == (node["type"], file.stem, "Fast VAE")
    assert node["properties"]["cnr_id"] == OURS
    for side in ("inputs", "outputs"):
        shown = [[(x["name"], x["type"]) for x in each[side]] for each in (node, graph)]
        assert shown[0] == shown[1]
