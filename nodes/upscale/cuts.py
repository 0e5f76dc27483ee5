"""Hard cuts of a video: found by FFmpeg's score of scene changes, or given by the user."""

import re
from collections.abc import Callable, Collection
from fractions import Fraction

import av
import torch
from av.error import BlockingIOError as NotYet
from torch import Tensor

from ..host.error_text import described

FOUND, NONE = "auto", "none"

# FFmpeg's documentation of its filter `select` advises a score from 0.3 to 0.5.
_SCORE = 0.3
# Frames are compared at this width: the score is a mean over pixels.
_WIDTH = 320

_NUMBERS = re.compile(r"\s*\d{1,9}(\s*[,;\s]\s*\d{1,9})*\s*[,;]?\s*")


def parsed(text: str) -> Collection[int] | None:
    """Return the frames that begin a scene, as the user wrote them; None: they are to be found."""
    if text.strip().lower() == FOUND:
        return None
    if text.strip().lower() in ("", NONE):
        return frozenset()
    if not _NUMBERS.fullmatch(text):
        raise ValueError(
            f"cuts is {described(text)}; expected {FOUND}, {NONE}, or frames, such as 48, 120"
        )
    return frozenset(map(int, re.findall(r"\d+", text)))


def cut_test(cuts: Collection[int] | None, size: tuple[int, int]) -> Callable[[int, Tensor], bool]:
    """Return what takes each frame `[H, W, 3]` with its number; True: a scene begins there."""
    if cuts is not None:
        return lambda number, _: number in cuts and number > 0
    return _Finder(*size)


class _Finder:
    """Finds the frames that have little in common with the one before."""

    def __init__(self, height: int, width: int) -> None:
        small = min(width, _WIDTH)
        self._graph = graph = av.filter.Graph()
        form, tick = av.VideoFormat("rgb24"), Fraction(1)
        graph.link_nodes(
            graph.add_buffer(width=width, height=height, format=form, time_base=tick),
            graph.add("scale", f"{small}:{max(1, round(height * small / width))}:flags=area"),
            graph.add("select", f"gt(scene,{_SCORE})"),
            graph.add("buffersink"),
        ).configure()

    def __call__(self, number: int, picture: Tensor) -> bool:
        frame = av.VideoFrame.from_ndarray(_bytes(picture).numpy(), format="rgb24")
        frame.pts, frame.time_base = number, Fraction(1)
        self._graph.push(frame)
        try:
            return self._graph.pull().pts == number and number > 0
        except NotYet:
            return False


def _bytes(picture: Tensor) -> Tensor:
    if picture.dtype == torch.uint16:
        picture = (picture.int() >> 8).to(torch.uint8)
    elif picture.is_floating_point():
        picture = picture.clamp(0, 1).mul(255).to(torch.uint8)
    return picture.contiguous()
