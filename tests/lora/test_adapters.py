"""Adapters against their formulas in float64, written from the papers; and broken files."""

import math

import numpy as np
import pytest
import torch

from fast_video_vae.lora.adapters import PARTS, make_adapter
from fast_video_vae.tests.lora.modules import ROWS, STRENGTHS, relative_error


def by_name(rows):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def named(name):
    return next(row for row in ROWS if row.name == name)


def by_position(size, product):
    """Return a kernel of `size` with `product(index)` at each of its positions."""
    kernel = np.zeros(size)
    for position in np.ndindex(kernel.shape[2:]):
        here = (slice(None), slice(None), *position)
        kernel[here] = product(here)
    return kernel


def delta_of_lora(p):
    up, down = (p[name].reshape(p[name].shape[0], -1) for name in ("up", "down"))
    if "mid" not in p:
        return up @ down
    size = up.shape[0], p["down"].shape[1], *p["mid"].shape[2:]
    return by_position(size, lambda here: up @ p["mid"][here] @ down)


def of_factors(p, name, core):
    if name in p:
        return p[name]
    a, b = p[f"{name}_a"], p[f"{name}_b"]
    if core not in p:
        return a @ b
    size = a.shape[1], b.shape[1], *p[core].shape[2:]
    return by_position(size, lambda here: a.T @ p[core][here] @ b)


def delta_of_lokr(p):
    w1, w2 = of_factors(p, "lokr_w1", ""), of_factors(p, "lokr_w2", "lokr_t2")
    size = w1.shape[0] * w2.shape[0], w1.shape[1] * w2.shape[1], *w2.shape[2:]
    return by_position(size, lambda here: np.kron(w1, w2[here]))


def delta_of_glora(p, weight, older):
    a1, a2, b1, b2 = (p[name].reshape(p[name].shape[0], -1) for name in ("a1", "a2", "b1", "b2"))
    if older:
        return weight.reshape(len(weight), -1) @ a2 @ a1 + b2 @ b1
    changed = by_position(weight.shape, lambda here: weight[here] @ a1 @ a2)
    return changed.reshape(len(weight), -1) + b1 @ b2


def rotations(p):
    """Return the Cayley rotation of each block; alpha limits the norm of all blocks together."""
    q = p["oft_blocks"] - np.swapaxes(p["oft_blocks"], -1, -2)
    limit = p.get("alpha", 0.0)
    norm = math.sqrt((q**2).sum()) + 1e-8
    if limit > 0 and norm > limit:
        q = q * limit / norm
    one = np.eye(q.shape[-1])
    flat = [(one + block) @ np.linalg.inv(one - block) for block in q.reshape(-1, *one.shape)]
    return np.stack(flat).reshape(q.shape)


def turned_by_oft(p, weight, strength):
    rows = weight.reshape(len(weight), -1)
    size = p["oft_blocks"].shape[-1]
    out = rows.copy()
    for block, rotation in enumerate(rotations(p)):
        here = slice(block * size, (block + 1) * size)
        out[here] += strength * (rotation.T - np.eye(size)) @ rows[here]
    return out.reshape(weight.shape)


def turned_by_boft(p, weight, strength):
    rows, size = weight.reshape(len(weight), -1), p["oft_blocks"].shape[-1]
    for stage, blocks in enumerate(rotations(p)):
        half = 2**stage * size // 2
        order = [
            start + which * half + step
            for start in range(0, len(rows), 2 * half)
            for step in range(half)
            for which in (0, 1)
        ]
        matrix = np.eye(len(rows))
        for block, rotation in enumerate(blocks):
            here = slice(block * size, (block + 1) * size)
            matrix[here, here] += strength * (rotation - np.eye(size))
        shuffle = np.eye(len(rows))[order]
        rows = shuffle.T @ matrix @ shuffle @ rows
    rows = rows * p["rescale"].reshape(-1, 1) if "rescale" in p else rows
    return rows.reshape(weight.shape)


def with_dora(p, weight, delta, strength, eps):
    """By output of the weight, of the sum (PEFT: peft/tuners/lora/dora.py), or by input of it."""
    merged, flat = weight + delta, (len(weight), -1)
    magnitude = p["dora_scale"] if "dora_scale" in p else p["magnitude"].reshape(-1, 1)
    if "magnitude" in p:
        norm = np.sqrt((merged**2).sum(1, keepdims=True))
    elif len(magnitude) == len(weight):
        norm = np.sqrt((weight.reshape(flat) ** 2).sum(1))
        norm = norm.reshape(-1, *[1] * (weight.ndim - 1))
    else:
        norm = np.sqrt((np.swapaxes(merged, 0, 1).reshape(weight.shape[1], -1) ** 2).sum(1))
        norm = norm.reshape(1, -1, *[1] * (weight.ndim - 2))
    return weight + strength * (merged * (magnitude / (norm + eps)) - weight)


