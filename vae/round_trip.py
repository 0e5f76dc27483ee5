"""An encode whose round trip is faithful: what is decoded from it encodes to the same latent.

A long video is made window by window, and the last frames of each are decoded, encoded and given
to the next. Each time a plain encode loses a part of them, always in the same direction. Here the
latent is corrected by the fixed-point iteration `z += E(x) - E(D(z))`, which ends where the decoded
frames have the latent of the given ones. Anderson's acceleration of depth 1 mixes each step with
the one before, so that what changes slowly, such as saturation, arrives earlier.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .model import VideoVAE
from .streaming.memory import retried
from .streaming.options import AUTOMATIC, StreamOptions
from .streaming.source import Rereadable

Counted = Callable[[Iterator[Tensor]], Iterator[Tensor]]

# Largest error of a latent, as a share of it, after which a step is used whose own error is not
# measured. The bundled VAE has 0.18, and random weights have 0.8 to 1.3.
_TRUSTED = 0.5


# A step is used while the errors fall, otherwise the latent with the least error. To measure the
# error of the last step would cost as much as another one.
def encode_corrected(
    vae: VideoVAE,
    frames: Tensor,
    corrections: int,
    options: StreamOptions = AUTOMATIC,
    *,
    to_range: Callable[[Tensor], Tensor] | None = None,
    counted: Counted = iter,
) -> Tensor:
    """Encode frames so that `encode(decode(latent).clamp(-1, 1))` is close to `encode(frames)`.

    Memory is that of one encode and one decode, the latents, and the given frames: a decoded video
    is encoded while it is decoded.

    Args:
        vae: The VAE.
        frames: `[B, C, T, H, W]`, as for `VideoVAE.encode`, or in the range of `to_range`.
        corrections: Most corrections, each of which costs a decode and an encode. 0: those of
            `VideoVAE.encode`. A video whose error does not fall gets no more.
        options: Options of each stream.
        to_range: Converts the float frames to [-1, 1]; None: they are in that range.
        counted: Passes the latents of each encode through, for a progress bar.

    Returns:
        The latent, `[B, C_latent, t, h, w]`, as from `VideoVAE.encode`.

    Raises:
        ValueError: As for `VideoVAE.encode`, or the decoder makes frames of another size.
    """
    check_corrections(vae, corrections)
    tried = functools.partial(retried, device=vae.device, task="an encode", release=options.release)
    stream = vae.encode_stream(frames, options, to_range=to_range)
    plain = vae.joined(list(counted(stream)))
    wide = torch.promote_types(plain.dtype, torch.float32)
    search = tried(lambda: _Search(plain.to(wide)))
    for left in reversed(range(corrections)):
        if not search.goes_on.any():
            break
        found = vae.joined(list(counted(_round_trip(vae, search.latent, options))))
        tried(functools.partial(search.step, found, is_last=not left))
    return tried(lambda: search.latent.to(plain.dtype))


def check_corrections(vae: VideoVAE, corrections: int) -> None:
    """Raise the `ValueError` of `encode_corrected` if a VAE has no round trip of one size."""
    vae.encoding()
    if corrections and vae.config.output_scale != 1:
        made = f"{vae.config.output_scale} times as high and wide as those that it encodes"
        expected = f"0: the decoder of this VAE makes frames {made}"
        raise ValueError(f"corrections is {corrections}; expected {expected}")


def _round_trip(vae: VideoVAE, latent: Tensor, options: StreamOptions) -> Iterator[Tensor]:
    """Decode a latent and encode its frames; yield latents."""

    def frames() -> Iterator[Tensor]:
        return (piece.clamp_(-1, 1) for piece in vae.decode_stream(latent, options))

    if latent.shape[2] == 1:  # a tensor, which takes a separate path
        yield from vae.encode_stream(vae.joined([*frames()]), options)
        return
    setting = options
    if options.chunk is None:
        height, width = (vae.config.spatial_compression * side for side in latent.shape[3:])
        setting = replace(options, chunk=vae.plan(height, width, options, encode=True).chunk)
    yield from vae.encode_stream(Rereadable(frames), setting)


class _Search:
    """The search, in each video, for the latent whose error against the plain encode is least."""

    def __init__(self, goal: Tensor) -> None:
        self.goal = self.latent = self.best = goal  # that to measure next, that of the least error
        self.size = _inner(goal, goal)
        self.least = torch.full_like(self.size, torch.inf)  # the least error, squared
        self.goes_on = self.size.isfinite()  # whether `latent` is a new one
        self.before: tuple[Tensor, Tensor] | None = None  # the latent before, and its error

    def step(self, found: Tensor, *, is_last: bool) -> None:
        """Go on from what `latent` is `found` to encode to."""
        latent, error = self.latent, self.goal - found
        size = _inner(error, error)
        goes_on = self.goes_on & (size < self.least)
        best = torch.where(goes_on, latent, self.best)
        least = torch.where(goes_on, size, self.least)
        if is_last:
            goes_on = goes_on & (size < _TRUSTED**2 * self.size)
        step = latent + error
        if self.before is not None:
            moved, changed = latent - self.before[0], error - self.before[1]
            # The share of the step before in the mix whose error is least, if errors are linear.
            share = (_inner(error, changed) / _inner(changed, changed)).nan_to_num(0, 0, 0)
            step = step - share * (moved + changed)
        step = torch.where(goes_on, step, best)
        # In the end, because a step is done again where memory runs out.
        self.best, self.least, self.goes_on = best, least, goes_on
        self.latent, self.before = step, (latent, error)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner product of each video of two latents, `[B, 1, 1, 1, 1]`."""
    return (one * other).sum((1, 2, 3, 4), keepdim=True)
