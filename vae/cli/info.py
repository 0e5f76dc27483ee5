"""`fast-video-vae info`: layout and memory of a VAE, and the backends of this machine."""

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path

import torch

from ... import kernels
from ..bench.device_report import check_device
from ..bench.precision import compare_precision
from ..bench.report import aligned, dtype_label, size
from ..model import VideoVAE
from ..planning.device_memory import free_bytes
from ..streaming.int8.settings import INT8
from ..streaming.options import StreamOptions
from ..validation import checked_device, dtype_name
from .loading import Say, load_named

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
        device = checked_device(args.device or kernels.default_device().type)
        capability = "none"
        if kernels.device_kind(device) == "nvidia":
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        parts.append(f"{kernels.device_name(device)}, compute capability {capability}")
    if args.check:
        device = checked_device(args.device or kernels.default_device().type)
        if device.type == "cpu":
            kernels.native_library()  # which is checked too
        parts.append(check_device(device))
    if args.backends:
        parts.append(backend_report())
    return "\n\n".join(parts)


def vae_report(vae: VideoVAE, path: Path, limit_bytes: int | None) -> str:
    """Describe a VAE and its plans within a memory limit (None: free memory)."""
    config, weights = vae.config, list(vae.parameters())
    dtypes = ", ".join(sorted({dtype_name(weight.dtype) for weight in weights}))
    weighs = sum(weight.nbytes for weight in weights) / MIB
    step, encodes = config.spatial_compression, config.encoder_width is not None
    rows = {
        "file": path,
        "family": config.family,
        "base width": f"encoder {config.encoder_width or '-'}, decoder {config.decoder_width}",
        "channels": f"{config.image_channels} image, {config.latent_channels} latent",
        "compression": f"{step} in space, {config.temporal_compression} in time",
        "output scale": f"{config.output_scale}x",
        "parameters": f"{sum(weight.numel() for weight in weights):,}",
        "weights": f"{dtypes}, {weighs:.1f} MiB on {vae.device}",
        "encodes in": dtype_name(vae.encode_dtype) if encodes else "-",
        "decodes in": dtype_name(vae.dtype),
    }
    most, where = limit_bytes or free_bytes(vae.device), "the limit" if limit_bytes else "is free"
    room = f"within {most / GIB:g} GiB" if limit_bytes else f"{size(most)} free"
    table = [["size", "", "  memory", "a step"]]
    for width, height in SIZES:
        for task in ("encode", "decode")[not encodes :]:
            options = StreamOptions(limit_bytes=limit_bytes)
            plan = vae.plan(height - height % step, width, options, encode=task == "encode")
            over = f"; more than {where}" if plan.peak_bytes > most else ""
            name = f"{width}x{height}" if task == "encode" or not encodes else ""
            how = f"{plan.step}, {plan.frames}{over}"
            first, *more = textwrap.wrap(how, _HOW_WIDTH, break_on_hyphens=False)
            table.append([name, task, f"{size(plan.peak_bytes):>8}", first])
            table += [["", "", "", f"  {line}"] for line in more]
    head = f"memory in addition to weights and frames, any length of video, on {vae.device}, {room}"
    lines = [f"{name:<14}{value}" for name, value in rows.items()]
    return "\n".join([*lines, "", head, *aligned(table)])


def backend_report() -> str:
    """Describe the backends of this machine in tables per kind of device and of op.

    A cell is "exact", "fast" or "no (2)" with the number of a reason, by dtype if these differ.
    """
    library, matrix = kernels.native_library(), kernels.backend_matrix()
    reasons = list(dict.fromkeys(each.reason for each in matrix if each.reason is not None))
    devices = [each.device for each in matrix]
    # Each kind of support with its dtypes, by device and op, then by backend.
    support: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for each in sorted(matrix, key=lambda each: devices.index(each.device)):
        kind = "exact" if each.exact else "fast"
        if each.reason is not None:
            kind = f"no ({reasons.index(each.reason) + 1})"
        kinds = support.setdefault((each.device, each.op), {}).setdefault(each.backend, {})
        kinds[kind] = f"{kinds.get(kind, kind)} {dtype_label(each.dtype)}"
    # Ops that have the same backends share a table.
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for (device, op), backends in support.items():
        head = ["op", *(f"{device} {backend}" for backend in backends)]
        cells = (kinds.values() if len(kinds) > 1 else kinds for kinds in backends.values())
        tables.setdefault(tuple(head), [head]).append([op, *map(", ".join, cells)])
    lines = [line for rows in tables.values() for line in (*aligned(rows), "")]
    lines += _wrapped({"": LEGEND, **{f"({n}) ": text for n, text in enumerate(reasons, 1)}})
    cpu = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    gpu = kernels.default_device()
    named = f"{kernels.device_name(gpu)} ({kernels.device_kind(gpu)})"
    machine = {
        "torch": torch.__version__,
        "CPU": cpu + (f"; native uses {library.instructions}" if library.instructions else ""),
        "GPU": "none" if gpu.type == "cpu" else named,
        "compiler": kernels.gpu_compiler(),
        "library": str(library.path or "none"),
        "missing": library.missing or "nothing",
    }
    lines += ["", *_wrapped({f"{name:<10}": text for name, text in machine.items()})]
    return "\n".join(lines)


def _wrapped(texts: Mapping[str, str]) -> list[str]:
    """Wrap each text below its label."""
    lines = []
    for label, text in texts.items():
        wrapper = textwrap.TextWrapper(
            WIDTH, label, " " * len(label), break_long_words=False, break_on_hyphens=False
        )
        lines += wrapper.wrap(text)
    return lines
