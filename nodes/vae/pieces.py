"""Streams of a fast VAE in ComfyUI: their options, weights and memory.

A stream holds a piece of a video at a time, so its memory does not grow with the length. A VAE here
is ComfyUI's object around a `FastVideoVAE`. Facts about ComfyUI are from comfy/sd.py and
comfy/model_management.py of 0.33.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import comfy.model_management
import comfy.sd
import torch
from torch import Tensor

from ...vae import StreamOptions, retried
from ..host import timing
from ..host.devices import names, selected
from ..host.oom import free_others, in_turn
from ..host.patches import log_cut_patches

AUTOMATIC = StreamOptions()

# Pieces of latents that one copy moves.
_MOVED_TOGETHER = 16


def options_for(
    vae: comfy.sd.VAE,
    options: StreamOptions,
    tile: tuple[int, int] | None = None,
    *,
    encode: bool = False,
    single_frame: bool = False,
) -> StreamOptions:
    """Return the options of a stream with a tile in latents.

    SeedVR2 cannot be tiled: there the memory of such a tile is the limit. When memory runs out, the
    stream lets other models be unloaded, and goes on in smaller steps and tiles, at last on the
    CPU.
    """
    model = vae.first_stage_model
    step = model.config.spatial_compression * model.config.output_scale
    limit = model.tile_limit(tile, encode=encode, single_frame=single_frame)
    if tile is not None:
        tile = None if model.is_seedvr2 else (tile[0] * step, tile[1] * step)
    return StreamOptions(options.chunk or model.chunk, options.dtype, limit, tile, release(vae))


def decode_pieces(
    vae: comfy.sd.VAE,
    latent: Tensor,
    options: StreamOptions,
    *,
    frames: range | None = None,
    images: Tensor | None = None,
    out: Tensor | None = None,
    deep: bool = False,
) -> Iterator[Tensor]:
    """Decode `[B, C_latent, t, h, w]` into `images` or `out`, if given, and yield each part."""
    with comfy.model_management.cuda_device_context(vae.device):
        load(vae, decode_bytes(vae, latent.shape, options))
        decode = vae.first_stage_model.decode_stream
        yield from decode(latent, options, out=out, images=images, frames=frames, deep=deep)


def moved(vae: comfy.sd.VAE, latents: Iterator[Tensor]) -> Tensor:
    """Join means to a LATENT on its device, several per copy, because each copy waits for it."""

    def joined(parts: list[Tensor]) -> Tensor:
        # At last a stream is on the CPU.
        whole = torch.cat([each.to(parts[-1].device) for each in parts], dim=2)
        return whole.to(vae.output_device, vae.vae_output_dtype())

    tried = functools.partial(retried, device=vae.device, task="an encode", release=release(vae))
    done: list[Tensor] = []
    while held := list(itertools.islice(latents, _MOVED_TOGETHER)):
        done.append(tried(functools.partial(joined, held)))
    whole, form = tried(lambda: joined(done)), vae.format_encoded
    return whole if form is None else tried(lambda: form(whole))


def log_cut(vae: comfy.sd.VAE, height: int, width: int) -> None:
    """Log a size of which the diffusion model cuts rows or columns."""
    config = vae.first_stage_model.config
    if config.family == "wan2.2":  # of one diffusion model
        step = config.spatial_compression
        log_cut_patches("Wan 2.2 5B", (height // step, width // step), (2, 2), step)


def load(vae: comfy.sd.VAE, memory_bytes: float) -> None:
    """Load the weights to the device of the work, and free `memory_bytes` on it and others.

    Where there is no room for the weights, they stay on the CPU, and the work is done there.
    """
    management, found = comfy.model_management, devices(vae)

    def loaded(on_cpu: bool) -> list[torch.device]:
        if on_cpu:
            management.unload_model_and_clones(vae.patcher)
            return [vae.device]
        management.load_models_gpu(
            [vae.patcher], memory_required=memory_bytes, force_full_load=vae.disable_offload
        )
        if vae.first_stage_model.device.type != vae.device.type:
            # With --novram ComfyUI leaves weights on the host, for operations that fetch them.
            vae.patcher.partially_load(vae.device, extra_memory=1e32)
        for each in found[1:]:
            _make_room(vae, memory_bytes, each)
        return found

    with timing.span("load", "VAE to its device", vae.device):
        shared = in_turn(vae.device, "the load of a VAE", loaded, "on the CPU")
    vae.first_stage_model.share(shared)


def release(vae: comfy.sd.VAE) -> Callable[[torch.device], None]:
    """Return a function that unloads other models from a device of `vae`."""

    def unload(device: torch.device) -> None:
        # Others are names of the VAE's own, such as mps:0 for mps.
        free_others(device if device in devices(vae) else vae.device, vae.patcher)

    return unload


def devices(vae: comfy.sd.VAE) -> list[torch.device]:
    """Return the device of `vae`, then the selected ones of its type that share its work."""
    # ComfyUI can put the VAE on another device than that of its loader.
    others = selected(vae.first_stage_model.selection)
    near = [each for each in others if each.type == vae.device.type and each != vae.device]
    return [vae.device, *near]


def label(vae: comfy.sd.VAE) -> str:
    """Return the names of the devices of `vae` for the table of times; "": there is one."""
    found = devices(vae)
    return names(found) if len(found) > 1 else ""


def decode_bytes(vae: comfy.sd.VAE, shape: torch.Size, options: StreamOptions = AUTOMATIC) -> int:
    """Return the bytes for decoding a latent of `shape`, per video of `vae`'s batch."""
    model = vae.first_stage_model
    height, width = (model.config.spatial_compression * length for length in shape[-2:])
    return _plan_bytes(
        vae, height, width, options, encode=False, single_frame=model.video_shape(shape)[2] == 1
    )


def encode_bytes(vae: comfy.sd.VAE, shape: torch.Size, options: StreamOptions = AUTOMATIC) -> int:
    """Return the bytes for encoding frames of `shape`, per video of `vae`'s batch."""
    single_frame = len(shape) == 4 or shape[2] <= vae.first_stage_model.config.temporal_compression
    return _plan_bytes(vae, *shape[-2:], options, encode=True, single_frame=single_frame)


def _make_room(vae: comfy.sd.VAE, memory_bytes: float, device: torch.device) -> None:
    """Unload models from another device of the work, as ComfyUI does for the VAE's own."""
    management = comfy.model_management
    # A band of the frames takes less than the frames; the copy of the weights is all of them.
    work = max(
        management.minimum_inference_memory(), memory_bytes + management.extra_reserved_memory()
    )
    management.free_memory(1.1 * vae.model_size() + work, device)


def _plan_bytes(
    vae: comfy.sd.VAE,
    height: int,
    width: int,
    options: StreamOptions,
    *,
    encode: bool,
    single_frame: bool,
) -> int:
    # The memory of the plan that an empty device would run, so that ComfyUI unloads other models
    # before. Requested tiles mean that memory is short: request the smallest steps on a tile. The
    # stream finds any further free memory itself.
    limit = options.limit_bytes or (None if options.tile is None else 1)
    plan = vae.first_stage_model.plan(
        height,
        width,
        StreamOptions(limit_bytes=limit, tile=options.tile),
        encode=encode,
        single_frame=single_frame,
        device=vae.device,  # the weights may be on the host
        empty=True,
    )
    return plan.peak_bytes
