"""Section `twice`: two decodes in a row, without releasing PyTorch's cached memory between them."""

import functools
import time

from fast_video_vae.kernels import synchronize

from .rows import Case, Results
from .session import Session
from .turns import free
from .users import CARDS, WHOLE, OnCard, clip_of

_KINDS = ("first", "second")

# Cards on which the cache of the first decode could change the plan of the second one.
_GIB = {WHOLE: None, **{name: CARDS[name] for name in ("11 GiB free", "16 GiB free")}}


def cases(session: Session) -> list[Case]:
    """Return one case per card, with a row for each decode."""
    clip = clip_of(session)
    return [
        Case(f"{clip.label}, {name}", _KINDS, functools.partial(_decode, session, gib))
        for name, gib in _GIB.items()
    ]


def _decode(session: Session, gib: float | None) -> Results:
    clip = clip_of(session)
    x = clip.make(session)
    work = OnCard(session, clip, x, session.ours(clip.family).new_frames(x), gib)
    free(session.device)
    with work.card():
        work.decode()  # compilation and trials
    free(session.device)
    plans, seconds = [], []
    with work.card():
        for _ in _KINDS:
            plans.append(work.plan())
            synchronize(session.device)
            start = time.perf_counter()
            work.decode()
            synchronize(session.device)
            seconds.append(time.perf_counter() - start)
    for kind, plan, value in zip(_KINDS, plans, seconds, strict=True):
        yield (
            kind,
            {
                "s": value,
                "same_plan": "yes" if plan == plans[0] else "NO",
                "planned_gib": plan.peak_bytes / 2**30,
                "plan": str(plan),
            },
        )
