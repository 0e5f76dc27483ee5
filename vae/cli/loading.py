"""Preparation of a command: device, VAE, options, kernels, the part of a video."""

import argparse
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from ...kernels import default_device
from ..bench.precision import int8_layers
from ..bench.report import part_in_int8
from ..checkpoint import load_vae
from ..media.video_reader import VideoFile
from ..model import VideoVAE
from ..models.config import VAEConfig
from ..streaming.bands.team import Team
from ..streaming.int8.settings import INT8
from ..streaming.options import StreamOptions
from ..validation import checked_device, checked_devices, dtype_name

# Seconds of a build without a line.
_QUIET_S = 0.5

# Options for the part of a video and its frame rate, as `VideoFile.estimate` names them.
STRETCH = ("fps", "start", "duration", "limit")
# Prints a line for the user.
Say = Callable[[str], None]


def load_named(args: argparse.Namespace, path: Path, say: Say = lambda _: None) -> VideoVAE:
    """Load a VAE on the device and in the dtypes of the command line; describe it to `say`."""
    devices = checked_devices(args.devices or [])
    device = checked_device(args.device or (devices or [default_device().type])[0])
    # With an index, as the others have one: "cuda" is the current GPU.
    if devices and checked_devices([device])[0] not in devices:
        names = ", ".join(map(str, devices))
        raise ValueError(f"device is {args.device!r}; expected one of the devices {names}")
    names = chosen(args, "dtype", "encode_dtype")
    dtypes = {option: name and getattr(torch, name) for option, name in names.items()}
    vae = load_vae(path, device=device, **dtypes)
    vae.devices = devices
    if args.ranks:
        vae.team = Team(vae.replicas, args.ranks.lead(vae))
    vae.shares = args.shares
    shared = ", ".join(map(str, vae.team.all)) or device
    say(
        f"{path.name}: {vae.config.family}, base width {vae.config.decoder_width}, on {shared}, "
        f"encodes in {dtype_name(vae.encode_dtype)}, decodes in {dtype_name(vae.dtype)}"
    )
    if args.precision != INT8:
        return vae
    if args.command == "encode":
        say("--precision int8 is for decodes; the encode is not affected")
        return vae
    build_kernels(vae, say)
    say("chooses the layers of int8, once for these weights")
    layers = int8_layers(vae)
    if not layers.names:
        lost = "with these weights every convolution would cost more than 1 dB"
        raise ValueError(f"precision is int8, but {lost}; expected auto")
    vae.precision = INT8
    say(f"decodes with {part_in_int8(layers)} in int8 ({len(layers.names)} convolutions)")
    return vae


def options_for(args: argparse.Namespace, vae: VideoVAE, say: Say) -> StreamOptions:
    """Return the stream options of the command line when the kernels are built."""
    step = vae.config.spatial_compression
    if args.tile and min(args.tile) < step:
        height, width = args.tile
        raise ValueError(f"tiles are {width}x{height}; this VAE needs at least {step}x{step}")
    build_kernels(vae, say)
    return StreamOptions(args.chunk, tile=args.tile)


def build_kernels(vae: VideoVAE, say: Say) -> None:
    """Wait for the kernels of `vae` before anything is timed; `say` prints the seconds."""
    start = time.perf_counter()
    if not vae.wait_until_prepared(_QUIET_S):
        say(f"building kernels for {vae.device}")
        vae.wait_until_prepared()
        say(f"kernels built in {time.perf_counter() - start:.1f} s, once")


def chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return options of the command line as arguments of a call."""
    return {name: getattr(args, name) for name in names}


def cropped(
    video: VideoFile, config: VAEConfig, size: tuple[int, int] | None, say: Say
) -> tuple[int, int]:
    """Return the height and width that a VAE encodes; print the video's size and the crop."""
    step = config.spatial_compression
    height, width = video.cropped_size(step, size)
    count, rate = labels(video.estimated_frames or 0, video.fps)
    known = f"{count}, " if video.estimated_frames else ""
    say(f"{video.path.name}: {known}{video.width}x{video.height}, {rate}")
    if (height, width) != (size or (video.height, video.width)):
        say(f"note: cropped about the centre to {width}x{height}, multiples of {step}")
    return height, width


def labels(frames: int, fps: Fraction) -> tuple[str, str]:
    """Format a number of frames and a rate as in "9 frames" and "29.97 fps"."""
    rate = f"{float(fps):.3f}".rstrip("0").rstrip(".")
    return f"{frames} frame{'' if frames == 1 else 's'}", f"{rate} fps"
