"""`fast-video-vae demo`: encode and decode a video, and compare the result with the source."""

import argparse
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from ...kernels import runtime
from ..demo import CLIP_PATH, VAE_PATH
from ..media.atomic_file import whole_file
from ..media.video_reader import read_video
from ..media.video_writer import VideoWriter
from .contact_sheet import ContactSheet
from .loading import Say, build_kernels, load_named, options_for
from .progress_bar import ProgressBar
from .reconstruction import RoundTrip, shrunk
from .stretch import affordable, cropped, estimated, fps_label, frames_label, stretch_named

# Note about the bundled VAE.
TOY = (
    "the bundled VAE is small and blurs; --vae FILE selects another, such as "
    "wan_2.1_vae.safetensors"
)
MIB = 2**20


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
        stretch, cut = stretch_named(args), ""
        if vae.device.type == "cpu":
            stretch, cut = affordable(video, vae.config, stretch)
        height, width = cropped(video, vae.config, stretch["size"], say)
        if cut:
            say(f"note: {cut}")
        trip = RoundTrip(vae, video, options_for(args, vae), stretch=stretch)
        build_kernels(vae, say)
        sheet = ContactSheet()
        before = _peak_bytes(vae.device)
        total = estimated(video, stretch)
        # The VAE drops frames that do not fill a latent.
        total = total and total - (total - 1) % vae.config.temporal_compression
        with ProgressBar(args.command, total, quiet=args.quiet) as progress:
            for source, result in trip:
                writer.write(result)
                sheet.add(source, shrunk(result, vae.config.output_scale))
                progress.update(len(result))
        verdict = f"PSNR {trip.psnr:.2f} dB"
        title = f"{video.path.name}   {frames_label(trip.frames)}   {width} x {height}   "
        image = sheet.draw(f"{title}{fps_label(fps)} fps", verdict, "" if args.vae else TOY)
        image.save(drawn.part, format="PNG")
    for name, seconds in (("encode", trip.encode_seconds), ("decode", trip.decode_seconds)):
        say(f"{name}  {seconds:8.2f} s  {trip.frames / seconds:8.2f} frames/s")
    if before is not None:
        peak = _peak_bytes(vae.device) or before
        say(f"peak memory {peak / MIB:.0f} MiB, of which {before / MIB:.0f} MiB before the start")
    say(f"wrote {writer.path}")
    say(f"wrote {drawn.path}")
    return verdict


def _outputs(folder: Path, stem: str, *, overwrite: bool) -> tuple[Path, Path]:
    """Return `x_decoded.mp4` and `x_sheet.png` for `x.mp4`, or the first free `x_2_decoded.mp4`."""
    stems = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
    pairs = ((folder / f"{each}_decoded.mp4", folder / f"{each}_sheet.png") for each in stems)
    return next(pair for pair in pairs if overwrite or not any(each.exists() for each in pair))


def _peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory so far: of the GPU if it is used, else of this process.

    None on Windows, where Python's standard library cannot measure it.
    """
    counter = getattr(runtime(device), "max_memory_allocated", None)
    if counter is not None and device.type != "cpu":
        return counter(device)
    try:
        import resource  # noqa: PLC0415, not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
