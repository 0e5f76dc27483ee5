"""The preview of a sampling run: the whole clip plays while the next step is computed.

After each step the denoised latent becomes one picture per latent frame, and a thread sends these
one after another (`clip_player`). ComfyUI's choice of a method holds: `--preview-method`, or the
prompt's own. With latent2rgb (and auto, which means it) the colors are one small product on the
device; with taesd a tiny decoder decodes the clip in the step's thread, for at most a tenth of the
time. As many copies wait for the device as in ComfyUI's own preview: one per step.

ComfyUI's own callback is used where there is nothing to play (no previews, images, other models),
and where another pack has replaced its previewer, such as VideoHelperSuite. Nothing of ComfyUI is
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
import torch
import torch.nn.functional as F
from comfy.cli_args import LatentPreviewMethod, args
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...kernels import is_out_of_memory
from ...vae import preview
from .clip_player import ClipPlayer
from .decoders import dtype_on
from .formats import color, has_factors
from .tiny_files import path_of, tiny_file

_logger = logging.getLogger(__name__)

Callback = Callable[[int, Any, Any, int], None]

# Frames per second of the models' videos, by channels of their latents.
_FPS = {16: 16, 48: 24}

# Share of the time that decodes with a tiny decoder may take.
_SHARE = 0.1

# Previewers that a clip may take the place of.
_CORE = ("Latent2RGBPreviewer", "TAEHVPreviewerImpl", "TAESDPreviewerImpl")


@contextmanager
def playing(
    model: ModelPatcher, steps: int, seen: dict[str, Any], latent: Tensor
) -> Iterator[Callback]:
    """Provide the function to call after each step, as ComfyUI's `prepare_callback` does.

    Args:
        model: The model of the run.
        steps: Steps of the run.
        seen: Gets the denoised latent of the last step as `x0`.
        latent: `[B, C, t, h, w]`, or several in one (`is_nested`): what the run starts from.

    Yields:
        A function of the step, the denoised latent, the noisy latent and the number of steps. It
        shows the progress and the preview.
    """
    first = latent.unbind()[0] if latent.is_nested else latent
    if not _may_play(model, first):
        yield latent_preview.prepare_callback(model, steps, seen)
        return
    source = _source(model, first)
    player = ClipPlayer(_FPS.get(first.shape[1], 16) / _times(model))
    bar = comfy.utils.ProgressBar(steps)

    def step_done(step: int, x0: Any, x: Any, total_steps: int) -> None:  # noqa: ANN401, tensors
        seen["x0"] = x0
        part = x0.tensors[0] if x0.is_nested else x0
        pictures = source(part[:1])
        if pictures is not None:
            player.play(pictures)
        bar.update_absolute(step + 1, total_steps, player.current)

    try:
        yield step_done
    finally:
        player.stop()


class _Colors:
    """Pictures by the factors of a latent format."""

    def __init__(self, latent_format: Any) -> None:  # noqa: ANN401, any format
        self._format = latent_format

    def __call__(self, x0: Tensor) -> numpy.ndarray:
        return color(self._format, x0[0]).cpu().numpy()


class _TinyFrames:
    """Pictures by a tiny decoder: every fourth frame, one for each latent frame.

    Where a decode does not fit into the time or the memory, the last pictures stay; where there are
    none, the factors are used.
    """

    def __init__(self, decoder: preview.TinyDecoder, latent_format: Any) -> None:  # noqa: ANN401
        self._decoder, self._format = decoder, latent_format
        self._instead: _Colors | None = _Colors(latent_format)
        self._free_at = 0.0

    def __call__(self, x0: Tensor) -> numpy.ndarray | None:
        start = time.monotonic()
        if start < self._free_at:
            return None
        pictures = self._decoded(x0) if self._fits(x0) else None
        if pictures is None:
            return None if self._instead is None else self._instead(x0)
        self._instead = None
        now = time.monotonic()
        self._free_at = now + (now - start) * (1 / _SHARE - 1)
        return pictures

    def _fits(self, x0: Tensor) -> bool:
        """Return whether a decode fits into free memory, without moving a model."""
        free = comfy.model_management.get_free_memory(self._decoder.device)
        return self._decoder.peak_bytes(x0.shape) < free

    def _decoded(self, x0: Tensor) -> numpy.ndarray | None:
        try:
            return torch.cat(list(self._frames(x0))).cpu().numpy()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _frames(self, x0: Tensor) -> Iterator[Tensor]:
        at, largest = 0, latent_preview.MAX_PREVIEW_RESOLUTION
        for piece in self._decoder.decode_stream(self._format.process_out(x0.float())):
            comfy.model_management.throw_exception_if_processing_interrupted()
            frames = piece[0, :, -at % 4 :: 4].movedim(1, 0)
            at += piece.shape[2]
            smaller = max(1, max(frames.shape[-2:]) // largest)
            frames = F.avg_pool2d(frames.float(), smaller)
            yield frames.movedim(1, -1).mul(255).clamp_(0, 255).to(torch.uint8)


def _may_play(model: ModelPatcher, latent: Tensor) -> bool:
    """Return whether a clip may take the place of ComfyUI's preview."""
    if args.preview_method == LatentPreviewMethod.NoPreviews:
        return False
    latent_format = model.model.latent_format
    if latent.ndim != 5 or latent.shape[2] < 2 or not has_factors(latent_format, latent.shape[1]):
        return False
    if args.preview_method == LatentPreviewMethod.TAESD and not _is_wan(latent_format):
        return False
    if not _is_cores(latent_preview.prepare_callback):
        return False
    if _is_cores(latent_preview.get_previewer):
        return True
    # Another pack may return ComfyUI's previewer, such as one whose switch is off.
    previewer = latent_preview.get_previewer(model.load_device, latent_format)
    return type(previewer) in [getattr(latent_preview, name, None) for name in _CORE]


def _is_cores(function: Callable[..., object]) -> bool:
    """Return whether a function was defined in ComfyUI's file; a wrapper can have its name."""
    return getattr(function, "__globals__", None) is vars(latent_preview)


def _is_wan(latent_format: Any) -> bool:  # noqa: ANN401, any format
    return str(latent_format.taesd_decoder_name).startswith("lighttaew2")


def _source(model: ModelPatcher, latent: Tensor) -> Callable[[Tensor], numpy.ndarray | None]:
    """Return the function that makes pictures of a denoised latent `[1, C, t, h, w]`."""
    latent_format, device = model.model.latent_format, model.load_device
    if args.preview_method != LatentPreviewMethod.TAESD:
        return _Colors(latent_format)
    name = tiny_file(latent.shape[1])
    if name is None:
        missing = latent_format.taesd_decoder_name
        _logger.warning(
            "Fast Video VAE: models/vae_approx has no %s for previews; using latent2rgb", missing
        )
        return _Colors(latent_format)
    try:
        decoder = preview.load_tiny_decoder(path_of(name), device, dtype_on(device))
    except Exception as error:
        if not (isinstance(error, ValueError | OSError) or is_out_of_memory(error)):
            raise
        _logger.warning("Fast Video VAE: no tiny decoder for previews: %s", error)
        return _Colors(latent_format)
    return _TinyFrames(decoder, latent_format)


def _times(model: ModelPatcher) -> int:
    """Return video frames per latent frame."""
    return max(1, getattr(model.model.latent_format, "temporal_downscale_ratio", 4))
