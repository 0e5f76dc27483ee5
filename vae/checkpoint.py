"""Load checkpoints: files or state dicts, Wan's key names, strict checks, a short report."""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels import guarded, line, shown
from .checkpoint_io.checkpoint_file import read_file
from .checkpoint_io.networks import flattened
from .model import VideoVAE
from .models.checkpoint_keys import ENCODER_NORM, VAES, scaled, take_scales, to_wan_keys
from .models.config import LayoutError, Shapes, VAEConfig, read_configs
from .streaming.precision import check_computes, fastest_decode_dtype
from .validation import widened

_logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

AnyVAE = TypeVar("AnyVAE", bound=VideoVAE)


@dataclass(frozen=True)
class Checkpoint:
    """Weights that fit a layout, under Wan's key names."""

    config: VAEConfig
    weights: dict[str, Tensor]


def load_vae(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    encode_dtype: torch.dtype | None = None,
    weights_dtype: torch.dtype | None = None,
    precision: str = "auto",
) -> VideoVAE:
    """Load a VAE of the Wan family or of SeedVR2; its kind is read from its tensors.

    Args:
        source: A safetensors file, a PyTorch file with tensors only (`.pth`, `.pt`, `.ckpt`,
            `.bin`), recognised by their content, or a state dict of tensors `[...]`. Keys are the
            original ones or diffusers', under any prefix and in any nested dict; the rest is left
            out. Weights can have any float dtype; float8 also with scales.
        device: Device of the weights and the computation.
        dtype: Dtype of the computation: float32, bfloat16, float16 or float64. None: decode in
            bfloat16 where the device supports it (a CPU: where it has instructions for it),
            otherwise in float32; encode in float32. A decode in bfloat16 then computes in float16
            where that is proved to be faster, until it overflows (`VideoVAE.allow_fp16`).
        encode_dtype: Dtype of encoding, if it differs from `dtype`.
        weights_dtype: Dtype of the stored weights; None: that of the computation.
        precision: Precision of decoding: "auto", or "int8" (`VideoVAE.precision`).

    Returns:
        The VAE. It shares no memory with `source`.

    Raises:
        OSError: The file is missing or cannot be opened.
        LayoutError: The weights belong to another network.
        ValueError: The file is not a checkpoint, or has two different VAEs; the weights do not fit
            the layout, or are not finite; a dtype is not supported.
    """
    place = torch.device(device)
    for name, wish in (("dtype", dtype), ("encode_dtype", encode_dtype)):
        if wish is not None and wish not in _DTYPES:
            expected = "torch.float32, bfloat16, float16 or float64"
            raise ValueError(f"{name} is {wish}; expected {expected}")
        if wish is not None:
            check_computes(wish, place, name)
    if weights_dtype is not None and not weights_dtype.is_floating_point:
        raise ValueError(f"weights_dtype is {weights_dtype}; expected a float dtype")
    vae = build_vae(
        read_checkpoint(source),
        device=place,
        dtype=dtype or fastest_decode_dtype(place),
        encode_dtype=encode_dtype or dtype or torch.float32,
        weights_dtype=weights_dtype,
    )
    vae.allow_fp16 = dtype is None
    vae.precision = precision
    vae.prepare()
    return vae


def read_checkpoint(source: str | os.PathLike[str] | Mapping[str, Tensor]) -> Checkpoint:
    """Read a checkpoint as `load_vae` does, and check that it is complete.

    Args:
        source: A file, or a state dict of tensors `[...]`, which are not copied.

    Returns:
        The checkpoint.

    Raises:
        OSError: The file is missing or cannot be opened.
        LayoutError: The weights belong to another network.
        ValueError: The file is not a checkpoint, or has two different VAEs, or the weights do not
            fit the layout.
    """
    mapped = isinstance(source, Mapping)
    name = "the state dict" if mapped else str(Path(source))
    with guarded(name, keep=(LayoutError,)):
        entries = flattened(source) if mapped else read_file(Path(source), VAES)
        network, left = VAES.take(entries)
        weights = to_wan_keys(network)
        scales = take_scales(weights)
        shapes = {key: tuple(value.shape) for key, value in weights.items()}
        # Without a network, the error names what is there.
        config, shapes = _fit(shapes or dict.fromkeys(left, ()))
        weights |= {key: scaled(key, weights[key], scale) for key, scale in scales.items()}
        for key, shape in shapes.items():
            fits = key in weights and weights[key].numel() == math.prod(shape)
            weights[key] = weights[key].reshape(shape) if fits else torch.zeros(shape)
        lost = [] if config.encoder_width else [key for key in left if ENCODER_NORM.search(key)]
        if lost:
            raise ValueError(f"{shown(lost[0])} is of an encoder; expected it next to its decoder")
        _check_values(weights, name)
    if left:
        text = f"left out {_some('not of the VAE', [shown(key, 40) for key in left])}"
        _logger.info("Fast Video VAE: %s", line(name, text))
    return Checkpoint(config, weights)


