"""Encode and decode of a scene in turns with the sampler: each stands still between its turns.

What a causal VAE remembers of the frames before stays on the device, or on the host where the
sampler needs the room. A scene that is continued in another process remembers nothing: its first
`WARM_UP` results are computed again and dropped, after which the bits are the same.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...vae import Rereadable, media
from ..host import timing
from ..host.oom import give_back
from ..vae import pieces as driver
from ..vae.comfy_vae import FastVAE

# Latents of SeedVR2 before a latent of an encode, and before a frame of a decode, that it depends
# on, and one that begins a video, which has one frame instead of four.
ENCODE_WARM_UP, DECODE_WARM_UP = 28 + 1, 37 + 1


class _Turns:
    """A stream of a VAE, one latent per step, whose weights may leave the device between turns."""

    def __init__(
        self,
        vae: FastVAE,
        size: tuple[int, int],
        begin: Callable[[Any], Iterator[Tensor]],
        *,
        encode: bool,
    ) -> None:
        step = 1 if encode else vae.first_stage_model.config.spatial_compression
        channels = 3 if encode else vae.first_stage_model.config.latent_channels
        shape = 1, channels, 5, size[0] // step, size[1] // step
        options, self._needed = driver.begin(vae, shape, encode=encode)
        self._vae, self._what = vae, "VAE encode" if encode else "VAE decode"
        self._stream: Any = begin(replace(options, chunk=1))

    def __enter__(self) -> "_Turns":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def park(self) -> None:
        """Free the memory of the device until the next turn."""
        self._stream.park()

    def _turn(self, count: int) -> Iterator[Tensor]:
        """Yield the pieces of the next `count` latents or frames, or of all that are left."""
        device = self._vae.device
        driver.load(self._vae, self._needed)
        with comfy.model_management.cuda_device_context(device):
            while count > 0:
                with timing.span(self._what, driver.label(self._vae), device):
                    piece = next(self._stream, None)
                if piece is None:
                    return
                count -= piece.shape[2]
                yield piece
        give_back(device)


class SceneEncoder(_Turns):
    """The latents of a scene from the frames of `read`, `[1, 3, n, H, W]` in [0, 1] at a time."""

    def __init__(
        self, vae: FastVAE, size: tuple[int, int], read: Callable[[], Iterator[Tensor]], skip: int
    ) -> None:
        """Prepare; the first `skip` latents are left out."""
        encode, convert = vae.first_stage_model.encode_stream, vae.process_input
        super().__init__(
            vae,
            size,
            lambda options: encode(Rereadable(read), options, scaled=False, to_range=convert),
            encode=True,
        )
        self._skip = skip

    def take(self, count: int) -> Tensor | None:
        """Return the next `count` latents as those of a LATENT, or all that are left; None: none.

        No frame is read beyond those of the latents.
        """
        if self._skip:
            for _ in self._turn(self._skip):
                pass
            self._skip = 0
        with closing(self._turn(count)) as means:
            first = next(means, None)
            done = itertools.chain([first], means)
            return None if first is None else driver.moved(self._vae, done)


class SceneDecoder(_Turns):
    """The frames of a scene, from latents that arrive a few at a time."""

    def __init__(self, vae: FastVAE, size: tuple[int, int]) -> None:
        self._latents: deque[Tensor] = deque()

        def given() -> Iterator[Tensor]:
            while True:  # never more are requested than there are
                yield self._latents.popleft()

        decode = vae.first_stage_model.decode_stream
        super().__init__(
            vae, size, lambda options: decode(given(), options, deep=True), encode=False
        )
        self._is_first = True

    def frames(self, latent: Tensor) -> Iterator[Tensor]:
        """Yield the images `[n, H, W, 3]` float32 of `latent` `[1, C, t, h, w]`, on the device."""
        count = latent.shape[2]
        if not count:
            return
        self._latents.extend(latent.split(1, dim=2))
        frames, self._is_first = 4 * count - 3 * self._is_first, False
        with closing(self._turn(frames)) as found:
            for piece in found:
                yield media.pictures_of(piece, torch.float32)
