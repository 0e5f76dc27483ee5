"""The fast VAE for the nodes of ComfyUI-WanVideoWrapper and their type WANVAE.

The public members here are all that these nodes use, in March 2025 and in 2026. The frames of a
tiled decode are float32, clamped to [-1, 1]. In March 2025 all others are so too; in 2026 they have
the VAE's dtype and are not clamped, which matters where a node scales frames by their own minimum
and maximum: WanVideo Decode of March 2025 always does, that of 2026 with `minmax` and for loops.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import comfy.model_management
import torch
from torch import Tensor

from ...vae import SEEDVR2, StreamOptions
from ..host.oom import in_turn, kept
from ..host.progress import Progress
from ..vae import pieces
from ..vae.comfy_vae import FastVAE, FastVideoVAE

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WanVideoWrapperVAE:
    """A `FastVAE` of Wan 2.1 or 2.2 with the methods of ComfyUI-WanVideoWrapper's VAE."""

    def __init__(self, vae: FastVAE) -> None:
        config = vae.first_stage_model.config
        known = (config.latent_channels, config.spatial_compression) in ((16, 8), (48, 16))
        if config.family == SEEDVR2 or not known or config.image_channels != 3:
            raise ValueError(
                f"got {config.family} with {config.latent_channels} latent channels and "
                f"{config.image_channels} image channels; expected Wan 2.1 (16, 3) or 2.2 (48, 3)"
            )
        self._vae = vae
        self._dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which callers cast frames and latents."""
        return self._dtype or self._vae.vae_dtype

    @property
    def upsampling_factor(self) -> int:
        """Pixels per latent pixel, in height and in width: 8, or 16 for Wan 2.2."""
        return self._vae.first_stage_model.config.spatial_compression

    @property
    def model(self) -> "WanVideoWrapperVAE":
        """The object itself: callers use `vae.model.to(device)` and `vae.model.clear_cache()`."""
        return self

    def clear_cache(self) -> None:
        """Do nothing, for callers of older versions: no frames are kept between calls."""

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> "WanVideoWrapperVAE":
        """Set the device and the dtype of the next work; another device frees its memory."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype}; expected one of {', '.join(map(str, _DTYPES))}")
        self._dtype = dtype or self._dtype
        # Only ComfyUI moves the weights: it tracks what is on the device for all their users. They
        # are loaded with the work, when the needed memory is known.
        patcher = self._vae.patcher
        if device is not None and torch.device(device).type != patcher.load_device.type:
            comfy.model_management.unload_model_and_clones(patcher, all_devices=True)
        return self

    # Rows, columns and frames at the end that do not fill a latent are dropped, as by the wrapper.
    # `end_`: the last frame is a separate video, whose latent comes last.
    def encode(
        self,
        videos: Tensor | Sequence[Tensor],
        device: torch.device | str,
        tiled: bool = False,
        end_: bool = False,
        tile_size: Sequence[int] | None = None,
        tile_stride: Sequence[int] | None = None,
        pbar: bool = True,
        sample: bool = False,
    ) -> Tensor:
        """Encode videos `[B, C, T, H, W]` in [-1, 1] to normalised float32 latents."""
        network, vae, parts = self._vae.first_stage_model, self._vae, []
        if network.encoder is None:
            raise ValueError("the VAE has no encoder; only decoding works with it")
        step, count = network.config.spatial_compression, network.config.latent_frames
        for each in _one_by_one(videos, "videos"):
            height, width = (side - side % step for side in each.shape[3:])
            video = each[..., :height, :width]
            network.check_frames(video, vae.device)
            parts.append([network.whole_groups(part) for part in _parts(video, end_)])
        shape, tile = parts[0][0].shape, tuple(tile_size) if tiled and tile_size else None
        total = len(parts) * sum(count(part.shape[2]) for part in parts[0])

        def go(_: bool) -> Tensor:
            options = StreamOptions(dtype=self._dtype)
            options, _ = pieces.begin(vae, shape, options, tile, encode=True)
            progress, rows = Progress(total, shown=pbar), []
            with _posterior(network) if sample else contextlib.nullcontext():
                for video in parts:
                    streams = (network.encode_stream(part, options, scaled=False) for part in video)
                    means = progress.counted(itertools.chain.from_iterable(streams))
                    drawn = [_drawn(network, each, sample=sample).to(device) for each in means]
                    rows.append(torch.cat(drawn, dim=2))
            with kept():
                return torch.cat(rows)

        return in_turn(vae.device, "an encode", go)

    # The frames of a tiled decode, and of a call with none of `end_`, `pbar`, `output_device` and
    # `output_dtype`, are clamped to [-1, 1] and in float32 by default: the nodes of March 2025 have
    # none of these arguments, and those of 2026 give `end_` or `pbar`. They are stored as `[B, T,
    # H, W, C]`, so that the caller's IMAGE is contiguous.
    def decode(
        self,
        hidden_states: Tensor | Sequence[Tensor],
        device: torch.device | str,
        tiled: bool = False,
        end_: bool | None = None,
        tile_size: Sequence[int] | None = (34, 34),
        tile_stride: Sequence[int] | None = (18, 16),
        pbar: bool | None = None,
        output_device: torch.device | str | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Decode normalised latents to frames `[B, C, T, H, W]` in about [-1, 1]."""
        network, vae = self._vae.first_stage_model, self._vae
        latents = _one_by_one(hidden_states, "hidden_states")
        for each in latents:
            network.check_latent(each)
        parts = [_parts(each, bool(end_)) for each in latents]
        place = torch.device(output_device or ("cpu" if tiled else device))
        clamped = tiled or {end_, pbar, output_device, output_dtype} == {None}
        dtype = output_dtype or (torch.float32 if clamped else self.dtype)
        shape, tile = parts[0][0].shape, tuple(tile_size) if tiled and tile_size else None
        counts = [network.config.frames(part.shape[2]) for part in parts[0]]
        _, channels, _, height, width = network.config.decoded_shape(shape)
        size = (len(parts), sum(counts), height, width, channels)

        def go(on_host: bool) -> Tensor:
            home = torch.device(output_device or "cpu") if on_host else place
            options = StreamOptions(dtype=self._dtype)
            room = 0 if home.type == "cpu" else math.prod(size) * dtype.itemsize
            options, _ = pieces.begin(vae, shape, options, tile, extra_bytes=room)
            with kept():
                frames = torch.empty(size, dtype=dtype, device=home).movedim(-1, 1)
            progress = Progress(len(parts) * sum(counts), shown=pbar is not False)
            for row, video in zip(frames.split(1), parts, strict=True):
                for out, part in zip(row.split(counts, dim=2), video, strict=True):
                    latent = network.denormalize(part.float())
                    for _ in progress.counted(pieces.decode_pieces(vae, latent, options, out=out)):
                        pass
            return frames.clamp_(-1, 1) if clamped else frames

        # Most callers move the frames to the host at once, and the work needs that memory.
        return in_turn(vae.device, "a decode", go, "with the frames on the host")


@contextlib.contextmanager
def _posterior(network: FastVideoVAE) -> Iterator[None]:
    """Make the encoder's last layer return mean and log variance within the block."""
    handle = network.conv1.register_forward_hook(lambda conv, inputs, _: conv.forward(inputs[0]))
    try:
        yield
    finally:
        handle.remove()


def _drawn(network: FastVideoVAE, moments: Tensor, *, sample: bool) -> Tensor:
    """Return normalised means, or a sample of means and log variances `[1, 2 C, t, h, w]`."""
    if not sample:
        return network.normalize(moments.float())
    mean, log_variance = moments.float().chunk(2, dim=1)
    spread = (log_variance.clamp(-30, 20) / 2).exp()  # these bounds are of Wan's own code
    noise = torch.randn(spread.shape, device=spread.device)  # the wrapper's values for a seed
    return network.normalize(mean) + spread * noise


def _one_by_one(videos: object, name: str) -> list[Tensor]:
    """Return the videos of a batch or list as `[1, C, T, H, W]` each."""
    is_batch = isinstance(videos, Tensor) and videos.ndim == 5
    batch = list(videos) if is_batch or isinstance(videos, list | tuple) else [None]
    if any(not isinstance(each, Tensor) or each.ndim != 4 for each in batch):
        shape = list(videos.shape) if isinstance(videos, Tensor) else f"a {type(videos).__name__}"
        raise ValueError(
            f"{name} is {shape}; expected a tensor [B, C, T, H, W] or a list of [C, T, H, W]"
        )
    if not batch:
        raise ValueError(f"{name} is empty; expected one video or more")
    shapes = [list(each.shape) for each in batch]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            expected = f"expected {shapes[0]}, the shape of the first"
            raise ValueError(f"{name}[{index}] is {shape}; {expected}")
    return [each.unsqueeze(0) for each in batch]


def _parts(video: Tensor, end_: bool) -> tuple[Tensor, ...]:
    """Return the parts that are separate videos: all, or all but the last frame, and that frame."""
    count = video.shape[2]
    return video.split([count - 1, 1], dim=2) if end_ and count > 1 else (video,)
