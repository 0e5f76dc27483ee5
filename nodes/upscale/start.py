"""The checks of a run of the upscaler, what it continues, and its end: one file of all parts."""

import functools
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import av
import comfy.sd
import folder_paths
import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.model_patcher import ModelPatcher
from comfyui_version import __version__ as comfyui_version
from torch.utils._pytree import tree_leaves

from ... import vae as library
from ...vae import media
from ..host import timing
from ..host.api import Input, io, ui
from ..host.error_text import about
from ..host.progress import Progress, show_text
from ..vae import accelerate
from ..vae.comfy_vae import FastVAE
from ..video.inputs import DEPTHS
from ..video.source import FileSource, Fit, Source, about_video
from ..video.target import VideoTarget, workflow_tags
from ..video.videos import source_of
from .reader import Reader
from .run import Clock, Run
from .store import State, Store, file_mark, graph_mark, tensors_mark
from .wanted import Wanted, parsed_cuts

_logger = logging.getLogger(__name__)

# Tensors whose numbers stand for those of a model, and frames for those of a video in memory.
_LOOKED_AT = 64
# Most seconds that a run waits for kernels; on two cores of a CPU their build takes 14.
_PATIENCE_S, _TICK_S = 300, 0.5
# Widgets that change no frame.
_NAMES = ("filename_prefix", "save_to")


def upscaled(
    video: Input.Video,
    model: ModelPatcher,
    vae: object,
    wanted: Wanted,
    hidden: io.HiddenHolder | None,
) -> tuple[Path, ui.SavedResult]:
    """Upscale a video; return the file and its entry for the frontend.

    Raises:
        ValueError: An input does not fit; before any work is done.
    """
    cuts, fast = parsed_cuts(wanted.cuts), _checked(model, vae)
    with about_video():
        source, second = source_of(video), source_of(video)
        sound = source.track(Fit())
    options = {"quality": wanted.quality, "bit_depth": DEPTHS[wanted.bit_depth]}
    target = VideoTarget(source.fps, wanted.codec, wanted.filename_prefix, wanted.save_to, options)
    height, width = size = wanted.size(source.size)
    shown = height - height % 2, width - width % 2
    target.check(*shown)
    if sound is not None:
        media.sound_encoder(target.form.codec, target.form.path)
    inputs = _inputs(video, source, model, fast, wanted)
    inputs["graph"] = "" if hidden is None else graph_mark(hidden.prompt, hidden.unique_id)
    base = Path(folder_paths.get_output_directory())
    store = Store(base, inputs, target.form.codec.suffix)
    state = _state(store, wanted, size)
    store.create()
    with (
        _reported(state, store),
        Reader(source, wanted.resized, cuts) as frames,
        Reader(second, wanted.resized) as originals,
    ):
        _prepare(fast)
        clock = Clock(source.estimate(Fit()), state.frames)
        run = Run(wanted, model, fast, target, size, frames, originals, store, state, clock)
        parts = run.finish()
    show_text("joining the windows")
    names = target.names(*shown)
    joined = functools.partial(media.join_parts, parts, next(names), target.fps, others=names)
    with timing.span("file"):
        path = joined(
            codec=wanted.codec,
            audio=sound,
            metadata=source.tags() | workflow_tags(hidden),
            frames=state.frames,
            passed=Progress(state.frames).passed,
        )
    store.remove()
    return path, target.saved(path)


@contextmanager
def _reported(state: State, store: Store) -> Iterator[None]:
    """Log what is kept if the block fails or is stopped."""
    try:
        yield
    except BaseException:
        if not state.parts:
            store.remove()
        else:
            text = "Fast Video VAE: %d frames are finished, in %s; the next run with the same "
            _logger.info(text + "inputs goes on from there", state.frames, store.folder)
        raise


