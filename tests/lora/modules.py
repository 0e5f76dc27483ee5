"""Modules of LoRA files, one row for each form that a file can have them in."""

import zlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """A weight, and the parts for it by the name and shape.

    `core` is False where ComfyUI cannot do it, or does something that nobody trained.
    """

    name: str
    weight: tuple[int, ...]
    parts: dict[str, tuple[int, ...]]
    alpha: float | None = None
    grows: tuple[int, ...] | None = None
    core: bool = True

    def tensors(self, dtype=torch.float32):
        """Random, the same at each call; the change is about as large as the weight."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        weight = torch.randn(self.weight, generator=generator)
        parts = {
            name: torch.randn(shape, generator=generator).mul(0.7).to(dtype)
            for name, shape in self.parts.items()
        }
        for name in ("dora_scale", "rescale"):  # magnitudes
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


def glora(*shapes, **more):
    return dict(zip(("a1", "a2", "b1", "b2"), shapes, strict=True)) | more


OUT, IN = (12, 1), (1, 10)  # magnitudes per output, per input of the linear weight below
KERNEL = (8, 6, 3, 3)

LORA = [
    Row("rank-1", (12, 10), pair((12, 1), (1, 10))),
    Row("rank-4", (12, 10), pair((12, 4), (4, 10)), alpha=1.0),
    # more than the weight has
    Row("rank-16", (12, 10), pair((12, 16), (16, 10)), alpha=64.0),
    Row("alpha-0", (12, 10), pair((12, 4), (4, 10)), alpha=0.0),
    Row("square", (9, 9), pair((9, 3), (3, 9)), alpha=3.0),
    Row("dora-out", (12, 10), pair((12, 4), (4, 10), dora_scale=OUT), alpha=2.0),
    Row("dora-in", (12, 10), pair((12, 4), (4, 10), dora_scale=IN), alpha=2.0),
    Row("dora-out-square", (9, 9), pair((9, 3), (3, 9), dora_scale=(9, 1))),
    Row("dora-in-square", (9, 9), pair((9, 3), (3, 9), dora_scale=(1, 9))),
    Row("dora-one-output", (1, 7), pair((1, 2), (2, 7), dora_scale=(1, 7))),
    Row("conv", KERNEL, pair((8, 4, 1, 1), (4, 6, 3, 3)), alpha=2.0),
    Row("conv-flat", KERNEL, pair((8, 4), (4, 54)), alpha=2.0),
    Row("conv-1d", (8, 6, 3), pair((8, 4, 1), (4, 6, 3))),
    Row("conv-3d", (8, 6, 1, 2, 2), pair((8, 4, 1, 1, 1), (4, 6, 1, 2, 2)), alpha=8.0),
    Row("pointwise-on-linear", (8, 6), pair((8, 4, 1, 1), (4, 6, 1, 1))),
    Row("conv-mid", KERNEL, pair((8, 4, 1, 1), (4, 6, 1, 1), mid=(4, 4, 3, 3)), alpha=2.0),
    Row(
        "conv-mid-3d",
        (8, 6, 1, 2, 2),
        pair((8, 4, 1, 1, 1), (4, 6, 1, 1, 1), mid=(4, 4, 1, 2, 2)),
        core=False,  # ComfyUI expects two dimensions
    ),
    Row("conv-dora-out", KERNEL, pair((8, 4, 1, 1), (4, 6, 3, 3), dora_scale=(8, 1, 1, 1))),
    Row("conv-dora-in", KERNEL, pair((8, 4, 1, 1), (4, 6, 3, 3), dora_scale=(1, 6, 1, 1))),
    Row(
        "conv-mid-dora",
        KERNEL,
        pair((8, 4, 1, 1), (4, 6, 1, 1), mid=(4, 4, 3, 3), dora_scale=(1, 6, 1, 1)),
        alpha=3.0,
    ),
    Row("grows", (12, 8), pair((12, 4), (4, 10)), alpha=2.0, grows=(12, 10)),
    Row("grows-both", (11, 8), pair((12, 4), (4, 10)), grows=(12, 10)),
    Row("grows-conv", (8, 3, 3, 3), pair((8, 4, 1, 1), (4, 6, 3, 3)), grows=KERNEL),
    Row("grows-dora", (12, 8), pair((12, 4), (4, 10), dora_scale=OUT), grows=(12, 10)),
]
LOHA = [
    Row("loha", (12, 10), loha(((12, 3), (3, 10)), ((12, 3), (3, 10))), alpha=2.0),
    Row("loha-no-alpha", (12, 10), loha(((12, 3), (3, 10)), ((12, 3), (3, 10)))),
    # the scale is over the first rank
    Row("loha-ranks", (12, 10), loha(((12, 3), (3, 10)), ((12, 5), (5, 10))), alpha=2.0),
    Row("loha-conv", KERNEL, loha(((8, 3), (3, 54)), ((8, 3), (3, 54))), alpha=2.0),
    Row(
        "loha-tucker",
        KERNEL,
        loha(
            ((3, 8), (3, 6)), ((3, 8), (3, 6)), hada_t1=(3, 3, 3, 3), hada_t2=(3, 3, 3, 3)
        ),
        alpha=2.0,
    ),
    Row(
        "loha-dora",
        (12, 10),
        loha(((12, 3), (3, 10)), ((12, 3), (3, 10)), dora_scale=IN),
        alpha=2.0,
    ),
]  # fmt: skip
LOKR = [
    Row("lokr", (12, 10), {"lokr_w1": (3, 2), "lokr_w2": (4, 5)}),
    # the alpha of whole factors says nothing
    Row("lokr-alpha", (12, 10), {"lokr_w1": (3, 2), "lokr_w2": (4, 5)}, alpha=7.0),
    Row(
        "lokr-w1",
        (12, 10),
        {"lokr_w1_a": (3, 2), "lokr_w1_b": (2, 2), "lokr_w2": (4, 5)},
        alpha=7.0,
    ),
    Row(
        "lokr-w2",
        (12, 10),
        {"lokr_w1": (3, 2), "lokr_w2_a": (4, 3), "lokr_w2_b": (3, 5)},
        alpha=7.0,
    ),
    # the scale is over the second rank
    Row(
        "lokr-both",
        (12, 10),
        {"lokr_w1_a": (3, 2), "lokr_w1_b": (2, 2), "lokr_w2_a": (4, 3), "lokr_w2_b": (3, 5)},
        alpha=7.0,
    ),
    Row("lokr-conv", KERNEL, {"lokr_w1": (2, 3), "lokr_w2": (4, 2, 3, 3)}),
    Row(
        "lokr-conv-flat",
        KERNEL,
        {"lokr_w1": (2, 3), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 18)},
        alpha=1.0,
    ),
    Row(
        "lokr-tucker",
        KERNEL,
        {"lokr_w1": (2, 3), "lokr_w2_a": (3, 4), "lokr_w2_b": (3, 2), "lokr_t2": (3, 3, 3, 3)},
        alpha=1.5,
    ),
    # ComfyUI gives the factor no kernel where that is not of two dimensions
    Row(
        "lokr-conv-3d", (8, 6, 1, 2, 2), {"lokr_w1": (2, 3), "lokr_w2": (4, 2, 1, 2, 2)}, core=False
    ),
    Row("lokr-dora", (12, 10), {"lokr_w1": (3, 2), "lokr_w2": (4, 5), "dora_scale": OUT}),
    Row(
        "lokr-conv-dora",
        KERNEL,
        {"lokr_w1": (2, 3), "lokr_w2": (4, 2, 3, 3), "dora_scale": (1, 6, 1, 1)},
    ),
]
GLORA = [
    Row("glora", (12, 10), glora((10, 3), (3, 10), (12, 3), (3, 10)), alpha=2.0),
    Row("glora-square", (9, 9), glora((9, 3), (3, 9), (9, 3), (3, 9)), alpha=2.0),
    Row("glora-no-alpha", (12, 10), glora((10, 3), (3, 10), (12, 3), (3, 10))),
    Row("glora-conv", KERNEL, glora((6, 3), (3, 6), (8, 3), (3, 54)), alpha=2.0),
    Row(
        "glora-conv-kernels",
        KERNEL,
        glora((6, 3, 1, 1), (3, 6, 1, 1), (8, 3, 1, 1), (3, 6, 3, 3)),
        alpha=2.0,
    ),
    Row(
        "glora-dora", (12, 10), glora((10, 3), (3, 10), (12, 3), (3, 10), dora_scale=OUT), alpha=2.0
    ),
    Row("glora-older", (12, 10), glora((3, 10), (10, 3), (3, 10), (12, 3)), alpha=2.0),
    Row("glora-older-square", (9, 9), glora((3, 9), (9, 3), (3, 9), (9, 3)), alpha=2.0),
    Row("glora-older-conv", KERNEL, glora((3, 54), (54, 3), (3, 54), (8, 3)), alpha=2.0),
    Row("glora-older-dora", (9, 9), glora((3, 9), (9, 3), (3, 9), (9, 3), dora_scale=(1, 9))),
]
OFT = [
    Row("oft", (12, 10), {"oft_blocks": (3, 4, 4)}),
    Row("oft-constraint", (12, 10), {"oft_blocks": (3, 4, 4)}, alpha=0.5),
    Row("oft-loose-constraint", (12, 10), {"oft_blocks": (3, 4, 4)}, alpha=50.0),
    Row("oft-negative-alpha", (12, 10), {"oft_blocks": (3, 4, 4)}, alpha=-1.0),
    Row("oft-rescale", (12, 10), {"oft_blocks": (3, 4, 4), "rescale": (12, 1)}),
    Row("oft-conv", KERNEL, {"oft_blocks": (2, 4, 4), "rescale": (8, 1, 1, 1)}, alpha=0.5),
    Row("oft-dora", (12, 10), {"oft_blocks": (3, 4, 4), "dora_scale": OUT}, alpha=0.5),
    Row("oft-dora-no-alpha", (12, 10), {"oft_blocks": (3, 4, 4), "dora_scale": IN}),
]
BOFT = [
    Row("boft-1", (16, 10), {"oft_blocks": (1, 4, 4, 4)}, alpha=0.0),
    Row("boft-3", (16, 10), {"oft_blocks": (3, 4, 4, 4)}, alpha=0.0),
    # 2 divides the blocks once
    Row("boft-2", (12, 10), {"oft_blocks": (2, 6, 2, 2)}, alpha=0.0),
    Row("boft-constraint", (16, 10), {"oft_blocks": (3, 4, 4, 4)}, alpha=0.5),
    Row("boft-rescale", (16, 10), {"oft_blocks": (3, 4, 4, 4), "rescale": (16, 1)}, alpha=0.5),
    Row("boft-conv", KERNEL, {"oft_blocks": (2, 2, 4, 4), "rescale": (8, 1, 1, 1)}, alpha=0.5),
    Row("boft-dora", (16, 10), {"oft_blocks": (3, 4, 4, 4), "dora_scale": (1, 10)}, alpha=0.5),
    # ComfyUI compares None with a number, and leaves the weight as it is
    Row("boft-no-alpha", (16, 10), {"oft_blocks": (3, 4, 4, 4)}, core=False),
]
WHOLE = [
    Row("diff", (12, 10), {"diff": (12, 10)}),
    Row("diff-alpha", (12, 10), {"diff": (12, 10)}, alpha=7.0),
    Row("diff-conv", KERNEL, {"diff": KERNEL}),
    Row("diff-bias", (12,), {"diff": (12,)}),
    Row("norm", (12,), {"w_norm": (12,)}),
    Row("set", (12, 10), {"set_weight": (12, 10)}),
]
ROWS = [*LORA, *LOHA, *LOKR, *GLORA, *OFT, *BOFT, *WHOLE]
STRENGTHS = (-1.0, 0.5, 1.0, 4.0)


def relative_error(result, expected):
    """The largest error beside the largest number."""
    result, expected = result.double(), expected.double()
    return ((result - expected).abs().max() / expected.abs().max()).item()
