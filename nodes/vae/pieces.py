"""Streams of a fast VAE in ComfyUI: their memory, and retries when it runs out.

A stream holds a piece of a video at a time, so its memory does not grow with the length. A VAE here
is ComfyUI's object around a `FastVideoVAE`. Facts about ComfyUI are from comfy/sd.py and
comfy/model_management.py of 0.33.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import comfy.model_management
import comfy.sd
import torch
from torch import Tensor

from ...vae import StreamOptions
from ..host import timing
from ..host.devices import names, selected
from ..host.oom import Way, free_others, resumed
from ..host.patches import log_cut_patches

AUTOMATIC = StreamOptions()

# Pieces of latents that one copy moves.
_MOVED_TOGETHER = 16

# Sides of tiles in latents, tried one after the other if nothing else fits. For SeedVR2, which
# cannot be tiled, the memory of such a tile is the limit.
_TILES = (64, 32, 16)


# When memory runs out it continues from the frame where it stopped: first within the stream by a
# smaller plan, then with all models unloaded, in smaller tiles, and finally on the CPU.
def decode_pieces(
    vae: comfy.sd.VAE,
    latent: Tensor,
    options: StreamOptions = AUTOMATIC,
    *,
    frames: range | None = None,
    images: Tensor | None = None,
    out: Tensor | None = None,
    tile: tuple[int, int] | None = None,
    deep: bool = False,
) -> Iterator[Tensor]:
    """Decode `[B, C_latent, t, h, w]` into `images` or `out`, if given, and yield each part."""
    model = vae.first_stage_model
    count = model.config.frames(latent.shape[2])
    wanted = range(count) if frames is None else frames
    at = wanted.start

    def go(way: Way) -> Iterator[Tensor]:
        nonlocal at
        rest = range(at, wanted.stop)
        if not rest:
            return
        load(vae, decode_bytes(vae, latent.shape, way), way)
        for piece in model.decode_stream(
            latent,
            _options(vae, way, options),
            out=None if out is None else out[:, :, at - wanted.start :],
            images=None if images is None else images[:, at - wanted.start :],
            frames=None if len(rest) == count else rest,
            deep=deep,
        ):
            at += piece.shape[2 if images is None else 1]
            yield piece

    found = ways(vae, tile, single_frame=latent.shape[2] == 1)
    return resumed(devices(vae), "a decode", found, go, lambda: f" at frame {at}")


def encode_pieces(
    vae: comfy.sd.VAE,
    pieces: Tensor | Iterable[Tensor],
    way: Way,
    options: StreamOptions = AUTOMATIC,
    to_range: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Encode `[B, C, t, H, W]` pieces on the device and yield the means as they are done."""
    asked = _options(vae, way, options)
    stream = vae.first_stage_model.encode_stream
    return stream(pieces, asked, scaled=False, to_range=to_range)


def moved(vae: comfy.sd.VAE, latents: Iterator[Tensor]) -> Tensor:
    """Join latents on the output device, several per copy, because each copy waits for it."""
    done: list[Tensor] = []
    while held := list(itertools.islice(latents, _MOVED_TOGETHER)):
        done.append(torch.cat(held, dim=2).to(vae.output_device, vae.vae_output_dtype()))
    return torch.cat(done, dim=2)


