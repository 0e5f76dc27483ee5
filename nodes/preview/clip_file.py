"""An animated picture of a clip in ComfyUI's folder of temporary files, for the node to show.

Long clips lose frames and large ones pixels, because a picture is encoded as a whole: memory is at
most that of 320 pictures of 512 x 512, 240 MiB.
"""

import itertools

import comfy.model_management
from PIL import Image
from torch import Tensor

from ...vae.media import whole_file
from ..host.api import io, ui
from ..host.numbering import saved, unused_names

SIDE = 512
_MOST_PICTURES = 320

# 81 frames of 512 x 296 take 0.6 s with the fastest method of WebP, and 4 s with the default one.
_METHOD, _QUALITY = 0, 80

# WebP counts milliseconds in 32 bits with a sign.
_LONGEST_MS = 2**31 - 1 - _MOST_PICTURES

_PREFIX = "fast_vae_preview"


def save_animation(images: Tensor, fps: float) -> ui.SavedImages:
    """Write images `[T, H, W, 3]` in [0, 1] to an animated WebP, and return the node's `ui`."""
    count = len(images)
    fps = max(fps, 1000 * count / _LONGEST_MS)
    step = -(-count // _MOST_PICTURES)
    pictures = [_picture(images[at]) for at in range(0, count, step)]
    ends = [round(1000 * min(at + step, count) / fps) for at in range(0, count, step)]
    durations = [max(1, end - start) for start, end in itertools.pairwise([0, *ends])]
    width, height = pictures[0].size
    animated = len(pictures) > 1
    options = {"save_all": True, "append_images": pictures[1:], "duration": durations, "loop": 0}
    options = options if animated else {}
    names = unused_names(_PREFIX, io.FolderType.temp, ".webp", height, width)
    with whole_file(next(names), others=names) as draft:
        pictures[0].save(draft.part, format="WEBP", quality=_QUALITY, method=_METHOD, **options)
    return ui.SavedImages([saved(draft.path, io.FolderType.temp)], is_animated=animated)


def _picture(image: Tensor) -> Image.Image:
    """Return an image `[H, W, 3]` with at most `SIDE` pixels in height and in width."""
    comfy.model_management.throw_exception_if_processing_interrupted()
    picture = Image.fromarray((image * 255).clamp(0, 255).byte().cpu().numpy())
    picture.thumbnail((SIDE, SIDE), Image.Resampling.BILINEAR)
    return picture
