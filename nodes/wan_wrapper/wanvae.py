"""The fast VAE for the nodes of ComfyUI-WanVideoWrapper and their type WANVAE.

The public members here are all that these nodes use, from March 2025 to May 2026. The frames of a
tiled decode are float32, clamped to [-1, 1]. In March 2025 all others are so too; in 2026 they have
the VAE's dtype and are not clamped, which matters where a node scales frames by their own minimum
and maximum: WanVideo Decode of March 2025 always does, that of 2026 with `minmax` and for loops.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import comfy.model_management
import torch
from torch import Tensor

from ...vae import SEEDVR2, StreamOptions, retried
from ..host.oom import in_turn, kept
from ..host.progress import Progress
from ..vae import pieces
from ..vae.comfy_vae import FastVAE
from ..vae.first_stage import FastVideoVAE

# Latent channels and spatial compression of Wan 2.1 and Wan 2.2, which the wrapper's models
# support.
_KNOWN = {(16, 8), (48, 16)}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_HOST = torch.device("cpu")

# Bounds of the log variance before sampling, as in Wan's own code.
_LOG_VARIANCE = (-30.0, 20.0)


class WanVideoWrapperVAE:
    """A `FastVAE` of Wan 2.1 or 2.2 with the methods of ComfyUI-WanVideoWrapper's VAE."""

    def __init__(self, vae: FastVAE) -> None:
        config = vae.first_stage_model.config
        known = (config.latent_channels, config.spatial_compression) in _KNOWN
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
        return self._network.config.spatial_compression

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
        # Only ComfyUI moves the weights. It tracks what is on the device, and weights that are
        # moved otherwise would be missing for their other users, such as ComfyUI's own nodes and
        # patchers with other LoRAs. So they are loaded with the work, when the needed memory is
        # known, and unloaded by ComfyUI.
        patcher = self._vae.patcher
        if device is not None and torch.device(device).type != patcher.load_device.type:
            comfy.model_management.unload_model_and_clones(patcher, all_devices=True)
        return self

    # Rows, columns and frames at the end that do not fill a latent are dropped. `end_`: the last
    # frame is a separate video, whose latent comes last.
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
        network = self._network
        if network.encoder is None:
            raise ValueError("the VAE has no encoder; only decoding works with it")
        step = network.config.spatial_compression
        frames = [_cropped(each, step) for each in _one_by_one(videos, "videos")]
        for each in frames:
            network.check_frames(each, self._vae.device)
        parts = [[network.whole_groups(part) for part in _parts(each, end_)] for each in frames]
        place, tile = torch.device(device), _tile(tile_size) if tiled else None

        go = lambda _: self._encode(parts, place, tile, shown=pbar, sample=sample)  # noqa: E731
        return in_turn(self._vae.device, "an encode", go)

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
        network = self._network
        latents = _one_by_one(hidden_states, "hidden_states")
        for each in latents:
            network.check_latent(each)
        parts = [_parts(each, bool(end_)) for each in latents]
        place = torch.device(output_device or (_HOST if tiled else device))
        later = (end_, pbar, output_device, output_dtype)
        clamped = tiled or all(given is None for given in later)
        dtype = output_dtype or (torch.float32 if clamped else self.dtype)
        tile = _tile(tile_size) if tiled else None

        def go(on_host: bool) -> Tensor:
            home = torch.device(output_device or _HOST) if on_host else place
            frames = self._decode(parts, home, dtype=dtype, tile=tile, shown=pbar is not False)
            return frames.clamp_(-1, 1) if clamped else frames

        # Most callers move the frames to the host at once, and the work needs that memory.
        return in_turn(self._vae.device, "a decode", go, "with the frames on the host")

    @property
    def _network(self) -> FastVideoVAE:
        return self._vae.first_stage_model

    def _encode(
        self,
        parts: list[list[Tensor]],
        device: torch.device,
        tile: tuple[int, int] | None,
        *,
        shown: bool,
        sample: bool,
    ) -> Tensor:
        """Encode videos of frames `[1, C, T, H, W]`, each part as a separate video."""
        network, vae = self._network, self._vae
        shape, config = parts[0][0].shape, network.config
        options = StreamOptions(dtype=self._dtype)
        options = pieces.options_for(vae, options, tile, encode=True, single_frame=shape[2] == 1)
        pieces.load(vae, pieces.encode_bytes(vae, shape, options))
        count = sum(config.latent_frames(part.shape[2]) for part in parts[0])
        height, width = (each // config.spatial_compression for each in shape[3:])
        with kept():
            size = (len(parts), config.latent_channels, count, height, width)
            latents = torch.empty(size, dtype=torch.float32, device=device)
        progress = Progress(len(parts) * count, shown=shown)
        with _posterior(network) if sample else contextlib.nullcontext():
            for row, video in zip(latents.split(1), parts, strict=True):
                done = 0
                for part in video:
                    stream = network.encode_stream(part, options, scaled=False)
                    for piece in progress.counted(stream):
                        drawn = functools.partial(_drawn, network, piece, sample=sample)
                        latent = retried(drawn, vae.device, "an encode", options.release)
                        row[:, :, done : done + latent.shape[2]] = latent
                        done += latent.shape[2]
        return latents

    def _decode(
        self,
        parts: list[tuple[Tensor, ...]],
        device: torch.device,
        *,
        dtype: torch.dtype,
        tile: tuple[int, int] | None,
        shown: bool,
    ) -> Tensor:
        """Decode videos of normalised `[1, C_latent, t, h, w]`, each part as a separate video."""
        network, vae = self._network, self._vae
        shape = parts[0][0].shape
        counts = [network.config.frames(part.shape[2]) for part in parts[0]]
        _, channels, _, height, width = network.config.decoded_shape(shape)
        size = (len(parts), sum(counts), height, width, channels)
        room = 0 if device.type == "cpu" else math.prod(size) * dtype.itemsize
        options = StreamOptions(dtype=self._dtype)
        options = pieces.options_for(vae, options, tile, single_frame=shape[2] == 1)
        pieces.load(vae, room + pieces.decode_bytes(vae, shape, options))
        with kept():
            frames = torch.empty(size, dtype=dtype, device=device).movedim(-1, 1)
        progress = Progress(len(parts) * sum(counts), shown=shown)
        for row, video in zip(frames.split(1), parts, strict=True):
            for out, part in zip(row.split(counts, dim=2), video, strict=True):
                plain = lambda part=part: network.denormalize(part.float())  # noqa: E731
                latent = retried(plain, vae.device, "a decode", options.release)
                stream = pieces.decode_pieces(vae, latent, options, out=out)
                for _ in progress.counted(stream):
                    pass
        return frames


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
    spread = (log_variance.clamp(*_LOG_VARIANCE) / 2).exp()
    noise = torch.randn(spread.shape, device=spread.device)  # the wrapper's values for a seed
    return network.normalize(mean) + spread * noise


def _tile(size: Sequence[int] | None) -> tuple[int, int] | None:
    return None if size is None else (int(size[0]), int(size[1]))


def _one_by_one(videos: object, name: str) -> list[Tensor]:
    """Return the videos of a batch or list as `[1, C, T, H, W]` each."""
    if isinstance(videos, Tensor) and videos.ndim == 5:
        batch = list(videos.split(1))
    elif isinstance(videos, list | tuple) and all(
        isinstance(each, Tensor) and each.ndim == 4 for each in videos
    ):
        batch = [each.unsqueeze(0) for each in videos]
    else:
        shape = list(videos.shape) if isinstance(videos, Tensor) else f"a {type(videos).__name__}"
        raise ValueError(
            f"{name} is {shape}; expected a tensor [B, C, T, H, W] or a list of [C, T, H, W]"
        )
    if not batch:
        raise ValueError(f"{name} is empty; expected one video or more")
    for index, each in enumerate(batch):
        if each.shape != batch[0].shape:
            raise ValueError(
                f"{name}[{index}] is {list(each.shape[1:])}; expected {list(batch[0].shape[1:])}, "
                "the shape of the first"
            )
    return batch


def _cropped(frames: Tensor, step: int) -> Tensor:
    """Drop the rows and columns at the end that do not fill a latent, as the wrapper does."""
    height, width = frames.shape[3:]
    return frames[..., : height - height % step, : width - width % step]


def _parts(video: Tensor, end_: bool) -> tuple[Tensor, ...]:
    """Return the parts that are separate videos: all, or all but the last frame, and that frame."""
    if not end_ or video.shape[2] < 2:
        return (video,)
    return video[:, :, :-1], video[:, :, -1:]