def build_vae(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    encode_dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
    share: bool = False,
    kind: type[AnyVAE] = VideoVAE,
) -> AnyVAE:
    """Build the VAE of a checkpoint; its weights are removed from the checkpoint one by one.

    Args:
        checkpoint: From `read_checkpoint`; empty afterwards.
        device: Device of the weights and the computation.
        dtype: Dtype of decoding.
        encode_dtype: Dtype of encoding.
        weights_dtype: As for `load_vae`.
        share: Use the memory of the checkpoint's tensors where device and dtype match.
        kind: Class of the VAE.

    Returns:
        The VAE, without gradients.
    """
    weights = checkpoint.weights
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            vae = kind(checkpoint.config, dtype, encode_dtype)
        placed = {}
        for key in list(weights):
            encodes = key.startswith(("encoder.", "conv1."))
            kept = weights_dtype or (encode_dtype if encodes else dtype)
            value = weights.pop(key).detach()
            order = orders.get(value.ndim, torch.contiguous_format)
            has_gaps = not (value.is_contiguous() or value.is_contiguous(memory_format=order))
            copies = has_gaps or not share
            order = order if copies else torch.preserve_format
            placed[key] = value.to(device, kept, copy=copies, memory_format=order)
        vae.load_state_dict(placed, strict=True, assign=True)
    return vae.requires_grad_(False).eval()


def _fit(given: Shapes) -> tuple[VAEConfig, Shapes]:
    """Return the configuration that fits and its shapes, or raise an error about the closest one.

    Convolutions of single frames can be 2D, and their `time_conv` is not used: it can be missing.
    """
    reports: list[tuple[int, VAEConfig, dict[str, list[str]]]] = []
    for config in read_configs(given):
        with torch.device("meta"):
            expected = VideoVAE(config, torch.float32, torch.float32).state_dict()
        shapes = dict(given)
        for key, value in expected.items() if config.taps == 1 else ():
            is_flat = value.shape[2:3] == (1,) and given.get(key) == value[:, :, 0].shape
            if is_flat or (config.is_of_one_frame and ".time_conv." in key):
                shapes[key] = tuple(value.shape)
        faults = {
            "missing": [key for key in expected if key not in shapes],
            "unexpected": [shown(key) for key in shapes if key not in expected],
            "of another shape": [
                f"{key} {list(shapes[key])}, expected {list(value.shape)}"
                for key, value in expected.items()
                if shapes.get(key, value.shape) != tuple(value.shape)
            ],
        }
        reports.append((sum(map(len, faults.values())), config, faults))
        if not reports[-1][0]:
            return config, shapes
    _, config, faults = min(reports, key=lambda entry: entry[0])
    first, *others = (entry for entry in faults.items() if entry[1])
    # One name for all kinds together: two would not fit into a line.
    report = ", ".join([_some(*first), *(f"{len(keys)} {kind}" for kind, keys in others)])
    raise ValueError(f"does not fit {config.family}: {report}")


def _check_values(weights: Mapping[str, Tensor], name: str) -> None:
    """Refuse integers, what training or a damaged disk leaves, and untrained files, with zeros."""
    whole = [
        f"{key} ({value.dtype})" for key, value in weights.items() if not value.is_floating_point()
    ]
    broken = [key for key, value in weights.items() if not widened(value).isfinite().all()]
    for keys, fault, expected in (
        (whole, "are not floating point", "floats"),
        (broken, "hold NaN or infinity", "finite ones"),
    ):
        if keys:
            raise ValueError(f"the weights {fault}: {_some('of them', keys)}; expected {expected}")
    # The convolutions next to the latent, which SeedVR2 has not.
    if "conv2.weight" in weights and not widened(weights["conv2.weight"]).any():
        what = "conv2.weight (post_quant_conv) is all zeros: all latents decode to one flat color"
        raise ValueError(f"{what}; expected trained weights")
    if "conv1.weight" in weights and not widened(weights["conv1.weight"]).any():
        text = "conv1.weight (quant_conv) is all zeros: all frames encode to the same latent"
        _logger.warning("Fast Video VAE: %s", line(name, text))


def _some(kind: str, entries: list[str]) -> str:
    """Return the count and the first entry, such as "2 missing (a and 1 more)"."""
    more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    return f"{len(entries)} {kind} ({entries[0]}{more})"
