"""The preview of a sampling run: the whole clip plays while the next step is computed.

ComfyUI's choice of a method holds (`--preview-method`, or the prompt's own): latent2rgb, or taesd
with a tiny decoder in the step's thread, for about a tenth of the time of the run. ComfyUI's own
callback is used where there is nothing to play (no previews, images, other models), and where
another pack has replaced a part of its preview, such as VideoHelperSuite. Nothing of ComfyUI is
replaced here. Facts about it are from latent_preview.py of 0.33.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.utils
import latent_preview
import numpy
import torch.nn.functional as F
from comfy.cli_args import LatentPreviewMethod, args
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...vae.preview import TinyDecoder
from .clip_player import ClipPlayer
from .decoders import tiny_decoder_on
from .formats import color, has_factors
from .tiny_files import tiny_file

_logger = logging.getLogger(__name__)

Callback = Callable[[int, Any, Any, int], None]

# Makes pictures `[T, H, W, 3]` uint8 of a denoised latent `[1, C, t, h, w]`; None: not of this one.
_Maker = Callable[[Tensor], numpy.ndarray | None]

# Frames per second of the models' videos, by channels of their latents.
_FPS = {16: 16, 48: 24}

# Share of the time of a run that decodes with a tiny decoder may take.
_SHARE = 0.1

# ComfyUI's previewers, and the methods of each that make a picture.
_PREVIEWERS = ("Latent2RGBPreviewer", "TAEHVPreviewerImpl", "TAESDPreviewerImpl")
_METHODS = ("decode_latent_to_preview", "decode_latent_to_preview_image")


@contextmanager
def playing(
    model: ModelPatcher, steps: int, seen: dict[str, Any], latent: Tensor
) -> Iterator[Callback]:
    """Provide the function to call after each step, as ComfyUI's `prepare_callback` does."""
    first = latent.unbind()[0] if latent.is_nested else latent
    if not _may_play(model, first):
        yield latent_preview.prepare_callback(model, steps, seen)
        return
    makers = _makers(model, first)
    frames = max(1, getattr(model.model.latent_format, "temporal_downscale_ratio", 4))
    player = ClipPlayer(_FPS.get(first.shape[1], 16) / frames)
    bar = comfy.utils.ProgressBar(steps)

    def step_done(step: int, x0: Any, x: Any, total_steps: int) -> None:  # noqa: ANN401, tensors
        seen["x0"] = x0
        video = x0.tensors[0] if x0.is_nested else x0
        pictures = _make(makers, video[:1])
        if pictures is not None:
            player.play(pictures)
        bar.update_absolute(step + 1, total_steps, player.current)

    try:
        yield step_done
    finally:
        player.stop()


# A maker that fails is removed, and so are those after one that made pictures: better pictures are
# never replaced by rougher ones.
def _make(makers: list[_Maker], x0: Tensor) -> numpy.ndarray | None:
    """Return the pictures of the first maker that makes some; None: the last pictures stay."""
    for maker in makers.copy():
        try:
            pictures = maker(x0)
        except Exception as error:
            makers.remove(maker)
            rest = "using latent2rgb" if makers else "the run goes on without"
            _logger.warning("Fast Video VAE: making a preview failed; %s: %s", rest, error)
            continue
        if pictures is not None:
            makers[:] = makers[: makers.index(maker) + 1]
            return pictures
    return None


