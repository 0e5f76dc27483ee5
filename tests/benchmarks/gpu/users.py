"""Section `users`: a decode of 720x1280x81 with the free memory of users' cards.

The frames are written to memory that was allocated before, so the memory is that of the stream.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fast_video_vae.vae import StreamOptions

from .card import smaller_card
from .flops import video_flops
from .rows import Case, Results, Values
from .session import Session
from .turns import free, in_turn, outcomes, pairs
from .vae import Clip

# Free GiB: what ComfyUI frees for a decode of this size, and cards of 10, 12 and 18 GiB or so.
CARDS = {f"{gib:g} GiB free": gib for gib in (5.4, 8, 11, 16)}
WHOLE = "the whole card"


def clip_of(session: Session) -> Clip:
    """Return the decode of the sections about users' memory."""
    return Clip("wan2.1", "decode", *session.pick((81, 720, 1280), (9, 64, 96)))


def cases(session: Session) -> list[Case]:
    """Return one case, with a row for each card."""
    clip = clip_of(session)
    flops = video_flops(session.ours(clip.family).config, *clip.content)
    expected = functools.partial(
        session.expected_s, (clip.family, clip.direction, "ours"), flops, 2 * (1 + len(CARDS))
    )
    run = functools.partial(_compare, session, clip)
    return [Case(clip.label, (WHOLE, *CARDS), run, expected)]


class OnCard:
    """Decodes of `x` `[1, C, T, H, W]` to `frames` as on a card with `gib` free; None: as it is.

    On a CPU, and in a small run, the limit is given to the stream instead, in MiB.
    """

    def __init__(
        self, session: Session, clip: Clip, x: Tensor, frames: Tensor, gib: float | None
    ) -> None:
        self._vae: Any = session.ours(clip.family)
        self._device, self._clip, self._x, self._frames = session.device, clip, x, frames
        limits = None if gib is None else int(gib * session.pick(1 << 30, 1 << 20))
        self._free_bytes = limits if session.cuda else None
        self._options = StreamOptions(limit_bytes=None if session.cuda else limits)

    def card(self) -> Any:
        """Return the context of the card, which is entered with an empty cache."""
        return smaller_card(self._device, self._free_bytes)

    def plan(self) -> Any:
        """Return the plan of a decode that starts here, within `card`."""
        return self._vae.plan(self._clip.height, self._clip.width, self._options)

    def decode(self) -> None:
        """Decode, within `card`."""
        with torch.inference_mode():
            for _ in self._vae.decode_stream(self._x, self._options, out=self._frames):
                pass


def _compare(session: Session, clip: Clip) -> Results:
    x = clip.make(session)
    frames = session.ours(clip.family).new_frames(x)
    kinds = {WHOLE: None, **CARDS}
    works = {kind: OnCard(session, clip, x, frames, gib) for kind, gib in kinds.items()}
    plans, failures = {}, {}

    def run(kind: str) -> Callable[[], None]:
        def decode() -> None:
            before = _failures(session.device)
            with works[kind].card():
                works[kind].decode()
            failures[kind] = _failures(session.device) - before

        return decode

    for kind, work in works.items():
        free(session.device)
        with work.card():
            plans[kind] = work.plan()
    results = in_turn(session, {kind: run(kind) for kind in kinds}, rounds=1)

    def more(kind: str) -> Values:
        return {
            "times_whole": pairs(results, kind, WHOLE),
            "planned_gib": plans[kind].peak_bytes / 2**30,
            "plan": str(plans[kind]),
            "failures": failures.get(kind),
        }

    yield from outcomes(results, more)


def _failures(device: torch.device) -> int:
    """Return how often PyTorch could not allocate memory, so far."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats(device).get("num_ooms", 0)
