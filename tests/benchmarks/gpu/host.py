"""Section `host`: a decode to images in host memory, and one to frames on the device."""

import functools
from typing import Any

import torch
from torch import Tensor

from fast_video_vae.kernels import frames_to_images

from .rows import Case, Results, Values
from .session import Session
from .turns import in_turn, outcomes, pairs
from .vae import Clip

_STAYS = "frames stay on the device"
_KINDS = {
    "fp32 IMAGE, host memory": (torch.float32, False),
    "fp32 IMAGE, pinned memory": (torch.float32, True),
    "uint8 IMAGE, host memory": (torch.uint8, False),
    "uint8 IMAGE, pinned memory": (torch.uint8, True),
}
_COPIED = "fp32 IMAGE on the device, then copied"


def cases(session: Session) -> list[Case]:
    """Return one case, with a row for each destination of the images."""
    size = session.pick((81, 720, 1280), (5, 32, 48))
    clip = Clip("wan2.1", "decode", *size)
    kinds = (_STAYS, *_KINDS, _COPIED)
    return [Case(clip.label, kinds, functools.partial(_compare, session, clip))]


def _compare(session: Session, clip: Clip) -> Results:
    vae = session.ours("wan2.1")
    x = clip.make(session)
    batch, channels, frames, height, width = vae.config.decoded_shape(x.shape)
    shape = (batch, frames, height, width, channels)
    runs = {_STAYS: lambda: vae.decode(x)}
    for kind, (dtype, pinned) in _KINDS.items():
        # Pinned memory is slow to allocate, so it is reused. Other memory is allocated in each run,
        # as in a node, so that the time includes its page faults.
        kept = torch.empty(shape, dtype=dtype, pin_memory=session.cuda) if pinned else None
        runs[kind] = functools.partial(_to_host, vae, x, shape, dtype, kept)
    runs[_COPIED] = lambda: frames_to_images(vae.decode(x)).cpu()
    results = in_turn(session, runs, shares_memory=True)

    def more(kind: str) -> Values:
        if kind == _STAYS:
            return {}
        dtype, _ = _KINDS.get(kind, (torch.float32, False))
        nbytes = frames * height * width * channels * dtype.itemsize
        return {"times_stays": pairs(results, kind, _STAYS), "image_gb": nbytes / 1e9}

    yield from outcomes(results, more)


def _to_host(
    vae: Any, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, kept: Tensor | None
) -> Tensor:
    images = torch.empty(shape, dtype=dtype) if kept is None else kept
    for _ in vae.decode_stream(x, images=images):
        pass
    return images
