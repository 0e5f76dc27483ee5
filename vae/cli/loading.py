"""Preparation of a command: device, VAE, options and kernels."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ...kernels import default_device
from ..bench.precision import int8_layers, part_in_int8
from ..checkpoint import load_vae
from ..model import VideoVAE
from ..streaming.bands.team import Team
from ..streaming.int8.settings import AUTO, INT8
from ..streaming.options import StreamOptions
from ..validation import checked_device, checked_devices, dtype_name

# Seconds of a build without a line.
_QUIET_S = 0.5

# Prints a line for the user.
Say = Callable[[str], None]


def device_named(name: str | None) -> torch.device:
    """Return the device of a name such as "cuda:1"; None or empty: the GPU if there is one."""
    return checked_device(name or default_device().type)


def load_named(args: argparse.Namespace, path: Path, say: Say | None = None) -> VideoVAE:
    """Load a VAE on the device and in the dtypes of the command line; describe it to `say`."""
    devices = checked_devices(getattr(args, "devices", None) or [])
    device = device_named(args.device) if args.device or not devices else devices[0]
    # With an index, as the others have one: "cuda" is the current GPU.
    if devices and checked_devices([device])[0] not in devices:
        names = ", ".join(map(str, devices))
        raise ValueError(f"device is {args.device!r}; expected one of the devices {names}")
    dtype, encode_dtype = (
        getattr(torch, name) if name else None for name in (args.dtype, args.encode_dtype)
    )
    vae = load_vae(path, device=device, dtype=dtype, encode_dtype=encode_dtype)
    vae.devices = devices
    if ranks := getattr(args, "ranks", None):
        vae.team = Team(vae.replicas, ranks.lead(vae))
    vae.shares = getattr(args, "shares", None)
    if say:
        shared = ", ".join(map(str, vae.team.all)) or device
        say(
            f"{path.name}: {vae.config.family}, base width {vae.config.decoder_width}, "
            f"on {shared}, encodes in {dtype_name(vae.encode_dtype)}, "
            f"decodes in {dtype_name(vae.dtype)}"
        )
    if getattr(args, "precision", AUTO) == INT8:
        if args.command != "encode":
            _use_int8(args, vae, say)
        elif say:
            say("--precision int8 is for decodes; the encode is not affected")
    return vae


def follow(args: argparse.Namespace) -> None:
    """Load the VAE of a command, and work for rank 0 until the command ends there."""
    ranks, args.ranks, args.shares, args.precision = args.ranks, None, None, AUTO
    vae = load_named(args, args.vae)
    ranks.follow(vae)


def _use_int8(args: argparse.Namespace, vae: VideoVAE, say: Say | None) -> None:
    """Select int8 for decodes, or raise a `ValueError` with the reason."""
    if say:
        build_kernels(vae, say)
        say("chooses the layers of int8, once for these weights")
    layers = int8_layers(vae)
    if not layers.names:
        raise ValueError(
            "precision is int8, but with these weights every convolution would cost more than "
            "1 dB; expected auto"
        )
    vae.precision = INT8
    if say:
        say(f"decodes with {part_in_int8(layers)} in int8 ({len(layers.names)} convolutions)")


def options_for(args: argparse.Namespace, vae: VideoVAE) -> StreamOptions:
    """Return the stream options of the command line."""
    step = vae.config.spatial_compression
    if args.tile and min(args.tile) < step:
        height, width = args.tile
        raise ValueError(f"tiles are {width}x{height}; this VAE needs at least {step}x{step}")
    return StreamOptions(args.chunk, tile=args.tile)


def build_kernels(vae: VideoVAE, say: Say) -> None:
    """Wait for the kernels of `vae` before anything is timed; `say` prints the seconds."""
    start = time.perf_counter()
    if not vae.wait_until_prepared(_QUIET_S):
        say(f"building kernels for {vae.device}")
        vae.wait_until_prepared()
        say(f"kernels built in {time.perf_counter() - start:.1f} s, once")
