"""The checks of a run of the upscaler, what it continues, and its end: one file of all parts."""

import functools
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import av
import comfy.sd
import folder_paths
import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.model_patcher import ModelPatcher
from comfyui_version import __version__ as comfyui_version

from ... import vae as library
from ...vae import media
from ..host import timing
from ..host.api import Input, io, ui
from ..host.error_text import about
from ..host.numbering import saved, unused_names
from ..host.progress import Progress, show_text
from ..vae import accelerate
from ..vae.comfy_vae import FastVAE
from ..video.file_prefix import check_prefix
from ..video.source import FileSource, Fit, Source, about_video
from ..video.target import VideoTarget
from ..video.videos import source_of
from . import store as stores
from .cuts import cut_test, parsed
from .reader import Reader, Resize
from .run import Sampling, Upscale
from .store import State, Store, file_mark, tensors_mark
from .windows import windows

_logger = logging.getLogger(__name__)

# Sides of the frames that the model takes are multiples of this.
_MULTIPLE = 16
# Tensors whose numbers stand for those of a model, and frames for those of a video in memory.
_LOOKED_AT = 64
# Most seconds that a run waits for kernels; on two cores of a CPU their build takes 14.
_PATIENCE_S, _TICK_S = 300, 0.5


@dataclass(frozen=True)
class Wanted:
    """What is made of a video: the values of the widgets (see their tooltips)."""

    resize: Resize
    sampling: dict[str, Any]  # fields of `Sampling`
    window: int
    overlap: int
    cuts: str
    color: str


@dataclass(frozen=True)
class Place:
    """The file that is written."""

    codec: str
    options: dict[str, Any]  # of `VideoWriter`
    prefix: str
    folder: str  # one of `FOLDERS`
    tags: dict[str, str]
    graph: str  # stands for the nodes before this one


