"""Construct a `FastVAE` from a file, or from a VAE that ComfyUI loaded.

ComfyUI builds its own object from tensors without memory, so that devices and defaults are
ComfyUI's and follow its upgrades. A copy of that object then gets this pack's network, a plain
`ModelPatcher` that keeps the weights resident, and the class `FastVAE`. Facts about ComfyUI here
are from comfy/sd.py and comfy/model_patcher.py of 0.33.
"""

import contextlib
import copy
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import comfy.sd
import torch
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...vae import Checkpoint, VAEConfig, VideoVAE, build_vae, read_checkpoint
from ..host.devices import ONE, names, selected
from ..host.error_text import about
from . import pieces
from .comfy_vae import FastVAE, FastVideoVAE

_logger = logging.getLogger(__name__)

# ComfyUI's networks that are replaced.
_NETWORKS = {
    ("comfy.ldm.wan.vae", "WanVAE"),
    ("comfy.ldm.wan.vae2_2", "WanVAE"),
    ("comfy.ldm.seedvr.vae", "VideoAutoencoderKLWrapper"),
}

# Options of ComfyUI's command line that choose the dtype of VAEs, or their device.
_DTYPE_FLAGS = ("fp32_vae", "fp16_vae", "bf16_vae", "cpu_vae")


@dataclass(frozen=True)
class Choice:
    """The user's settings for a VAE; None: ComfyUI's, the VAE's own, or chosen by the plan."""

    dtype: torch.dtype | None = None
    encode_dtype: torch.dtype | None = None
    chunk: int | None = None  # latents per step; -1: all
    allow_fp16: bool = False  # not chosen: true without `dtype` and ComfyUI's own options
    devices: str | None = None  # a selection of `host.devices`
    precision: str | None = None  # of decoding


def load(path: str | Path, choice: Choice) -> FastVAE:
    """Load a VAE from a checkpoint; ComfyUI reloads it from `path` for another device."""
    return _ready(_loaded(path, choice))


def accelerate(vae: comfy.sd.VAE, choice: Choice) -> comfy.sd.VAE:
    """Put this pack's network into a copy of a VAE, or return it with the reason in the log."""
    reason = _refusal(vae, choice)
    if reason is not None:
        _logger.info("Fast Video VAE: this VAE is unchanged: %s", reason)
        return vae
    settled = _settled(vae, choice)
    fast = _swapped(vae, _network(vae.patcher, settled))
    fast.patcher.patches = patches_of(vae.patcher)
    origin = vae.patcher.cached_patcher_init
    if origin is not None:
        fast.patcher.cached_patcher_init = (_accelerate_patcher, (origin, settled))
    return _ready(fast)


def accelerated(vae: comfy.sd.VAE, choice: Choice, kinds: str) -> FastVAE:
    """Return the fast VAE of `accelerate`, or raise an error that names the expected `kinds`."""
    fast = accelerate(vae, choice)
    if not isinstance(fast, FastVAE):
        raise ValueError(
            f"got a {type(vae).__name__} with {type(vae.first_stage_model).__name__}, which cannot "
            f"be accelerated (see the log); expected a VAE of {kinds}"
        )
    return fast


def weights_of(patcher: ModelPatcher) -> dict[str, Tensor]:
    """Return the weights of the model of `patcher`, tensors `[...]`, without patches."""
    saved = {key: backup.weight for key, backup in patcher.backup.items()}
    return dict(patcher.model.state_dict()) | saved


def patches_of(patcher: ModelPatcher) -> dict[str, list]:
    """Return the weight patches of `patcher`, for another patcher."""
    return {key: list(patches) for key, patches in patcher.patches.items()}


def _loaded(path: str | Path, choice: Choice) -> FastVAE:
    checkpoint = read_checkpoint(path)
    core = _core_vae(checkpoint.config)
    vae = _swapped(core, _network(core.patcher, _settled(core, choice), checkpoint))
    vae.patcher.cached_patcher_init = (_load_patcher, (str(path), choice))
    return vae


def _ready(vae: FastVAE) -> FastVAE:
    """Prepare the kernels of a VAE, and log the devices that it uses if several are selected."""
    model, own, found = vae.first_stage_model, vae.device, pieces.devices(vae)
    if len(found) > 1:
        _logger.info("Fast Video VAE: this VAE shares each video among %s", names(found))
        model.share(found)
    elif model.is_seedvr2 and any(each != own for each in selected(model.selection)):
        _logger.info(
            "Fast Video VAE: this VAE uses %s alone: the norms of SeedVR2 measure whole frames",
            names(found),
        )
    model.prepare(own)
    return vae


def _refusal(vae: comfy.sd.VAE, choice: Choice) -> str | None:
    """Return why a VAE is not accelerated; None: it is."""
    kind, network = type(vae), type(vae.first_stage_model)
    if kind is FastVAE:
        same = choice.devices in (None, vae.first_stage_model.selection)
        if replace(choice, devices=None) == Choice() and same:
            return "it is fast already"
    elif kind is not comfy.sd.VAE:
        return f"it is a {kind.__name__} of another pack"
    elif (network.__module__, network.__qualname__) not in _NETWORKS:
        return f"its network is {network.__name__}, not of Wan, Qwen-Image or SeedVR2"
    for name in ("object_patches", "weight_wrapper_patches", "injections", "hook_patches"):
        if getattr(vae.patcher, name, None):
            return f"another node has changed its network ({name})"
    return None


