"""The videos that `test_any_way.py` draws, and the ways that they take."""

import itertools
import random
from dataclasses import dataclass

import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import STATES, overwritten
from fast_video_vae.tests.vae.layers.candidate import CHOICES
from fast_video_vae.tests.wan22 import random_wan22
from fast_video_vae.vae import Rereadable

FAMILIES = {
    "wan2.1": STATES["wan2.1"],
    "qwen-image": STATES["wan2.1"],
    "2x": lambda: random_state_dict(8, out_channels=12),
    "wan2.2": lambda: random_wan22(8, 4),  # the decoder is narrower than the encoder
    "qwen-image-2.1": STATES["qwen-image-2.1"],
    "seedvr2": lambda: random_seedvr2((32, 32, 32, 64)),
}
TILED = ("wan2.1", "2x", "wan2.2", "qwen-image-2.1")

# Most latents of a video times the pixels of a latent, for a test of a tenth of a second.
WORK, WORK_OF_SEEDVR2 = 30, 6

# Targets of a decode: the argument, and the dtype of the memory.
TARGETS = {
    "new": ("", None),
    "out": ("out", torch.float32),
    "wide out": ("out", torch.float64),
    "images": ("images", torch.float32),
    "8 bits": ("images", torch.uint8),
    "16 bits": ("images", torch.uint16),
}
WHITE = {torch.uint8: 255, torch.uint16: 65535}


@dataclass(frozen=True)
class Case:
    """A video, and the way that it takes."""

    family: str
    decode: bool
    batch: int
    length: int  # latents of a decode, frames of an encode
    size: tuple[int, int]  # of a latent
    runs: tuple[int, ...] = ()  # lengths of the runs of equal frames of an encode, then single ones
    dtype: torch.dtype | None = None  # of the frames of an encode; None: float32
    layout: str = "dense"
    cuts: tuple[int, ...] | None = None  # frames at which it is cut; None: one tensor
    source: str = "iterator"  # what has the pieces
    whole: bool = False  # through `decode` and `encode`
    chunk: int | None = None
    computed: torch.dtype | None = None
    tile: tuple[int, int] | None = None
    cut: int | None = None  # index in `can_cut` of the layers in tiles; None: chosen
    parked: bool = False  # tails of tiles leave for the host
    limit_bytes: int | None = None
    part_bytes: int | None = None  # None: as on this CPU
    wanted: tuple[int, int] | None = None  # first and last frame of a decode; None: all
    target: str = "new"
    background: bool = False  # frames for a target leave through a thread, as from a GPU
    weights: str = "oneDNN"
    fused: str | None = None  # by a candidate in place of the library
    fails: tuple[int, int] | None = None  # first allocation that fails, and how many in a row
    graphs: bool = False  # steps are recorded and replayed, as by a GPU
    bright: int | None = None  # a latent that overflows in float16, which a VAE in bfloat16 chose
    devices: int = 1  # that share the frames
    shares: tuple[float, ...] | str | None = None  # of the work of the devices
    precision: str = "auto"

    @property
    def gain(self):
        return 1 if self.bright is None else 1e3

    @property
    def result(self):
        """Dtype of the result, if the caller has no memory for it."""
        return self.computed or (torch.float32 if self.bright is None else torch.bfloat16)

    @property
    def frames(self):
        return self.wanted and range(self.wanted[0], self.wanted[1] + 1)

    def given(self, video):
        """Return the video in its layout, as a tensor or in pieces."""
        if self.layout == "channels-last":
            video = video.contiguous(memory_format=torch.channels_last_3d)
        elif self.layout == "every second frame":
            video = torch.stack([video, video.flip(2)], dim=3).flatten(2, 3)[:, :, ::2]
        if self.cuts is None:
            return video
        edges = [0, *self.cuts, video.shape[2]]
        pieces = [video[:, :, start:stop] for start, stop in itertools.pairwise(edges)]
        if self.source == "file":
            return Rereadable(lambda: iter(pieces))
        return {"list": list, "iterator": iter, "reused": overwritten}[self.source](pieces)


def case_of(seed, *, decode, shared=False):
    """Return one of the cases; `shared`: of several devices.

    Each seed has one of its own: examples that hypothesis derives from others differ in little.
    """
    chance = random.Random(seed)
    number, half = chance.randint, lambda: chance.random() < 0.5
    sample = lambda *values: chance.choice(values)  # noqa: E731
    family = sample(*(TILED if shared else FAMILIES))
    if family == "seedvr2":  # in float32 its norms are not exact over the numbers of one pixel
        size, work = sample((1, 2), (2, 1), (1, 4), (2, 2), (3, 2)), WORK_OF_SEEDVR2
    else:
        size, work = (number(1, 6), number(1, 6)), WORK
    batch, int8 = sample(1, 1, 2), decode and number(0, 5) == 0
    if int8:  # of which some are long
        size = (1, number(1, 2)) if family != "seedvr2" else size
    latents = number(1, max(1, min(12, work // (size[0] * size[1] * batch))))
    pictures = family == "qwen-image-2.1"
    length = latents if decode or pictures else number(4 * latents - 3, 4 * latents)
    places = chance.sample(range(1, length), min(length - 1, number(0, 4)))
    cuts = tuple(sorted(places)) if half() else None
    case = {
        "family": family, "decode": decode, "batch": batch, "length": length, "size": size,
        "cuts": cuts, "source": sample("list", "iterator", "reused", "file"),
        "whole": cuts is None and sample(False, False, True),
        "layout": sample("dense", "channels-last", "every second frame"),
        "chunk": sample(None, -1, 1, 2, 3, 4, 5),
        "computed": sample(None, None, None, torch.float64, torch.bfloat16, torch.float16),
        "limit_bytes": sample(None, None, 1, 20_000, 300_000),
        "part_bytes": sample(None, None, 1, 1 << 12),
        "weights": sample("oneDNN", "plain"), "fused": sample(None, None, None, *CHOICES),
    }  # fmt: skip
    if half():
        case["fails"] = number(1, 150), sample(1, 1, 2, 2, 3)
    else:
        case["graphs"] = half()
    if decode and not int8 and sample(False, False, True):
        case |= {"bright": number(0, length - 1), "computed": None}
    if family in TILED and half():
        step = 16 if family in ("wan2.2", "qwen-image-2.1") else 8
        case["tile"] = tuple(number(max(8, step * n // 4), step * n + 8) for n in size)
        case["cut"], case["parked"] = sample(None, 0, 1, 2), half()
    elif family in TILED:
        case["devices"] = number(1, 4)
    if shared:
        count = case["devices"] = number(2, 4)
        parts = tuple(number(1, 4) for _ in range(count))
        case |= {"shares": sample(None, "memory", parts), "cut": None, "parked": False}
    if case["whole"]:
        case |= {"computed": None, "tile": None}
    if not decode:
        case["dtype"] = sample(None, torch.uint8, torch.uint16)
        runs = chance.choices([1, 2, 4, 6, 9, 40], k=number(0, 6))
        case["runs"] = tuple(runs)
    elif not case["whole"]:
        last = length - 1 if pictures else 4 * length - 4
        case["wanted"] = sample(None, tuple(sorted((number(0, last), number(0, last)))))
        case["target"], case["background"] = sample(*TARGETS), half()
    if int8:
        case |= {"precision": "int8", "computed": None, "fused": None}
        case["weights"] = "oneDNN"
    return Case(**case)