def with_chunk(
    vae: comfy.sd.VAE, height: int, width: int, options: StreamOptions, way: Way
) -> StreamOptions:
    """Return the options of an encode in pieces, with a definite chunk; log a size that is cut."""
    asked = StreamOptions(dtype=options.dtype, limit_bytes=way.limit_bytes)
    model = vae.first_stage_model
    if model.config.family == "wan2.2":  # of one diffusion model
        step = model.config.spatial_compression
        log_cut_patches("Wan 2.2 5B", (height // step, width // step), (2, 2), step)
    chunk = options.chunk or model.chunk or model.plan(height, width, asked, encode=True).chunk
    return replace(options, chunk=chunk)


def ways(
    vae: comfy.sd.VAE,
    tile: tuple[int, int] | None,
    *,
    encode: bool = False,
    single_frame: bool = False,
) -> list[Way]:
    """Return the ways to try while memory runs out, the first with the requested tile."""
    model = vae.first_stage_model
    step = model.config.spatial_compression * model.config.output_scale

    def sized(size: tuple[int, int] | None) -> Way:
        if size is None:
            return Way("")
        if model.is_seedvr2:
            limit = model.tile_limit(size, encode=encode, single_frame=single_frame)
            return Way(f"in steps of {limit / 2**20:.0f} MiB", limit_bytes=limit)
        return Way(f"in tiles of {size[0] * step} pixels", (size[0] * step, size[1] * step))

    own = replace(sized(tile), words="")
    smaller = (sized((side, side)) for side in _TILES)
    found = [own, replace(own, words="with all models unloaded")]
    found += [way for way in smaller if way.size < own.size]
    if vae.device.type != "cpu":
        found.append(Way("on the CPU", on_host=True))
    return found


def load(vae: comfy.sd.VAE, memory_bytes: float, way: Way | None = None) -> None:
    """Load the weights to the device of the work, and free `memory_bytes` on it and others."""
    if way is not None and way.on_host:
        comfy.model_management.unload_model_and_clones(vae.patcher)
        vae.first_stage_model.share([vae.device])
        return
    found = devices(vae)
    with timing.span("load", "VAE to its device", vae.device):
        comfy.model_management.load_models_gpu(
            [vae.patcher], memory_required=memory_bytes, force_full_load=vae.disable_offload
        )
        if vae.first_stage_model.device.type != vae.device.type:
            # With --novram ComfyUI leaves weights on the host, for operations that fetch them.
            vae.patcher.partially_load(vae.device, extra_memory=1e32)
        for device in found[1:]:
            _make_room(vae, memory_bytes, device)
    vae.first_stage_model.share(found)


def release(vae: comfy.sd.VAE) -> Callable[[torch.device], None]:
    """Return a function that unloads other models from a device of `vae`."""

    def unload(device: torch.device) -> None:
        # Others are names of the VAE's own, such as mps:0 for mps.
        free_others(vae.patcher, device if device in devices(vae) else vae.device)

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


def decode_bytes(vae: comfy.sd.VAE, shape: torch.Size, way: Way) -> int:
    """Return the bytes for decoding a latent of `shape` in `way`, per video of `vae`'s batch."""
    model = vae.first_stage_model
    height, width = (model.config.spatial_compression * length for length in shape[-2:])
    return _plan_bytes(
        vae, height, width, way, encode=False, single_frame=model.video_shape(shape)[2] == 1
    )


def encode_bytes(vae: comfy.sd.VAE, shape: torch.Size, way: Way) -> int:
    """Return the bytes for encoding frames of `shape` in `way`, per video of `vae`'s batch."""
    single_frame = len(shape) == 4 or shape[2] <= vae.first_stage_model.config.temporal_compression
    return _plan_bytes(vae, *shape[-2:], way, encode=True, single_frame=single_frame)


def _make_room(vae: comfy.sd.VAE, memory_bytes: float, device: torch.device) -> None:
    """Unload models from another device of the work, as ComfyUI does for the VAE's own."""
    management = comfy.model_management
    # A band of the frames takes less than the frames; the copy of the weights is all of them.
    work = max(
        management.minimum_inference_memory(), memory_bytes + management.extra_reserved_memory()
    )
    management.free_memory(1.1 * vae.model_size() + work, device)


def _plan_bytes(
    vae: comfy.sd.VAE, height: int, width: int, way: Way, *, encode: bool, single_frame: bool
) -> int:
    # The memory of the plan that an empty device would run, so that ComfyUI unloads other models
    # before. Requested tiles mean that memory is short: request the smallest steps on a tile. The
    # stream finds any further free memory itself.
    limit = way.limit_bytes or (None if way.tile is None else 1)
    plan = vae.first_stage_model.plan(
        height,
        width,
        StreamOptions(limit_bytes=limit, tile=way.tile),
        encode=encode,
        single_frame=single_frame,
        device=vae.device,  # the weights may be on the host
        cuts=limit is None,
        empty=True,
    )
    return plan.peak_bytes


def _options(vae: comfy.sd.VAE, way: Way, options: StreamOptions) -> StreamOptions:
    chunk = options.chunk or vae.first_stage_model.chunk
    return StreamOptions(chunk, options.dtype, way.limit_bytes, way.tile, release(vae))
