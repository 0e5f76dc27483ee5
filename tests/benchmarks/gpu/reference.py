"""Section `reference`: every op by PyTorch alone, as on a machine without Triton."""

import functools

import torch

from fast_video_vae.kernels import use_backend

from .rows import Case, Results, Values
from .session import Session
from .turns import in_turn, outcomes, pairs
from .vae import Clip

_AS_IT_IS, _ALONE = "as it is", "the reference alone"


def cases(session: Session) -> list[Case]:
    """Return a decode and an encode, each with and without the other backends."""
    size = session.pick((81, 720, 1280), (5, 32, 48))
    clips = [Clip("wan2.1", direction, *size) for direction in ("decode", "encode")]
    kinds = (_AS_IT_IS, _ALONE)
    return [Case(clip.label, kinds, functools.partial(_compare, session, clip)) for clip in clips]


def _compare(session: Session, clip: Clip) -> Results:
    vae, x = session.ours(clip.family), clip.make(session)
    call = functools.partial(getattr(vae, clip.direction), x)
    with torch.inference_mode():
        results = in_turn(session, {_AS_IT_IS: call, _ALONE: use_backend("reference")(call)})

    def more(kind: str) -> Values:
        return {"times_as_it_is": None if kind == _AS_IT_IS else pairs(results, kind, _AS_IT_IS)}

    yield from outcomes(results, more)
