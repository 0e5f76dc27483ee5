"""The contestants of the command line's benchmark: this package twice, and diffusers.

All have the weights of one file, the same device and dtype, and the tensors of ComfyUI's nodes: a
decode returns float32 images in [0, 1] on the host, an encode a latent.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels import use_backend
from ..model import VideoVAE
from ..models.checkpoint_keys import to_wan_keys
from ..models.config import QWEN21, SEEDVR2, WAN22, LayoutError, VAEConfig
from ..streaming.options import StreamOptions
from .content import Clip, fitted, moving_pictures, random_latent
from .measure import Contestant, compare, device_label
from .report import ENCODE, BenchmarkReport, dtype_label


def race(
    vae: VideoVAE,
    tasks: Sequence[str],
    clip: Clip,
    rounds: int,
    chunk: int | None,
    progress: Callable[[int], Callable[[], None]],
) -> BenchmarkReport:
    """Measure a VAE on the fastest backends and on the reference, and diffusers' VAE.

    `progress` takes the number of calls of a task, and returns a function to call after each.
    """
    config, kept = vae.config, fitted(vae.config, clip)
    notes = [] if kept == clip else [f"{clip} requested, cropped to whole latents"]
    comparisons = []
    for task in tasks:
        found, note = contestants(vae, task, kept, chunk)
        notes += [] if note is None or note in notes else [note]
        passed = progress(len(found) * (rounds + 1))
        given = {"rounds": rounds, "dtype": dtype_label(_dtype(vae, task)), "device": vae.device}
        comparisons.append(compare(task, found, **given, passed=passed))
    name, device = f"{config.family}, base width {config.decoder_width}", device_label(vae.device)
    return BenchmarkReport(name, device, kept, rounds, comparisons, notes)


def contestants(
    vae: VideoVAE, task: str, clip: Clip, chunk: int | None = None
) -> tuple[list[Contestant], str | None]:
    """Return reference, fast and diffusers for a task, and why diffusers is missing, if it is."""
    config, dtype = vae.config, _dtype(vae, task)
    if task == ENCODE and config.encoder_width is None:
        raise ValueError("the VAE has a decoder only; expected --task decode")
    content = random_latent(config, clip)
    if task == ENCODE:  # with an opaque alpha channel where the VAE has one
        alpha = 0, 0, 0, 0, 0, 0, 0, config.image_channels - 3
        content = functional.pad(moving_pictures(clip) * 2 - 1, alpha, value=1.0)

    @torch.inference_mode()
    def fast() -> Tensor:
        if task == ENCODE:
            return vae.encode(content, chunk).to("cpu", torch.float32)
        batch, channels, *size = config.decoded_shape(content.shape)
        images = torch.empty(batch, *size, channels)
        # In the dtype that the report names: a chosen dtype never becomes float16 for its speed.
        for _ in vae.decode_stream(content, StreamOptions(chunk, vae.dtype), images=images):
            pass
        return images

    @torch.inference_mode()
    def diffusers() -> Tensor:
        turned = (0, 2) if config.is_of_pictures else (0, 0)  # its VAE for images takes a batch
        given = content.to(vae.device, dtype).transpose(*turned)
        if task == ENCODE:
            return peer.encode(given).latent_dist.mode().transpose(*turned).to("cpu", torch.float32)
        made = peer.decode(given).sample.transpose(*turned).to("cpu", torch.float32)
        return made.add_(1).div_(2).clamp_(0, 1).movedim(1, -1)

    found = [Contestant("reference", use_backend("reference")(fast)), Contestant("fast", fast)]
    try:
        if config.output_scale != 1:
            raise LayoutError("it has no VAE of this layout")
        peer: Any = diffusers_vae(vae.state_dict(), config, vae.device, dtype)
    except (LayoutError, ImportError) as error:
        return found, f"diffusers is left out: {error}"
    return [*found, Contestant("diffusers", diffusers)], None


def diffusers_vae(
    state: Mapping[str, Tensor], config: VAEConfig, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Build diffusers' VAE with copies of the weights `state` under Wan's names."""
    if importlib.util.find_spec("diffusers") is None:
        raise ImportError("it is not installed")
    if config.family == SEEDVR2 or config.encoder_widths is None:
        raise LayoutError("it has no VAE of this layout")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the import do not concern users
        try:
            import diffusers  # noqa: PLC0415, optional and slow
        except RuntimeError as error:
            raise ImportError(f"it does not import: {error}") from error
        name = "AutoencoderKLQwenImage21" if config.family == QWEN21 else "AutoencoderKLWan"
        kind = getattr(diffusers, name, None)
    if kind is None:
        raise LayoutError(f"this version has no {name}")
    channels = config.image_channels * config.patch_size**2
    given: dict[str, Any] = {
        "base_dim": config.encoder_width,
        "z_dim": config.latent_channels,
        "in_channels": channels,
        "out_channels": channels * config.output_scale**2,
    }
    if config.family in (WAN22, QWEN21):
        given["decoder_base_dim"] = config.decoder_width
    if config.family == WAN22:
        times = [False, True, True]
        given |= {"is_residual": True, "patch_size": 2, "temperal_downsample": times}
    with torch.device("meta"):
        module = kind(**given)
    shapes = module.state_dict()
    # The key names that we read from diffusers' files, in reverse.
    names = dict(zip(shapes, to_wan_keys(shapes), strict=True))
    if any(state[own].numel() != shapes[name].numel() for name, own in names.items()):
        raise LayoutError("it has no VAE with these stage widths")
    copies = {
        name: state[own].to(device, dtype).contiguous().clone().view(shapes[name].shape)
        for name, own in names.items()
    }
    module.load_state_dict(copies, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def _dtype(vae: VideoVAE, task: str) -> torch.dtype:
    return vae.encode_dtype if task == ENCODE else vae.dtype
