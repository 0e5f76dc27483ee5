"""What a VAE is and the memory that it takes, as text, for `fast-video-vae info FILE`."""

from collections.abc import Sequence
from pathlib import Path

from ..model import VideoVAE
from ..planning.plan import free_bytes
from ..streaming.options import StreamOptions
from ..validation import dtype_name
from .backend_report import aligned

MIB, GIB = 2**20, 2**30


def vae_report(
    vae: VideoVAE, path: Path, sizes: Sequence[tuple[int, int]], limit_bytes: int | None
) -> str:
    """Say what a VAE is, and how it would run.

    Args:
        vae: The VAE.
        path: Its file.
        sizes: Width and height of the frames in the table of memory.
        limit_bytes: Memory that a stream may take; None: what is free.

    Returns:
        A table of many lines.
    """
    config = vae.config
    weights = list(vae.parameters())
    dtypes = sorted({dtype_name(weight.dtype) for weight in weights})
    size = sum(weight.nbytes for weight in weights) / MIB
    step = config.spatial_compression
    rows = [
        ("file", str(path)),
        ("family", config.family),
        ("base width", f"encoder {config.encoder_width or '-'}, decoder {config.decoder_width}"),
        ("channels", f"{config.image_channels} image, {config.latent_channels} latent"),
        ("compression", f"{step} in space, {config.temporal_compression} in time"),
        ("output scale", f"{config.output_scale}x"),
        ("parameters", f"{sum(weight.numel() for weight in weights):,}"),
        ("weights", f"{', '.join(dtypes)}, {size:.1f} MiB on {vae.device}"),
        ("encodes in", dtype_name(vae.encode_dtype) if config.encoder_width else "-"),
        ("decodes in", dtype_name(vae.dtype)),
    ]
    lines = [f"{name:<14}{value}" for name, value in rows]
    free = free_bytes(vae.device)
    room = f"{_size(free)} free" if limit_bytes is None else f"within {limit_bytes / GIB:g} GiB"
    lines += [
        "",
        f"memory beside weights and pictures, a video of any length on {vae.device}, {room}",
    ]
    options = StreamOptions(limit_bytes=limit_bytes)
    table = [["size", "", "  memory", "a step"]]
    for width, height in sizes:
        for encode in (True, False) if config.encoder_width else (False,):
            plan = vae.plan(height - height % step, width, options, encode=encode)
            most, where = (free, "is free") if limit_bytes is None else (limit_bytes, "the limit")
            over = f"; more than {where}" if plan.peak_bytes > most else ""
            name = f"{width}x{height}" if encode or not config.encoder_width else ""
            task, how = "encode" if encode else "decode", f"{plan.step}, {plan.frames}{over}"
            table.append([name, task, f"{_size(plan.peak_bytes):>8}", how])
    return "\n".join([*lines, *aligned(table)])


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
