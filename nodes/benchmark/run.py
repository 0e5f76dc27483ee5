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
from ..host.error_text import about, require
from ..host.oom import give_back
from ..host.progress import Progress
from ..host.widgets import AUTO, DTYPES, INT8
from ..vae.accelerate import Choice, accelerated, patches_of, weights_of
from ..vae.comfy_vae import FastVAE, one_video
from ..vae.pieces import load, release

_logger = logging.getLogger(__name__)


def benchmark(
    vae: VAE, task: str, clip: Clip, rounds: int, dtype: str, precision: str, *given: Tensor | None
) -> bench.BenchmarkReport:
    """Measure both networks of a VAE, which is not modified, on a latent and pixels or None."""
    tasks, codes = bench.tasks_of(task), precision == INT8
    if codes and "decode" not in tasks:
        raise ValueError(f"precision: int8 is for decodes; expected auto for task {task}")
    stock, fast = _pair(vae, DTYPES.get(dtype), precision)
    hook, model, lost = comfy.utils.PROGRESS_BAR_HOOK, fast.first_stage_model, None
    try:
        clip, content, notes = _content(fast, tasks, clip, *given)
        # The bar of the rounds keeps the hook; bars and previews of the VAEs are hidden.
        bar = Progress(len(tasks) * 2 * (rounds + 1) + codes)
        comfy.utils.set_progress_bar_global_hook(None)
        tick, comparisons = functools.partial(bar.passed, 1), []
        if model.precision == INT8 and "decode" in tasks:
            _contestant(fast, "decode", content["decode"]).prepare()
            _logger.info("Fast Video VAE: choosing the layers of int8, once for these weights")
            bench.int8_layers(model)  # an error before the long work, where int8 is not supported
        model.wait_until_prepared(device=fast.device)
        if codes:
            # The first latent, and two with a past: the frames of three decodes are on the host.
            first = one_video(fast, content["decode"])[:, :, :3]
            lost = bench.compare_precision(model, first, StreamOptions(release=release(fast)))
            tick()
        known = {"rounds": rounds, "dtype": bench.dtype_label(model.dtype), "device": fast.device}
        for each in tasks:
            both = [_contestant(one, each, content[each]) for one in (stock, fast)]
            comparisons.append(bench.compare(each, both, passed=tick, **known))
    finally:
        comfy.utils.set_progress_bar_global_hook(hook)
        # VAEs of the comparison leave the device; the given one stays loaded.
        for each in {stock, fast} - {vae}:
            management.unload_model_and_clones(each.patcher, all_devices=True)
        management.soft_empty_cache()
        give_back(fast.device)
    notes += bench.device_notes(fast.device)
    # What the calls so far have shown of the kernels on a GPU without measured ones.
    if rows := table_entry(fast.device):
        notes += ["this GPU is not in the table of measured chips; please post these lines:", *rows]
    title = f"{model.config.family}, base width {model.config.decoder_width}"
    device = bench.device_label(vae.device)
    return bench.BenchmarkReport(title, device, clip, rounds, comparisons, notes, lost)


def _pair(vae: object, dtype: torch.dtype | None, precision: str) -> tuple[VAE, FastVAE]:
    """Return ComfyUI's own network, the VAE itself if its dtype fits, and the fast one."""
    require(isinstance(vae, VAE), vae, "a VAE", "vae: got")
    vae.throw_exception_if_invalid()
    is_fast = isinstance(vae, FastVAE)
    chosen = dtype or (vae.first_stage_model.dtype if is_fast else vae.vae_dtype)
    with about("vae"):
        # A chosen dtype never becomes float16 for its speed.
        fast = accelerated(vae, Choice(chosen, chosen), "Wan, Qwen-Image or SeedVR2")
    if precision != AUTO:
        fast.first_stage_model.precision = precision
    if not is_fast and chosen == vae.vae_dtype:
        return vae, fast
    config, weights = fast.first_stage_model.config, weights_of(fast.patcher)
    # In the memory order of a file: with dynamic memory ComfyUI computes with them directly.
    copies = {key: value.to("cpu", copy=True).contiguous() for key, value in weights.items()}
    try:
        if config.output_scale != 1:
            raise ValueError("its decoder doubles the size of frames")
        if config.encoder_width is None:
            raise ValueError("it has a decoder only")
        stock = VAE(sd=copies, device=fast.device, dtype=chosen)
        network = stock.first_stage_model
        if network is None or network.state_dict().keys() != weights.keys():
            raise ValueError("this ComfyUI loads it as another network")
    except Exception as error:  # of the constructor too: shapes, missing keys, an unknown layout
        raise ValueError(
            f"vae: ComfyUI has no network for this {config.family} VAE, so they cannot be "
            f"compared: {first_line(error)}"
        ) from None
    stock.patcher.patches = patches_of(fast.patcher)
    return stock, fast


