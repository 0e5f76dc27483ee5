"""The commands of `fast-video-vae`; slow imports are here.

Every command takes the parsed arguments and `say`, which prints a line, and returns the last line.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from ..background_writer import BackgroundWriter
from ..bench.baselines import race
from ..bench.chart import draw_chart
from ..bench.content import Clip
from ..bench.report import tasks_of
from ..demo import VAE_PATH
from ..media.atomic_file import unfinished, whole_file
from ..media.audio import read_audio
from ..media.codecs import codec_for
from ..media.latent_file import load_latent, save_latent
from ..media.pictures import with_channels
from ..media.video_reader import read_video
from ..media.video_writer import VideoWriter, parts_of
from ..streaming.bands.ranks import Ranks
from ..streaming.int8.settings import AUTO
from ..streaming.memory import retried
from ..streaming.source import Rereadable
from .demo import demo
from .info import info
from .loading import STRETCH, Say, build_kernels, chosen, cropped, labels, load_named, options_for
from .progress_bar import ProgressBar

# Frame rate of the Wan 2.1 models, for latents without a frame rate.
LATENT_FPS = Fraction(16)


def run(args: argparse.Namespace, say: Say) -> str:
    """Run a command; of the processes of `torchrun`, the others work for rank 0 and return ""."""
    commands = {"demo": demo, "encode": encode, "decode": decode, "bench": bench, "info": info}
    args.ranks = None
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return commands[args.command](args, say)
    if args.command not in ("encode", "decode"):
        only = "torchrun is for encode and decode"
        raise ValueError(f"{only}; expected one process to {args.command}")
    if args.devices:
        raise ValueError("--devices is for one process; expected it without torchrun")
    if torch.cuda.is_available() and args.device in (None, "cuda"):
        # A process without `--device` takes the GPU of its number.
        number = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        args.device = f"cuda:{number % torch.cuda.device_count()}"
        torch.cuda.set_device(args.device)
    dist.init_process_group("gloo")
    last = ""
    with Ranks(unfinished) as ranks:
        if ranks.number:
            args.shares, args.precision = None, AUTO
            ranks.follow(load_named(args, args.vae))
        else:
            args.ranks = ranks
            last = commands[args.command](args, say)
    dist.destroy_process_group()
    return last


def encode(args: argparse.Namespace, say: Say) -> str:
    """Encode a video to a latent file."""
    if args.output.suffix.lower() != ".safetensors":
        raise ValueError(f"{args.output} is not a latent file; expected x.safetensors")
    video, stretch = read_video(args.video), chosen(args, *STRETCH)
    expected = video.estimate(**stretch)
    with whole_file(args.output, overwrite=args.overwrite) as draft:
        vae = load_named(args, args.vae, say)
        config = vae.config
        if config.encoder_width is None:
            raise ValueError(f"{args.vae} has a decoder only; expected a VAE with an encoder")
        cropped(video, config, args.size, say)
        options, step = options_for(args, vae, say), config.spatial_compression
        with ProgressBar(args.command, expected, quiet=args.quiet) as progress:

            def pictures() -> Iterator[Tensor]:
                pieces = video.pieces(multiple=step, size=args.size, **stretch)
                for piece in progress.counted(pieces):
                    yield with_channels(piece, config.image_channels)

            parts = [x.cpu() for x in vae.encode_stream(Rereadable(pictures), options)]
        latent = retried(lambda: torch.cat(parts, dim=2), torch.device("cpu"), "an encode")
        frames, fps = config.frames(latent.shape[2]), args.fps or video.fps
        given = {"family": config.family, "fps": fps, "frames": frames, "compression": step}
        save_latent(draft.part, latent, **given)
    count, rate = labels(frames, fps)
    return f"wrote {draft.path}: {list(latent.shape)} for {count} at {rate}"


def decode(args: argparse.Namespace, say: Say) -> str:
    """Decode a latent file to a video."""
    file = load_latent(args.latents)
    fps = args.fps or file.fps or LATENT_FPS
    # A part of the video has its part of the audio.
    late = args.frames.start / fps if args.frames else Fraction(0)
    writer = VideoWriter(
        args.output,
        fps,
        codec=args.codec or codec_for(args.output).name,
        audio=read_audio(args.audio, late) if args.audio else None,
        **chosen(args, "quality", "hardware", "bit_depth", "dither", "alpha", "overwrite"),
    )
    with writer:
        vae = load_named(args, args.vae, say)
        config = vae.config
        if file.family not in (None, config.family):
            other = f"{args.vae} is {config.family}"
            raise ValueError(f"{args.latents} is a latent of {file.family}; {other}")
        total = config.frames(file.latent.shape[2])
        wanted = args.frames or range(total)
        if wanted.stop > total:
            asked = f"{wanted.start}-{wanted.stop - 1}"
            raise ValueError(f"frames are {asked}; {args.latents} has 0-{total - 1}")
        scale = config.spatial_compression * config.output_scale
        height, width = (scale * side for side in file.latent.shape[3:])
        writer.check(height, width, config.image_channels)
        options = options_for(args, vae, say)
        with (
            ProgressBar(args.command, len(wanted), quiet=args.quiet) as progress,
            BackgroundWriter(writer.write, dtype=writer.dtype, cancel=writer.cancel) as background,
        ):
            deep = writer.dtype != torch.uint8
            pieces = vae.decode_stream(file.latent, options, frames=wanted, deep=deep)
            for piece in progress.counted(pieces):
                for part in parts_of(piece, writer.dtype):
                    put = lambda part=part: background.put(writer.pictures(part))  # noqa: E731
                    retried(put, vae.device, "a decode")
    made, name = writer.encoding, writer.codec.name
    say(f"{name} in {made.bit_depth} bits ({made.pixel_format}) encoded by {made.encoder}")
    count, rate = labels(writer.frames, writer.fps)
    return f"wrote {writer.path}: {count} at {rate}"


def bench(args: argparse.Namespace, say: Say) -> str:
    """Measure a VAE file with this package, its plain reference, and diffusers if installed."""
    if args.output and args.output.suffix.lower() != ".png":
        raise ValueError(f"{args.output} is not a PNG file; expected x.png")
    path = args.vae or VAE_PATH
    with ExitStack() as stack:
        chart, text = (
            stack.enter_context(whole_file(each, overwrite=args.overwrite)) if each else None
            for each in (args.output, args.json)
        )
        vae = load_named(args, path)
        clip = Clip(args.size[1], args.size[0], args.frames)
        build_kernels(vae, say)
        with ProgressBar(args.command, 0, unit="runs", quiet=args.quiet) as progress:

            def began(calls: int) -> Callable[[], None]:
                progress.total = (progress.total or 0) + calls
                return progress.update

            done = race(vae, tasks_of(args.task), clip, args.rounds, args.chunk, began)
        if chart:
            draw_chart(done).save(chart.part, format="PNG")
        if text:
            text.part.write_text(done.as_json(), encoding="utf-8")
    say(f"{path.name}: {done.table()}\n")
    for draft in (chart, text):
        if draft:
            say(f"wrote {draft.path}")
    return done.summary()
