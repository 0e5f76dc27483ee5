"""Section `host`: decodes to images in host memory and encodes of them, and both on the device."""

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
_IS_THERE = "frames are on the device"
_GIVEN = {"fp32 IMAGE uploaded": torch.float32, "uint8 IMAGE uploaded": torch.uint8}
_CAST = "fp32 IMAGE cast on the host, then uploaded"


def cases(session: Session) -> list[Case]:
    """Return two cases, with a row for each destination and each source of the images."""
    size = session.pick((81, 720, 1280), (5, 32, 48))
    decode, encode = Clip("wan2.1", "decode", *size), Clip("wan2.1", "encode", *size)
    leave, arrive = (_STAYS, *_KINDS, _COPIED), (_IS_THERE, *_GIVEN, _CAST)
    return [
        Case(decode.label, leave, functools.partial(_decodes, session, decode)),
        Case(encode.label, arrive, functools.partial(_encodes, session, encode)),
    ]


def _decodes(session: Session, clip: Clip) -> Results:
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


def _encodes(session: Session, clip: Clip) -> Results:
    vae = session.ours("wan2.1")
    x = clip.make(session)
    images = x.float().cpu().add(1).div_(2).movedim(1, -1).contiguous()
    video = images.movedim(-1, 1)  # as ComfyUI gives it to the VAE
    given = {torch.float32: video, torch.uint8: video.mul(255).byte()}
    runs = {_IS_THERE: lambda: vae.encode(x)}
    for kind, dtype in _GIVEN.items():
        runs[kind] = functools.partial(_uploaded, vae, given[dtype])
    runs[_CAST] = lambda: vae.encode(_in_range(video).to(torch.bfloat16))
    results = in_turn(session, runs, shares_memory=True)

    def more(kind: str) -> Values:
        if kind == _IS_THERE:
            return {}
        sent = given[torch.uint8] if kind.startswith("uint8") else video
        return {"times_stays": pairs(results, kind, _IS_THERE), "image_gb": sent.nbytes / 1e9}

    yield from outcomes(results, more)


def _uploaded(vae: Any, video: Tensor) -> Tensor:
    return torch.cat(list(vae.encode_stream(video, to_range=_in_range)), dim=2)


def _in_range(video: Tensor) -> Tensor:
    return video * 2 - 1


def _to_host(
    vae: Any, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, kept: Tensor | None
) -> Tensor:
    images = torch.empty(shape, dtype=dtype) if kept is None else kept
    for _ in vae.decode_stream(x, images=images):
        pass
    return images
