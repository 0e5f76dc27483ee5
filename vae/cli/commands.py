"""What the commands of the command line do. All that is slow to import is imported here."""

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels import gpu_config, native_library, preparations
from ..bench.baselines import Rivals
from ..bench.chart import draw_chart
from ..bench.content import Clip
from ..bench.report import tasks_of
from ..checkpoint import load_vae
from ..demo import CLIP_PATH, VAE_PATH
from ..layers.oom import Relief
from ..media.atomic_file import whole_file
from ..media.audio import read_audio
from ..media.background_writer import Handoff
from ..media.codecs import check_size, codec_for
from ..media.latent_file import load_latent, save_latent
from ..media.video_reader import VideoFile, read_video
from ..media.video_writer import VideoWriter, frames_to_uint8
from ..model import VideoVAE
from ..streaming.options import StreamOptions
from ..validation import dtype_name
from .backend_report import backend_report
from .contact_sheet import ContactSheet
from .devices import device_named
from .progress import Progress
from .reconstruction import RoundTrip, shrunk, with_channels
from .showing import TOY, affordable, outputs_of, peak_bytes
from .vae_report import vae_report

# The rate that the Wan 2.1 models make videos at, for latents that do not name theirs.
LATENT_FPS = Fraction(16)
# Frame sizes that people decode, (width, height), for the table of `info`.
SIZES = ((512, 512), (832, 480), (1280, 720), (1920, 1080), (3840, 2160))
MIB = 2**20
# Tells the user something on the way.
Say = Callable[[str], None]


def demo(args: argparse.Namespace, say: Say) -> str:
    """Encode and decode a video; write the result and a contact sheet.

    Args:
        args: `video` and `vae` (None: the bundled ones), `out`, those of a stretch as `encode`
            has them, `tile`, and the common ones.
        say: Takes the lines before the last.

    Returns:
        The last line: `PSNR 24.13 dB`.
    """
    video = read_video(args.video or CLIP_PATH)
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"{args.out} is a file; expected a folder to write to")
    args.out.mkdir(parents=True, exist_ok=True)
    outputs = outputs_of(args.out, video.path)
    fps = args.fps or video.fps
    # Both outputs are opened before the work, so that a folder that is not writable costs no time.
    with ExitStack() as stack:
        part = stack.enter_context(whole_file(outputs.picture))
        writer = stack.enter_context(VideoWriter(outputs.movie, fps))
        vae = _load(args, args.vae or VAE_PATH, say)
        if not args.vae:
            say(f"note: {TOY}")
        stretch, (height, width) = _taken(args, video, vae, say)
        trip = RoundTrip(vae, video, _options(args, vae), stretch=stretch)
        _build_kernels(vae.device, say)
        sheet = ContactSheet()
        before = peak_bytes(vae.device)
        with _progress(args, _kept(video, vae, stretch)) as progress:
            for source, result in trip:
                writer.write(result)
                sheet.add(source, shrunk(result, vae.config.output_scale))
                progress.update(len(result))
        verdict = f"PSNR {trip.psnr:.2f} dB"
        title = f"{video.path.name}   {_frames(trip.frames)}   {width} x {height}   "
        picture = sheet.draw(f"{title}{_number(fps)} fps", verdict, "" if args.vae else TOY)
        picture.save(part, format="PNG", pnginfo=outputs.tags)
    for name, seconds in (("encode", trip.encode_seconds), ("decode", trip.decode_seconds)):
        say(f"{name}  {seconds:8.2f} s  {trip.frames / seconds:8.2f} frames/s")
    if before is not None:
        peak = peak_bytes(vae.device) or before
        say(f"peak memory {peak / MIB:.0f} MiB, of which {before / MIB:.0f} MiB before it began")
    say(f"wrote {outputs.movie}")
    say(f"wrote {outputs.picture}")
    return verdict


