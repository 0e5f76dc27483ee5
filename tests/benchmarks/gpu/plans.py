"""Section `plans`: measured and planned memory under decreasing memory limits.

Only memory of the stream counts: steps, tiles and caches. The frames are written to memory that was
allocated before.
"""

import functools

from fast_video_vae.vae import StreamOptions

from .rows import Case, Results, Values
from .session import Session
from .turns import in_turn, outcomes, pairs
from .vae import Clip

# Limits as shares of the peak with whole frames.
_SHARES = {f"within {share:.0%} of whole frames": share for share in (1.0, 0.6, 0.3)}
_WHOLE = next(iter(_SHARES))


def cases(session: Session) -> list[Case]:
    """Return a decode and an encode of each family."""
    size = session.pick((33, 720, 1280), (5, 64, 96))
    clips = [
        Clip(family, direction, *size)
        for family in ("wan2.1", "wan2.2", "seedvr2")
        for direction in ("decode", "encode")
    ]
    return [
        Case(clip.label, tuple(_SHARES), functools.partial(_compare, session, clip))
        for clip in clips
    ]


def _compare(session: Session, clip: Clip) -> Results:
    vae, encodes = session.ours(clip.family), clip.direction == "encode"
    x = clip.make(session)
    plan = functools.partial(vae.plan, clip.height, clip.width, encode=encodes)
    whole = plan(cuts=False)
    limits: dict[str, int | None] = {
        kind: int(share * whole.peak_bytes) for kind, share in _SHARES.items()
    }
    limits[_WHOLE] = None
    frames = None if encodes else vae.new_frames(x)

    def run(limit: int | None) -> None:
        stream = (
            vae.encode_stream(x, StreamOptions(limit_bytes=limit))
            if encodes
            else vae.decode_stream(x, StreamOptions(limit_bytes=limit), out=frames)
        )
        for _ in stream:
            pass

    runs = {kind: functools.partial(run, limit) for kind, limit in limits.items()}
    results = in_turn(session, runs, rounds=2)

    def more(kind: str) -> Values:
        limit = limits[kind]
        chosen = whole if limit is None else plan(StreamOptions(limit_bytes=limit))
        return {
            "times_whole": pairs(results, kind, _WHOLE),
            "planned_gib": chosen.peak_bytes / 2**30,
            "plan": str(chosen),
        }

    yield from outcomes(results, more)
