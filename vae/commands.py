"""What the commands of the command line do. All that is slow to import is imported here."""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ..kernels import gpu_config
from .backends import aligned, backend_report
from .bench_chart import draw_chart
from .bench_content import Clip
from .bench_report import tasks_of
from .checkpoint import load_vae
from .codecs import check_size, codec_for
from .demo import CLIP_PATH, VAE_PATH
from .files import load_latent, save_latent, whole_file
from .handoff import Handoff
from .media import VideoFile, read_video
from .model import VideoVAE
from .plan import free_bytes
from .relief import Relief
from .rivals import Rivals
from .roundtrip import RoundTrip, shrunk, with_channels
from .sheet import ContactSheet
from .sound import read_audio
from .writer import VideoWriter, frames_to_uint8

# The rate that the Wan 2.1 models make videos at, for latents that do not name theirs.
LATENT_FPS = Fraction(16)
# Frame sizes that people decode, (width, height), for the table of `info`.
SIZES = ((512, 512), (832, 480), (1280, 720), (1920, 1080), (3840, 2160))
MIB, GIB = 2**20, 2**30

# Tells the user something on the way.
Say = Callable[[str], None]


def demo(args: argparse.Namespace, say: Say) -> str:
    """Encode and decode a video; write the result and a contact sheet.

    Args:
        args: `video` and `vae` (None: the bundled ones), `out`, and the common ones.
        say: Takes the lines before the last.

    Returns:
        The last line: `PSNR 24.13 dB`.
    """
    video = read_video(args.video or CLIP_PATH)
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"{args.out} is a file; expected a folder to write to")
    args.out.mkdir(parents=True, exist_ok=True)
    movie = args.out / f"{video.path.stem}_decoded.mp4"
    picture = args.out / f"{video.path.stem}_sheet.png"
    # Both outputs are opened before the work, so that a folder that is not writable costs no time.
    with ExitStack() as stack:
        part = stack.enter_context(whole_file(picture))
        writer = stack.enter_context(VideoWriter(movie, video.fps))
        vae = _load(args, args.vae or VAE_PATH, say)
        height, width = _cropped(video, vae, say)
        trip = RoundTrip(vae, video, args.chunk)
        sheet = ContactSheet()
        before = _peak_bytes(vae)
        with _bar(args, _kept(video, vae)) as bar:
            for source, result in trip:
                writer.write(result)
                sheet.add(source, shrunk(result, vae.config.output_scale))
                bar.update(len(result))
        size = f"{width} x {height}   {_number(video.fps)} fps"
        verdict = f"PSNR {trip.psnr:.2f} dB"
        title = f"{video.path.name}   {_frames(trip.frames)}   {size}"
        sheet.draw(title, verdict).save(part, format="PNG")
    for name, seconds in (("encode", trip.encode_seconds), ("decode", trip.decode_seconds)):
        say(f"{name}  {seconds:8.2f} s  {trip.frames / seconds:8.2f} frames/s")
    if before is not None:
        peak = _peak_bytes(vae) or before
        say(f"peak memory {peak / MIB:.0f} MiB, of which {before / MIB:.0f} MiB before it began")
    say(f"wrote {movie}")
    say(f"wrote {picture}")
    return verdict


def encode(args: argparse.Namespace, say: Say) -> str:
    """Encode a video to a latent file.

    Args:
        args: `video`, `vae`, `output`, `fps`, `size`, `start`, `duration`, `frames_limit`, and the
            common ones.
        say: Takes the lines before the last.

    Returns:
        The last line: what was written.
    """
    if args.output.suffix.lower() != ".safetensors":
        raise ValueError(f"{args.output} is not named as a latent; expected x.safetensors")
    video = read_video(args.video)
    stretch = {
        "fps": args.fps,
        "start": args.start,
        "duration": args.duration,
        "limit": args.frames_limit,
    }
    expected = video.estimate(**stretch)
    with whole_file(args.output) as part:
        vae = _load(args, args.vae, say)
        config = vae.config
        if config.encoder_width is None:
            raise ValueError(f"{args.vae} has a decoder only; expected a VAE that can encode too")
        _cropped(video, vae, say, args.size)
        pieces = video.pieces(multiple=config.spatial_compression, size=args.size, **stretch)
        with _bar(args, expected) as bar:
            pictures = (
                with_channels(piece, config.image_channels) for piece in _counted(pieces, bar)
            )
            parts = [x.cpu() for x in vae.encode_stream(pictures, args.chunk)]
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
            (None: by the suffix), `video_quality`, `hardware`, `audio` (None: no sound), and the
            common ones.
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
        with _bar(args, len(wanted)) as bar, Handoff(writer.write) as handoff:
            relief = Relief(vae.device, "a decode")
            for piece in _counted(vae.decode_stream(file.latent, args.chunk, frames=wanted), bar):
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
    path, device = args.vae or VAE_PATH, _device(args)
    with ExitStack() as stack:
        chart, text = (
            stack.enter_context(whole_file(each)) if each else None
            for each in (args.output, args.json)
        )
        rivals = Rivals(path, device, *_dtypes(args), args.chunk)
        clip = Clip(args.size[1], args.size[0], args.frames)
        with tqdm(unit=" runs", total=0, delay=2, leave=False, disable=args.quiet) as bar:

            def progress(calls: int) -> Callable[[], None]:
                bar.total += calls

                def passed() -> None:
                    bar.update()

                return passed

            done = rivals.race(tasks_of(args.task), clip, args.rounds, progress)
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
    parts = [_file_report(args)] if args.file else []
    if args.device is not None:
        parts.append("\n".join(gpu_config(_device(args)).lines()))
    if args.backends:
        parts.append(backend_report())
    return "\n\n".join(parts)