def encode(args: argparse.Namespace, say: Say) -> str:
    """Encode a video to a latent file.

    Args:
        args: `video`, `vae`, `output`, `fps`, `size`, `start`, `duration`, `frames_limit`, `tile`,
            and the common ones.
        say: Takes the lines before the last.

    Returns:
        The last line: what was written.
    """
    if args.output.suffix.lower() != ".safetensors":
        raise ValueError(f"{args.output} is not named as a latent; expected x.safetensors")
    video = read_video(args.video)
    stretch = _stretch(args)
    expected = video.estimate(**stretch)
    with whole_file(args.output) as part:
        vae = _load(args, args.vae, say)
        config = vae.config
        if config.encoder_width is None:
            raise ValueError(f"{args.vae} has a decoder only; expected a VAE that can encode too")
        _cropped(video, vae, say, args.size)
        pieces = video.pieces(multiple=config.spatial_compression, size=args.size, **stretch)
        options = _options(args, vae)
        _build_kernels(vae.device, say)
        with _progress(args, expected) as progress:
            pictures = (
                with_channels(piece, config.image_channels) for piece in _counted(pieces, progress)
            )
            latents = vae.encode_stream(pictures, options)
            parts = [x.cpu() for x in latents]
        latent = Relief(vae.device, "an encode").finish(lambda: torch.cat(parts, dim=2))
        frames = config.frames(latent.shape[2])
        fps = args.fps or video.fps
        save_latent(
            part,
            latent,
            family=config.family,
            fps=fps,
            frames=frames,
            compression=config.spatial_compression,
        )
    made = f"{list(latent.shape)} for {_frames(frames)} at {_number(fps)} fps"
    return f"wrote {args.output}: {made}"


def decode(args: argparse.Namespace, say: Say) -> str:
    """Decode a latent file to a video.

    Args:
        args: `latents`, `vae`, `output`, `fps` (None: the file's), `frames` (None: all), `codec`
            (None: by the suffix), `video_quality`, `hardware`, `audio` (None: no sound), `tile`,
            and the common ones.
        say: Takes the lines before the last.

    Returns:
        The last line: what was written.
    """
    codec = args.codec or codec_for(args.output).name
    file = load_latent(args.latents)
    fps = args.fps or file.fps or LATENT_FPS
    # The sound belongs to the whole video, so a part of the video has its part of the sound.
    late = args.frames.start / fps if args.frames else Fraction(0)
    writer = VideoWriter(
        args.output,
        fps,
        codec=codec,
        quality=args.video_quality,
        hardware=args.hardware,
        audio=read_audio(args.audio, late) if args.audio else None,
    )
    with writer:
        vae = _load(args, args.vae, say)
        config = vae.config
        if file.family not in (None, config.family):
            raise ValueError(
                f"{args.latents} is of the family {file.family}; {args.vae} is {config.family}"
            )
        total = config.frames(file.latent.shape[2])
        wanted = args.frames or range(total)
        if wanted.stop > total:
            raise ValueError(
                f"frames are {wanted.start}-{wanted.stop - 1}; {args.latents} holds 0-{total - 1}"
            )
        scale = config.spatial_compression * config.output_scale
        check_size(codec, *(scale * side for side in file.latent.shape[3:]))
        options = _options(args, vae)
        _build_kernels(vae.device, say)
        with _progress(args, len(wanted)) as progress, Handoff(writer.write) as handoff:
            relief = Relief(vae.device, "a decode")
            pieces = vae.decode_stream(file.latent, options, frames=wanted)
            for piece in _counted(pieces, progress):
                pictures = relief.finish(functools.partial(frames_to_uint8, piece))
                relief.finish(functools.partial(handoff.put, pictures))
    say(f"{codec} by {writer.encoder}")
    return f"wrote {args.output}: {_frames(writer.frames)} at {_number(writer.fps)} fps"


def bench(args: argparse.Namespace, say: Say) -> str:
    """Measure a VAE file: this package, its plain reference, and diffusers where it is there.

    Args:
        args: `vae` (None: the bundled one), `size`, `frames`, `rounds`, `task`, `output` and
            `json` (None: no such file), and the common ones.
        say: Takes the table.

    Returns:
        The last lines: for each task and contestant but the first how it does beside that.
    """
    if args.output and args.output.suffix.lower() != ".png":
        raise ValueError(f"{args.output} is not named as a chart; expected x.png")
    path, device = args.vae or VAE_PATH, device_named(args.device)
    with ExitStack() as stack:
        chart, text = (
            stack.enter_context(whole_file(each)) if each else None
            for each in (args.output, args.json)
        )
        rivals = Rivals(path, device, *_dtypes(args), args.chunk)
        clip = Clip(args.size[1], args.size[0], args.frames)
        _build_kernels(device, say)
        with _progress(args, 0, unit="runs") as progress:

            def began(calls: int) -> Callable[[], None]:
                progress.total = (progress.total or 0) + calls
                return progress.update

            done = rivals.race(tasks_of(args.task), clip, args.rounds, began)
        if chart:
            draw_chart(done).save(chart, format="PNG")
        if text:
            text.write_text(done.as_json(), encoding="utf-8")
    say(f"{path.name}: {done.table()}\n")
    for each in (args.output, args.json):
        if each:
            say(f"wrote {each}")
    return done.summary()


