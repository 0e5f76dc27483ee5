"""Our adapters against ComfyUI's own, from the same file, by the patched weight."""

import logging

import pytest
import torch

from fast_video_vae.lora.adapters import make_adapter
from fast_video_vae.tests.lora.modules import ROWS, STRENGTHS, relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

SPELLED = {
    "up": "lora_up.weight", "down": "lora_down.weight", "mid": "lora_mid.weight",
    "a1": "a1.weight", "a2": "a2.weight", "b1": "b1.weight", "b2": "b2.weight",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kron_of_any_strides(monkeypatch):
    """The result of einsum is not contiguous, which `torch.kron` in ComfyUI's LoKr rejects."""
    kron = torch.kron
    monkeypatch.setattr(torch, "kron", lambda a, b: kron(a.contiguous(), b.contiguous()))


def patched_by_comfyui(parts, weight, strength):
    import comfy.lora

    file = {f"m.{SPELLED.get(name, name)}": part.clone() for name, part in parts.items()}
    (patch,) = comfy.lora.load_lora(file, {"m": "m.weight"}).values()
    return comfy.lora.calculate_weight(
        [(strength, patch, 1.0, None, None)], weight.clone(), "m.weight"
    )


@pytest.mark.parametrize("row", [row for row in ROWS if row.core], ids=lambda row: row.name)
def test_a_weight_is_changed_as_in_comfyui(row, caplog):
    weight, parts = row.tensors()
    adapter = make_adapter(parts, "here")
    for strength in STRENGTHS:
        with caplog.at_level(logging.WARNING):
            expected = patched_by_comfyui(parts, weight, strength)
        assert not caplog.messages, "ComfyUI could not read it"
        result = adapter.apply(weight, strength)
        assert result.shape == expected.shape
        assert relative_error(result, expected) < 1e-5
    # ComfyUI's loader does not even begin to replace a weight with a strength of 0.
    if row.name != "set":
        assert torch.equal(adapter.apply(weight, 0.0), patched_by_comfyui(parts, weight, 0.0))
