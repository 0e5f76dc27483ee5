"""Tiny decoders of Wan in models/vae_approx: ComfyUI's network `TAEHV`, frame by frame.

ComfyUI's own decode keeps all frames, and does not see the name of a file, which alone says for
which latents it was trained: "light" files for raw ones (lightx2v, vae_tiny.py, `need_scaled`),
"taew" files for those that diffusion models use (madebyollin/taehv, README.md). Facts about ComfyUI
are from comfy/taesd/taehv.py, comfy/model_management.py and comfy/utils.py of 0.33.
"""

import copy
import functools
import pickle
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import comfy.model_management
import comfy.utils
import folder_paths
import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from comfy.ops import disable_weight_init
from comfy.taesd.taehv import TAEHV, MemBlock, TGrow
from torch import Tensor, nn

from ..host.lazy import Later
from ..host.progress import Progress
from .formats import WAN

kernels, vaes = Later("kernels"), Later("vae")
oom, timing = Later("nodes.host.oom"), Later("nodes.host.timing")

_FOLDER = "vae_approx"

# Names of the files by channels of the latent, the preferred one first: those of LightX2V are
# trained further, and ComfyUI's own preview looks for them.
_NAMES = {16: ("lighttaew2_1", "taew2_1"), 48: ("lighttaew2_2", "taew2_2")}

# The wider decoders of taehv, such as taew2_2_super, have another layout.
_WIDER = re.compile(r"super|wide")

# Values in memory per pixel of a frame: on a CPU 294 with 16 channels, and 323 with 48.
_VALUES = 400


def tiny_files(*prefixes: str) -> list[str]:
    """Return the names of the files with one of the prefixes, or of all."""
    known = prefixes or tuple(prefix for names in _NAMES.values() for prefix in names)
    names = folder_paths.get_filename_list(_FOLDER)
    stems = {name: name.replace("\\", "/").rpartition("/")[2].lower() for name in names}
    return [n for n, stem in stems.items() if stem.startswith(known) and not _WIDER.search(stem)]


def tiny_file(channels: int) -> str | None:
    """Return the name of the preferred file for a latent of `channels`, or None."""
    found = (name for prefix in _NAMES.get(channels, ()) for name in tiny_files(prefix))
    return next(found, None)


class TinyDecoder(nn.Module):
    """The decoder of a `TAEHV`, for raw latents; `is_raw`: the network was trained on these."""

    def __init__(self, network: TAEHV, *, is_raw: bool) -> None:
        super().__init__()
        layers = list(network.decoder)
        for at in reversed([at for at, each in enumerate(layers) if isinstance(each, TGrow)]):
            layers[at - 1 : at + 2] = [_Grow(*layers[at : at + 2])]
        self.layers = nn.ModuleList(layers)
        self.channels, self.patch = network.latent_channels, network.patch_size
        self.dropped = network.frames_to_trim
        self.process = torch.Tensor.float if is_raw else WAN[self.channels]().process_in

    def frames(self, latent: Tensor, device: torch.device) -> Iterator[Tensor]:
        """Yield frames `[B, 3, H, W]` in about [0, 1], not clamped, of `[B, C, t, h, w]`."""
        past: dict[int, Tensor] = {}
        given = self.process(latent.float()).to(self.layers[1].weight.dtype).unbind(2)
        inputs = (each.to(device, memory_format=torch.channels_last) for each in given)
        return islice((y for x in inputs for y in self._run(x, 0, past)), self.dropped, None)

    def peak_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that the frames of `[B, C, t, h, w]` need, one by one."""
        pixels = 64 * shape[0] * shape[3] * shape[4]  # of the last convolution
        return _VALUES * pixels * self.layers[1].weight.dtype.itemsize

    def _run(self, x: Tensor, first: int, past: dict[int, Tensor]) -> Iterator[Tensor]:
        """Run the layers from `first` on; `past` has each block's input of the frame before."""
        for at, layer in enumerate(self.layers[first:], first):
            if isinstance(layer, _Grow):
                for each in layer(x).chunk(layer.times, 1):
                    yield from self._run(each, at + 1, past)
                return
            if isinstance(layer, MemBlock):
                before = past[at] if at in past else torch.zeros_like(x)
                past[at], x = x, layer(x, before)
            else:
                x = layer(x)
        yield F.pixel_shuffle(x, self.patch)


class _Grow(disable_weight_init.ConvTranspose2d):
    """`Upsample`, `TGrow` and the convolution after them in one: 4 products per weight, not 9."""

    def __init__(self, grow: TGrow, mix: nn.Conv2d) -> None:
        inner = grow.conv.weight.unflatten(0, (grow.stride, -1)).flatten(2)
        self.times, outputs = grow.stride, grow.stride * mix.out_channels
        super().__init__(inner.shape[2], outputs, 4, stride=2, padding=1, bias=False)
        taps = torch.einsum("omhw,tmi->itohw", mix.weight, inner).flatten(1, 2).flip(2, 3)
        self.weight.data = F.avg_pool2d(taps, 2, 1, padding=1, divisor_override=1)