def info(args: argparse.Namespace, _: Say) -> str:
    """Tell what a VAE file is, and the memory that it takes; and what runs on this machine.

    Args:
        args: `file` (None: no VAE), `backends`, `device` (None: nothing of it; "": the best there
            is), `limit` in bytes (None: what is free), and the common ones.
        _: Nothing comes before the result.

    Returns:
        A table of many lines.
    """
    parts = []
    if args.file:
        parts.append(vae_report(_load(args, args.file), args.file, SIZES, args.limit))
    if args.device is not None:
        parts.append("\n".join(gpu_config(device_named(args.device)).lines()))
    if args.backends:
        parts.append(backend_report())
    return "\n\n".join(parts)


def _load(args: argparse.Namespace, path: Path, say: Say | None = None) -> VideoVAE:
    device = device_named(args.device)
    dtype, encode_dtype = _dtypes(args)
    vae = load_vae(path, device=device, dtype=dtype, encode_dtype=encode_dtype)
    if say:
        say(
            f"{path.name}: {vae.config.family}, base width {vae.config.decoder_width}, "
            f"on {device}, encodes in {dtype_name(vae.encode_dtype)}, "
            f"decodes in {dtype_name(vae.dtype)}"
        )
    return vae


def _dtypes(args: argparse.Namespace) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Those to decode and to encode in; None: chosen."""
    dtype, encode_dtype = (
        getattr(torch, name) if name else None for name in (args.dtype, args.encode_dtype)
    )
    return dtype, encode_dtype


def _stretch(args: argparse.Namespace) -> dict[str, Any]:
    """What is taken of a video, as `VideoFile.pieces` and `VideoFile.estimate` are asked for it."""
    return {
        "fps": args.fps,
        "start": args.start,
        "duration": args.duration,
        "limit": args.frames_limit,
    }


def _taken(
    args: argparse.Namespace, video: VideoFile, vae: VideoVAE, say: Say
) -> tuple[dict[str, Any], tuple[int, int]]:
    """What the demo takes of a video; and height and width of it."""
    stretch, cut = _stretch(args) | {"size": args.size}, ""
    if vae.device.type == "cpu":
        stretch, cut = affordable(video, vae.config, stretch)
    shape = _cropped(video, vae, say, stretch["size"])
    if cut:
        say(f"note: {cut}")
    return stretch, shape


def _options(args: argparse.Namespace, vae: VideoVAE) -> StreamOptions:
    step = vae.config.spatial_compression
    if args.tile and min(args.tile) < step:
        height, width = args.tile
        raise ValueError(f"tiles are {width}x{height}; this VAE needs at least {step}x{step}")
    return StreamOptions(args.chunk, tile=args.tile)


def _build_kernels(device: torch.device, say: Say) -> None:
    """Build what a first run has to build, before a clock runs."""
    if device.type != "cpu":
        return
    before = len(preparations())
    library = native_library()
    seconds = sum(done.end - done.start for done in preparations()[before:])
    if seconds and not library.missing:
        say(f"kernels built in {seconds:.1f} s, once")


def _cropped(
    video: VideoFile, vae: VideoVAE, say: Say, size: tuple[int, int] | None = None
) -> tuple[int, int]:
    step = vae.config.spatial_compression
    full = size or (video.height, video.width)
    height, width = video.cropped_size(step, size)
    count = f"{_frames(video.estimated_frames)}, " if video.estimated_frames else ""
    say(f"{video.path.name}: {count}{video.width}x{video.height}, {_number(video.fps)} fps")
    if (height, width) != full:
        say(f"note: cropped about the centre to {width}x{height}, multiples of {step}")
    return height, width


def _kept(video: VideoFile, vae: VideoVAE, stretch: dict[str, Any]) -> int | None:
    """How many frames the VAE will take of those that the file announces."""
    frames = video.estimate(**{key: stretch[key] for key in stretch if key != "size"})
    return frames and frames - (frames - 1) % vae.config.temporal_compression


def _progress(args: argparse.Namespace, total: int | None, unit: str = "frames") -> Progress:
    return Progress(args.command, total, unit=unit, quiet=args.quiet)


def _counted(pieces: Iterable[Tensor], progress: Progress) -> Iterator[Tensor]:
    for piece in pieces:
        yield piece
        progress.update(piece.shape[2])


def _frames(count: int) -> str:
    return f"{count} frame{'' if count == 1 else 's'}"


def _number(fps: Fraction) -> str:
    return f"{float(fps):.3f}".rstrip("0").rstrip(".")
