"""Sources of a fast VAE: a VAE of ComfyUI or a file; and the inputs that must not change."""

import gc
import logging
import weakref

import pytest
import torch

from fast_video_vae.tests.nodes.vae.pairs import (
    accelerated,
    clip,
    fast_vae,
    latents,
    relative_error,
    stock_vae,
)

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


def test_accelerating_shares_the_weights_and_does_not_change_the_input(family):
    stock = family.another_stock()
    before = dict(stock.__dict__)
    fast = accelerated(stock)
    assert stock.__dict__ == before
    assert all(torch.equal(value, family.state[key]) for key, value in stock.get_sd().items())
    theirs = dict(stock.first_stage_model.named_parameters())
    for key, parameter in fast.first_stage_model.named_parameters():
        assert parameter.data_ptr() == theirs[key].data_ptr(), key
        assert parameter is not theirs[key]
    kept = weakref.ref(stock.first_stage_model)
    del stock, before, theirs, parameter
    gc.collect()
    assert kept() is None
    latent, pixels = latents(2, 4, 6), clip(5, 32, 48)
    assert relative_error(fast.decode(latent), family.stock.decode(latent)) <= 1e-5
    assert relative_error(fast.encode(pixels), family.stock.encode(pixels)) <= 1e-5


def test_applied_patches_of_the_input_are_kept(state):
    stock = stock_vae(state)
    key = "decoder.conv1.weight"
    stock.patcher.add_patches({key: ("diff", (torch.full(state[key].shape, 0.05),))})
    expected = stock.decode(latents(2))  # the patched weights are in the network from here on
    fast = accelerated(stock)
    assert relative_error(fast.decode(latents(2)), expected) <= 1e-5
    fast.patcher.patches.clear()
    fast.patcher.patches_uuid = "none"
    assert relative_error(fast.decode(latents(2)), stock_vae(state).decode(latents(2))) <= 1e-5
    assert torch.equal(stock.decode(latents(2)), expected)


def test_a_fast_vae_accepts_new_options_on_the_same_weights(state, tmp_path):
    fast = fast_vae(state, tmp_path, chunk=2)
    assert accelerated(fast) is fast
    rough, other = accelerated(fast, dtype=torch.bfloat16), accelerated(fast, chunk=3)
    assert rough.first_stage_model.dtype == torch.bfloat16
    assert fast.first_stage_model.dtype == other.first_stage_model.dtype == torch.float32
    for vae, chunk in ((fast, 2), (rough, 2), (other, 3)):
        clone = vae.patcher.deepclone_multigpu(new_load_device=torch.device("cpu"))
        assert vae.first_stage_model.chunk == clone.model.chunk == chunk
    for key, value in other.first_stage_model.state_dict().items():
        assert value.data_ptr() == fast.first_stage_model.state_dict()[key].data_ptr(), key
    assert relative_error(other.decode(latents(2)), fast.decode(latents(2))) <= 1e-5


def test_an_accelerated_vae_reloads_through_its_loader(state, tmp_path):
    import comfy.sd
    from safetensors.torch import save_file

    save_file(state, tmp_path / "stock.safetensors")
    stock = stock_vae(state)
    stock.patcher.cached_patcher_init = (
        comfy.sd.load_vae_patcher,
        (str(tmp_path / "stock.safetensors"), None, None),
    )
    fast = accelerated(stock, chunk=2)
    clone = fast.patcher.deepclone_multigpu(new_load_device=torch.device("cpu"))
    assert type(clone.model) is type(fast.first_stage_model)
    assert clone.model.chunk == 2
    assert torch.equal(clone.model.decode(latents(2)), fast.first_stage_model.decode(latents(2)))
    assert accelerated(stock_vae(state)).patcher.cached_patcher_init is None


@pytest.mark.parametrize("reason", ["TheirVAE of another pack", "its network is", "object_patches"])
def test_other_vaes_are_returned_with_a_logged_reason(state, caplog, reason):
    import comfy.sd

    vae = stock_vae(state)
    if "pack" in reason:
        vae.__class__ = type("TheirVAE", (type(vae),), {})
    elif "network" in reason:
        vae = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    else:
        vae.patcher = vae.patcher.clone()
        vae.patcher.add_object_patch("decoder.something", object())
    before = dict(vae.__dict__)
    with caplog.at_level(logging.INFO):
        assert accelerated(vae) is vae
    assert vae.__dict__ == before
    (line,) = [r.getMessage() for r in caplog.records if "Fast Video VAE" in r.getMessage()]
    assert reason in line


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
            (accelerated(fast, chunk=3), flag is None),
            (accelerated(fast, encode_dtype=torch.float32), flag is None),
            (chosen, False),
            (accelerated(chosen, chunk=3), False),
        ):
            assert vae.first_stage_model.allow_fp16 == allowed
        fast.first_stage_model.allow_fp16 = False  # as after an overflow
        assert not accelerated(fast, chunk=3).first_stage_model.allow_fp16


def test_inputs_keep_the_precision_of_both_directions(state, tmp_path):
    exact = fast_vae(state, tmp_path)
    mixed = fast_vae(state, tmp_path, dtype=torch.bfloat16, encode_dtype=torch.float32)
    assert mixed.vae_dtype == torch.float32
    assert torch.equal(mixed.encode(clip(5)), exact.encode(clip(5)))
    difference = (mixed.decode(latents(2)) - exact.decode(latents(2))).abs().max()
    assert 1e-4 < difference < 0.1
