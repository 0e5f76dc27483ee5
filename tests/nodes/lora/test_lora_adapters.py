"""Our adapters beside ComfyUI's own: what it reads from the same file, and makes of the weight."""

import logging

import pytest
import torch

from fast_video_vae.lora.adapter_parser import make_adapter
from fast_video_vae.tests.lora.modules import ROWS, STRENGTHS, relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

SPELLED = {
    "up": "lora_up.weight", "down": "lora_down.weight", "mid": "lora_mid.weight",
    "a1": "a1.weight", "a2": "a2.weight", "b1": "b1.weight", "b2": "b2.weight",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kron_of_any_strides(monkeypatch):
    """What einsum returns is not contiguous, and `torch.kron` in ComfyUI's LoKr fails on that."""
    kron = torch.kron
    monkeypatch.setattr(torch, "kron", lambda a, b: kron(a.contiguous(), b.contiguous()))


def patched_by_comfyui(parts, weight, strength):
    import comfy.lora

    file = {f"m.{SPELLED.get(name, name)}": part.clone() for name, part in parts.items()}
    (patch,) = comfy.lora.load_lora(file, {"m": "m.weight"}).values()
    return comfy.lora.calculate_weight(
        [(strength, patch, 1.0, None, None)], weight.clone(), "m.weight"
    )


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("row", [row for row in ROWS if row.core], ids=lambda row: row.name)
def test_a_weight_is_changed_as_comfyui_changes_it(row, strength, caplog):
    weight, parts = row.tensors()
    with caplog.at_level(logging.WARNING):
        expected = patched_by_comfyui(parts, weight, strength)
    assert not caplog.messages, "ComfyUI could not read it"
    result = make_adapter(parts, "here").apply(weight, strength)
    assert result.shape == expected.shape
    assert relative_error(result, expected) < 1e-5


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.core and row.name != "set"], ids=lambda row: row.name
)
def test_strength_0_leaves_the_values_in_comfyui_too(row):
    """But for a replaced weight: there its loader does not even begin with a strength of 0."""
    weight, parts = row.tensors()
    expected = patched_by_comfyui(parts, weight, 0.0)
    assert torch.equal(make_adapter(parts, "here").apply(weight, 0.0), expected)
