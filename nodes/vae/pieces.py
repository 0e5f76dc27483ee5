"""The work of a fast VAE in ComfyUI: every decode and encode passes through here.

The order is: options of the stream, memory and weights, then the stream in parts. A stream holds a
piece of a video at a time, so its memory does not grow with the length. A VAE here is ComfyUI's
object around a `FastVideoVAE`. Facts about ComfyUI are from comfy/sd.py and
comfy/model_management.py of 0.33.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import comfy.model_management
import comfy.sd
import torch
from torch import Tensor

from ...vae import StreamOptions, encode_corrected, retried
from ..host import timing
from ..host.devices import names, selected
from ..host.latents import log_cut_patches
from ..host.oom import free_others, give_back, in_turn
from ..host.progress import Progress

AUTOMATIC = StreamOptions()

# Pieces of latents that one copy moves.
_MOVED_TOGETHER = 16


def decode_pieces(
    vae: comfy.sd.VAE,
    latent: Tensor,
    options: StreamOptions = AUTOMATIC,
    tile: tuple[int, int] | None = None,
    *,
    frames: range | None = None,
    images: Tensor | None = None,
    out: Tensor | None = None,
    deep: bool = False,
) -> Iterator[Tensor]:
    """Yield the parts of `VideoVAE.decode_stream` for `[B, C_latent, t, h, w]`; tile in latents."""
    decode, done = vae.first_stage_model.decode_stream, 0
    try:
        with comfy.model_management.cuda_device_context(vae.device):
            options, needed = begin(vae, latent.shape, options, tile)
            for part in _parts(vae, latent, options, needed):
                to, into = (x if x is None else x[done : done + len(part)] for x in (out, images))
                yield from decode(part, options, out=to, images=into, frames=frames, deep=deep)
                done += len(part)
    finally:
        give_back(vae.device)


def encoded(
    vae: comfy.sd.VAE,
    video: Tensor,
    options: StreamOptions = AUTOMATIC,
    tile: tuple[int, int] | None = None,
    corrections: int = 0,
) -> Tensor:
    """Encode `[B, C, T, H, W]` in [0, 1] to a LATENT, with a tile in latents."""
    *_, frames, height, width = video.shape
    model, latents = vae.first_stage_model, []
    step, count = model.config.spatial_compression, model.config.latent_frames(frames)
    also = 0  # a decode, at the same time
    if corrections:
        shape = len(video), model.config.latent_channels, count, height // step, width // step
        also = work_bytes(vae, shape, options)
    options, needed = begin(vae, video.shape, options, tile, encode=True, extra_bytes=also)
    log_cut(vae, height, width)
    progress = Progress(len(video) * count * (1 + corrections))
    for part in _parts(vae, video, options, needed + also):
        if corrections:
            latent = encode_corrected(
                model,
                part,
                corrections,
                options,
                to_range=vae.process_input,
                counted=progress.counted,
            )
            done = functools.partial(latent.to, vae.output_device, vae.vae_output_dtype())
            latents.append(retried(done, vae.device, "an encode", options.release))
            continue
        stream = model.encode_stream(part, options, scaled=False, to_range=vae.process_input)
        latents.append(moved(vae, progress.counted(stream)))
    progress.completed()
    return retried(lambda: torch.cat(latents), vae.device, "an encode", options.release)


# The norms of SeedVR2 are over the whole frame, so its tiles would differ for any overlap: there
# the memory of the shortest steps on such a tile is the limit.
def begin(
    vae: comfy.sd.VAE,
    shape: Sequence[int],
    options: StreamOptions = AUTOMATIC,
    tile: tuple[int, int] | None = None,
    *,
    encode: bool = False,
    extra_bytes: int = 0,
) -> tuple[StreamOptions, int]:
    """Load the weights for a stream of `shape`, with a tile in latents; return options and bytes.

    When memory runs out, the stream lets other models be unloaded, and goes on in smaller steps and
    tiles, at last on the CPU. The bytes are `work_bytes`; `extra_bytes` are freed too.
    """
    model = vae.first_stage_model
    options = replace(options, chunk=options.chunk or model.chunk, release=release(vae))
    if tile is not None:
        height, width = (max(1, side) * model.config.spatial_compression for side in tile)
        if model.is_seedvr2:
            least, single = StreamOptions(limit_bytes=1), shape[2] == 1
            plan = model.plan(height, width, least, encode=encode, single_frame=single)
            options = replace(options, limit_bytes=plan.peak_bytes)
        else:
            scale = model.config.output_scale
            options = replace(options, tile=(height * scale, width * scale))
    needed = work_bytes(vae, shape, options, encode=encode)
    load(vae, needed + extra_bytes)
    return options, needed


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
    """Load the weights and free `memory_bytes` on the devices; without room, work on the CPU."""
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
        # On the others, as ComfyUI does on the VAE's own. A band of the frames takes less than the
        # frames; the copy of the weights is all of them.
        work = memory_bytes + management.extra_reserved_memory()
        work = 1.1 * vae.model_size() + max(work, management.minimum_inference_memory())
        for each in found[1:]:
            management.free_memory(work, each)
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
    model, own = vae.first_stage_model, vae.device
    others = [] if model.is_seedvr2 else selected(model.selection)
    return [own, *(each for each in others if each.type == own.type and each != own)]


def label(vae: comfy.sd.VAE) -> str:
    """Return the names of the devices of `vae` for the table of times; "": there is one."""
    found = devices(vae)
    return names(found) if len(found) > 1 else ""


# The memory of the plan that an empty device would run, so that ComfyUI unloads other models
# before. Requested tiles mean that memory is short: request the smallest steps on a tile. The
# stream finds any further free memory itself.
def work_bytes(
    vae: comfy.sd.VAE,
    shape: Sequence[int],
    options: StreamOptions = AUTOMATIC,
    *,
    encode: bool = False,
) -> int:
    """Return the bytes for a latent or, to encode, frames of `shape`, per video of the batch."""
    model = vae.first_stage_model
    *_, count, height, width = model.video_shape(shape)
    step = 1 if encode else model.config.spatial_compression
    limit = options.limit_bytes or (None if options.tile is None else 1)
    plan = model.plan(
        height * step,
        width * step,
        StreamOptions(limit_bytes=limit, tile=options.tile),
        encode=encode,
        single_frame=count == 1,
        device=vae.device,  # the weights may be on the host
        empty=True,
    )
    return plan.peak_bytes


def _parts(
    vae: comfy.sd.VAE, batch: Tensor, options: StreamOptions, memory_bytes: int
) -> tuple[Tensor, ...]:
    """Return what runs at once: a video, or images as GPU memory allows."""
    if options.limit_bytes is not None or batch.shape[2] > 1 or vae.device.type == "cpu":
        return batch.split(1)
    free = min(map(vae.patcher.get_free_memory, devices(vae)))
    return batch.split(max(1, int(free / max(1, memory_bytes))))
