"""Compare ComfyUI's network and this pack's on the weights of one VAE, in ComfyUI's memory.

Facts about ComfyUI here are from comfy/sd.py and comfy/utils.py of 0.33.
"""

import functools
import logging
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import Tensor

from ...kernels import first_line, table_entry
from ...vae import StreamOptions, check_finite
from ...vae.bench import (
    BenchmarkReport,
    Clip,
    Comparison,
    Contestant,
    compare,
    compare_precision,
    device_label,
    dtype_label,
    fitted,
    int8_layers,
    moving_pictures,
    random_latent,
    tasks_of,
)
from ..host.error_text import about
from ..host.oom import give_back
from ..host.progress import Progress
from ..host.widgets import INT8
from ..vae.accelerate import Choice, accelerate, accelerated, patches_of, weights_of
from ..vae.comfy_vae import FastVAE, one_video
from ..vae.pieces import load, release

_logger = logging.getLogger(__name__)

# Latents whose precision is measured: the first, and two steps with a past. All frames of the
# three decodes are on the host at once.
_MEASURED_LATENTS = 3


def benchmark(
    vae: comfy.sd.VAE,
    task: str,
    clip: Clip,
    rounds: int,
    dtype: torch.dtype | None,
    latent: Tensor | None,
    pixels: Tensor | None,
    precision: str = "auto",
) -> BenchmarkReport:
    """Measure both networks of a VAE, a fast one or ComfyUI's own, which is not modified."""
    tasks, codes = tasks_of(task), precision == INT8
    if codes and "decode" not in tasks:
        raise ValueError(f"precision: int8 is for decodes; expected auto for task {task}")
    stock, fast, computed = pair_of(vae, dtype, precision)
    hook, lost = comfy.utils.PROGRESS_BAR_HOOK, None
    try:
        clip, latent, pixels, notes = content_for(fast, tasks, clip, latent, pixels)
        # The bar of the rounds keeps the hook; bars and previews of the VAEs are hidden.
        bar = Progress(len(tasks) * 2 * (rounds + 1) + codes)
        comfy.utils.set_progress_bar_global_hook(None)
        given = {"rounds": rounds, "dtype": dtype_label(computed), "device": fast.device}
        given["passed"] = functools.partial(bar.passed, 1)
        comparisons = _measured(stock, fast, tasks, latent, pixels, given, codes=codes)
        if codes:
            _load(fast, latent.shape)
            first = one_video(fast, latent)[:, :, :_MEASURED_LATENTS]
            options = StreamOptions(release=release(fast))
            lost = compare_precision(fast.first_stage_model, first, options)
            bar.passed(1)
    finally:
        comfy.utils.set_progress_bar_global_hook(hook)
        # VAEs that were created for the comparison leave the device; the given one stays loaded.
        for each in (stock, fast):
            if each is not vae:
                comfy.model_management.unload_model_and_clones(each.patcher, all_devices=True)
        comfy.model_management.soft_empty_cache()
        give_back(fast.device)
    # What the calls so far have shown of the kernels on a GPU without measured ones.
    if entry := table_entry(fast.device):
        notes += [
            "this GPU is not in the table of measured chips; please post these lines:",
            *entry,
        ]
    config = fast.first_stage_model.config
    name = f"{config.family}, base width {config.decoder_width}"
    return BenchmarkReport(name, device_label(vae.device), clip, rounds, comparisons, notes, lost)


def pair_of(
    vae: Any,  # noqa: ANN401, any object
    dtype: torch.dtype | None,
    precision: str,
) -> tuple[comfy.sd.VAE, FastVAE, torch.dtype]:
    """Return both networks on a VAE's weights, itself included if its dtype fits, and the dtype."""
    if not isinstance(vae, comfy.sd.VAE):
        raise ValueError(f"vae: got a {type(vae).__name__}; expected a VAE")
    vae.throw_exception_if_invalid()
    model = vae.first_stage_model
    if isinstance(vae, FastVAE):
        chosen = dtype or model.dtype
        stock, fast = stock_of(vae, chosen), vae
        # A chosen dtype never becomes float16 for its speed.
        fits = not model.allow_fp16 and model.dtype == model.encode_dtype == chosen
        if not fits or precision not in ("auto", model.precision):
            fast = accelerate(vae, Choice(chosen, chosen))
    else:
        chosen = dtype or vae.vae_dtype
        with about("vae"):
            fast = accelerated(vae, Choice(chosen, chosen), "Wan, Qwen-Image or SeedVR2")
        stock = vae if chosen == vae.vae_dtype else stock_of(fast, chosen)
    if precision != "auto":
        fast.first_stage_model.precision = precision
    return stock, fast, chosen


def stock_of(fast: FastVAE, dtype: torch.dtype) -> comfy.sd.VAE:
    """Return ComfyUI's own VAE on a copy of the weights of a fast one, computing in `dtype`."""
    config, weights = fast.first_stage_model.config, weights_of(fast.patcher)
    # In the memory order of a file: with dynamic memory ComfyUI computes with them directly.
    copies = {key: value.to("cpu", copy=True).contiguous() for key, value in weights.items()}
    try:
        if config.output_scale != 1:
            raise ValueError("its decoder doubles the size of frames")
        if config.encoder_width is None:
            raise ValueError("it has a decoder only")
        stock = comfy.sd.VAE(sd=copies, device=fast.device, dtype=dtype)
        network = stock.first_stage_model
        if network is None or network.state_dict().keys() != weights.keys():
            raise ValueError("this ComfyUI loads it as another network")
    except Exception as error:
        # Any error of the constructor too: shapes, missing keys, an unknown layout.
        raise ValueError(
            f"vae: ComfyUI has no network for this {config.family} VAE, so they cannot be "
            f"compared: {first_line(error)}"
        ) from None
    stock.patcher.patches = patches_of(fast.patcher)
    return stock


