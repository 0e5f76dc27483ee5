"""Compare ComfyUI's network and this pack's on the weights of one VAE, in ComfyUI's memory.

Facts about ComfyUI here are from comfy/sd.py and comfy/utils.py of 0.33.
"""

import functools
import logging

import comfy.model_management as management
import comfy.utils
import torch
from comfy.sd import VAE
from torch import Tensor

from ...kernels import first_line, table_entry
from ...vae import StreamOptions, bench, check_finite
from ...vae.bench import Clip
from ..host.error_text import about
from ..host.oom import give_back
from ..host.progress import Progress
from ..host.widgets import AUTO, INT8
from ..vae.accelerate import Choice, accelerated, patches_of, weights_of
from ..vae.comfy_vae import FastVAE, one_video
from ..vae.pieces import load, release

_logger = logging.getLogger(__name__)

# Latents whose precision is measured: the first, and two steps with a past. All frames of the
# three decodes are on the host at once.
_MEASURED_LATENTS = 3


def benchmark(
    vae: VAE,
    task: str,
    clip: Clip,
    rounds: int,
    dtype: torch.dtype | None,
    latent: Tensor | None,
    pixels: Tensor | None,
    precision: str = AUTO,
) -> bench.BenchmarkReport:
    """Measure both networks of a VAE, a fast one or ComfyUI's own, which is not modified."""
    tasks, codes = bench.tasks_of(task), precision == INT8
    if codes and "decode" not in tasks:
        raise ValueError(f"precision: int8 is for decodes; expected auto for task {task}")
    stock, fast, computed = _pair(vae, dtype, precision)
    hook, model, lost = comfy.utils.PROGRESS_BAR_HOOK, fast.first_stage_model, None
    try:
        clip, latent, pixels, notes = _content(fast, tasks, clip, latent, pixels)
        # The bar of the rounds keeps the hook; bars and previews of the VAEs are hidden.
        bar = Progress(len(tasks) * 2 * (rounds + 1) + codes)
        comfy.utils.set_progress_bar_global_hook(None)
        given = {"rounds": rounds, "dtype": bench.dtype_label(computed), "device": fast.device}
        given["passed"] = functools.partial(bar.passed, 1)
        if model.precision == INT8 and latent is not None:
            _load(fast, latent)
            _logger.info("Fast Video VAE: choosing the layers of int8, once for these weights")
            bench.int8_layers(model)  # an error before the long work, where int8 is not supported
        model.wait_until_prepared(device=fast.device)
        comparisons = []
        for each in tasks:
            both = [_contestant(one, each, latent, pixels) for one in (stock, fast)]
            comparisons.append(bench.compare(each, both, **given))
        if codes:
            _load(fast, latent)
            first = one_video(fast, latent)[:, :, :_MEASURED_LATENTS]
            lost = bench.compare_precision(model, first, StreamOptions(release=release(fast)))
            bar.passed(1)
    finally:
        comfy.utils.set_progress_bar_global_hook(hook)
        # VAEs of the comparison leave the device; the given one stays loaded.
        for each in {stock, fast} - {vae}:
            management.unload_model_and_clones(each.patcher, all_devices=True)
        management.soft_empty_cache()
        give_back(fast.device)
    # What the calls so far have shown of the kernels on a GPU without measured ones.
    if entry := table_entry(fast.device):
        notes += [
            "this GPU is not in the table of measured chips; please post these lines:",
            *entry,
        ]
    title = f"{model.config.family}, base width {model.config.decoder_width}"
    device = bench.device_label(vae.device)
    return bench.BenchmarkReport(title, device, clip, rounds, comparisons, notes, lost)


def _pair(
    vae: object, dtype: torch.dtype | None, precision: str
) -> tuple[VAE, FastVAE, torch.dtype]:
    """Return both networks on a VAE's weights, ComfyUI's own if its dtype fits, and the dtype."""
    if not isinstance(vae, VAE):
        raise ValueError(f"vae: got a {type(vae).__name__}; expected a VAE")
    vae.throw_exception_if_invalid()
    is_fast = isinstance(vae, FastVAE)
    chosen = dtype or (vae.first_stage_model.dtype if is_fast else vae.vae_dtype)
    with about("vae"):
        # A chosen dtype never becomes float16 for its speed.
        fast = accelerated(vae, Choice(chosen, chosen), "Wan, Qwen-Image or SeedVR2")
    stock = _stock(fast, chosen) if is_fast or chosen != vae.vae_dtype else vae
    if precision != AUTO:
        fast.first_stage_model.precision = precision
    return stock, fast, chosen


