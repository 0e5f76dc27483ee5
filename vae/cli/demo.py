"""`fast-video-vae demo`: encode and decode a video, and compare the result with the source.

Reading, encoding and decoding are lazy, and only source frames between encoder and decoder are
kept, so memory does not grow with the length of the video.
"""

import argparse
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...kernels import runtime, synchronize
from ..demo import CLIP_PATH, VAE_PATH
from ..media.atomic_file import whole_file
from ..media.pictures import with_channels
from ..media.video_reader import VideoFile, read_video
from ..media.video_writer import VideoWriter, pictures_of
from ..model import VideoVAE
from ..models.config import VAEConfig
from ..streaming.options import StreamOptions
from ..streaming.source import Rereadable
from .contact_sheet import ContactSheet
from .loading import STRETCH, Say, chosen, cropped, labels, load_named, options_for
from .progress_bar import ProgressBar

# Note about the bundled VAE.
TOY = (
    "the bundled VAE is small and blurs; --vae FILE selects another, such as "
    "wan_2.1_vae.safetensors"
)
MIB = 2**20
# Default work on a CPU in pixels: about half a minute with the bundled VAE (one thread of an AMD
# EPYC encodes and decodes 0.3 million pixels per second, 2026-11).
CPU_PIXELS = 12_000_000
CPU_AREA = 640 * 360
# Fewer frames show no motion.
LEAST_FRAMES = 5


def demo(args: argparse.Namespace, say: Say) -> str:
    """Encode and decode a video; write the result and a contact sheet."""
    video = read_video(args.video or CLIP_PATH)
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"{args.out} is a file; expected a folder to write to")
    args.out.mkdir(parents=True, exist_ok=True)
    movie, picture = _outputs(args.out, video.path.stem, overwrite=args.overwrite)
    fps = args.fps or video.fps
    # Both outputs are opened first, so that a folder that is not writable fails early.
    with ExitStack() as stack:
        drawn = stack.enter_context(whole_file(picture, overwrite=args.overwrite))
        writer = stack.enter_context(VideoWriter(movie, fps, overwrite=args.overwrite))
        vae = load_named(args, args.vae or VAE_PATH, say)
        if not args.vae:
            say(f"note: {TOY}")
        cut = afford(args, video, vae.config) if vae.device.type == "cpu" else ""
        height, width = cropped(video, vae.config, args.size, say)
        if cut:
            say(f"note: {cut}")
        if vae.config.encoder_width is None:
            raise ValueError("the VAE has a decoder only; expected one that can encode too")
        options, stretch = options_for(args, vae, say), chosen(args, *STRETCH)
        sheet, seconds = ContactSheet(), {"read": 0.0, "encode": 0.0, "decode": 0.0}
        before = _peak_bytes(vae.device)
        total = video.estimate(**stretch)
        # The VAE drops frames that do not fill a latent.
        total = total and total - (total - 1) % vae.config.temporal_compression
        with ProgressBar(args.command, total, quiet=args.quiet) as progress:
            read = partial(video.pieces, dtype=torch.uint8, size=args.size, **stretch)
            for source, result in round_trip(vae, read, options, seconds):
                writer.write(result)
                sheet.add(source, result)
                progress.update(len(result))
        verdict, (count, rate) = f"PSNR {sheet.psnr:.2f} dB", labels(writer.frames, fps)
        title = f"{video.path.name}   {count}   {width} x {height}   {rate}"
        sheet.draw(title, verdict, "" if args.vae else TOY).save(drawn.part, format="PNG")
    # Each of them waits for the one before it.
    for inner, name in itertools.pairwise(seconds):
        took = seconds[name] - seconds[inner]
        say(f"{name}  {took:8.2f} s  {writer.frames / took:8.2f} frames/s")
    if before is not None:
        peak = _peak_bytes(vae.device) or before
        say(f"peak memory {peak / MIB:.0f} MiB, of which {before / MIB:.0f} MiB before the start")
    say(f"wrote {writer.path}")
    say(f"wrote {drawn.path}")
    return verdict


def round_trip(
    vae: VideoVAE,
    read: Callable[..., Iterator[Tensor]],
    options: StreamOptions,
    seconds: dict[str, float],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a video and its reconstruction, `[t, H, W, 3]`, uint8 on the CPU.

    Adds up the `seconds` of "read", "encode" and "decode". `read` takes the `multiple` of height
    and width.
    """
    kept: deque[Tensor] = deque()  # source frames that are not decoded yet
    seen = 0

    def timed(name: str, items: Iterator[Tensor]) -> Iterator[Tensor]:
        while True:
            start = time.perf_counter()
            item = next(items, None)
            synchronize(vae.device)
            seconds[name] += time.perf_counter() - start
            if item is None:
                return
            yield item

    def source() -> Iterator[Tensor]:
        nonlocal seen
        at = 0
        for piece in timed("read", read(multiple=vae.config.spatial_compression)):
            # It is read again where memory runs out.
            kept.extend(piece[0, :, max(0, seen - at) :].permute(1, 2, 3, 0))
            at += piece.shape[2]
            seen = max(seen, at)
            yield with_channels(piece, vae.config.image_channels)

    latents = timed("encode", vae.encode_stream(Rereadable(source), options))
    for piece in timed("decode", vae.decode_stream(latents, options)):
        result = pictures_of(piece, torch.uint8).cpu()
        yield torch.stack([kept.popleft() for _ in result]), result


def afford(args: argparse.Namespace, video: VideoFile, config: VAEConfig) -> str:
    """Set a size and a limit that a CPU can do where `args` has none; return the note, or ""."""
    notes, step = [], config.spatial_compression
    height, width = args.size or (video.height, video.width)
    if not args.size and height * width > CPU_AREA:
        shrink = math.sqrt(CPU_AREA / (height * width))
        height, width = (max(step, int(side * shrink) // step * step) for side in (height, width))
        args.size = height, width
        notes.append(f"{width}x{height} instead of {video.width}x{video.height} (--size)")
    if args.duration is None and args.limit is None:
        count, most = video.estimate(**chosen(args, *STRETCH)), CPU_PIXELS // (height * width)
        kept = config.frames(config.latent_frames(max(LEAST_FRAMES, most)))
        if count is None or count > kept:
            args.limit = kept
            frames = f"{kept} of {count} frames" if count else f"at most {kept} frames"
            notes.append(f"{frames} (--duration, --frames-limit)")
    return f"on a CPU the demo uses {' and '.join(notes)}; these options change it" if notes else ""


def _outputs(folder: Path, stem: str, *, overwrite: bool) -> tuple[Path, Path]:
    """Return `x_decoded.mp4` and `x_sheet.png` for `x.mp4`, or the first free `x_2_decoded.mp4`."""
    stems = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
    pairs = ((folder / f"{each}_decoded.mp4", folder / f"{each}_sheet.png") for each in stems)
    return next(pair for pair in pairs if overwrite or not any(each.exists() for each in pair))


def _peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory of the GPU in use or of this process; None: unknown, on Windows."""
    counter = getattr(runtime(device), "max_memory_allocated", None)
    if counter is not None and device.type != "cpu":
        return counter(device)
    try:
        import resource  # noqa: PLC0415, not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
