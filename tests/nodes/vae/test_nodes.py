"""The VAE nodes, called as ComfyUI calls them: options, outputs, sources of a VAE, and errors."""

import asyncio
import gc
import logging
import weakref

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.kernels import errors
from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.cards import machine
from fast_video_vae.tests.nodes.server import NODES
from fast_video_vae.tests.nodes.vae.pairs import (
    accelerated,
    clip,
    fast_vae,
    latents,
    ours,
    relative_error,
    stock_vae,
)
from fast_video_vae.tests.vae.families import computes_16_bits

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

SAMPLES, CLIP = {"samples": latents(2)}, clip(5)


def run(name, **inputs):
    """The first output of a node."""
    result = ours(name, **inputs).args[0]
    return result["samples"] if name == "Encode" else result


@pytest.fixture(scope="module")
def vae_name(models, state):
    save_file(state, models / "small.safetensors")
    save_file({"pixel_space_vae": torch.tensor(1.0)}, models / "pixels.safetensors")
    return "small.safetensors"


def test_the_menu_lists_the_nodes_in_order(comfyui):
    from fast_video_vae import comfy_entrypoint

    async def nodes():
        return await (await comfy_entrypoint()).get_node_list()

    schemas = [node.GET_SCHEMA() for node in asyncio.run(nodes())]
    assert [(schema.node_id, schema.display_name) for schema in schemas] == [*NODES.items()]
    assert {schema.category for schema in schemas} == {"Fast VAE"}
    for schema in schemas:
        schema.validate()


def test_the_loader_lists_the_files_and_the_bundled_vae_reconstructs_the_bundled_clip(vae_name):
    from folder_paths import get_filename_list

    from fast_video_vae.nodes.vae.nodes import Load

    options = Load.define_schema().inputs[0].options
    assert options == [*get_filename_list("vae"), "bundled demo"]
    assert vae_name in options
    images, video = ours("DemoClip").args
    assert images.shape == (33, 256, 256, 3)
    assert images.dtype == torch.float32
    assert float(video.get_components().frame_rate) == 16
    assert (video.get_components().images - images).abs().max() < 0.05
    vae = run("Load", vae_name="bundled demo")
    part = images[:5, :128, :128]
    decoded = run("Decode", samples={"samples": run("Encode", pixels=part, vae=vae)}, vae=vae)
    assert ((decoded - part) ** 2).mean() < 10**-2.2


@pytest.mark.parametrize(
    ("name", "given"), [("Decode", {"samples": SAMPLES}), ("Encode", {"pixels": CLIP})]
)
def test_a_dtype_for_one_run_does_not_change_the_vae(fast, stock, monkeypatch, caplog, name, given):
    # Also on a CPU that is slow in bfloat16, and would compute in float32.
    computes_16_bits(monkeypatch)
    exact, rounded, after = (
        run(name, vae=fast, **given, dtype=dtype) for dtype in ("auto", "bf16", "auto")
    )
    assert 1e-4 < (rounded - exact).abs().max() < 0.1
    assert rounded.dtype == torch.float32
    assert torch.equal(after, exact)
    # Another VAE uses its own method.
    with caplog.at_level(logging.INFO):
        assert relative_error(run(name, vae=stock, **given, chunk=2), exact) <= 1e-5
    assert "unused: chunk" in caplog.text


def test_the_error_of_a_bad_file_names_the_input(models, state):
    file, less = models / "bad.safetensors", dict(state)
    del less["decoder.middle.0.residual.2.bias"]
    for tensors, reason in (
        (less, "1 missing"),
        (state | {"conv2.bias": torch.full((16,), torch.nan)}, "NaN"),
        ({"x": torch.zeros(1)}, "and Load VAE fails"),
    ):
        save_file(tensors, file)
        with pytest.raises(ValueError, match=rf"^vae_name: .*{reason}"):
            run("Load", vae_name=file.name)


def test_accelerating_shares_the_weights_and_does_not_change_the_input(family):
    stock = family.another_stock()
    before = dict(stock.__dict__)
    fast = accelerated(stock)
    assert stock.__dict__ == before
    theirs = dict(stock.first_stage_model.named_parameters())
    for key, parameter in fast.first_stage_model.named_parameters():
        assert parameter.data_ptr() == theirs[key].data_ptr(), key
        assert parameter is not theirs[key]
    kept = weakref.ref(stock.first_stage_model)
    del stock, before, theirs, parameter
    gc.collect()
    assert kept() is None
    latent, pixels = latents(2, 2, 2), clip(5, 16, 16)
    assert relative_error(fast.decode(latent), family.stock.decode(latent)) <= 1e-5
    assert relative_error(fast.encode(pixels), family.stock.encode(pixels)) <= 1e-5


def test_applied_patches_of_the_input_are_kept(state):
    stock, key, plain = stock_vae(state), "decoder.conv1.weight", stock_vae(state)
    stock.patcher.add_patches({key: ("diff", (torch.full(state[key].shape, 0.05),))})
    expected = stock.decode(latents(2))  # the patched weights are in the network from here on
    fast = accelerated(stock)
    assert relative_error(fast.decode(latents(2)), expected) <= 1e-5
    assert relative_error(expected, plain.decode(latents(2))) > 1e-3
    fast.patcher.patches.clear()
    fast.patcher.patches_uuid = "none"
    assert relative_error(fast.decode(latents(2)), plain.decode(latents(2))) <= 1e-5