def content_for(
    fast: FastVAE,
    tasks: tuple[str, ...],
    clip: Clip,
    latent: Tensor | None,
    pixels: Tensor | None,
) -> tuple[Clip, Tensor | None, Tensor | None, list[str]]:
    """Return the size, what to decode and to encode `[T, H, W, C]`, and remarks."""
    # Both are given, derived from what is given, or generated.
    config, sizes, notes = fast.first_stage_model.config, [], []
    if latent is not None:
        latent = _as_taken(fast, one_video(fast, latent))
    if pixels is not None:
        pixels, notes = _cropped(fast, pixels)
    if latent is None and pixels is None:
        with about("width, height, frames"):
            kept = fitted(config, clip)
        notes = [] if kept == clip else [f"requested {clip}, cut to whole latents"]
        if "decode" in tasks:
            latent = _as_taken(fast, random_latent(config, kept)).contiguous()
        if "encode" in tasks:
            pixels = moving_pictures(kept)[0].movedim(0, -1).contiguous()
    if latent is not None:
        shape = config.decoded_shape(fast.first_stage_model.video_shape(latent.shape))
        sizes.append(Clip(shape[4], shape[3], shape[0] * shape[2]))
    if pixels is not None:
        sizes.append(Clip(pixels.shape[2], pixels.shape[1], len(pixels)))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"samples: they decode to {sizes[0]}; expected {sizes[1]}, the size of pixels"
        )
    if "decode" in tasks and latent is None:
        latent = fast.encode(pixels)
    if "encode" in tasks and pixels is None:
        pixels = fast.decode(latent).flatten(0, -4)
    return sizes[0], latent, pixels, notes


def _measured(
    stock: comfy.sd.VAE,
    fast: FastVAE,
    tasks: tuple[str, ...],
    latent: Tensor | None,
    pixels: Tensor | None,
    given: dict[str, Any],
    *,
    codes: bool,
) -> list[Comparison]:
    """Measure both networks; the fast one decodes in its precision, with `codes` in int8."""

    def contestant(name: str, vae: comfy.sd.VAE, task: str) -> Contestant:
        if task == "decode":
            return Contestant(name, lambda: vae.decode(latent), lambda: _load(vae, latent.shape))
        video = pixels.movedim(-1, 1) if vae.latent_dim == 2 else pixels.movedim(-1, 0)[None]
        prepare = functools.partial(_load, vae, video.shape, encode=True)
        return Contestant(name, lambda: vae.encode(pixels), prepare)

    model, names = fast.first_stage_model, {"encode": "fast", "decode": "fast"}
    model.wait_until_prepared(device=fast.device)
    if model.precision == INT8 and latent is not None:
        names["decode"] = "fast int8"
        _load(fast, latent.shape)
        _logger.info("Fast Video VAE: choosing the layers of int8, once for these weights")
        if codes:
            # An error before the long work, where int8 is not supported.
            int8_layers(model)
        model.wait_until_prepared()
    comparisons = []
    for task in tasks:
        both = [contestant("stock", stock, task), contestant(names[task], fast, task)]
        comparisons.append(compare(task, both, **given))
    return comparisons


def _load(vae: comfy.sd.VAE, shape: torch.Size, *, encode: bool = False) -> None:
    """Free memory and load the weights, as the work itself would; this time is not measured."""
    used = vae.memory_used_encode if encode else vae.memory_used_decode
    needed = used(shape, vae.vae_dtype)
    if isinstance(vae, FastVAE):
        load(vae, needed)
    else:
        comfy.model_management.load_models_gpu(
            [vae.patcher], memory_required=needed, force_full_load=vae.disable_offload
        )


def _as_taken(fast: FastVAE, latent: Tensor) -> Tensor:
    """Return the latent of one video as ComfyUI's VAE takes it: `[t, C, h, w]` for images."""
    return latent[0].movedim(1, 0) if fast.latent_dim == 2 else latent


def _cropped(fast: FastVAE, pixels: Tensor) -> tuple[Tensor, list[str]]:
    """Cut an IMAGE `[T, H, W, C]` to whole latents, with a note if anything was cut."""
    if pixels.ndim == 5 and len(pixels) == 1:
        pixels = pixels[0]
    if pixels.ndim != 4:
        raise ValueError(f"pixels: got {list(pixels.shape)}; expected [N, H, W, C]")
    clip = Clip(pixels.shape[2], pixels.shape[1], len(pixels))
    with about("pixels"):
        kept = fitted(fast.first_stage_model.config, clip)
        top, left = (clip.height - kept.height) // 2, (clip.width - kept.width) // 2
        cut = pixels[: kept.frames, top : top + kept.height, left : left + kept.width]
        check_finite(cut.movedim(-1, 0)[None], "frames")
    return cut, [] if kept == clip else [f"pixels {clip} were cut to whole latents"]