def upscaled(
    video: Input.Video, model: ModelPatcher, vae: object, wanted: Wanted, place: Place
) -> tuple[Path, ui.SavedResult]:
    """Upscale a video; return the file and its entry for the frontend.

    Raises:
        ValueError: An input does not fit; before any work is done.
    """
    cuts = parsed(wanted.cuts)
    check_prefix(place.prefix, Path(folder_paths.get_directory_by_type(place.folder)))
    _check_model(model)
    fast = _seedvr2(vae)
    with about_video():
        source, second = source_of(video), source_of(video)
        sound = source.track(Fit())
    height, width = _shape(source, wanted.resize)
    target = VideoTarget(source.fps, place.codec, place.prefix, place.folder, place.options)
    shown = height - height % 2, width - width % 2
    target.check(*shown)
    suffix = target.form.codec.suffix
    if sound is not None:
        media.sound_encoder(target.form.codec, Path("x" + suffix))
    inputs = _inputs(video, source, model, fast, wanted, place)
    store = Store(Path(folder_paths.get_output_directory()), inputs)
    writer = functools.partial(
        media.VideoWriter, fps=target.fps, codec=place.codec, overwrite=True, **place.options
    )
    size = -(-height // _MULTIPLE) * _MULTIPLE, -(-width // _MULTIPLE) * _MULTIPLE
    sampling, total = Sampling(**wanted.sampling), source.estimate(Fit())
    job = Upscale(model, fast, sampling, wanted.color, size, writer, suffix, total)
    state = _continued(store, suffix) or _begun(wanted, job.size)
    store.create()
    tests = functools.partial(cut_test, cuts, source.size)
    with (
        _reported(state, store),
        Reader(source, wanted.resize, tests) as frames,
        Reader(second, wanted.resize) as originals,
    ):
        _prepare(fast)
        parts = job.run(frames, originals, store, state)
    show_text("joining the windows")
    whole = store.folder / f"whole{suffix}"
    joined = functools.partial(media.join_parts, parts, whole, target.fps, codec=place.codec)
    with timing.span("file"):
        joined(
            audio=sound,
            metadata=source.tags() | place.tags,
            frames=state.frames,
            passed=Progress(state.frames).passed,
        )
    found = _named(whole, target, shown)
    store.remove()
    return found


def _named(whole: Path, target: VideoTarget, size: tuple[int, int]) -> tuple[Path, ui.SavedResult]:
    """Give a finished file its name; return it and its entry for the frontend."""
    kind = io.FolderType(target.folder)
    names = unused_names(target.prefix, kind, target.form.codec.suffix, *size)
    with media.whole_file(next(names), others=names) as draft:
        try:
            whole.replace(draft.part)
        except OSError:  # another disk
            shutil.copyfile(whole, draft.part)
    return draft.path, saved(draft.path, kind)


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


def graph_mark(hidden: io.HiddenHolder | None) -> str:
    """Return a hash of the nodes before the one that runs."""
    return "" if hidden is None else stores.graph_mark(hidden.prompt, hidden.unique_id)


def _check_model(model: ModelPatcher) -> None:
    network = getattr(model.model, "diffusion_model", None)
    if not hasattr(network, "positive_conditioning"):
        name = type(network).__name__
        raise ValueError(f"model: got {name}; expected SeedVR2, from Load Diffusion Model")


def _seedvr2(vae: object) -> FastVAE:
    with about("vae"):
        if not isinstance(vae, comfy.sd.VAE):
            raise ValueError(f"got a {type(vae).__name__}; expected the VAE of SeedVR2")
        fast = vae
        if not isinstance(fast, FastVAE):
            fast = accelerate.accelerated(vae, accelerate.Choice(), library.SEEDVR2)
        config = fast.first_stage_model.config
        if config.family != library.SEEDVR2:
            raise ValueError(f"got the VAE of {config.family}; expected that of SeedVR2")
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


def _shape(source: Source, resize: Resize) -> tuple[int, int]:
    """Return height and width after the resizing, which are those of a black frame."""
    height, width = size = resize.size(source.size)
    if min(size) < _MULTIPLE:
        name = "shorter_side" if resize.shorter_side else "multiplier"
        raise ValueError(
            f"{name}: it makes {width} x {height} of {source.size[1]} x {source.size[0]}; "
            f"expected at least {_MULTIPLE} x {_MULTIPLE}"
        )
    return size


def _begun(wanted: Wanted, size: tuple[int, int]) -> State:
    chosen = windows(wanted.window, wanted.overlap, size)
    frames = 4 * chosen.length - 3
    text = "Fast Video VAE: windows of %d frames, which share %d latent frames"
    _logger.info(text, frames, chosen.overlap)
    return State(chosen.length, chosen.overlap)


def _continued(store: Store, suffix: str) -> State | None:
    state = store.load(suffix)
    if state is not None:
        text = "Fast Video VAE: going on after frame %d, from the finished parts in %s"
        _logger.info(text, state.frames - 1, store.folder)
    return state


def _inputs(
    video: Input.Video,
    source: Source,
    model: ModelPatcher,
    vae: FastVAE,
    wanted: Wanted,
    place: Place,
) -> dict[str, Any]:
    """Return what the frames of the file depend on, but for the amount of free memory."""
    if isinstance(source, FileSource):
        film: object = [file_mark(video.get_stream_source()), *video.get_active_trim_window()]
    else:
        some = range(0, source.count, max(1, source.count // _LOOKED_AT))
        film = [
            source.count,
            tensors_mark(("", source.read(range(number, number + 1))) for number in some),
        ]
    network = vae.first_stage_model
    return {
        "video": film,
        "fps": str(source.fps),
        "model": [_weights(accelerate.weights_of(model)), _patches(model)],
        "vae": [_weights(network.state_dict()), str(network.dtype), str(network.encode_dtype)],
        "wanted": [str(wanted)],
        "graph": place.graph,
        "file": [place.codec, str(place.options)],
        "versions": [comfyui_version, torch.__version__, av.__version__, _own_version()],
    }


def _weights(weights: Mapping[str, Any]) -> str:
    names = [name for name in weights if isinstance(weights[name], torch.Tensor)]
    step = max(1, len(names) // _LOOKED_AT)
    return tensors_mark((name, weights[name]) for name in names[::step])


def _patches(model: ModelPatcher) -> list[object]:
    """Return what identifies the LoRAs and other patches of the weights."""
    found = [[key, [each[0] for each in model.patches[key]]] for key in model.patches]
    found.append([tensors_mark(("", each) for each in _tensors(model.patches))])
    options = model.model_options.get("transformer_options", {})
    return [str(found), sorted(map(str, options)), sorted(map(str, model.object_patches))]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, dictionaries and the weights of ComfyUI's adapters."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "weights"):
        yield from _tensors(value.weights)


def _own_version() -> str:
    try:
        return version("fast-video-vae")
    except ModuleNotFoundError:  # it is not installed as a package
        return ""
