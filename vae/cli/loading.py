"""Preparation of a command: device, VAE, options and kernels."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from ...kernels import default_device, native_library, preparations
from ..checkpoint import load_vae
from ..model import VideoVAE
from ..streaming.options import StreamOptions
from ..validation import dtype_name

# Prints a line for the user.
Say = Callable[[str], None]


def device_named(name: str | None) -> torch.device:
    """Return the device of a name.

    Args:
        name: Such as "cuda:1" or "mps"; None or empty: the GPU if there is one, else the CPU.

    Returns:
        The device.

    Raises:
        ValueError: The device does not exist.
    """
    name = name or default_device().type
    there = available_devices()
    try:
        device = torch.device(name)
    except RuntimeError:
        message = f"device {name!r} is unknown; this PyTorch has {', '.join(there)}"
        raise ValueError(message) from None
    # A device without an index is the current one. PyTorch keeps 8 bits of an index: 256 becomes 0.
    indexed = name if device.index is not None else f"{device.type}:0"
    if indexed not in there and indexed != "cpu:0":
        raise ValueError(f"device is {name!r}; this PyTorch has {', '.join(there)}")
    # PyTorch treats `cpu` and `cpu:0` as different devices.
    return torch.device("cpu") if device.type == "cpu" else device


def available_devices() -> list[str]:
    """Return the names of the CPU and of each accelerator, such as "cuda:0"."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None:
            found += [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
    return found


def load_named(args: argparse.Namespace, path: Path, say: Say | None = None) -> VideoVAE:
    """Load a VAE on the device and in the dtypes of the command line.

    Args:
        args: Arguments of the command.
        path: File of the VAE.
        say: Prints a line about the VAE; None: nothing.

    Returns:
        The VAE.

    Raises:
        ValueError: The device does not exist, or the file is not a VAE.
        OSError: The file is missing or not readable.
    """
    device = device_named(args.device)
    dtype, encode_dtype = (
        getattr(torch, name) if name else None for name in (args.dtype, args.encode_dtype)
    )
    vae = load_vae(path, device=device, dtype=dtype, encode_dtype=encode_dtype)
    if say:
        say(
            f"{path.name}: {vae.config.family}, base width {vae.config.decoder_width}, "
            f"on {device}, encodes in {dtype_name(vae.encode_dtype)}, "
            f"decodes in {dtype_name(vae.dtype)}"
        )
    return vae


def options_for(args: argparse.Namespace, vae: VideoVAE) -> StreamOptions:
    """Return the stream options of the command line.

    Args:
        args: Arguments of the command.
        vae: The VAE.

    Returns:
        The options.

    Raises:
        ValueError: The tiles are smaller than a latent.
    """
    step = vae.config.spatial_compression
    if args.tile and min(args.tile) < step:
        height, width = args.tile
        raise ValueError(f"tiles are {width}x{height}; this VAE needs at least {step}x{step}")
    return StreamOptions(args.chunk, tile=args.tile)


def build_kernels(device: torch.device, say: Say) -> None:
    """Build the CPU kernels for `device` before anything is timed; `say` prints the seconds."""
    if device.type != "cpu":
        return
    before = len(preparations())
    library = native_library()
    seconds = sum(done.end - done.start for done in preparations()[before:])
    if seconds and not library.missing:
        say(f"kernels built in {seconds:.1f} s, once")
