"""Section `vae`: decodes and encodes of whole clips by this pack and its peers, in turn."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .flops import video_flops
from .rows import Case, Results, Values
from .schedule import check_fits
from .session import Session
from .turns import ROUNDS, in_turn, outcomes, pairs, snr_db

NAMES = ("ours", "diffusers", "comfyui")


@dataclass(frozen=True)
class Clip:
    """A clip to decode or encode; height and width in pixels."""

    family: str
    direction: str  # "decode" or "encode"
    frames: int
    height: int
    width: int

    @property
    def label(self) -> str:
        family = self.family.title()
        return f"{family} {self.direction} {self.height}x{self.width}x{self.frames}, bf16"

    @property
    def content(self) -> tuple[str, int, int, int]:
        """Direction, frames, height and width: the arguments of `video_flops`."""
        return self.direction, self.frames, self.height, self.width

    def make(self, session: Session) -> Tensor:
        """Return random frames or a random latent, `[B, C, T, H, W]`, on the session's device."""
        config = session.ours(self.family).config
        if self.direction == "encode":
            x = session.normal(1, config.image_channels, self.frames, self.height, self.width)
            return x.mul_(0.4).clamp_(-1, 1)
        step, latents = config.spatial_compression, config.latent_frames(self.frames)
        return session.normal(
            1, config.latent_channels, latents, self.height // step, self.width // step
        )


def clips(session: Session) -> list[Clip]:
    """Return the clips, most important first, because the budget may be too short for all."""
    hd, sd = session.pick(((81, 720, 1280), (81, 480, 832)), ((5, 32, 48), (5, 32, 32)))
    full_hd = session.pick((81, 1088, 1920), (9, 32, 48))
    upscaled = session.pick((33, 720, 1280), (5, 32, 32))
    picture = session.pick((1, 2160, 3840), (1, 48, 64))
    both = ("decode", "encode")
    ordered = [
        *(("wan2.1", direction, size) for direction in both for size in (hd, sd)),
        *(("wan2.1", direction, size) for size in (picture, full_hd) for direction in both),
        *(("seedvr2", direction, upscaled) for direction in both),
        *(("wan2.2", direction, hd) for direction in both),
    ]
    return [Clip(family, direction, *size) for family, direction, size in ordered]


def cases(session: Session) -> list[Case]:
    """Return one case per clip, with a row per implementation."""
    return [
        Case(clip.label, NAMES, functools.partial(_compare, session, clip))
        for clip in clips(session)
    ]


def _compare(session: Session, clip: Clip) -> Results:
    flops = video_flops(session.ours(clip.family).config, *clip.content)
    x = clip.make(session)
    runs: dict[str, Callable[[], Tensor]] = {}
    needed = 0.0
    for name in NAMES:
        try:
            vae = session.ours(clip.family) if name == "ours" else session.peer(clip.family, name)
            runs[name] = functools.partial(getattr(vae, clip.direction), x)
            # A first run and one round, predicted from smaller clips.
            expected = session.expected_s((clip.family, clip.direction, name), flops)
            check_fits(expected, session.clock.left() - needed)
            needed += expected
        except Exception as error:  # the others run without it
            runs.pop(name, None)
            yield name, error.with_traceback(None)
    ours: list[Tensor] = []
    agreement: dict[str, float] = {}

    def look(name: str, result: Tensor) -> None:
        if clip.direction == "decode":  # diffusers clamps what it decodes
            result = result.clamp(-1, 1)
        if name == "ours":
            ours.append(result)
        elif ours:
            agreement[name] = snr_db(ours[0], result)

    with torch.inference_mode():
        # One round for a long clip, so that the budget lasts for the others.
        rounds = 1 if needed > session.clock.left() / 4 else ROUNDS
        results = in_turn(session, runs, look=look, rounds=rounds)

    def more(name: str) -> Values:
        median = results[name].median_s
        session.rates[clip.family, clip.direction, name] = median / flops
        compares = name != "ours" and "ours" in results
        return {
            "tflops": flops / median / 1e12,
            "floor_percent": 100 * flops / session.product_flops / median,
            "times_ours": pairs(results, name, "ours") if compares else None,
            "snr_db": agreement.get(name),
            "version": None if name == "ours" else session.version(name),
        }

    yield from outcomes(results, more)
