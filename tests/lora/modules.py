"""Modules of LoRA files, one `Row` for each supported form."""

import zlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """A module of a LoRA file: the shape of its weight, and of its parts by name.

    `grows` is the `reshape_weight` of the file. `core` is False where ComfyUI does not support the
    module or differs from the trainer.
    """

    name: str
    weight: tuple[int, ...]
    parts: dict[str, tuple[int, ...]]
    alpha: float | None = None
    grows: tuple[int, ...] | None = None
    core: bool = True

    def tensors(self, dtype=torch.float32):
        """Return a seeded random weight and its parts, whose delta is about as large."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        weight = torch.randn(self.weight, generator=generator)
        parts = {
            name: torch.randn(shape, generator=generator).mul(0.7).to(dtype)
            for name, shape in self.parts.items()
        }
        for name in ("dora_scale", "magnitude", "rescale"):
            if name in parts:
                parts[name] = parts[name].abs() + 0.5
        if self.alpha is not None:
            parts["alpha"] = torch.tensor(self.alpha)
        if self.grows is not None:
            parts["reshape_weight"] = torch.tensor(self.grows)
        return weight, parts


def pair(up, down, **more):
    return {"up": up, "down": down, **more}


def loha(w1, w2, **more):
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    return dict(zip(names, (*w1, *w2), strict=True)) | more


def lokr(w1, w2, **more):
    """Each factor is one shape, two for `a` and `b`, or three for `a`, `b` and the core `t2`."""
    parts = dict(more)
    for name, shapes in (("lokr_w1", w1), ("lokr_w2", w2)):
        if isinstance(shapes[0], int):
            parts[name] = shapes
        else:
            parts |= dict(zip((f"{name}_a", f"{name}_b", "lokr_t2"), shapes, strict=False))
    return parts


def glora(*shapes, **more):
    return dict(zip(("a1", "a2", "b1", "b2"), shapes, strict=True)) | more


def oft(*shape, **more):
    return {"oft_blocks": shape, **more}


OUT, IN = (12, 1), (1, 10)  # magnitudes per output, per input of the linear weight
LINEAR, SQUARE, KERNEL, KERNEL_3D = (12, 10), (9, 9), (8, 6, 3, 3), (8, 6, 1, 2, 2)
PAIR = ((12, 4), (4, 10))
CONV = ((8, 4, 1, 1), (4, 6, 3, 3))
MID = ((8, 4, 1, 1), (4, 6, 1, 1))
W, CORE = ((12, 3), (3, 10)), (3, 3, 3, 3)
W1, W2 = (3, 2), (4, 5)
W1_AB, W2_AB = ((3, 2), (2, 2)), ((4, 3), (3, 5))
FIRST = ((10, 3), (3, 10), (12, 3), (3, 10))

LORA = [
    Row("rank-1", LINEAR, pair((12, 1), (1, 10))),
    Row("rank-4", LINEAR, pair(*PAIR), alpha=1.0),
    Row("rank-16", LINEAR, pair((12, 16), (16, 10)), alpha=64.0),  # above the weight's rank
    Row("alpha-0", LINEAR, pair(*PAIR), alpha=0.0),
    Row("square", SQUARE, pair((9, 3), (3, 9)), alpha=3.0),
    Row("dora-out", LINEAR, pair(*PAIR, dora_scale=OUT), alpha=2.0),
    Row("dora-in", LINEAR, pair(*PAIR, dora_scale=IN), alpha=2.0),
    # PEFT's magnitudes, with the norms of the sum; ComfyUI does not support them.
    Row("dora-peft", LINEAR, pair(*PAIR, magnitude=(12,)), alpha=2.0, core=False),
    Row("dora-out-square", SQUARE, pair((9, 3), (3, 9), dora_scale=(9, 1))),
    Row("dora-in-square", SQUARE, pair((9, 3), (3, 9), dora_scale=(1, 9))),
    Row("dora-one-output", (1, 7), pair((1, 2), (2, 7), dora_scale=(1, 7))),
    Row("conv", KERNEL, pair(*CONV), alpha=2.0),
    Row("conv-flat", KERNEL, pair((8, 4), (4, 54)), alpha=2.0),
    Row("conv-of-flat-weight", (8, 54), pair(*CONV), alpha=2.0),
    Row("conv-1d", (8, 6, 3), pair((8, 4, 1), (4, 6, 3))),
    Row("conv-3d", KERNEL_3D, pair((8, 4, 1, 1, 1), (4, 6, 1, 2, 2)), alpha=8.0),
    Row("pointwise-on-linear", (8, 6), pair(*MID)),
    Row("conv-mid", KERNEL, pair(*MID, mid=(4, 4, 3, 3)), alpha=2.0),
    Row(
        "conv-mid-3d",
        KERNEL_3D,
        pair((8, 4, 1, 1, 1), (4, 6, 1, 1, 1), mid=(4, 4, 1, 2, 2)),
        core=False,  # ComfyUI expects two dimensions
    ),
    Row("conv-dora-out", KERNEL, pair(*CONV, dora_scale=(8, 1, 1, 1))),
    Row("conv-dora-in", KERNEL, pair(*CONV, dora_scale=(1, 6, 1, 1))),
    Row("conv-mid-dora", KERNEL, pair(*MID, mid=(4, 4, 3, 3), dora_scale=(1, 6, 1, 1)), alpha=3.0),
    Row("grows", (12, 8), pair(*PAIR), alpha=2.0, grows=LINEAR),
    Row("grows-both", (11, 8), pair(*PAIR), grows=LINEAR),
    Row("grows-conv", (8, 3, 3, 3), pair(*CONV), grows=KERNEL),
    Row("grows-dora", (12, 8), pair(*PAIR, dora_scale=OUT), grows=LINEAR),
]
TUCKER = ((3, 8), (3, 6))
LOHA = [
    Row("loha", LINEAR, loha(W, W), alpha=2.0),
    Row("loha-no-alpha", LINEAR, loha(W, W)),
    # scale: alpha / rank of w1
    Row("loha-ranks", LINEAR, loha(W, ((12, 5), (5, 10))), alpha=2.0),
    Row("loha-conv", KERNEL, loha(((8, 3), (3, 54)), ((8, 3), (3, 54))), alpha=2.0),
    Row("loha-tucker", KERNEL, loha(TUCKER, TUCKER, hada_t1=CORE, hada_t2=CORE), alpha=2.0),
    Row("loha-dora", LINEAR, loha(W, W, dora_scale=IN), alpha=2.0),
]
LOKR = [
    Row("lokr", LINEAR, lokr(W1, W2)),
    Row("lokr-alpha", LINEAR, lokr(W1, W2), alpha=7.0),  # alpha has no effect on full factors
    Row("lokr-w1", LINEAR, lokr(W1_AB, W2), alpha=7.0),
    Row("lokr-w2", LINEAR, lokr(W1, W2_AB), alpha=7.0),
    Row("lokr-both", LINEAR, lokr(W1_AB, W2_AB), alpha=7.0),  # scale: alpha / rank of w2
    Row("lokr-conv", KERNEL, lokr((2, 3), (4, 2, 3, 3))),
    Row("lokr-conv-flat", KERNEL, lokr((2, 3), ((4, 2), (2, 18))), alpha=1.0),
    Row("lokr-tucker", KERNEL, lokr((2, 3), ((3, 4), (3, 2), CORE)), alpha=1.5),
    # ComfyUI adds kernel dimensions to w1 only for 2D kernels
    Row("lokr-conv-3d", KERNEL_3D, lokr((2, 3), (4, 2, 1, 2, 2)), core=False),
    Row("lokr-dora", LINEAR, lokr(W1, W2, dora_scale=OUT)),
    Row("lokr-conv-dora", KERNEL, lokr((2, 3), (4, 2, 3, 3), dora_scale=(1, 6, 1, 1))),
]
OLDER = ((3, 9), (9, 3), (3, 9), (9, 3))
GLORA = [
    Row("glora", LINEAR, glora(*FIRST), alpha=2.0),
    Row("glora-square", SQUARE, glora((9, 3), (3, 9), (9, 3), (3, 9)), alpha=2.0),
    Row("glora-no-alpha", LINEAR, glora(*FIRST)),
    Row("glora-conv", KERNEL, glora((6, 3), (3, 6), (8, 3), (3, 54)), alpha=2.0),
    Row(
        "glora-conv-kernels",
        KERNEL,
        glora((6, 3, 1, 1), (3, 6, 1, 1), (8, 3, 1, 1), (3, 6, 3, 3)),
        alpha=2.0,
    ),
    Row("glora-dora", LINEAR, glora(*FIRST, dora_scale=OUT), alpha=2.0),
    Row("glora-older", LINEAR, glora((3, 10), (10, 3), (3, 10), (12, 3)), alpha=2.0),
    Row("glora-older-square", SQUARE, glora(*OLDER), alpha=2.0),
    Row("glora-older-conv", KERNEL, glora((3, 54), (54, 3), (3, 54), (8, 3)), alpha=2.0),
    Row("glora-older-dora", SQUARE, glora(*OLDER, dora_scale=(1, 9))),
]
OFT = [
    Row("oft", LINEAR, oft(3, 4, 4)),
    Row("oft-constraint", LINEAR, oft(3, 4, 4), alpha=0.5),
    Row("oft-loose-constraint", LINEAR, oft(3, 4, 4), alpha=50.0),
    Row("oft-negative-alpha", LINEAR, oft(3, 4, 4), alpha=-1.0),
    Row("oft-rescale", LINEAR, oft(3, 4, 4, rescale=(12, 1))),
    Row("oft-conv", KERNEL, oft(2, 4, 4, rescale=(8, 1, 1, 1)), alpha=0.5),
    Row("oft-dora", LINEAR, oft(3, 4, 4, dora_scale=OUT), alpha=0.5),
    Row("oft-dora-no-alpha", LINEAR, oft(3, 4, 4, dora_scale=IN)),
]
BOFT = [
    Row("boft-1", (16, 10), oft(1, 4, 4, 4), alpha=0.0),
    Row("boft-3", (16, 10), oft(3, 4, 4, 4), alpha=0.0),
    Row("boft-2", LINEAR, oft(2, 6, 2, 2), alpha=0.0),  # 6 blocks can be halved only once
    Row("boft-constraint", (16, 10), oft(3, 4, 4, 4), alpha=0.5),
    Row("boft-rescale", (16, 10), oft(3, 4, 4, 4, rescale=(16, 1)), alpha=0.5),
    Row("boft-conv", KERNEL, oft(2, 2, 4, 4, rescale=(8, 1, 1, 1)), alpha=0.5),
    Row("boft-dora", (16, 10), oft(3, 4, 4, 4, dora_scale=(1, 10)), alpha=0.5),
    # ComfyUI compares None with a number, fails, and does not change the weight
    Row("boft-no-alpha", (16, 10), oft(3, 4, 4, 4), core=False),
]
WHOLE = [
    Row("diff", LINEAR, {"diff": LINEAR}),
    Row("diff-alpha", LINEAR, {"diff": LINEAR}, alpha=7.0),
    Row("diff-conv", KERNEL, {"diff": KERNEL}),
    Row("diff-bias", (12,), {"diff": (12,)}),
    Row("norm", (12,), {"w_norm": (12,)}),
    Row("set", LINEAR, {"set_weight": LINEAR}),
]
ROWS = [*LORA, *LOHA, *LOKR, *GLORA, *OFT, *BOFT, *WHOLE]
STRENGTHS = (-1.0, 0.5, 1.0, 4.0)


def relative_error(result, expected):
    """Return the largest error over the largest value."""
    result, expected = result.double(), expected.double()
    return ((result - expected).abs().max() / expected.abs().max()).item()
