"""Kinds of LoRA files against ComfyUI's loader: bits of a weight, and a whole run."""

import itertools
import logging
import zlib

import pytest
import torch

from fast_video_vae.lora.deltas import make_function
from fast_video_vae.tests.nodes.diffusion import KIND, load_model, random_weights, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import apply, core, save_lora, stack

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui", "inference")]

# ComfyUI's endings of keys that differ from the names of parts.
ENDS = {"up": "lora_up.weight", "down": "lora_down.weight", "mid": "lora_mid.weight"}
ENDS |= {part: f"{part}.weight" for part in ("a1", "a2", "b1", "b2")}
LINEAR, KERNEL = (16, 8), (8, 6, 3, 3)
CORES = {"hada_t1": (3, 3, 3, 3), "hada_t2": (3, 3, 3, 3)}
MID = {"up": (8, 4, 1, 1), "down": (4, 6, 1, 1), "mid": (4, 4, 3, 3)}
PAIR = {"up": (16, 4), "down": (4, 8)}


def loha(a, b, **more):
    return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": a, "hada_w2_b": b, **more}


def glora(*shapes, **more):
    return dict(zip(("a1", "a2", "b1", "b2"), shapes, strict=True)) | more


def linear(out, inner):
    """Rows for a matrix of any size: shapes of the parts, and alpha."""
    pair, pairs = {"up": (out, 4), "down": (4, inner)}, loha((out, 3), (3, inner))
    low = {"lokr_w2_a": (out // 4, 3), "lokr_w2_b": (3, inner // 4)}
    blocks = {"oft_blocks": (out // 8, 8, 8)}
    return {
        "rank above the weight's": ({"up": (out, 24), "down": (24, inner)}, 2.0),
        "dora-out": (pair | {"dora_scale": (out, 1)}, 0.1),
        "dora-in": (pair | {"dora_scale": (1, inner)}, 2.0),
        "loha": (pairs, 0.3),
        "loha-dora": (pairs | {"dora_scale": (1, inner)}, None),
        "lokr": ({"lokr_w1": (4, 4), "lokr_w2": (out // 4, inner // 4)}, 7.0),
        "lokr-factors": ({"lokr_w1_a": (4, 2), "lokr_w1_b": (2, 4), **low}, 7.0),
        "glora": (glora((inner, 3), (3, inner), (out, 3), (3, inner)), 0.02),
        "oft": (blocks | {"rescale": (out, 1)}, None),
        "oft-constraint": (blocks, 0.5),
        "boft": ({"oft_blocks": (2, out // 8, 8, 8), "rescale": (out, 1)}, 0.5),
        "replacement": ({"set_weight": (out, inner)}, None),
    }


# Shape of the weight, shapes of the parts, and alpha.
ROWS = {
    **{name: (LINEAR, *row) for name, row in linear(*LINEAR).items()},
    "alpha 0": (LINEAR, PAIR, 0.0),
    "convolution": (KERNEL, {"up": (8, 4, 1, 1), "down": (4, 6, 3, 3)}, 8.0),
    "flat": (KERNEL, {"up": (8, 4), "down": (4, 54)}, None),
    "dora-one-output": ((1, 7), {"up": (1, 2), "down": (2, 7), "dora_scale": (1, 7)}, None),
    "conv-mid": (KERNEL, MID, 2.0),
    "grows": ((15, 6), PAIR | {"reshape_weight": LINEAR}, 2.0),
    "loha-tucker": (KERNEL, loha((3, 8), (3, 6), **CORES), 2.0),
    "glora-conv": (KERNEL, glora((6, 3), (3, 6), (8, 3), (3, 54)), 2.0),
    "glora-older": ((9, 9), glora((3, 9), (9, 3), (3, 9), (9, 3), dora_scale=(1, 9)), 2.0),
    "difference": (KERNEL, {"diff": KERNEL}, None),
    "norm": ((12,), {"w_norm": (12,)}, None),
}


def made(name, shapes, alpha):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    parts = {part: 0.7 * torch.randn(shape, generator=generator) for part, shape in shapes.items()}
    for part in parts.keys() & {"dora_scale", "rescale"}:
        parts[part] = parts[part].abs() + 0.5
    if "reshape_weight" in parts:
        parts["reshape_weight"] = torch.tensor(shapes["reshape_weight"])
    return parts if alpha is None else parts | {"alpha": torch.tensor(alpha)}


def function(parts, shape):
    from fast_video_vae.nodes.lora.kinds import function_of

    parts = {("diff" if name == "w_norm" else name): part for name, part in parts.items()}
    return make_function(parts, shape, function_of)


@pytest.mark.parametrize("row", ROWS)
def test_a_weight_gets_the_bits_of_comfyuis_merge(row, caplog):
    import comfy.lora

    shape, shapes, alpha = ROWS[row]
    parts, weight = made(row, shapes, alpha), torch.randn(shape)
    ours, before = function(parts, shape), weight.clone()
    file = {f"m.{ENDS.get(name, name)}": part for name, part in parts.items()}
    (patch,) = comfy.lora.load_lora(file, {"m": "m.weight"}).values()
    for strength in (-1.0, 0.5, 4.0):
        patches = [(strength, patch, 1.0, None, None)]
        expected = comfy.lora.calculate_weight(patches, weight.clone(), "m.weight")
        result = ours.apply(weight, strength)
        if shapes.keys() == {"up", "down"}:  # the pack's own sum, rounded in another order
            assert loras.relative_error(result, expected) < 2e-6
        else:
            assert torch.equal(result, expected)
        assert torch.equal(result, before) == (alpha == 0)
    assert torch.equal(weight, before)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("shapes", "shape"),
    [
        ({"lokr_w1": (4, 4), "lokr_w2": (4, 2)}, (16, 9)),
        ({"lokr_w1": (4, 4)}, LINEAR),  # without the second factor
        (loha((16, 3), (4, 8)), LINEAR),  # ranks differ
        (PAIR | {"dora_scale": (1, 16)}, LINEAR),
        (PAIR | {"lokr_w1": (4, 4), "lokr_w2": (4, 2)}, LINEAR),  # two kinds
        (PAIR | {"rescale": (16, 1)}, LINEAR),  # a part that is not used
        ({"oft_blocks": (3, 4, 4)}, LINEAR),
        ({"up": (8, 4, 1, 1, 1), "down": (4, 6, 1, 1, 1), "mid": (4, 4, 1, 2, 2)}, (8, 6, 1, 2, 2)),
    ],
)
def test_what_comfyui_cannot_apply_has_a_reason_before_the_run(shapes, shape, caplog):
    for alpha in (None, 2.0):
        with pytest.raises(ValueError, match=r"for a parameter of \d+x\d+") as caught:
            function(made("misfit", shapes, alpha), shape)
        assert all(name in str(caught.value) for name in shapes)
    assert not caplog.messages


@pytest.mark.parametrize("row", ["lokr", "dora-out"])
def test_an_error_in_a_run_is_raised(row, monkeypatch):
    """ComfyUI logs it and goes on without the LoRA, for example when memory is missing."""
    ours = function(made(row, *ROWS[row][1:]), LINEAR)

    def fail(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "kron", fail)
    monkeypatch.setattr(torch.Tensor, "norm", fail)  # after the delta
    with pytest.raises(torch.OutOfMemoryError):
        ours.apply(torch.randn(LINEAR), 1.0)
    assert not logging.getLogger().filters


def test_a_run_with_all_kinds_has_the_bits_of_comfyuis_merge_in_each_mode():
    model, state, file = load_model(KIND), random_weights(KIND), {}
    kinds, without = itertools.cycle([*linear(*LINEAR)][1:]), sample(model)  # no plain pairs
    for key, value in state.items():
        if key.startswith("blocks.") and key.endswith(".weight") and value.ndim == 2:
            name = f"diffusion_model.{key.removesuffix('.weight')}"
            for part, tensor in made(name, *linear(*value.shape)[next(kinds)]).items():
                file[f"{name}.{ENDS.get(part, part)}"] = tensor
    save_lora(file, "kinds.safetensors")
    expected = sample(core(load_model(KIND), "kinds.safetensors", 0.8))
    assert loras.relative_error(expected, without) > loras.EFFECT
    for mode in ("auto", "merged"):
        patched, report = apply(model, stack("kinds.safetensors", 0.8), mode)
        assert "do not fit" not in report
        assert torch.equal(sample(patched), expected), mode
    assert torch.equal(sample(model), without)