def formula(row, weight, parts, strength):
    """Return the changed weight in float64, computed as in the papers."""
    p = {name: part.double().numpy() for name, part in parts.items()}
    eps = torch.finfo(weight.dtype).eps
    weight = weight.double().numpy()
    if row.grows is not None:
        padding = [(0, new - old) for new, old in zip(row.grows, weight.shape, strict=True)]
        weight = np.pad(weight, padding)
    alpha, scale = float(p.get("alpha", math.nan)), 1.0
    if "set_weight" in p:
        return torch.from_numpy(p["set_weight"])
    if "diff" in p or "w_norm" in p:
        return torch.from_numpy(weight + strength * p["diff" if "diff" in p else "w_norm"])
    if "oft_blocks" in p:
        turn = turned_by_oft if p["oft_blocks"].ndim == 3 else turned_by_boft
        delta = turn(p, weight, strength) - weight
        scale = 1.0 if "dora_scale" not in p else float(p.get("alpha", 0.0))
    elif "up" in p:
        delta, rank = delta_of_lora(p), p["down"].shape[0]
    elif "hada_w1_a" in p:
        w1, w2 = of_factors(p, "hada_w1", "hada_t1"), of_factors(p, "hada_w2", "hada_t2")
        delta, rank = w1 * w2, p["hada_w1_b"].shape[0]
    elif "a1" in p:
        delta, rank = delta_of_glora(p, weight, "older" in row.name), min(p["a1"].shape[:2])
    else:
        delta = delta_of_lokr(p)
        ranks = [p[name].shape[0] for name in ("lokr_w2_b", "lokr_w1_b") if name in p]
        rank = ranks[0] if ranks else alpha
    if "alpha" in p and "oft_blocks" not in p:
        scale = alpha / rank
    delta = scale * delta.reshape(weight.shape)
    if {"dora_scale", "magnitude"} & p.keys():
        return torch.from_numpy(with_dora(p, weight, delta, strength, eps))
    return torch.from_numpy(weight + strength * delta)


@by_name(ROWS)
def test_an_adapter_equals_its_formula(row):
    weight, parts = row.tensors()
    adapter, exact = make_adapter(parts, "here"), weight.double()
    assert adapter.misfit(weight.shape) is None
    for strength in STRENGTHS:
        expected = formula(row, weight, parts, strength)
        assert relative_error(adapter.apply(weight, strength), expected) < 1e-5
        expected = formula(row, exact, parts, strength)
        assert relative_error(adapter.apply(exact, strength), expected) < 1e-12
    delta = adapter.delta(weight.shape, torch.float64, "cpu")
    depends = (
        adapter.kind in {"glora", "oft", "boft", "set"}
        or {"dora_scale", "magnitude"} & parts.keys()
    )
    assert (delta is None) == bool(depends)
    if delta is not None:
        grown = adapter.apply(exact, 0.0)
        assert relative_error(grown + delta, adapter.apply(exact, 1.0)) < 1e-12
        rounded = adapter.delta(weight.shape, torch.bfloat16, "cpu")
        assert torch.equal(rounded, adapter.delta(weight.shape, torch.float32, "cpu").bfloat16())


@by_name(ROWS)
def test_a_weight_is_copied_and_rounded_once(row):
    """Inputs are not modified, also a parameter or a weight that is not contiguous."""
    weight, parts = row.tensors()
    before = [tensor.clone() for tensor in (weight, *parts.values())]
    adapter = make_adapter(parts, "here")
    strided = torch.nn.Parameter(torch.stack([weight, weight], -1)[..., 0])
    result = adapter.apply(strided, 0.7)
    assert not result.requires_grad
    assert torch.equal(result, adapter.apply(weight, 0.7))
    for dtype in (torch.float16, torch.bfloat16):
        low = weight.to(dtype)
        assert torch.equal(adapter.apply(low, 0.7), adapter.apply(low.float(), 0.7).to(dtype))
    result, expected = adapter.apply(weight, 0.0), torch.zeros(row.grows or row.weight)
    expected[tuple(slice(size) for size in weight.shape)] = weight
    assert torch.equal(result, expected)
    assert result.data_ptr() != weight.data_ptr()
    after = (weight, *parts.values())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def broken(name, **changes):
    """Return the parts of a row with `changes`; None removes a part."""
    _, parts = named(name).tensors()
    return {key: value for key, value in (parts | changes).items() if value is not None}


def one_nan(dtype):
    up = torch.ones(12, 4)
    up[7, 3] = math.nan
    return up.to(dtype)