def _content(
    fast: FastVAE, tasks: tuple[str, ...], clip: Clip, latent: Tensor | None, pixels: Tensor | None
) -> tuple[Clip, dict[str, Tensor | None], list[str]]:
    """Return the size, what each task takes, a latent or `[T, H, W, C]`, and remarks."""
    config, name, asked = fast.first_stage_model.config, "width, height, frames", "requested {},"
    if latent is not None:
        latent = one_video(fast, latent)
        frames, height, width = config.decoded_shape(latent.shape)[2:]
        clip = size = Clip(width, height, frames)
    if pixels is not None:
        pixels = pixels[0] if pixels.ndim == 5 and len(pixels) == 1 else pixels
        if pixels.ndim != 4:
            raise ValueError(f"pixels: got {list(pixels.shape)}; expected [N, H, W, C]")
        clip = Clip(pixels.shape[2], pixels.shape[1], len(pixels))
        name, asked = "pixels", "pixels {} were"
    with about(name):
        kept = bench.fitted(config, clip)
        if pixels is not None:
            top, left = (clip.height - kept.height) // 2, (clip.width - kept.width) // 2
            pixels = pixels[: kept.frames, top : top + kept.height, left : left + kept.width]
            check_finite(pixels.movedim(-1, 0)[None], "frames")
    if latent is not None and size != kept:
        raise ValueError(f"samples: they decode to {size}; expected {kept}, the size of pixels")
    if latent is None and pixels is None:
        latent = bench.random_latent(config, kept) if "decode" in tasks else None
        if "encode" in tasks:
            pixels = bench.moving_pictures(kept)[0].movedim(0, -1).contiguous()
    # Derive what is not there; a latent is as ComfyUI's VAE takes it: `[t, C, h, w]` for images.
    if latent is not None:
        latent = (latent[0].movedim(1, 0) if fast.latent_dim == 2 else latent).contiguous()
    elif "decode" in tasks:
        latent = fast.encode(pixels)
    if "encode" in tasks and pixels is None:
        pixels = fast.decode(latent).flatten(0, -4)
    notes = [f"{asked.format(clip)} cut to whole latents"] if kept != clip else []
    return kept, {"decode": latent, "encode": pixels}, notes


def _contestant(vae: VAE, task: str, given: Tensor) -> bench.Contestant:
    """Return the work of one network; the load of its weights is not measured."""
    is_fast, taken = isinstance(vae, FastVAE), given
    name, run, used = "fast" if is_fast else "stock", vae.decode, vae.memory_used_decode
    if task == "encode":
        run, used = vae.encode, vae.memory_used_encode
        taken = given.movedim(-1, 1) if vae.latent_dim == 2 else given.movedim(-1, 0)[None]
    elif is_fast and vae.first_stage_model.precision == INT8:
        name = "fast int8"

    def prepare() -> None:
        needed = used(taken.shape, vae.vae_dtype)
        if is_fast:
            load(vae, needed)
        else:
            management.load_models_gpu([vae.patcher], needed, force_full_load=vae.disable_offload)

    return bench.Contestant(name, lambda: run(given), prepare)
