"""Section `reference`: every op by PyTorch alone, and a machine without Triton, as on Windows."""

import functools
import os
from unittest import mock

import torch

from fast_video_vae.kernels import use_backend

from .rows import Case, Results, Values
from .session import Session
from .turns import in_turn, outcomes, pairs
from .vae import Clip

_AS_IT_IS, _WITHOUT, _ALONE = "as it is", "without Triton", "the reference alone"


def cases(session: Session) -> list[Case]:
    """Return a decode and an encode, each with and without the other backends."""
    size = session.pick((81, 720, 1280), (5, 32, 48))
    clips = [Clip("wan2.1", direction, *size) for direction in ("decode", "encode")]
    kinds = (_AS_IT_IS, _WITHOUT, _ALONE)
    return [Case(clip.label, kinds, functools.partial(_compare, session, clip)) for clip in clips]


def _compare(session: Session, clip: Clip) -> Results:
    vae, x = session.ours(clip.family), clip.make(session)
    call = functools.partial(getattr(vae, clip.direction), x)
    without = mock.patch.dict(os.environ, FAST_VIDEO_VAE_TRITON="0")
    with torch.inference_mode():
        results = in_turn(
            session,
            {_AS_IT_IS: call, _WITHOUT: without(call), _ALONE: use_backend("reference")(call)},
        )

    def more(kind: str) -> Values:
        return {"times_as_it_is": None if kind == _AS_IT_IS else pairs(results, kind, _AS_IT_IS)}

    yield from outcomes(results, more)
