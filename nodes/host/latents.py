"""The video or images of a LATENT, and latents that do not fill the patches of a model."""

from collections.abc import Sequence

from torch import Tensor

from .lazy import Later

kernels = Later("kernels")


def first_of(samples: Tensor) -> Tensor:
    """Return the samples of a LATENT; of one with audio, those without it."""
    return samples.unbind()[0] if samples.is_nested else samples


def log_cut_patches(model: str, size: Sequence[int], patch: Sequence[int], step: int) -> None:
    """Log once that the rows and columns `size`, of `step` pixels, do not fill patches.

    ComfyUI then adds some of the opposite edge for the model, and cuts off what it makes of them
    (`pad_to_patch_size` of comfy/ldm/common_dit.py, 0.33).
    """
    fits = []
    for edge, length, side in zip(("height", "width"), size, patch, strict=True):
        if odd := length % side:
            around = [str(step * each) for each in (length - odd, length - odd + side) if each]
            fits.append(f"{edge} {' or '.join(around)}")
    if fits:
        needs = "even numbers" if max(patch) == 2 else f"multiples of {max(patch)}"
        kernels.log_once(
            f"the latent has {size[0]} rows and {size[1]} columns; {model} needs {needs}, so "
            f"ComfyUI repeats the opposite edge, which can show. In pixels: {', '.join(fits)}"
        )
