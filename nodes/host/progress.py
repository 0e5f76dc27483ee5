"""Progress bar, preview and stop button of an encode or decode."""

import sys
import time
from collections.abc import Iterable, Iterator

import comfy.utils
import latent_preview
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_execution.utils import get_executing_context
from torch import Tensor, nn

# Seconds between previews; each is a message of its own, and at this rate they cost nothing.
_PREVIEW_SECONDS = 0.5


class Progress:
    """Progress bar and preview, if `shown`, and interrupt check of one encode or decode."""

    def __init__(self, total: int, *, shown: bool = True) -> None:
        throw_exception_if_processing_interrupted()
        self._bar = comfy.utils.ProgressBar(total) if shown else None
        self._done, self._total = 0, total
        self._previewed = 0.0

    def passed(self, count: int, images: Tensor | None = None) -> None:
        """Report `count` frames or latents as done, and show the last of `[T, H, W, C]` images."""
        throw_exception_if_processing_interrupted()
        self._done += count
        if self._bar is not None:
            self._bar.update_absolute(self._done, preview=self._preview(images))

    def completed(self) -> None:
        """Fill the progress bar of work that took fewer steps than expected."""
        if self._done < self._total:
            self.passed(self._total - self._done)

    def counted(self, pieces: Iterator[Tensor], *, are_images: bool = False) -> Iterator[Tensor]:
        """Report and yield pieces `[B, C, n, h, w]`, or images `[B, n, H, W, C]` to preview."""
        for piece in pieces:
            count = piece.shape[0] * piece.shape[1 if are_images else 2]
            self.passed(count, piece[-1] if are_images else None)
            yield piece

    def _preview(self, images: Tensor | None) -> tuple[str, object, int] | None:
        if images is None or args.preview_method == LatentPreviewMethod.NoPreviews:
            return None
        if time.monotonic() - self._previewed < _PREVIEW_SECONDS:
            return None
        self._previewed = time.monotonic()
        last = images[-1, :, :, :3].cpu().float()
        unit = last if images.is_floating_point() else last / torch.iinfo(images.dtype).max
        picture = latent_preview.preview_to_image(unit, do_scale=False)
        return "JPEG", picture, latent_preview.MAX_PREVIEW_RESOLUTION


def show_text(text: str) -> None:
    """Show `text` on the running node, if there is a frontend."""
    host = getattr(sys.modules.get("server"), "PromptServer", None)
    context, instance = get_executing_context(), getattr(host, "instance", None)
    if context is not None and instance is not None:
        instance.send_progress_text(text, context.node_id)


def stop_between_layers(layers: Iterable[nn.Module]) -> None:
    """Check for an interrupt before each of `layers`: a chunk of large frames can take minutes."""
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: throw_exception_if_processing_interrupted())
