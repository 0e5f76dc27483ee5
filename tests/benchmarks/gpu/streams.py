"""Section `streams`: two tiles on two CUDA streams, beside one after the other.

The tiles are decoded on their own, without the rim that neighbours would need.
"""

import collections
import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .rows import Case, Results
from .session import Session
from .turns import in_turn, outcomes, pairs
from .vae import Clip

_ONE, _BOTH = "one after the other", "on two streams"


def cases(session: Session) -> list[Case]:
    """Halves of a large video, and two tiles too small to fill a GPU."""
    sizes = session.pick(((81, 480, 416), (81, 256, 256)), ((5, 32, 16), (5, 16, 16)))
    found = []
    for size in sizes:
        clip = Clip("wan2.1", "decode", *size)
        run = functools.partial(_compare, session, clip)
        found.append(Case(f"2 x {clip.label}", (_ONE, _BOTH), run))
    return found


def _compare(session: Session, clip: Clip) -> Results:
    vae = session.ours("wan2.1")
    tiles = [clip.make(session), clip.make(session).flip(-1)]
    targets = [vae.new_frames(tile) for tile in tiles]

    def decode(streams: list[AbstractContextManager[object]]) -> None:
        """Step by step in turn, where there are two streams; the host only starts the work."""
        passes = [
            vae.decode_stream(tile, out=target) for tile, target in zip(tiles, targets, strict=True)
        ]
        if streams:
            steps = map(_inside, streams, passes)
            collections.deque(itertools.zip_longest(*steps), maxlen=0)
        else:
            collections.deque(itertools.chain(*passes), maxlen=0)

    both = [_stream(session) for _ in tiles]
    runs = {_ONE: functools.partial(decode, []), _BOTH: functools.partial(decode, both)}
    results = in_turn(session, runs, alike=True)
    yield from outcomes(results, lambda kind: {"times_alone": pairs(results, kind, _ONE)})


def _stream(session: Session) -> AbstractContextManager[object]:
    """A stream to work on; without a GPU nothing, so that the rest of the code runs there."""
    if not session.cuda:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(session.device))


def _inside(stream: AbstractContextManager[object], steps: Iterator[Tensor]) -> Iterator[None]:
    """Take each step on the stream, and leave it between two."""
    while True:
        with stream:
            done = next(steps, None) is None
        if done:
            return
        yield
