"""Section `lora`: a LoRA on linear layers of Wan 14B: this pack's modes and other methods."""

import functools
import tempfile
from pathlib import Path

import torch

from fast_video_vae.tests.benchmarks import lora_ways

from .rows import Case, Results
from .session import Session
from .turns import in_turn, outcomes, pairs

# Tokens of a prompt, of a small picture, of 832 x 480 x 81 and of 1280 x 720 x 81.
_TOKENS = (512, 4096, 32760, 75600)


def cases(session: Session) -> list[Case]:
    """Return one layer at each number of tokens, and the linear layers of four blocks."""
    hidden, wide = session.pick((5120, 13824), (256, 512))
    layer = [(hidden, hidden)]
    block = [(hidden, hidden)] * 8 + [(hidden, wide), (wide, hidden)]
    works = [(f"{hidden}x{hidden}", layer, tokens) for tokens in session.pick(_TOKENS, (64, 512))]
    works += [
        ("four blocks of Wan 14B", block * 4, tokens) for tokens in session.pick(_TOKENS[2:], (64,))
    ]
    return [
        Case(
            f"{label}, rank 64, {tokens} tokens",
            lora_ways.WAYS,
            functools.partial(_compare, session, sizes, tokens),
        )
        for label, sizes, tokens in works
    ]


def _compare(session: Session, sizes: list[tuple[int, int]], tokens: int) -> Results:
    dtype = torch.bfloat16
    model = lora_ways.Layers(sizes, session.device, dtype)
    x = session.normal(1, tokens, sizes[0][0]).to(dtype)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        runs = lora_ways.ways(model, x, 64, Path(folder))
        results = in_turn(session, runs, shares_memory=True)
    yield from outcomes(
        results,
        lambda way: {
            "s": None,
            "cold_s": None,
            "ms": 1e3 * results[way].median_s,
            "times_plain": pairs(results, way, "no LoRA"),
        },
    )
