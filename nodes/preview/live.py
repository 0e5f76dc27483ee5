"""The preview of a sampling run: the whole clip plays while the next step is computed.

ComfyUI's choice of a method holds (`--preview-method`, or the prompt's own): latent2rgb, or taesd
with a tiny decoder in the step's thread, for about a tenth of the time of the run. ComfyUI's own
callback is used where there is nothing to play (no previews, images, other models), and where
another pack has replaced a part of its preview, such as VideoHelperSuite. Nothing of ComfyUI is
replaced here. Facts about it are from latent_preview.py and main.py of 0.33.
"""

import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import comfy.model_management
import comfy.utils
import latent_preview
import torch.nn.functional as F
from comfy.cli_args import LatentPreviewMethod, args
from comfy.model_patcher import ModelPatcher
from PIL.Image import Image, fromarray
from torch import Tensor

from ..host.latents import first_of
from .formats import colors, has_factors
from .tiny_decoder import TinyDecoder, tiny_decoder_on, tiny_file, tiny_model

_logger = logging.getLogger(__name__)

Callback = Callable[[int, Any, Any, int], None]

# Makes pictures of a denoised latent `[1, C, t, h, w]`, one of each latent frame, or none.
_Maker = Callable[[Tensor], list[Image]]

# Frames per second of the models' videos, by channels of their latents.
_FPS = {16: 16, 48: 24}

# Share of the time of a run that decodes with a tiny decoder may take.
_SHARE = 0.1

# A thread that is in the middle of a message ends within microseconds.
_JOIN_S = 5.0


# The thread calls ComfyUI's hook as a step does: the hook puts messages into the server's queue.
@contextmanager
def playing(
    model: ModelPatcher, steps: int, seen: dict[str, Any], latent: Tensor
) -> Iterator[Callback]:
    """Provide the function to call after each step, as ComfyUI's `prepare_callback` does."""
    first = first_of(latent)
    if not _may_play(model, first):
        yield latent_preview.prepare_callback(model, steps, seen)
        return
    latent_format = model.model.latent_format
    makers: list[_Maker] = [lambda x0: colors(latent_format, x0)]
    if args.preview_method == LatentPreviewMethod.TAESD:
        makers.insert(0, _TinyFrames(model))
    frames = max(1, getattr(latent_format, "temporal_downscale_ratio", 4))
    period_s = frames / _FPS.get(first.shape[1], 16)
    bar, clip, ended = comfy.utils.ProgressBar(steps), list[Image](), threading.Event()

    def picture() -> tuple[str, Image, int] | None:
        at = int(time.monotonic() / period_s) % max(1, len(clip))
        return ("JPEG", clip[at], latent_preview.MAX_PREVIEW_RESOLUTION) if clip else None

    def step_done(step: int, x0: Any, x: Any, total_steps: int) -> None:  # noqa: ANN401, tensors
        seen["x0"] = x0
        clip[:] = _make(makers, first_of(x0)[:1]) or clip
        bar.update_absolute(step + 1, total_steps, picture())

    def play() -> None:
        while not ended.wait(period_s):
            try:
                if clip and bar.hook:
                    bar.hook(bar.current, bar.total, picture(), node_id=bar.node_id)
            except comfy.model_management.InterruptProcessingException:  # for the other thread
                return comfy.model_management.interrupt_current_processing()
            except RuntimeError:  # the server shuts down: its event loop is closed
                return

    run = contextvars.copy_context().run  # names the node
    thread = threading.Thread(target=run, args=(play,), name="fast-vae-preview", daemon=True)
    thread.start()
    try:
        yield step_done
    finally:
        ended.set()
        thread.join(_JOIN_S)


# A maker that fails is removed, and so are those after one that made pictures: better pictures are
# never replaced by rougher ones.
def _make(makers: list[_Maker], x0: Tensor) -> list[Image]:
    """Return the pictures of the first maker that makes some; none: the last pictures stay."""
    for maker in makers.copy():
        try:
            pictures = maker(x0)
        except Exception as error:
            makers.remove(maker)
            rest = "using latent2rgb" if makers else "the run goes on without"
            _logger.warning("Fast Video VAE: making a preview failed; %s: %s", rest, error)
            continue
        if pictures:
            makers[:] = makers[: makers.index(maker) + 1]
            return pictures
    return []


# Where a decode does not fit into the time or the memory, there are none. A decode that takes
# longer than it may is given up after a latent frame, and tried again when there is twice the time.
class _TinyFrames:
    """Makes pictures by a tiny decoder: every fourth frame, one for each latent frame."""

    def __init__(self, model: ModelPatcher) -> None:
        self._format, self._device = model.model.latent_format, model.load_device
        self._began_at = time.monotonic()
        self._spent_s = self._needed_s = 0.0

    @functools.cached_property
    def _decoder(self) -> TinyDecoder:
        channels = self._format.latent_channels
        name = tiny_file(channels)
        if name is None:
            raise FileNotFoundError(f"models/vae_approx has no {self._format.taesd_decoder_name}")
        return tiny_decoder_on(self._device, tiny_model(name, channels))

    def __call__(self, x0: Tensor) -> list[Image]:
        # Wait for the step, so that the time of its queued work is not counted as that of a decode.
        x0[(0,) * x0.ndim].item()
        decoder, done, start = self._decoder, [], time.monotonic()
        allowed_s = _SHARE * (start - self._began_at) - self._spent_s
        free = comfy.model_management.get_free_memory(self._device)  # no model is moved
        if self._needed_s > allowed_s or decoder.peak_bytes(x0.shape) >= free:
            return []
        frames = decoder.frames(self._format.process_out(x0.float()), self._device)
        for frame in islice(frames, None, None, 4):
            comfy.model_management.throw_exception_if_processing_interrupted()
            smaller = max(1, max(frame.shape[-2:]) // latent_preview.MAX_PREVIEW_RESOLUTION)
            picture = F.avg_pool2d(frame.float(), smaller)[0].movedim(0, -1)
            done.append(fromarray(picture.mul(255).clamp_(0, 255).byte().cpu().numpy()))
            if time.monotonic() - start > allowed_s:
                break
        took_s, whole = time.monotonic() - start, len(done) == x0.shape[2]
        self._spent_s += took_s
        self._needed_s = took_s if whole else 2 * took_s
        return done if whole else []


def _may_play(model: ModelPatcher, latent: Tensor) -> bool:
    """Return whether a clip may take the place of ComfyUI's preview."""
    method, latent_format = args.preview_method, model.model.latent_format
    is_clip = latent.ndim == 5 and latent.shape[2] > 1
    is_wan = str(latent_format.taesd_decoder_name).startswith("lighttaew2")
    is_known = is_wan if method == LatentPreviewMethod.TAESD else True
    if method == LatentPreviewMethod.NoPreviews or not (is_clip and is_known):
        return False
    if not has_factors(latent_format, latent.shape[1]):
        return False
    args.preview_method = LatentPreviewMethod.Latent2RGB  # with taesd it loads a decoder
    try:
        previewer: Any = latent_preview.get_previewer(model.load_device, latent_format)
    finally:
        args.preview_method = method
    if type(previewer) is not latent_preview.Latent2RGBPreviewer:
        return False
    # Another pack may replace a class, a method or a function of ComfyUI's file, under its name.
    used = [latent_preview.prepare_callback, latent_preview.preview_to_image]
    used += [previewer.decode_latent_to_preview, previewer.decode_latent_to_preview_image]
    return all(getattr(each, "__globals__", None) is vars(latent_preview) for each in used)
