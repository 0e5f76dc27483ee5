"""Helpers for tests of video files: moving frames, and files written with PyAV directly."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from fast_video_vae.vae.media import VideoWriter, read_video

# Tests that import this file need it too.
av = pytest.importorskip("av", reason="PyAV is not installed")


def moving_clip(frames, height=48, width=64):
    """Smooth pictures that move, `[T, H, W, 3]` uint8; no two frames are equal."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    t = torch.arange(frames).view(-1, 1, 1) / 16
    gray = 0.5 + 0.4 * torch.sin(6 * (x + t)) * torch.cos(5 * (y - t))
    tint = 0.1 * torch.stack([x.expand_as(gray), y.expand_as(gray), -x.expand_as(gray)], dim=-1)
    return ((gray.unsqueeze(-1) + tint).clamp(0, 1) * 255).round().to(torch.uint8)


def write_clip(path, frames, height=32, width=48, fps=24, codec="h264", **options):
    """Write a moving clip with the package's own writer, in a new folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, moving_clip(frames, height, width), fps, codec=codec, **options)


def numbered_clip(frames, height=48, width=64):
    """Gray pictures that encode their number modulo 50, `[T, H, W, 3]` uint8."""
    gray = (torch.arange(frames) % 50 * 4 + 30).to(torch.uint8)
    return gray.view(-1, 1, 1, 1).expand(frames, height, width, 3)


def pieces_of(video, **options):
    """Return the frames of `pieces` as `[T, H, W, 3]`."""
    return torch.cat(list(video.pieces(**options)), dim=2)[0].permute(1, 2, 3, 0)


def numbers(frames):
    """The numbers of what `numbered_clip` made, from `[T, H, W, 3]`."""
    return ((frames.float().mean(dim=(1, 2, 3)) - 30) / 4).round().int().tolist()


def write_with(
    path, frames, container, codec="h264", options=None, pix_fmt="yuv420p", prepare=None,
    times=None, rate=24,
):  # fmt: skip
    """Write `[T, H, W, 3]` with PyAV directly, in any container; `times` are in 1/1000 s."""
    with av.open(str(path), "w", format=container, options=options or {}) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pix_fmt
        if prepare:
            prepare(stream)
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index, picture in enumerate(frames.contiguous().numpy()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pix_fmt)
            if times:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def write_planes(path, codec, pix_fmt, pictures, options=None, prepare=None, full=False, matrix=2):
    """Write pictures in a format of more than 8 bits with PyAV directly.

    `pictures` are lists of planes `[H, W]` or `[H, W, values]` of the numbers that the file has.
    """
    container = {".png": "image2", ".exr": "image2", ".mkv": "matroska"}.get(path.suffix)
    order = ">" if pix_fmt.endswith("be") else "<"
    dtype = order + ("f4" if "f32" in pix_fmt else "u2")
    height, width = pictures[0][0].shape[:2]
    with av.open(str(path), "w", format=container) as output:
        stream = output.add_stream(codec, rate=24, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.colorspace = matrix
        stream.codec_context.color_range = 2 if full else 1
        if prepare:
            prepare(stream)
        for index, planes in enumerate(pictures):
            frame = av.VideoFrame(width, height, pix_fmt)
            frame.pts, frame.time_base = index, Fraction(1, 24)
            frame.colorspace, frame.color_range = matrix, 2 if full else 1
            for plane, values in zip(frame.planes, planes, strict=True):
                rows = np.zeros((plane.height, plane.line_size), np.uint8)
                data = np.ascontiguousarray(values.reshape(plane.height, -1), dtype).view(np.uint8)
                rows[:, : data.shape[1]] = data
                plane.update(rows.tobytes())
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def write(path, frames, fps=24, **options):
    """Write `[T, H, W, 3]` with `VideoWriter`, in place of an older file."""
    with VideoWriter(path, fps, overwrite=True, **options) as writer:
        writer.write(frames)
    return path


def stacked(video):
    """Every frame of a video or of a file, `[T, H, W, 3]` uint8."""
    video = video if hasattr(video, "frames") else read_video(video)
    return torch.stack(list(video.frames(dtype=torch.uint8)))


def psnr(result, source):
    """Peak signal-to-noise ratio in dB of 8-bit pictures."""
    error = (result.double() - source.double()).square().mean()
    return (10 * torch.log10(255**2 / error)).item()
