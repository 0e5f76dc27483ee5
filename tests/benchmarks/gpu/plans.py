"""Section `plans`: what plans take, beside what they say, within less and less memory.

The memory that is counted is above what was held before: steps, tiles and caches; the frames go to
memory that is there already.
"""

import functools
from collections.abc import Iterator

from fast_video_vae.vae import StreamOptions

from .rows import Case, Values
from .session import Session
from .turns import in_turn, outcomes, pairs
from .vae import Clip

# Of what whole frames take.
_SHARES = (1.0, 0.6, 0.3)


def cases(session: Session) -> list[Case]:
    """A decode and an encode of each family."""
    size = session.pick((33, 720, 1280), (5, 64, 96))
    clips = [
        Clip(family, direction, *size)
        for family in ("wan2.1", "wan2.2", "seedvr2")
        for direction in ("decode", "encode")
    ]
    return [Case(_names(clip), functools.partial(_compare, session, clip)) for clip in clips]


def _names(clip: Clip) -> tuple[str, ...]:
    return tuple(clip.row(f"within {share:.0%} of whole frames") for share in _SHARES)


def _compare(session: Session, clip: Clip) -> Iterator[tuple[str, Values | Exception]]:
    vae, encodes = session.ours(clip.family), clip.direction == "encode"
    x = clip.make(session)
    plan = functools.partial(vae.plan, clip.height, clip.width, encode=encodes)
    whole = plan(cuts=False)
    limits = [None, *(int(share * whole.peak_bytes) for share in _SHARES[1:])]
    frames = None if encodes else vae.new_frames(x)

    def run(limit: int | None) -> None:
        stream = (
            vae.encode_stream(x, StreamOptions(limit_bytes=limit))
            if encodes
            else vae.decode_stream(x, StreamOptions(limit_bytes=limit), out=frames)
        )
        for _ in stream:
            pass

    names = _names(clip)
    runs = {name: functools.partial(run, each) for name, each in zip(names, limits, strict=True)}
    results = in_turn(session, runs, rounds=2)

    def more(name: str) -> Values:
        limit = limits[names.index(name)]
        chosen = whole if limit is None else plan(StreamOptions(limit_bytes=limit))
        return {
            "times_whole": pairs(results, name, names[0]),
            "said_gib": chosen.peak_bytes / 2**30,
            "plan": str(chosen),
        }

    yield from outcomes(results, dict(zip(names, names, strict=True)), more)
