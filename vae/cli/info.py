"""`fast-video-vae info`: layout and memory of a VAE, and the backends of this machine."""

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ...kernels import (
    Support,
    backend_matrix,
    default_device,
    device_kind,
    device_name,
    gpu_compiler,
    native_library,
)
from ..bench.precision import compare_precision
from ..bench.tables import aligned, dtype_label
from ..model import VideoVAE
from ..planning.device_memory import free_bytes
from ..streaming.int8.settings import INT8
from ..streaming.options import StreamOptions
from ..validation import dtype_name
from .loading import Say, device_named, load_named

MIB, GIB = 2**20, 2**30
# Width of the text in columns.
WIDTH = 100
# Width of the last column of the memory table; bands of several devices take more than one line.
_HOW_WIDTH = 68
# Common frame sizes (width, height) for the memory table.
SIZES = ((512, 512), (832, 480), (1280, 720), (1920, 1080), (3840, 2160))
LEGEND = "exact: bit-identical to the reference; fast: equal except for rounding"


def info(args: argparse.Namespace, _: Say) -> str:
    """Describe a VAE file, its memory and what int8 costs, the device, and the backends."""
    parts = []
    if args.file:
        vae = load_named(args, args.file)
        parts.append(vae_report(vae, args.file, args.limit))
        if args.precision == INT8:
            parts.append(compare_precision(vae).text())
    if args.device is not None:
        parts.append(_device_line(device_named(args.device)))
    if args.backends:
        parts.append(backend_report())
    return "\n\n".join(parts)


def vae_report(vae: VideoVAE, path: Path, limit_bytes: int | None) -> str:
    """Describe a VAE and its plans within a memory limit (None: free memory)."""
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
        f"memory in addition to weights and frames, any length of video, on {vae.device}, {room}",
    ]
    options = StreamOptions(limit_bytes=limit_bytes)
    table = [["size", "", "  memory", "a step"]]
    for width, height in SIZES:
        for encode in (True, False) if config.encoder_width else (False,):
            plan = vae.plan(height - height % step, width, options, encode=encode)
            most, where = (free, "is free") if limit_bytes is None else (limit_bytes, "the limit")
            over = f"; more than {where}" if plan.peak_bytes > most else ""
            name = f"{width}x{height}" if encode or not config.encoder_width else ""
            task, how = "encode" if encode else "decode", f"{plan.step}, {plan.frames}{over}"
            first, *more = textwrap.wrap(how, _HOW_WIDTH, break_on_hyphens=False)
            table.append([name, task, f"{_size(plan.peak_bytes):>8}", first])
            table += [["", "", "", f"  {line}"] for line in more]
    return "\n".join([*lines, *aligned(table)])


def _device_line(device: torch.device) -> str:
    capability = "none"
    if device_kind(device) == "nvidia":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{device_name(device)}, compute capability {capability}"


def backend_report() -> str:
    """Describe the backends of this machine in tables per kind of device and of op.

    The compiled library for the CPU is built if it is missing.
    """
    library = native_library()
    matrix = backend_matrix()
    reasons = reasons_of(matrix)
    lines = []
    for entries in tables_of(matrix):
        lines += [*aligned(support_table(entries, reasons)), ""]
    lines += _wrapped("", LEGEND)
    for number, reason in enumerate(reasons, 1):
        lines += _wrapped(f"({number}) ", reason)
    threads, gpu = torch.get_num_threads(), default_device()
    machine = {
        "torch": torch.__version__,
        "CPU": f"{torch.backends.cpu.get_cpu_capability()}, {threads} threads"
        + (f"; native uses {library.instructions}" if library.instructions else ""),
        "GPU": "none" if gpu.type == "cpu" else f"{device_name(gpu)} ({device_kind(gpu)})",
        "compiler": gpu_compiler(),
        "library": str(library.path or "none"),
        "missing": library.missing or "nothing",
    }
    lines.append("")
    for name, value in machine.items():
        lines += _wrapped(f"{name:<10}", value)
    return "\n".join(lines)


def tables_of(matrix: Sequence[Support]) -> list[list[Support]]:
    """Divide the support into tables: a device each, and ops that have the same backends."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for each in matrix:
        names.setdefault((each.device, each.op), {})[each.backend] = None
    tables: dict[tuple[str, ...], list[Support]] = {}
    for each in matrix:
        backends = names[each.device, each.op]
        tables.setdefault((each.device, *backends), []).append(each)
    devices = [each.device for each in matrix]
    return sorted(tables.values(), key=lambda entries: devices.index(entries[0].device))


def reasons_of(matrix: Sequence[Support]) -> list[str]:
    """List the different reasons for which backends do not support calls."""
    return list(dict.fromkeys(each.reason for each in matrix if each.reason is not None))


def support_table(matrix: Sequence[Support], reasons: Sequence[str]) -> list[list[str]]:
    """Format the support of ops by backends as cells.

    A cell is "exact", "fast" or "no (2)" with the number of a reason. If dtypes differ, each is
    listed: "exact bf16 fp16, fast fp32".
    """
    columns = list(dict.fromkeys((each.device, each.backend) for each in matrix))
    rows = [["op", *(f"{device} {backend}" for device, backend in columns)]]
    for op in dict.fromkeys(each.op for each in matrix):
        cells = [
            _cell([m for m in matrix if (m.op, m.device, m.backend) == (op, *column)], reasons)
            for column in columns
        ]
        rows.append([op, *cells])
    return rows


def _wrapped(label: str, text: str) -> list[str]:
    """Wrap a text below its label."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cell(entries: Iterable[Support], reasons: Sequence[str]) -> str:
    kinds: dict[str, list[str]] = {}
    for each in entries:
        kinds.setdefault(_kind(each, reasons), []).append(dtype_label(each.dtype))
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} {' '.join(dtypes)}" for kind, dtypes in kinds.items())


def _kind(each: Support, reasons: Sequence[str]) -> str:
    if each.reason is not None:
        return f"no ({reasons.index(each.reason) + 1})"
    return "exact" if each.exact else "fast"


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
