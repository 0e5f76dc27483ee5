"""Section `host`: a decode whose images end in the host's memory, beside one that stays."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fast_video_vae.kernels import frames_to_images

from .rows import Case, Values
from .session import Session
from .turns import in_turn, ratio
from .vae import Clip

_STAYS = "frames stay on the device"
_KINDS = {
    "fp32 IMAGE, memory of the host": (torch.float32, False),
    "fp32 IMAGE, pinned memory": (torch.float32, True),
    "uint8 IMAGE, memory of the host": (torch.uint8, False),
    "uint8 IMAGE, pinned memory": (torch.uint8, True),
}
_COPIED = "fp32 IMAGE on the device, then copied"


def cases(session: Session) -> list[Case]:
    """One for each kind of image."""
    size = session.pick((81, 720, 1280), (5, 32, 48))
    clip = Clip("wan2.1", "decode", *size)
    found = []
    for kind in (*_KINDS, _COPIED):
        name = f"{clip.label}: {kind}"
        found.append(Case((name,), functools.partial(_compare, session, clip, kind, name)))
    return found


def _compare(
    session: Session, clip: Clip, kind: str, name: str
) -> Iterator[tuple[str, Values | Exception]]:
    vae = session.ours("wan2.1")
    x = clip.make(session)
    batch, channels, frames, height, width = vae.config.decoded_shape(x.shape)
    shape = (batch, frames, height, width, channels)
    dtype, pinned = _KINDS.get(kind, (torch.float32, False))
    # Pinned memory is slow to get and is therefore kept; other memory is fresh each time, as in a
    # node, and its first touch is a part of the time.
    kept = torch.empty(shape, dtype=dtype, pin_memory=session.cuda) if pinned else None

    def to_host() -> Tensor:
        if kind == _COPIED:
            return frames_to_images(vae.decode(x)).cpu()
        images = torch.empty(shape, dtype=dtype) if kept is None else kept
        for _ in vae.decode_stream(x, images=images):
            pass
        return images

    runs = {_STAYS: lambda: vae.decode(x), kind: to_host}
    results = in_turn(session, runs, alike=True)
    base, one = results[_STAYS], results[kind]
    error = one.error or base.error
    if error is not None:
        yield name, error
        return
    nbytes = frames * height * width * channels * dtype.itemsize
    yield (
        name,
        {
            "s": one.median_s,
            "stays_s": base.median_s,
            "times_stays": ratio(results, kind, _STAYS),
            "image_gb": nbytes / 1e9,
            "peak_gib": one.peak_gib,
            "cold_s": one.cold_s,
            "rounds": len(one.seconds),
        },
    )
