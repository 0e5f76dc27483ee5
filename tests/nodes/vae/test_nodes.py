"""The VAE nodes, called as ComfyUI calls them: options, outputs, and errors that name an input."""

import logging

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.server import NODES
from fast_video_vae.tests.nodes.vae.pairs import clip, latents, ours
from fast_video_vae.vae.streaming import precision

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


def run(name, **inputs):
    return ours(name, **inputs).args


@pytest.fixture(scope="module")
def vae_name(models, state):
    save_file(state, models / "small.safetensors")
    return "small.safetensors"


def test_the_menu_lists_the_nodes_in_order(comfyui):
    import asyncio

    from fast_video_vae import comfy_entrypoint

    async def nodes():
        return await (await comfy_entrypoint()).get_node_list()

    schemas = [node.GET_SCHEMA() for node in asyncio.run(nodes())]
    names = [(schema.node_id, schema.display_name) for schema in schemas]
    assert names == [*NODES.items()]
    assert {schema.category for schema in schemas} == {"Fast VAE"}
    for schema in schemas:
        schema.validate()


def test_the_options_of_the_loader(vae_name):
    from folder_paths import get_filename_list

    from fast_video_vae.nodes.vae.nodes import Load

    options = Load.define_schema().inputs[0].options
    assert options == [*get_filename_list("vae"), "bundled demo"]
    assert vae_name in options
    assert "bundled demo" not in get_filename_list("vae")
    (vae,) = run("Load", vae_name=vae_name, dtype="bf16", encode_dtype="fp32", chunk=3)
    model = vae.first_stage_model
    assert (model.dtype, model.encode_dtype, model.chunk) == (torch.bfloat16, torch.float32, 3)


def test_the_bundled_vae_reconstructs_the_bundled_clip():
    images, video = run("DemoClip")
    assert images.shape == (33, 256, 256, 3)
    assert images.dtype == torch.float32
    assert video.get_dimensions() == (256, 256)
    assert float(video.get_components().frame_rate) == 16
    assert (video.get_components().images - images).abs().max() < 0.05
    (vae,) = run("Load", vae_name="bundled demo")
    (samples,) = run("Encode", pixels=images[:9], vae=vae)
    decoded, _ = run("Decode", samples=samples, vae=vae)
    psnr = -10 * torch.log10(((decoded - images[:9]) ** 2).mean())
    assert psnr > 22


def test_a_dtype_for_one_run_does_not_change_the_vae(fast, monkeypatch):
    # Also on a CPU that is slow in bfloat16, and would compute in float32.
    monkeypatch.setattr(precision, "_is_slow", lambda _: False)
    samples = {"samples": latents(2)}
    exact, _ = run("Decode", samples=samples, vae=fast)
    rounded, _ = run("Decode", samples=samples, vae=fast, dtype="bf16")
    assert 1e-4 < (rounded - exact).abs().max() < 0.1
    assert torch.equal(run("Decode", samples=samples, vae=fast)[0], exact)
    (latent,) = run("Encode", pixels=clip(5), vae=fast, dtype="bf16")
    assert latent["samples"].dtype == torch.float32


def test_another_vae_uses_its_own_method(stock, caplog):
    samples = {"samples": latents(2)}
    with caplog.at_level(logging.INFO):
        images, _ = run("Decode", samples=samples, vae=stock, chunk=2)
    assert torch.equal(images, stock.decode(samples["samples"])[0])
    assert "unused: chunk" in caplog.text
    (latent,) = run("Encode", pixels=clip(5), vae=stock)
    assert torch.equal(latent["samples"], stock.encode(clip(5)))


def test_another_vae_file_is_loaded_as_in_comfyui(models, caplog):
    import comfy.sd

    save_file({"pixel_space_vae": torch.tensor(1.0)}, models / "pixels.safetensors")
    with caplog.at_level(logging.INFO):
        (vae,) = run("Load", vae_name="pixels.safetensors")
    assert type(vae) is comfy.sd.VAE
    assert "pixels.safetensors is loaded as by Load VAE" in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"not a checkpoint", "not a complete"),
        ({"decoder.middle.0.residual.2.bias": None}, "1 missing"),
        ({"conv2.bias": torch.full((16,), torch.nan)}, "NaN"),
        (None, "and Load VAE fails"),
    ],
    ids=["empty", "damaged", "incomplete", "NaN", "not a VAE"],
)
def test_the_error_of_a_bad_file_names_the_input(models, state, content, reason):
    file = models / "bad.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        tensors = {"x": torch.zeros(1)} if content is None else state | content
        save_file({key: value for key, value in tensors.items() if value is not None}, file)
    with pytest.raises(ValueError, match=rf"^vae_name: .*{reason}"):
        run("Load", vae_name=file.name)


@pytest.mark.parametrize("name", ["Decode", "DecodeVideo"])
@pytest.mark.parametrize(
    ("latent", "reason"),
    [
        (torch.zeros(1, 4, 1, 8, 8), "4 channels; this VAE needs 16"),
        (torch.zeros(1, 48, 1, 8, 8), "48 channels"),
        (torch.zeros(16, 8, 8), "3 dimensions"),
        (torch.zeros(1, 16, 0, 8, 8), "empty"),
        (torch.full((1, 16, 1, 8, 8), torch.nan), "NaN"),
        (torch.zeros(1, 16, 1, 8, 8, dtype=torch.int64), "int64"),
    ],
)
def test_a_bad_latent_is_an_error_before_anything_is_loaded(
    fast, monkeypatch, name, latent, reason
):
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", pytest.fail)
    with refused(rf"^samples: .*{reason}"):
        run(name, samples={"samples": latent}, vae=fast)


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (torch.zeros(1, 7, 64, 3), "7 x 64"),
        (torch.zeros(0, 64, 64, 3), "empty"),
        (torch.zeros(64, 64, 3), r"\[64, 64, 3\]; expected \[N, H, W, C\]"),
        (torch.full((1, 64, 64, 3), torch.inf), "infinite"),
        (torch.zeros(1, 64, 64, 3, dtype=torch.uint8), "uint8"),
    ],
)
def test_the_error_of_a_bad_image_names_the_input(fast, pixels, reason):
    with refused(rf"^pixels: .*{reason}"):
        run("Encode", pixels=pixels, vae=fast)