def _checked(model: ModelPatcher, vae: object) -> FastVAE:
    """Return the fast VAE for a model of SeedVR2."""
    network = getattr(model.model, "diffusion_model", None)
    if not hasattr(network, "positive_conditioning"):
        name = type(network).__name__
        raise ValueError(f"model: got {name}; expected SeedVR2, from Load Diffusion Model")
    with about("vae"):
        if not isinstance(vae, comfy.sd.VAE):
            raise ValueError(f"got a {type(vae).__name__}; expected the VAE of SeedVR2")
        fast = vae
        if not isinstance(fast, FastVAE):
            fast = accelerate.accelerated(vae, accelerate.Choice(), library.SEEDVR2)
        family = fast.first_stage_model.config.family
        if family != library.SEEDVR2:
            raise ValueError(f"got the VAE of {family}; expected that of SeedVR2")
        if fast.first_stage_model.encoder is None:
            raise ValueError("the checkpoint has no encoder; expected a whole VAE of SeedVR2")
        fast.throw_exception_if_invalid()
    return fast


def _prepare(vae: FastVAE) -> None:
    """Wait for the kernels of a VAE that are being built, once per installation.

    A run may take hours, and all of its parts have to be computed alike: a run that goes on has the
    kernels from its start.
    """
    model, end = vae.first_stage_model, time.monotonic() + _PATIENCE_S
    while not model.wait_until_prepared(_TICK_S, vae.device) and time.monotonic() < end:
        throw_exception_if_processing_interrupted()
        show_text("building kernels")


def _state(store: Store, wanted: Wanted, size: tuple[int, int]) -> State:
    """Return where the run begins or goes on."""
    state = store.load()
    if state is not None:
        text = "Fast Video VAE: going on after frame %d, from the finished parts in %s"
        _logger.info(text, state.frames - 1, store.folder)
        return state
    state = State(*wanted.latents(size))
    text = "Fast Video VAE: windows of %d frames, which share %d latent frames"
    _logger.info(text, 4 * state.length - 3, state.overlap)
    return state


def _inputs(
    video: Input.Video, source: Source, model: ModelPatcher, vae: FastVAE, wanted: Wanted
) -> dict[str, Any]:
    """Return what the frames of the file depend on, but for the amount of free memory."""
    if isinstance(source, FileSource):
        film: object = [file_mark(video.get_stream_source()), *video.get_active_trim_window()]
    else:
        some = range(0, source.count, max(1, source.count // _LOOKED_AT))
        shown = (source.read(range(number, number + 1)) for number in some)
        film = [source.count, _mark(shown)]
    network, options = vae.first_stage_model, model.model_options.get("transformer_options", {})
    strengths = [[key, [each[0] for each in model.patches[key]]] for key in model.patches]
    patches = [str(strengths), _mark(_leaves(model.patches))]
    try:
        own = version("fast-video-vae")
    except PackageNotFoundError:
        own = ""
    return {
        "video": film,
        "fps": str(source.fps),
        "model": [_weights(accelerate.weights_of(model)), *patches],
        "options": [sorted(map(str, each)) for each in (options, model.object_patches)],
        "vae": [_weights(network.state_dict()), str(network.dtype), str(network.encode_dtype)],
        "wanted": {key: value for key, value in vars(wanted).items() if key not in _NAMES},
        "versions": [comfyui_version, torch.__version__, av.__version__, own],
    }


def _mark(tensors: Iterator[torch.Tensor]) -> str:
    return tensors_mark(("", each) for each in tensors)


def _weights(weights: Mapping[str, Any]) -> str:
    names = [name for name in weights if isinstance(weights[name], torch.Tensor)]
    step = max(1, len(names) // _LOOKED_AT)
    return tensors_mark((name, weights[name]) for name in names[::step])


def _leaves(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in collections, and in the weights of ComfyUI's adapters."""
    for each in tree_leaves(value):
        if isinstance(each, torch.Tensor):
            yield each
        elif hasattr(each, "weights"):
            yield from _leaves(each.weights)