def settings(vae):
    """What a VAE keeps, which a copy for another device has too."""
    clone = vae.patcher.deepclone_multigpu(new_load_device=torch.device("cpu")).model
    assert torch.equal(clone.conv2.weight, vae.first_stage_model.conv2.weight)
    each = [(x.dtype, x.encode_dtype, x.chunk, x.precision) for x in (vae.first_stage_model, clone)]
    assert each[0] == each[1]
    return each[0]


def test_a_fast_vae_accepts_new_options_on_the_same_weights(models, vae_name, state):
    import comfy.sd

    bf16, fp32 = torch.bfloat16, torch.float32
    stock = stock_vae(state)
    assert accelerated(stock).patcher.cached_patcher_init is None
    made = str(models / vae_name), None, None
    stock.patcher.cached_patcher_init = comfy.sd.load_vae_patcher, made
    assert settings(accelerated(stock, chunk=3)) == (fp32, fp32, 3, "auto")
    fast = run("Load", vae_name=vae_name, encode_dtype="bf16", chunk=2)
    assert accelerated(fast) is fast
    other, coded = accelerated(fast, chunk=3), accelerated(fast, precision="int8")
    assert settings(fast) == (fp32, bf16, 2, "auto")
    assert settings(other) == (fp32, bf16, 3, "auto")
    assert settings(coded) == (fp32, bf16, 2, "int8")
    assert settings(accelerated(coded, dtype=bf16)) == (bf16, bf16, 2, "int8")
    assert fast.vae_dtype == fp32  # the wider one, of inputs
    for key, value in other.first_stage_model.decoder.state_dict().items():
        assert value.data_ptr() == fast.first_stage_model.decoder.state_dict()[key].data_ptr(), key
    assert relative_error(other.decode(latents(2)), fast.decode(latents(2))) <= 1e-5


@pytest.mark.parametrize("reason", ["TheirVAE of another pack", "its network is", "object_patches"])
def test_other_vaes_are_returned_with_a_logged_reason(vae_name, state, caplog, reason):
    vae = stock_vae(state)
    with caplog.at_level(logging.INFO):
        if "pack" in reason:
            vae.__class__ = type("TheirVAE", (type(vae),), {})
        elif "network" in reason:
            vae = run("Load", vae_name="pixels.safetensors")
            assert "pixels.safetensors is loaded as by Load VAE" in caplog.text
        else:
            vae.patcher = vae.patcher.clone()
            vae.patcher.add_object_patch("decoder.something", object())
        before = dict(vae.__dict__)
        assert accelerated(vae) is vae
    assert vae.__dict__ == before
    assert reason in [text for text in caplog.messages if "Fast Video VAE" in text][-1]


@pytest.mark.parametrize("flag", [None, "fp32_vae", "bf16_vae", "fp16_vae", "cpu_vae"])
def test_float16_is_allowed_only_where_nothing_chose_a_dtype(state, tmp_path, monkeypatch, flag):
    from comfy.cli_args import args

    if flag:
        monkeypatch.setattr(args, flag, True)
    for fast in (fast_vae(state, tmp_path), accelerated(stock_vae(state))):
        if flag == "bf16_vae":
            model = fast.first_stage_model
            assert {fast.vae_dtype, model.dtype, model.encode_dtype} == {torch.bfloat16}
            assert fast.decode(latents(1)).dtype == torch.float32
        chosen = accelerated(fast, dtype=torch.bfloat16)
        for vae, allowed in (
            (fast, flag is None),
            (accelerated(fast, encode_dtype=torch.float32), flag is None),
            (chosen, False),
            (accelerated(chosen, chunk=3), False),
        ):
            assert vae.first_stage_model.allow_fp16 == allowed
        fast.first_stage_model.allow_fp16 = False  # as after an overflow
        assert not accelerated(fast, chunk=3).first_stage_model.allow_fp16


@pytest.mark.parametrize(
    ("given", "kept"), [("int8", "int8"), ("int8 and encode", "int8"), ("exact", "auto")]
)
def test_both_nodes_store_the_precision(vae_name, stock, caplog, monkeypatch, given, kept):
    """Values of widgets are saved by position: a removed choice."""
    from fast_video_vae.nodes.vae import nodes

    monkeypatch.setattr(errors, "_logged", set())
    for name, inputs in (("Load", {"vae_name": vae_name}), ("Accelerate", {"vae": stock})):
        assert getattr(nodes, name).validate_inputs(precision=given) is True
        vae = run(name, **inputs, precision=given)
        assert vae.first_stage_model.precision == kept
    logged = [text for text in caplog.messages if "is 'int8', which is for decodes" in text]
    assert len(logged) == (given == "int8 and encode")


def test_the_devices_of_an_older_workflow_are_used(vae_name, monkeypatch):
    machine(monkeypatch, 2)
    for given in ({"precision": "all"}, {"precision": "one", "devices": "all"}):
        assert run("Load", vae_name=vae_name, **given).first_stage_model.selection == "all"
    with refused("^precision: got 'fp8'; expected one of: auto, int8"):
        run("Load", vae_name=vae_name, precision="fp8")
