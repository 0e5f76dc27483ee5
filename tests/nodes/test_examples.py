"""The files of `example_workflows/`, without a browser: their content is consistent."""

import asyncio
import json
from urllib.parse import urlparse

import pytest
from PIL import Image

from fast_video_vae.tests.nodes.checkout import PACK
from fast_video_vae.tests.tools.workflows import wrapper
from fast_video_vae.tests.tools.workflows.catalogue import catalogue
from fast_video_vae.tests.tools.workflows.graph import links
from fast_video_vae.tests.tools.workflows.packs import project

# The two that are kept by hand.
NO_DOWNLOAD = [
    "1 No download - encode and decode a clip",
    "2 No download - long video to a file",
]

FILES = sorted((PACK / "example_workflows").glob("*.json"))

# Inputs whose values are files of a folder.
LOADERS = {
    "CheckpointLoaderSimple", "UNETLoader", "CLIPLoader", "VAELoader", "LoraLoaderModelOnly",
    "ModelPatchLoader", "AudioEncoderLoader", "FastVAE_Load", "FastVAE_LoraStack",
    "WanVideoModelLoader", "LoadWanVideoT5TextEncoder",
}  # fmt: skip

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def test_every_task_has_a_workflow():
    assert [file.stem for file in FILES] == sorted([*NO_DOWNLOAD, *catalogue()])


@pytest.mark.parametrize("at", range(len(FILES)))
def test_file_names_are_titles_and_mention_no_download(at):
    """The Templates dialog shows the file name, in the order of the file system."""
    number, _, title = FILES[at].stem.partition(" ")
    assert number == str(at + 1)
    assert title[0].isupper()
    assert "_" not in title
    assert len(title) <= 40
    models = any(node["properties"].get("models") for node in read(FILES[at])["nodes"])
    assert title.startswith("No download - ") is (at < len(NO_DOWNLOAD)) is (not models)


# Below this scale the frontend draws no text on nodes.
READABLE = 0.575


@every_file
def test_a_workflow_is_valid_and_readable(file):
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
    assert workflow["last_node_id"] >= max(nodes)
    assert workflow["last_link_id"] >= max(known)


@every_file
def test_every_node_names_its_pack(file):
    for node in read(file)["nodes"]:
        if node["type"] in ("MarkdownNote", "Note"):  # the frontend's own
            continue
        properties = node["properties"]
        assert properties["Node name for S&R"] == node["type"]
        bringer = wrapper.NAME if node["type"] in wrapper.NODES else "comfy-core"
        if node["type"].startswith("FastVAE_"):
            bringer = project()["name"]
            assert properties["ver"] == project()["version"]
        assert properties["cnr_id"] == bringer


@every_file
@pytest.mark.comfyui
def test_saved_nodes_match_their_schemas(comfyui, file):
    """Inputs may only be appended, so that files saved before remain valid."""
    from fast_video_vae.nodes import FastVideoVAEExtension

    classes = asyncio.run(FastVideoVAEExtension().get_node_list())
    schemas = {schema.node_id: schema for schema in (node.GET_SCHEMA() for node in classes)}
    for node in read(file)["nodes"]:
        if not node["type"].startswith("FastVAE_"):
            continue
        schema = schemas[node["type"]]
        assert {entry["name"] for entry in node["inputs"]} <= {one.id for one in schema.inputs}
        assert node.get("widgets_values_named", {}).keys() - {"control_after_generate"} <= {
            one.id for one in schema.inputs
        }
        types = [output["type"] for output in node["outputs"]]
        assert types == [output.io_type for output in schema.outputs][: len(types)]


@every_file
@pytest.mark.comfyui
def test_every_loader_has_the_address_of_its_file(comfyui, file):
    import folder_paths

    for node in read(file)["nodes"]:
        values = node.get("widgets_values_named", {}).values()
        models = node["properties"].get("models", [])
        for model in models:
            assert model["name"] in values
            address = urlparse(model["url"])
            assert (address.scheme, address.netloc) == ("https", "huggingface.co")
            assert address.path.partition("/resolve/main/")[2].rpartition("/")[2] == model["name"]
            assert model["directory"] in folder_paths.folder_names_and_paths
        if node["type"] in LOADERS and "bundled demo" not in values:
            assert models, node["type"]
        elif node["type"] not in LOADERS:
            assert not any(str(value).endswith(".safetensors") for value in values)


@every_file
def test_the_note_lists_every_file_and_its_folder(file):
    workflow = read(file)
    (note,) = [node for node in workflow["nodes"] if node["type"] == "MarkdownNote"]
    (text, *_) = note["widgets_values"]
    assert text.startswith("## ")
    for node in workflow["nodes"]:
        for model in node["properties"].get("models", []):
            assert f"[{model['name']}]({model['url']}) in `models/{model['directory']}`" in text


@every_file
def test_a_thumbnail_is_a_small_image(file):
    picture = file.with_suffix(".jpg")
    assert picture.stat().st_size < 200_000
    with Image.open(picture) as image:
        assert image.format == "JPEG"
        assert 600 <= image.width <= 1100
        assert image.height >= 480


@pytest.mark.parametrize("name", catalogue())
def test_a_file_matches_its_generator(name):
    """If this fails, run `python tests/tools/workflows/write.py`."""
    graph = catalogue()[name]
    workflow = read(PACK / "example_workflows" / f"{name}.json")
    saved = workflow["nodes"]
    assert [node["type"] for node in saved] == [node.kind for node in graph.nodes]
    numbers = {id(node): saved[at]["id"] for at, node in enumerate(graph.nodes)}
    nodes = {node["id"]: node for node in saved}
    drawn = {
        (source, nodes[target]["id"], nodes[target]["inputs"][into]["name"])
        for _, source, _, target, into, _ in workflow["links"]
    }
    assert drawn == {
        (numbers[id(output.node)], numbers[id(node)], entry) for output, node, entry in links(graph)
    }
    assert saved[0]["widgets_values"][0] == graph.markdown()
    assert [group["title"] for group in workflow["groups"]] == [
        group.title for column in graph.columns for group in column.groups
    ]