def tiny_model(name: str, channels: int) -> ModelPatcher:
    """Load the `TinyDecoder` of a file for latents of `channels`; the last two are kept."""
    path = Path(folder_paths.get_full_path_or_raise(_FOLDER, name))
    found = path.stat()
    patcher = _loaded(path, found.st_mtime_ns, found.st_size)
    expected = patcher.model.channels
    if channels != expected:
        raise ValueError(
            f"{name} is for latents of {expected} channels; expected one for {channels}"
        )
    return patcher


def tiny_decoder_on(device: torch.device, patcher: ModelPatcher) -> TinyDecoder:
    """Return a copy of a decoder on `device`, which ComfyUI does not move."""
    with torch.inference_mode(False):
        return copy.deepcopy(patcher.model).to(device, dtype_on(device))


def decode(patcher: ModelPatcher, latent: Tensor) -> Tensor:
    """Decode raw `[B, C, t, h, w]` to an IMAGE `[B * (4 t - 3), H, W, 3]` with a tiny decoder."""
    device, scale = patcher.load_device, 8 * patcher.model.patch
    height, width = (scale * length for length in latent.shape[-2:])
    shape = (latent.shape[0] * (4 * latent.shape[2] - 3), height, width, 3)

    def go(on_cpu: bool) -> Tensor:
        decoder, used = patcher.model, torch.device("cpu") if on_cpu else device
        if on_cpu:
            comfy.model_management.unload_model_and_clones(patcher)
            decoder = tiny_decoder_on(used, patcher)
        else:
            needed = decoder.peak_bytes((1, *latent.shape[1:]))
            comfy.model_management.load_models_gpu([patcher], needed, force_full_load=True)
        return image(shape, (y for x in latent.split(1) for y in decoder.frames(x, used)))

    with timing.span("VAE decode", "tiny decoder", device):
        return oom.in_turn(device, "a preview", go, "on the CPU")


def image(shape: tuple[int, ...], frames: Iterator[Tensor]) -> Tensor:
    """Return an IMAGE `[T, H, W, 3]` of frames `[1, 3, H, W]`, clamped, with a progress bar."""
    with oom.kept():
        images = torch.empty(shape, device=comfy.model_management.intermediate_device())
    progress = Progress(len(images))
    for place, frame in zip(images.split(1), frames, strict=True):
        place.copy_(frame.movedim(1, -1)).clamp_(0, 1)
        progress.passed(1, place)
    return images


# On a CPU it is never float16: a decode took 4 to 6 times as long (2026-11, AMD Zen 5).
def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype of tiny decoders on `device`: ComfyUI's choice, on a CPU the fastest."""
    if device.type == "cpu":
        return vaes.fastest_decode_dtype(device)
    return comfy.model_management.vae_dtype(device, [torch.float16, torch.bfloat16])


@functools.lru_cache(maxsize=2)
def _loaded(path: Path, changed_ns: int, size: int) -> ModelPatcher:
    management = comfy.model_management
    device, home = management.vae_device(), management.vae_offload_device()
    with kernels.guarded(str(path)), torch.inference_mode(False):
        decoder = TinyDecoder(_network(path), is_raw=path.name.lower().startswith("light"))
        decoder.to(home, dtype_on(device), memory_format=torch.channels_last)
    return ModelPatcher(decoder, load_device=device, offload_device=home)


def _network(path: Path) -> TAEHV:
    """Return ComfyUI's network with the weights of a file."""
    try:
        state = comfy.utils.load_torch_file(str(path), safe_load=True)
    except pickle.UnpicklingError:  # whose text is advice to trust the file
        raise ValueError("its pickle is damaged, or holds more than tensors") from None
    named = ((key.rpartition("decoder."), each) for key, each in state.items())
    state = {key: each for (_, found, key), each in named if found}
    if "1.weight" not in state or "22.bias" not in state:
        raise ValueError("it is not a tiny decoder: decoder.1.weight or decoder.22.bias is missing")
    channels = state["1.weight"].shape[1]
    if channels not in WAN:
        raise ValueError(f"it is for {channels} latent channels; expected 16 or 48, as of Wan")
    network = TAEHV(channels).requires_grad_(False)
    for key, own in network.decoder.state_dict().items():
        value = state.get(key)
        if value is None or value.shape != own.shape:
            got = "missing" if value is None else list(value.shape)
            raise ValueError(f"decoder.{key} is {got}; a tiny decoder needs {list(own.shape)}")
        if not own.copy_(value).isfinite().all():
            raise ValueError(f"decoder.{key} holds NaN or infinity; expected finite numbers")
    return network