# Where a decode does not fit into the time or the memory, there are none. A decode that takes
# longer than it may is given up after a latent frame, and tried again when there is twice the time.
class _TinyFrames:
    """Makes pictures by a tiny decoder: every fourth frame, one for each latent frame."""

    def __init__(self, decoder: TinyDecoder, latent_format: Any) -> None:  # noqa: ANN401
        self._decoder, self._format = decoder, latent_format
        self._began_at = time.monotonic()
        self._spent_s = self._needed_s = 0.0

    def __call__(self, x0: Tensor) -> numpy.ndarray | None:
        # Wait for the step, so that the time of its queued work is not counted as that of a decode.
        x0[(0,) * x0.ndim].item()
        start = time.monotonic()
        allowed_s = _SHARE * (start - self._began_at) - self._spent_s
        if self._needed_s > allowed_s or not self._fits(x0):
            return None
        pictures = self._decode(x0, start + allowed_s)
        took_s = time.monotonic() - start
        self._spent_s += took_s
        self._needed_s = took_s if pictures is not None else 2 * took_s
        return pictures

    def _fits(self, x0: Tensor) -> bool:
        """Return whether a decode fits into free memory, without moving a model."""
        free = comfy.model_management.get_free_memory(self._decoder.device)
        return self._decoder.peak_bytes(x0.shape, chunk=1) < free

    def _decode(self, x0: Tensor, end: float) -> numpy.ndarray | None:
        """Return the pictures; None: at the time `end` there are latent frames left."""
        done, largest = [], latent_preview.MAX_PREVIEW_RESOLUTION
        for frames in self._decoder.decode_stream(self._format.process_out(x0.float()), chunk=1):
            comfy.model_management.throw_exception_if_processing_interrupted()
            picture = frames[:, :, -1].float()  # the only frame of the first latent frame
            smaller = max(1, max(picture.shape[-2:]) // largest)
            picture = F.avg_pool2d(picture, smaller)[0].movedim(0, -1)
            done.append(picture.mul(255).clamp_(0, 255).byte().cpu().numpy())
            if len(done) < x0.shape[2] and time.monotonic() > end:
                return None
        return numpy.stack(done)


def _may_play(model: ModelPatcher, latent: Tensor) -> bool:
    """Return whether a clip may take the place of ComfyUI's preview."""
    if args.preview_method == LatentPreviewMethod.NoPreviews:
        return False
    latent_format = model.model.latent_format
    if latent.ndim != 5 or latent.shape[2] < 2 or not has_factors(latent_format, latent.shape[1]):
        return False
    if args.preview_method == LatentPreviewMethod.TAESD and not _is_wan(latent_format):
        return False
    kinds = [getattr(latent_preview, name) for name in _PREVIEWERS if hasattr(latent_preview, name)]
    methods = [getattr(kind, name) for kind in kinds for name in _METHODS]
    functions = [latent_preview.prepare_callback, latent_preview.preview_to_image, *methods]
    if not all(_is_of_comfyui(each) for each in functions):
        return False
    if _is_of_comfyui(latent_preview.get_previewer):
        return True
    # Another pack may return ComfyUI's previewer, such as one whose switch is off. With taesd a
    # previewer loads its decoder.
    method, args.preview_method = args.preview_method, LatentPreviewMethod.Latent2RGB
    try:
        return type(latent_preview.get_previewer(model.load_device, latent_format)) in kinds
    finally:
        args.preview_method = method


def _is_of_comfyui(function: Callable[..., object]) -> bool:
    """Return whether a function was defined in ComfyUI's file; a wrapper can have its name."""
    return getattr(function, "__globals__", None) is vars(latent_preview)


def _is_wan(latent_format: Any) -> bool:  # noqa: ANN401, any format
    return str(latent_format.taesd_decoder_name).startswith("lighttaew2")


def _makers(model: ModelPatcher, latent: Tensor) -> list[_Maker]:
    """Return what makes pictures, the preferred one first, for latents like `[B, C, t, h, w]`."""
    latent_format, device = model.model.latent_format, model.load_device
    makers: list[_Maker] = [lambda x0: color(latent_format, x0[0]).cpu().numpy()]
    if args.preview_method != LatentPreviewMethod.TAESD:
        return makers
    channels = latent.shape[1]
    try:
        name = tiny_file(channels)
        if name is None:
            raise FileNotFoundError(f"models/vae_approx has no {latent_format.taesd_decoder_name}")
        return [_TinyFrames(tiny_decoder_on(device, name, channels), latent_format), *makers]
    except Exception as error:
        _logger.warning("Fast Video VAE: no tiny decoder for previews; using latent2rgb: %s", error)
        return makers