def _stock(fast: FastVAE, dtype: torch.dtype) -> VAE:
    """Return ComfyUI's own VAE on a copy of the weights of a fast one, computing in `dtype`."""
    config, weights = fast.first_stage_model.config, weights_of(fast.patcher)
    # In the memory order of a file: with dynamic memory ComfyUI computes with them directly.
    copies = {key: value.to("cpu", copy=True).contiguous() for key, value in weights.items()}
    try:
        if config.output_scale != 1:
            raise ValueError("its decoder doubles the size of frames")
        if config.encoder_width is None:
            raise ValueError("it has a decoder only")
        stock = VAE(sd=copies, device=fast.device, dtype=dtype)
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


def _content(
    fast: FastVAE, tasks: tuple[str, ...], clip: Clip, latent: Tensor | None, pixels: Tensor | None
) -> tuple[Clip, Tensor | None, Tensor | None, list[str]]:
    """Return the size, what to decode and to encode `[T, H, W, C]`, and remarks."""
    # Both are given, derived from what is given, or generated.
    model, sizes, asked = fast.first_stage_model, [], ""
    if latent is not None:
        latent = one_video(fast, latent)
    if pixels is not None:
        pixels = pixels[0] if pixels.ndim == 5 and len(pixels) == 1 else pixels
        if pixels.ndim != 4:
            raise ValueError(f"pixels: got {list(pixels.shape)}; expected [N, H, W, C]")
        clip = Clip(pixels.shape[2], pixels.shape[1], len(pixels))
        with about("pixels"):
            kept = bench.fitted(model.config, clip)
            top, left = (clip.height - kept.height) // 2, (clip.width - kept.width) // 2
            pixels = pixels[: kept.frames, top : top + kept.height, left : left + kept.width]
            check_finite(pixels.movedim(-1, 0)[None], "frames")
        asked = f"pixels {clip} were"
    elif latent is None:
        with about("width, height, frames"):
            kept = bench.fitted(model.config, clip)
        asked = f"requested {clip},"
        latent = bench.random_latent(model.config, kept) if "decode" in tasks else None
        if "encode" in tasks:
            pixels = bench.moving_pictures(kept)[0].movedim(0, -1).contiguous()
    notes = [f"{asked} cut to whole latents"] if asked and kept != clip else []
    if latent is not None:
        # As ComfyUI's VAE takes it: `[t, C, h, w]` for images.
        latent = (latent[0].movedim(1, 0) if fast.latent_dim == 2 else latent).contiguous()
        shape = model.config.decoded_shape(model.video_shape(latent.shape))
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


def _contestant(
    vae: VAE, task: str, latent: Tensor | None, pixels: Tensor | None
) -> bench.Contestant:
    """Return the work of one network; the load of its weights is not measured."""
    name = "fast" if isinstance(vae, FastVAE) else "stock"
    if task == "decode":
        if name == "fast" and vae.first_stage_model.precision == INT8:
            name = "fast int8"
        return bench.Contestant(name, lambda: vae.decode(latent), lambda: _load(vae, latent))
    video = pixels.movedim(-1, 1) if vae.latent_dim == 2 else pixels.movedim(-1, 0)[None]
    prepare = functools.partial(_load, vae, video, encode=True)
    return bench.Contestant(name, lambda: vae.encode(pixels), prepare)


def _load(vae: VAE, given: Tensor, *, encode: bool = False) -> None:
    """Free memory and load the weights, as the work itself would."""
    used = vae.memory_used_encode if encode else vae.memory_used_decode
    needed = used(given.shape, vae.vae_dtype)
    if isinstance(vae, FastVAE):
        load(vae, needed)
    else:
        management.load_models_gpu(
            [vae.patcher], memory_required=needed, force_full_load=vae.disable_offload
        )