def _file_report(args: argparse.Namespace) -> str:
    vae = _load(args, args.file)
    config = vae.config
    weights = list(vae.parameters())
    dtypes = sorted({_dtype_name(weight.dtype) for weight in weights})
    size = sum(weight.nbytes for weight in weights) / MIB
    step = config.spatial_compression
    rows = [
        ("file", str(args.file)),
        ("family", config.family),
        ("base width", f"encoder {config.encoder_width or '-'}, decoder {config.decoder_width}"),
        ("channels", f"{config.image_channels} image, {config.latent_channels} latent"),
        ("compression", f"{step} in space, {config.temporal_compression} in time"),
        ("output scale", f"{config.output_scale}x"),
        ("parameters", f"{sum(weight.numel() for weight in weights):,}"),
        ("weights", f"{', '.join(dtypes)}, {size:.1f} MiB on {vae.device}"),
        ("encodes in", _dtype_name(vae.encode_dtype) if config.encoder_width else "-"),
        ("decodes in", _dtype_name(vae.dtype)),
        ("quality", vae.quality),
    ]
    lines = [f"{name:<14}{value}" for name, value in rows]
    free = free_bytes(vae.device)
    room = f"{_size(free)} free" if args.limit is None else f"within {args.limit / GIB:g} GiB"
    lines += [
        "",
        f"memory beside weights and pictures, a video of any length on {vae.device}, {room}",
    ]
    table = [["size", "", "  memory", "a step"]]
    for width, height in SIZES:
        for encode in (True, False) if config.encoder_width else (False,):
            plan = vae.plan(height - height % step, width, encode=encode, limit_bytes=args.limit)
            most, where = (free, "is free") if args.limit is None else (args.limit, "the limit")
            over = f"; more than {where}" if plan.peak_bytes > most else ""
            name = f"{width}x{height}" if encode or not config.encoder_width else ""
            task, how = "encode" if encode else "decode", f"{plan.step}, {plan.frames}{over}"
            table.append([name, task, f"{_size(plan.peak_bytes):>8}", how])
    return "\n".join([*lines, *aligned(table)])


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def _load(args: argparse.Namespace, path: Path, say: Say | None = None) -> VideoVAE:
    device = _device(args)
    dtype, encode_dtype = _dtypes(args)
    vae = load_vae(
        path, device=device, dtype=dtype, encode_dtype=encode_dtype, quality=args.quality
    )
    if say:
        say(
            f"{path.name}: {vae.config.family}, base width {vae.config.decoder_width}, "
            f"on {device}, encodes in {_dtype_name(vae.encode_dtype)}, "
            f"decodes in {_dtype_name(vae.dtype)}"
        )
    return vae


def _dtypes(args: argparse.Namespace) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Those to decode and to encode in; None: chosen."""
    dtype, encode_dtype = (
        getattr(torch, name) if name else None for name in (args.dtype, args.encode_dtype)
    )
    return dtype, encode_dtype


def _device(args: argparse.Namespace) -> torch.device:
    """The device that is asked for, or else the best there is."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is unknown; expected such as cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not there: this PyTorch finds no CUDA device")
    return device


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


def _kept(video: VideoFile, vae: VideoVAE) -> int | None:
    """How many frames the VAE will take of those that the file announces."""
    frames = video.estimated_frames
    return frames and frames - (frames - 1) % vae.config.temporal_compression


def _peak_bytes(vae: VideoVAE) -> int | None:
    """Peak of the memory so far: of the GPU where it works there, else of this process.

    None on Windows, where Python's own library does not tell.
    """
    if vae.device.type == "cuda":
        return torch.cuda.max_memory_allocated(vae.device)
    try:
        import resource  # noqa: PLC0415, not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _bar(args: argparse.Namespace, frames: int | None) -> tqdm:
    # What takes less than two seconds needs no bar.
    return tqdm(
        total=frames,
        unit=" frames",
        delay=2,
        leave=False,
        disable=args.quiet,
        dynamic_ncols=True,
    )


def _counted(pieces: Iterable[Tensor], bar: tqdm) -> Iterator[Tensor]:
    for piece in pieces:
        yield piece
        bar.update(piece.shape[2])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _frames(count: int) -> str:
    return f"{count} frame{'' if count == 1 else 's'}"


def _number(fps: Fraction) -> str:
    return f"{float(fps):.3f}".rstrip("0").rstrip(".")