def _settled(vae: comfy.sd.VAE, choice: Choice) -> Choice:
    """Return the choice with open values filled in from the VAE."""
    if isinstance(vae, FastVAE):
        model = vae.first_stage_model
        own = Choice(model.dtype, model.encode_dtype, model.chunk, model.allow_fp16)
        own = replace(own, devices=model.selection, precision=model.precision)
    else:
        allow_fp16 = not any(getattr(args, flag, False) for flag in _DTYPE_FLAGS)
        own = Choice(vae.vae_dtype, vae.vae_dtype, allow_fp16=allow_fp16, devices=ONE)
    if choice.dtype:
        own = replace(own, encode_dtype=choice.dtype, allow_fp16=False)
    return replace(own, **{name: value for name, value in vars(choice).items() if value})


def _network(
    patcher: ModelPatcher, settled: Choice, checkpoint: Checkpoint | None = None
) -> FastVideoVAE:
    """Return a network with the weights of a checkpoint; None: it shares those of `patcher`."""
    model = build_vae(
        checkpoint or read_checkpoint(weights_of(patcher)),
        device=patcher.offload_device,
        dtype=settled.dtype,
        encode_dtype=settled.encode_dtype,
        share=checkpoint is None,
        kind=FastVideoVAE,
    )
    model.chunk, model.allow_fp16 = settled.chunk, settled.allow_fp16
    model.selection = settled.devices
    if settled.precision is not None:
        with about("precision"):
            model.precision = settled.precision
    return model


# The published VAE of the same layout, because ComfyUI's classes do not support all widths.
def _core_vae(config: VAEConfig) -> comfy.sd.VAE:
    """Return ComfyUI's own VAE object around a network without memory."""
    with torch.device("meta"):
        shapes = VideoVAE(config.standard(), torch.float32, torch.float32).state_dict()
        with contextlib.suppress(NotImplementedError, RuntimeError):
            return comfy.sd.VAE(sd=dict(shapes))
    # A ComfyUI that reads the weights gets zeros.
    return comfy.sd.VAE(sd={key: torch.zeros(value.shape) for key, value in shapes.items()})


def _swapped(core: comfy.sd.VAE, model: FastVideoVAE) -> FastVAE:
    """Return a copy of ComfyUI's VAE object with this pack's network, patcher and values."""
    config, scale = model.config, model.config.latent_scale
    vae = copy.copy(core)
    vae.__class__ = FastVAE
    vae.first_stage_model = model
    vae.patcher = ModelPatcher(model, core.patcher.load_device, core.patcher.offload_device)
    # The weights are on the device as a whole or not at all, because our convolutions do not fetch
    # them.
    vae.disable_offload = True
    # The network has no tiles; those of `FastVAE` are exact.
    vae.handles_tiling = False
    # Rows and columns that do not fill a latent are cropped. For SeedVR2, ComfyUI leaves that to
    # the convolutions, which see them but output no latent for them.
    vae.crop_input = True
    # Inputs are cast to this dtype, so it is the wider of the two; each is cast again.
    vae.vae_dtype = torch.promote_types(model.dtype, model.encode_dtype)
    vae.size = None  # of ComfyUI's network
    # ComfyUI's are attributes of the object and keep its network alive; without them the class's
    # are used.
    vae.format_encoded = None if scale == 1 else (lambda means: means * scale)
    for name in ("memory_used_decode", "memory_used_encode"):
        vae.__dict__.pop(name, None)
    frames, small = config.temporal_compression, config.spatial_compression
    large = small * config.output_scale
    vae.latent_dim, vae.downscale_ratio, vae.upscale_ratio = 2, small, large
    vae.downscale_index_formula = vae.upscale_index_formula = None
    if not config.is_of_pictures:
        vae.latent_dim, vae.downscale_ratio = 3, (config.latent_frames, small, small)
        vae.upscale_ratio = (lambda latents: max(0, config.frames(latents)), large, large)
        vae.downscale_index_formula = frames, small, small
        vae.upscale_index_formula = frames, large, large
    vae.latent_channels = config.latent_channels
    vae.output_channels = vae.conv_out_channels = config.image_channels
    if config.image_channels == 4:
        vae.pad_channel_value = 1.0  # a missing alpha channel is opaque
    return vae


def _load_patcher(path: str, choice: Choice, disable_dynamic: bool = False) -> ModelPatcher:
    """Read the file again; ComfyUI calls this to get the same VAE for another device."""
    return _loaded(path, choice).patcher


def _accelerate_patcher(
    origin: tuple[object, ...], settled: Choice, disable_dynamic: bool = False
) -> ModelPatcher:
    """Let ComfyUI read its VAE again, and put this pack's network on it."""
    factory, arguments, *index = origin
    patcher = factory(*arguments)
    patcher = patcher[index[0]] if index else patcher
    return ModelPatcher(_network(patcher, settled), patcher.load_device, patcher.offload_device)
