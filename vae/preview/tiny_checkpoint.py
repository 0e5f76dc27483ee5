"""Files of tiny decoders: their layout, what latents they expect, and loading.

Whether a file takes normalised latents, `(latent - latent_mean) / latent_std`, is in its training
and not in its tensors. The sources:

- taehv (madebyollin/taehv, README.md): "TAEHV does not use any latent scales / shifts (TAEHV
  encodes / decodes exactly what diffusion models use)". A diffusion model of Wan uses normalised
  latents, so `taew2_1` and `taew2_2` expect these.
- LightX2V (lightx2v/models/video_encoders/hf/wan/vae_tiny.py): `need_scaled`, set for files with
  "lighttae" in their name, undoes the normalisation before the network. So `lighttaew2_1` and
  `lighttaew2_2` expect raw latents.

A name that starts with "light" means raw latents, one that starts with "taew" normalised ones, and
for any other name the caller has to say it. ComfyUI (comfy/sd.py of 0.33, at "decoder.22.bias")
does not see the name, so its VAE Decode shows other colors of a `taew2_1` in float16: it takes such
a file for one of HunyuanVideo, and passes raw latents to every other file of Wan.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from ...kernels import guarded, shown
from ..checkpoint_io.checkpoint_file import read_file
from ..checkpoint_io.networks import Network
from ..models.latent_stats import latent_statistics
from ..streaming.precision import check_computes, fastest_decode_dtype
from .tiny_decoder import BLOCKS, TIMES, WIDTHS, TinyDecoder

# Latent channels of a file, and the patches of its pixels.
_PATCHES = {16: 1, 48: 2}

_KEY = "decoder."

# Positions in the published list of modules: of the first convolution, of the first block of a
# level, of what follows its blocks, and of the last convolution.
_ENTER, _LEAVE = 1, 22
_LEVELS = (3, 9, 15)
_GROW, _MIX = BLOCKS + 1, BLOCKS + 2

_TINY = Network((f"{_KEY}{_LEAVE}.bias",), (_KEY,))

Weights = dict[str, Tensor]


def load_tiny_decoder(
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    normalizes: bool | None = None,
) -> TinyDecoder:
    """Load a tiny decoder of Wan 2.1 or Wan 2.2 5B; an encoder in the file is ignored.

    `dtype` None: bfloat16 where the device computes in it. `normalizes`: the file expects
    normalised latents; None: it does if its name starts with "taew", not if with "light".
    """
    place = torch.device("cpu" if device is None else device)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; expected a float dtype")
    used = dtype or fastest_decode_dtype(place)
    check_computes(used, place)
    with guarded(str(Path(path))):
        network, _ = _TINY.take(read_file(Path(path), _TINY))
        weights = {key.removeprefix(_KEY): value for key, value in network.items()}
        channels = _check(weights)
        if normalizes is None:
            normalizes = _expects_normalised(Path(path).name)
        statistics = latent_statistics(channels) if normalizes else (None, None)
        with torch.inference_mode(False), torch.no_grad():
            decoder = TinyDecoder(channels, _PATCHES[channels], *statistics)
            decoder.load_state_dict(_state(weights))
    return decoder.to(place, used).requires_grad_(False).eval()


def expected_shapes(channels: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's decoder by key without its prefix, for `channels` latents."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, outputs: int, inputs: int, size: int = 3, *, biased: bool = True) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, size, size)
        if biased:
            shapes[f"{name}.bias"] = (outputs,)

    conv(f"{_ENTER}", WIDTHS[0], channels)
    for number, start in enumerate(_LEVELS):
        width, after, times = WIDTHS[number], WIDTHS[number + 1], TIMES[number]
        for block in range(start, start + BLOCKS):
            conv(f"{block}.conv.0", width, 2 * width)
            conv(f"{block}.conv.2", width, width)
            conv(f"{block}.conv.4", width, width)
        conv(f"{start + _GROW}.conv", times * width, width, 1, biased=False)
        conv(f"{start + _MIX}", after, width, biased=False)
    conv(f"{_LEAVE}", 3 * _PATCHES[channels] ** 2, WIDTHS[-1])
    return shapes


def _check(weights: Weights) -> int:
    """Return the latent channels of a complete file."""
    first = weights.get(f"{_ENTER}.weight")
    if first is None or first.ndim != 4 or f"{_LEAVE}.bias" not in weights:
        raise ValueError(
            f"it is not a tiny decoder: {_KEY}{_ENTER}.weight or {_KEY}{_LEAVE}.bias is missing"
        )
    channels = first.shape[1]
    if channels not in _PATCHES:
        raise ValueError(f"it is for {channels} latent channels; expected 16 or 48, as of Wan")
    expected = expected_shapes(channels)
    missing = [key for key in expected if key not in weights]
    if missing:
        raise ValueError(f"it is incomplete: {len(missing)} missing, such as {_KEY}{missing[0]}")
    for key, shape in expected.items():
        value = weights[key]
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{_KEY}{shown(key)} is {list(value.shape)}; a tiny decoder needs {list(shape)}"
            )
        if not value.is_floating_point():
            raise ValueError(f"{_KEY}{key} is {value.dtype}; expected floats")
        if not bool(value.float().isfinite().all()):
            raise ValueError(f"{_KEY}{key} holds NaN or infinity; expected finite numbers")
    return channels


def _expects_normalised(name: str) -> bool:
    """Return whether a file of this name was trained on normalised latents."""
    for start, normalizes in (("light", False), ("taew", True)):
        if name.lower().startswith(start):
            return normalizes
    raise ValueError(
        "its name does not say which latents it expects; expected one that starts with light (raw) "
        "or taew (normalised), or the argument normalizes"
    )


def _state(weights: Weights) -> Weights:
    """Return the state dict of `TinyDecoder` from a file's tensors, in float32."""
    wide = {key: value.detach().float() for key, value in weights.items()}
    state: Weights = {}

    def conv(target: str, weight: Tensor, bias: Tensor | None) -> None:
        state[f"{target}.weight"] = weight
        state[f"{target}.bias"] = weight.new_zeros(weight.shape[0]) if bias is None else bias

    def frame(target: str, source: str) -> None:
        conv(target, wide[f"{source}.weight"].unsqueeze(2), wide[f"{source}.bias"])

    frame("enter", f"{_ENTER}")
    for number, start in enumerate(_LEVELS):
        for block in range(BLOCKS):
            source, target = f"{start + block}.conv", f"levels.{number}.{block}"
            # Its input channels are those of the frame, then those of the frame before.
            now, before = wide[f"{source}.0.weight"].chunk(2, dim=1)
            conv(f"{target}.first", torch.stack([before, now], dim=2), wide[f"{source}.0.bias"])
            frame(f"{target}.second", f"{source}.2")
            frame(f"{target}.third", f"{source}.4")
        mix, grow = wide[f"{start + _MIX}.weight"], wide[f"{start + _GROW}.conv.weight"]
        for phase, part in enumerate(grow.flatten(1).chunk(TIMES[number])):
            conv(f"grow.{number}.{phase}", torch.einsum("omhw,mi->oihw", mix, part), None)
    frame("leave", f"{_LEAVE}")
    return state
