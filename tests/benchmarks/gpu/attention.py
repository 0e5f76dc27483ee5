"""Section `attention`: PyTorch's fused kernel, blocks of products, and Triton, by size."""

import functools
import importlib

import torch

from .ops import forced
from .rows import Case, Results
from .session import Session

# The function of the same name hides the module in its package.
_reference = importlib.import_module("fast_video_vae.kernels.reference.attention")

# Head size and tokens: Wan 2.1 at about 480x480, 720x1280 and 1080x1920; SeedVR2, the encoder and
# decoder of Wan 2.2, at 720x1280.
_SIZES = ((384, 3600), (384, 14400), (384, 32400), (512, 14400), (640, 3600), (1024, 3600))
_SMALL_SIZES = ((384, 64), (384, 96), (384, 128), (512, 96), (640, 64), (1024, 64))

_KINDS = {
    "PyTorch's fused kernel": _reference._fused,
    "blocks of products": _reference.in_blocks,
    "Triton": lambda q, k, v: forced("triton", q.device, "attention", q, k, v),
}


def cases(session: Session) -> list[Case]:
    """Return one case per implementation and size."""
    found = []
    for head, tokens in session.pick(_SIZES, _SMALL_SIZES):
        for kind in _KINDS:
            run = functools.partial(_measure, session, head, tokens, kind)
            found.append(Case(f"head {head}, {tokens} tokens, bf16", (kind,), run))
    return found


def _measure(session: Session, head: int, tokens: int, kind: str) -> Results:
    # Thirds of one tensor, as the VAE passes them.
    q, k, v = session.normal(1, tokens, 3 * head).chunk(3, dim=-1)
    with torch.no_grad():
        seconds = session.seconds(lambda: _KINDS[kind](q, k, v))
    yield kind, {"ms": 1e3 * seconds, "tflops": 4 * tokens**2 * head / seconds / 1e12}
