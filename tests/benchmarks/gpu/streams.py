"""Section `streams`: a decode whose frames leave the device as 8-bit pictures while it runs."""

import functools
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fast_video_vae.kernels import frames_to_images
from fast_video_vae.vae import media

from .rows import Case, Missing, Results, Values
from .session import Session
from .turns import in_turn, outcomes, pairs
from .vae import Clip

_STAYS = "pictures stay on the device"
_WAITED = "copied, each piece waited for"
_PINNED = "copied to pinned memory, waited for at the end"
_WRITER = "through the background writer"
_FILE = "to an MP4 file"
_KINDS = (_STAYS, _WAITED, _PINNED, _WRITER, _FILE)


def cases(session: Session) -> list[Case]:
    """Return one case, with a row for each destination of the pictures."""
    clip = Clip("wan2.1", "decode", *session.pick((81, 720, 1280), (9, 64, 96)))
    return [Case(clip.label, _KINDS, functools.partial(_compare, session, clip))]


def _compare(session: Session, clip: Clip) -> Results:
    x = clip.make(session)
    runs: dict[str, Callable[[], None]] = {}
    for kind, make in _MAKE.items():
        try:
            runs[kind] = functools.partial(torch.inference_mode()(make(session, clip)), x)
        except Missing as error:
            yield kind, error
    results = in_turn(session, runs, rounds=2, shares_memory=True)

    def more(kind: str) -> Values:
        return {"times_stays": None if kind == _STAYS else pairs(results, kind, _STAYS)}

    yield from outcomes(results, more)


def _pictures(session: Session, x: Tensor) -> Iterator[Tensor]:
    """Yield `[T, H, W, C]` uint8 on the device, from the latent `x` `[1, C, T, H, W]`."""
    for piece in session.ours("wan2.1").decode_stream(x):
        yield frames_to_images(piece, dtype=torch.uint8)


def _staying(session: Session, clip: Clip) -> Callable[[Tensor], None]:
    def run(x: Tensor) -> None:
        for _ in _pictures(session, x):
            pass

    return run


def _waiting(session: Session, clip: Clip) -> Callable[[Tensor], None]:
    def run(x: Tensor) -> None:
        for pictures in _pictures(session, x):
            pictures.cpu()

    return run


def _pinning(session: Session, clip: Clip) -> Callable[[Tensor], None]:
    shape = (clip.frames, clip.height, clip.width, 3)
    host = torch.empty(shape, dtype=torch.uint8, pin_memory=session.cuda)

    def run(x: Tensor) -> None:
        start = 0
        for pictures in _pictures(session, x):
            host[start : start + len(pictures)].copy_(pictures, non_blocking=True)
            start += len(pictures)

    return run


def _writing(session: Session, clip: Clip) -> Callable[[Tensor], None]:

    def run(x: Tensor) -> None:
        with media.BackgroundWriter(lambda pictures: None) as background:
            for pictures in _pictures(session, x):
                background.put(pictures)

    return run


def _filing(session: Session, clip: Clip) -> Callable[[Tensor], None]:
    if importlib.util.find_spec("av") is None:
        raise Missing("PyAV is not installed")

    def run(x: Tensor) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            media.VideoWriter(Path(folder) / "video.mp4", 16) as file,
            media.BackgroundWriter(file.write) as background,
        ):
            for pictures in _pictures(session, x):
                background.put(pictures)

    return run


_MAKE = dict(zip(_KINDS, (_staying, _waiting, _pinning, _writing, _filing), strict=True))
