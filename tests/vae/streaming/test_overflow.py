"""Decodes in float16 that overflow: from that frame on they are those of bfloat16, with no gap.

`test_any_way.py` shows it for all families, tiles, ranges and targets.

The VAEs are narrow ones whose first convolution is so large that a bright latent exceeds 65504
there, and the norm after it makes the other frames ordinary. The device is the CPU, which is said
to have fast convolutions in both dtypes.
"""

import copy
import importlib
import logging

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import computes_16_bits, joined, latent_for, overwritten
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.streaming import output, precision

checkpoint = importlib.import_module("fast_video_vae.vae.checkpoint")

STEP = StreamOptions(1)


@pytest.fixture(autouse=True)
def fast_float16(monkeypatch):
    """Both 16-bit dtypes are fast here, float16 more so."""
    monkeypatch.setattr(precision, "fp16_pays", lambda device: True)
    computes_16_bits(monkeypatch)


def allowing(vae):
    vae.allow_fp16 = True
    return vae


@pytest.fixture(scope="module")
def wan():
    """A VAE that overflows in float16 on a bright latent; to copy: an overflow is remembered."""
    state = random_state_dict(8)
    for key in ("decoder.conv1.weight", "decoder.conv1.bias"):
        state[key] = state[key] * 1e3
    return allowing(load_vae(state, dtype=torch.bfloat16))


@pytest.fixture
def vae(wan):
    return copy.deepcopy(wan)


def video(vae, latents, bright=None):
    """A latent of which number `bright` overflows."""
    latent = latent_for(vae, latents, 16, 16)
    if bright is not None:
        latent[:, :, bright] *= 1e3
    return latent


def wide(vae, latent):
    """All frames of the latent in bfloat16, `[B, C, T, H, W]`."""
    return joined(vae.decode_stream(latent, StreamOptions(1, torch.bfloat16)))


def lines(caplog):
    return [each.getMessage() for each in caplog.records if "overflow" in each.getMessage()]


@pytest.mark.parametrize(("bright", "given"), [(0, "tensor"), (3, "uneven pieces")])
def test_frames_are_of_float16_before_the_overflow_and_of_bfloat16_after_it(
    vae, caplog, bright, given
):
    latent, at = video(vae, 6, bright), vae.config.frames(bright) if bright else 0
    after = wide(vae, latent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output.Watch, "overflowed", lambda watch: False)
        before = joined(copy.deepcopy(vae).decode_stream(latent, STEP))
    assert before[:, :, :at].isfinite().all()
    assert not before[:, :, at:].isfinite().any()
    parts = latent if given == "tensor" else overwritten(latent.split([3, 2, 1], dim=2))
    with caplog.at_level(logging.INFO):
        pieces = list(vae.decode_stream(parts, STEP))
    assert torch.equal(
        torch.cat(pieces, dim=2), torch.cat([before[:, :, :at], after[:, :, at:]], 2)
    )
    assert all(piece.dtype == torch.bfloat16 and piece.shape[2] for piece in pieces)
    (line,) = lines(caplog)
    assert f"bfloat16 from frame {at} on" in line


def test_the_next_decode_starts_in_bfloat16_in_silence(vae, caplog):
    def kept():
        return {form.dtype for each in vae.modules() for form in getattr(each, "forms", {})}

    vae.decode(video(vae, 2), 1)
    assert torch.float16 in kept()
    vae.decode(video(vae, 3, 1))
    assert not vae.allow_fp16
    assert torch.float16 not in kept()  # the memory is free
    caplog.clear()
    dark = video(vae, 3)
    with caplog.at_level(logging.INFO):
        assert torch.equal(vae.decode(dark, 1), wide(vae, dark))
        assert torch.equal(copy.deepcopy(vae).decode(dark, 1), wide(vae, dark))
    assert not lines(caplog)


def test_an_explicit_dtype_is_never_changed(caplog):
    state, dtype = random_state_dict(8), torch.bfloat16
    vae = load_vae(state, dtype=dtype)
    assert not vae.allow_fp16
    latent = latent_for(vae, 2, 16, 16)
    seen = dtypes_of(vae, lambda: vae.decode(latent))
    assert seen == {dtype}
    # Nor for one stream of a VAE that chooses, nor in a VAE that was cast.
    free = allowing(load_vae(state, dtype=torch.bfloat16))
    seen = dtypes_of(free, lambda: list(free.decode_stream(latent, StreamOptions(1, dtype))))
    assert seen == {dtype}
    assert not free.to(torch.float32).to(torch.bfloat16).allow_fp16
    assert not lines(caplog)


def dtypes_of(vae, run):
    """The dtypes of the inputs of the decoder's layers."""
    seen = set()
    handles = [
        layer.register_forward_pre_hook(lambda layer, inputs: seen.add(inputs[0].dtype))
        for layer in vae.decoder.layers()
    ]
    run()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("fastest", "computed"),
    [(torch.bfloat16, torch.float16), (torch.float32, torch.float32)],
)
def test_a_vae_loaded_without_a_dtype_decodes_in_the_fastest(monkeypatch, fastest, computed):
    monkeypatch.setattr(checkpoint, "fastest_decode_dtype", lambda device: fastest)
    vae = load_vae(random_state_dict(8))
    latent = latent_for(vae, 2, 16, 16)
    assert dtypes_of(vae, lambda: vae.decode(latent)) == {computed}
    assert vae.decode(latent).dtype == vae.dtype == fastest
    assert copy.deepcopy(vae).to("cpu").allow_fp16
    monkeypatch.setattr(precision, "fp16_pays", lambda device: False)
    assert dtypes_of(vae, lambda: vae.decode(latent)) == {fastest}
