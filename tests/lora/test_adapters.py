"""Pairs, whole weights and PEFT's DoRA against their formulas in float64."""

import pytest
import torch

from fast_video_vae.lora.adapters import Pair, WeightFunction, make_function

KERNEL = 8, 6, 1, 2, 2
PAIR = {"up": (12, 4), "down": (4, 10)}

# The shape of the weight and of the parts, and alpha.
ROWS = {
    "rank above the weight's": ((12, 10), {"up": (12, 16), "down": (16, 10)}, 64.0),
    "alpha 0": ((12, 10), PAIR, 0.0),
    "convolution": (KERNEL, {"up": (8, 4, 1, 1, 1), "down": (4, 6, 1, 2, 2)}, 8.0),
    "flat pair without alpha": (KERNEL, {"up": (8, 4), "down": (4, 24)}, None),
    "PEFT's DoRA": ((12, 10), PAIR | {"magnitude": (12,)}, 2.0),
    "DoRA of a kernel": (
        (8, 6, 3, 3), {"up": (8, 4, 1, 1), "down": (4, 6, 3, 3), "magnitude": (1, 8, 1, 1)}, None,
    ),
    "difference": (KERNEL, {"diff": KERNEL}, None),
    "of a bias": ((12,), {"diff": (12,)}, 7.0),  # its alpha is ignored
    "replacement": ((12, 10), {"set_weight": (12, 10)}, None),
}  # fmt: skip


def made(shapes, alpha):
    torch.manual_seed(0)
    parts = {name: torch.randn(shape) for name, shape in shapes.items()}
    return parts if alpha is None else parts | {"alpha": torch.tensor(alpha)}


def formula(weight, parts, strength):
    if "set_weight" in parts:
        return parts["set_weight"]
    if "diff" in parts:
        return weight + strength * parts["diff"]
    up, down = parts["up"].flatten(1), parts["down"].flatten(1)
    delta = (float(parts.get("alpha", len(down))) / len(down) * up @ down).view(weight.shape)
    if "magnitude" not in parts:
        return weight + strength * delta
    # peft/tuners/lora/dora.py: the rows of the sum have the magnitudes as norms.
    merged = (weight + delta).flatten(1)
    turned = merged * (parts["magnitude"].reshape(-1, 1) / merged.norm(dim=1, keepdim=True))
    return weight + strength * (turned.view(weight.shape) - weight)


def relative_error(result, expected):
    return ((result.double() - expected.double()).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("row", ROWS)
def test_a_function_equals_its_formula_and_overwrites_nothing(row):
    """In each dtype, rounded once, also for a parameter that is not contiguous."""
    shape, shapes, alpha = ROWS[row]
    parts, weight = made(shapes, alpha), torch.randn(shape)
    function = make_function(parts, shape)
    before = [each.clone() for each in (weight, *parts.values())]
    strided = torch.nn.Parameter(torch.stack([weight, weight], -1)[..., 0])
    exact = {name: part.double() for name, part in parts.items()}
    for strength in (-1.0, 0.5, 4.0):
        expected = formula(weight.double(), exact, strength)
        assert relative_error(function.apply(weight.double(), strength), expected) < 1e-6
        result = function.apply(weight, strength)
        assert relative_error(result, expected) < 2e-6
        changed = function.apply(strided, strength)
        assert torch.equal(changed, result)
        assert not changed.requires_grad
        half = weight.bfloat16()
        rounded = function.apply(half.float(), strength).bfloat16()
        assert torch.equal(function.apply(half, strength), rounded)
    zero = function.apply(weight, 0.0)
    assert torch.equal(zero, weight)
    assert zero.data_ptr() != weight.data_ptr()
    assert all(map(torch.equal, before, (weight, *parts.values())))
    if function.adds:
        delta = function.apply(torch.zeros(shape), 2.0)
        assert relative_error(weight + delta, function.apply(weight, 2.0)) < 1e-6


def test_other_kinds_are_asked_for_and_only_plain_pairs_can_be_joined():
    other = WeightFunction((), lambda weight, *_: weight)
    for more in ("dora_scale", "mid", "reshape_weight"):
        parts = made(PAIR | {more: (12, 1)}, 2.0)
        assert make_function(parts, (12, 10), lambda *_: other) is other
        with pytest.raises(ValueError, match=r"^\w+ \d+x\d+, .*\d: only ComfyUI has this kind$"):
            make_function(parts, (12, 10))
    assert isinstance(make_function(made(PAIR, 2.0), (12, 10)), Pair)
    assert not isinstance(make_function(made(PAIR | {"magnitude": (12,)}, 2.0), (12, 10)), Pair)