BAD = [
    ("rank-4", {"up": torch.ones(12, 8)}, "up has rank 8, down has rank 4; expected the same rank"),
    ("conv-mid", {"mid": torch.ones(4, 3, 3, 3)}, "down has rank 4, mid has rank 3"),
    ("loha", {"hada_w2_b": torch.ones(4, 10)}, "hada_w2_a has rank 3, hada_w2_b has rank 4"),
    ("loha", {"hada_w2_b": torch.ones(3, 9)}, "hada_w1 is 12x10, hada_w2 is 12x9"),
    ("loha-tucker", {"hada_t2": torch.ones(2, 3, 3, 3)}, "w2_a has rank 3, hada_t2 has rank 2"),
    ("glora", {"a2": torch.ones(5, 10)}, "a1 is 10x3, a2 is 5x10, b1 is 12x3, b2 is 3x10"),
    ("rank-4", {"down": None, "alpha": None}, "up without down"),
    ("lokr", {"lokr_w2": None}, "lokr_w1 without lokr_w2_a, lokr_w2_b"),
    ("lokr", {"lokr_w1": torch.ones(3, 2, 1, 1)}, "lokr_w1 is 3x2x1x1; expected two dimensions"),
    ("lokr", {"lokr_w1_a": torch.ones(3, 2)}, "lokr_w1 both whole and decomposed"),
    ("oft-rescale", {"oft_blocks": None}, "rescale without oft_blocks"),
    *(("rank-4", {"up": one_nan(dtype)}, "up holds nan; expected finite numbers")
      for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)),
    ("rank-4", {"down": torch.full((4, 10), -math.inf)}, "down holds -inf; expected finite"),
    ("rank-4", {"alpha": torch.tensor(math.inf)}, "alpha is inf; expected one finite number"),
    ("rank-4", {"alpha": torch.ones(2)}, r"alpha is \[2\]; expected one finite number"),
    ("dora-out", {"dora_scale": torch.tensor(1.0)}, "dora_scale is a scalar"),
    ("rank-4", {"up": torch.ones(12, 4, dtype=torch.int8)}, "up is torch.int8; expected floating"),
    ("rank-4", {"up": torch.ones(12)}, r"up has the shape \[12\]; expected two dimensions"),
    ("rank-4", {"up": torch.ones(12, 0)}, r"up has the shape \[12, 0\]; expected values"),
    ("rank-4", {"diff": torch.ones(12, 10)}, "the parts are alpha, diff, down, up; expected those"),
    ("rank-4", {"up": None, "down": None}, "the parts are alpha; expected"),
    ("diff", {"dora_scale": torch.ones(12, 1)}, "dora_scale with a whole weight"),
    ("diff", {"w_norm": torch.ones(12, 10)}, "diff and w_norm together"),
    ("rank-4", {"gate": torch.ones(1)}, "unknown part 'gate'"),
    ("oft", {"oft_blocks": torch.ones(3, 4, 5)}, "oft_blocks is 3x4x5; expected square blocks"),
    ("boft-1", {"oft_blocks": torch.ones(1, 4, 3, 3)}, "oft_blocks is 1x4x3x3; expected blocks of"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_a_broken_module_is_an_error_of_one_line(name, changes, message):
    parts = broken(name, **changes)
    with pytest.raises(ValueError, match=f"^a.safetensors: blocks.0: .*{message}.*$") as caught:
        make_adapter(parts, "a.safetensors: blocks.0")
    assert "\n" not in str(caught.value)


def test_every_part_is_covered_by_a_row():
    used = {name for row in ROWS for name in row.tensors()[1]}
    assert used == PARTS - {"b_norm", "diff_b", "diff_m"}


# Row, shapes of replaced parts, shape of the weight (None: the row's), reason.
MISFITS = [
    ("rank-4", {}, (10, 12), "delta is 12x10; the weight is 10x12"),
    ("rank-4", {}, (120,), "delta is 12x10; the weight is 120"),
    ("conv", {}, (8, 6, 1, 1), "delta is 8x6x3x3; the weight is 8x6x1x1"),
    ("grows", {}, (12, 11), "reshape_weight is 12x10; the weight is 12x11"),
    ("grows", {}, (12, 8, 1), "reshape_weight is 12x10; the weight is 12x8x1"),
    ("lokr-conv", {}, (8, 7, 3, 3), "delta is 8x6x3x3; the weight is 8x7x3x3"),
    ("glora-conv", {}, (8, 54), "a1 and a2 are for 6x6 inputs; the weight is 8x54"),
    ("oft", {}, (16, 10), "3 blocks of 4 outputs; the weight is 16x10"),
    ("boft-3", {}, (12, 10), "4 blocks of 4 outputs; the weight is 12x10"),
    ("diff", {}, (10, 12), "delta is 12x10; the weight is 10x12"),
    ("set", {}, (10, 12), "set_weight is 12x10; the weight is 10x12"),
    ("dora-out", {"dora_scale": (1, 12)}, None, "dora_scale is 1x12; the weight is 12x10"),
    ("dora-in", {"dora_scale": (12, 10)}, None, "dora_scale is 12x10; the weight is 12x10"),
    ("oft", {"rescale": (11, 1)}, None, "rescale has 11 numbers; the weight is 12x10"),
    ("boft-2", {"oft_blocks": (3, 6, 2, 2)}, None, "6 blocks cannot be halved 2 times"),
]


@pytest.mark.parametrize(("name", "parts", "shape", "reason"), MISFITS)
def test_a_mismatch_has_a_reason(name, parts, shape, reason):
    changes = {part: torch.ones(size) for part, size in parts.items()}
    adapter = make_adapter(broken(name, **changes), "here")
    shape = named(name).weight if shape is None else shape
    assert adapter.misfit(shape) == reason
    with pytest.raises(ValueError, match=f"^{adapter.kind}: {reason}$"):
        adapter.apply(torch.zeros(shape), 1.0)
