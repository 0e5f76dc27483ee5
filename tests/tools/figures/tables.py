"""The tables of the texts, written from the rows of the benchmarks."""

import math
import re
import statistics
from collections.abc import Callable

from fast_video_vae.tests.benchmarks.weights import WIDTHS

from .bands import speed_up
from .cells import (
    FAMILIES,
    NAMES,
    PEERS,
    case_of,
    compared,
    device_of,
    origin,
    peaks,
    seconds,
    size_of,
    table,
    value,
    with_commit,
    with_machine,
)
from .rows import Row, by_case, one, select

_BACKEND = re.compile(r"(\w+) step (\d+)x(\d+) (\w+) (.+), (triton|cuda|reference)(.*)")
_STREAM = re.compile(r"(\S+), (\w+), width \d+, 1 x (\d+) latents of (\S+) (\w+)")
_LENGTHS = (1, 33, 129)  # frames of a short and a long video
_TWO = ("comfyui", "ours")

# A PSNR of frames in [-1, 1] next to a mean squared error.
_PEAK_2_DB = 20 * math.log10(2)


def speed() -> str:
    """The front page: what was measured next to ComfyUI and diffusers, by device."""
    measured = [
        ("Wan 2.1 decode, 1 x 512 x 512", "bench_vae", "decode 1x512x512 bfloat16", ""),
        ("Wan 2.1 decode, 17 x 192 x 192", "bench_vae", "decode 17x192x192 bfloat16", ""),
        ("Wan 2.2 decode, 17 x 128 x 128", "bench_vae", "decode 17x128x128 bfloat16", "wan2.2"),
        ("SeedVR2 decode, 5 x 128 x 128", "bench_vae", "decode 5x128x128 bfloat16", "seedvr2"),
        ("Wan 2.1 decode, 81 x 720 x 1280", "bench_gpu", "Wan2.1 decode 720x1280x81, bf16", ""),
    ]
    body = []
    for work, bench, case, family in measured:
        name = f"{case} {family}".strip()
        rows = by_case([row for row in select(bench, name) if row["case"] == name])[name]
        ours = rows["ours"]
        command = f"`{bench}.py{f' --family {family}' if family else ''}`, {ours['commit']}"
        device = device_of(ours)
        shown = "" if device in (line[0] for line in body) else device
        body.append([shown, work, *seconds(rows, PEERS), peaks(rows), command])
    head = ["device", "seconds, bf16", "ComfyUI", "diffusers", "this pack", "peak GiB of the three"]
    return table([*head, "`python tests/benchmarks/`"], body)


def vae(family: str) -> str:
    """Seconds of `bench_vae.py` for a family, as wide as the published one."""
    suffix = "" if family == "wan2.1" else f" {family}"
    rows = [
        row
        for row in select("bench_vae", base_width=WIDTHS[family])
        if row["case"].endswith((f"bfloat16{suffix}", f"float32{suffix}"))
    ]
    return compared(rows)


def static() -> str:
    """Encodes of a picture and grey frames, with static frames skipped and not."""
    body = []
    for case, each in by_case(select("bench_vae", ", static")).items():
        ours = each["ours"]
        cells = [case_of(case), str(ours["base_width"]), *seconds(each, ("comfyui", "every"))]
        body.append([*cells, origin(ours)])
    head = ["case", "base width", "ComfyUI", "this pack, each frame", "this pack", "commit"]
    return with_machine(table(head, body), ours)


def server() -> str:
    """Seconds of ComfyUI's nodes in its server."""
    return compared(select("bench_comfyui"))


def gpu() -> str:
    """Whole encodes and decodes on a GPU."""
    body = []
    rows = [row for row in select("bench_gpu", "Wan2.1 ") if "s" in row]
    for case, each in by_case(rows).items():
        ours = each["ours"]
        height, width, frames = re.search(r"(\d+)x(\d+)x(\d+)", case).groups()
        work = f"{case.split()[1]} {frames} x {height} x {width} bf16"
        body.append([work, *seconds(each, PEERS), peaks(each), origin(ours)])
    head = ["case", "ComfyUI", "diffusers", "this pack", "peak GiB of the three", "commit"]
    return with_machine(table(head, body), ours)


def int8_gpu() -> str:
    """Milliseconds of one convolution by implementation."""
    names = ["int8 triton", "bf16 triton, first tile", "bf16 aten", "fp16 aten"]
    body = []
    for case, each in by_case(select("int8", "conv3d")).items():
        body.append([case, *(f"{each[name]['ms']:.2f}" for name in names), origin(each[names[0]])])
    head = ["case", "int8", "bf16, our kernel", "bf16, cuDNN", "fp16, cuDNN", "commit"]
    return with_machine(table(head, body), each[names[0]])


def int8_error() -> str:
    """What int8 loses, by family and dtype of the other layers."""
    body = []
    for row in select("int8", "full-width random weights"):
        size, family, other = re.fullmatch(
            r"decode (\S+) (\S+), full-width random weights, other layers torch\.(\w+)", row["case"]
        ).groups()
        cells = [f"{_PEAK_2_DB - row[key]:.1f}" for key in ("bf16_error_db", "int8_error_db")]
        share = f"{100 * row['share']:.0f} %"
        body.append([FAMILIES[family], size_of(size), other, share, *cells, origin(row)])
    head = ["VAE", "video", "other layers", "in int8", "PSNR, bf16", "PSNR, int8", "commit"]
    return with_machine(table(head, body), row)


def int8_cpu() -> str:
    """Seconds of a decode with and without int8 on a CPU."""
    body = []
    for row in select("int8", "bundled VAE"):
        times = [f"{statistics.median(row[key]):.2f}" for key in ("bf16_s", "int8_s")]
        share, ratio = f"{100 * row['share']:.0f} %", f"{row['bf16_over_int8']:.2f}x"
        body.append([size_of(row["case"].partition(",")[0]), share, *times, ratio, origin(row)])
    head = ["case", "in int8", "bf16, s", "int8, s", "ratio", "commit"]
    return with_machine(table(head, body), row)


def count_bytes() -> str:
    """Bytes and launches of a step."""
    body = []
    for row in select("count_bytes", "step"):
        if row["case"].endswith("own kernel"):
            continue
        own = one("count_bytes", f"{row['case']}, own kernel")
        direction, _, _, _, family = row["case"].split(" ")
        moved, least = row["gigabytes_per_latent"], row["needed"]
        cells = [f"{moved:.1f} ({moved / least:.2f}x)", f"{least:.1f}"]
        cells += [f"{row['launches_per_latent']:.0f}"]
        cells += [f"{own['gigabytes_per_latent']:.1f} ({own['gigabytes_per_latent'] / least:.2f}x)"]
        cells += [f"{own['launches_per_latent']:.0f}", origin(own)]
        body.append([f"{FAMILIES[family]} {direction}", *cells])
    body.sort()
    head = ["step", "GB", "a pass each", "launches", "with our kernel", "launches", "commit"]
    return table(head, body)


def launches() -> str:
    """Bytes and launches of a step by GPU backend."""
    cells: dict[str, dict[str, str]] = {}
    for row in select("count_backends", "step"):
        direction, *_, family, backend, attends = _BACKEND.fullmatch(row["case"]).groups()
        moved = row["gigabytes_without_convolutions_per_latent"]
        text = f"{moved:.1f} GB, {row['launches_per_latent']:,.0f}"
        cells.setdefault(f"{FAMILIES[family]} {direction}", {})[backend + attends] = text
    kinds = ["triton", "cuda", "cuda with attention", "reference"]
    body = [[step, *(each[kind] for kind in kinds)] for step, each in cells.items()]
    return with_commit(table(["step", *kinds], body), row)


def cuda_kernels() -> str:
    """Registers and shared memory of the CUDA kernels, the most of all chips."""
    most: dict[str, list[int]] = {}
    fields = ("registers", "shared_bytes", "spilled_bytes")
    rows = [row for row in select("compile_cuda") if "registers" in row]
    for row in rows:
        name = row["case"].split(" ")[0]
        values = [row[field] for field in fields]
        most[name] = [*map(max, most.get(name, values), values)]
    body = [[f"`{name}`", *(f"{value:,}" for value in most[name])] for name in sorted(most)]
    head = ["kernel", "registers", "shared bytes", "spilled bytes"]
    return with_commit(table(head, body), rows[-1])


def memory() -> str:
    """Peaks of short and long streams."""
    lengths: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in select("bench_memory", "latents of"):
        family, direction, latents, size, dtype = _STREAM.fullmatch(row["case"]).groups()
        case = f"{FAMILIES[family]} {direction}, {case_of(f'{size} {dtype}')}"
        key = case, str(row["base_width"]), origin(row)
        lengths.setdefault(key, {})[4 * int(latents) - 3] = row
    body = []
    for (case, width, commit), rows in lengths.items():
        most = [f"{rows[frames]['peak_mib']:.0f}" for frames in _LENGTHS]
        body.append([case, width, *most, f"{rows[_LENGTHS[-1]]['estimate_mib']:.0f}", commit])
    head = ["MiB", "base width", *(f"frames: {frames}" for frames in _LENGTHS)]
    return with_machine(table([*head, "planned", "commit"], body), row)


def peak() -> str:
    """Peaks of a process that loads a file and decodes."""
    body = []
    for case, each in by_case(select("bench_peak")).items():
        cells = [f"{each[n][key]:.0f}" for key in ("peak_mib", "stays_mib") for n in _TWO]
        body.append([case_of(case), *cells, origin(each["ours"])])
    head = ["case", "peak, ComfyUI", "this pack", "afterwards, ComfyUI", "this pack", "commit"]
    return with_machine(table(head, body), each["ours"])


def seams() -> str:
    """Errors of tiled decodes."""
    body = []
    for case, each in by_case(select("bench_seams")).items():
        for name in _TWO:
            row = each[name]
            psnr = "identical" if row["psnr_db"] is None else f"{row['psnr_db']:.1f} dB"
            cells = [f"{row[key]:.3g}" for key in ("max_levels", "mean_levels", "step_levels")]
            cells.insert(2, psnr)
            body.append([case, NAMES[name], *cells, origin(each["ours"])])
    head = ["tiles", "VAE", "largest", "mean", "PSNR", "largest step of brightness", "commit"]
    return with_machine(table(head, body), row)


def tiny() -> str:
    """Tiny decoders next to ComfyUI's and the full decoder."""
    body = []
    for case, each in by_case(select("bench_tiny")).items():
        if "processor time" in case:
            continue
        ours = each["ours"]
        body.append([case_of(case), *seconds(each, ("comfyui", "full")), origin(ours)])
    head = ["case", "ComfyUI's", "full decoder", "tiny decoder", "commit"]
    return with_machine(table(head, body), ours)


def preview() -> str:
    """A step of the sampler with a preview and without."""
    with_it, without = (
        one("test_preview_speed", implementation=name) for name in ("ours", "none")
    )  # fmt: skip
    cells = [f"{value(with_it):.2f}", f"{value(without):.2f}"]
    body = [[with_it["case"].partition(", previews")[0], *cells, origin(with_it)]]
    head = ["step", "with a preview, s", "without, s", "commit"]
    return with_machine(table(head, body), with_it)


def lora() -> str:
    """A linear layer with a LoRA, by mode."""
    names = ["auto", "stream", "beside", "ComfyUI's bypass", "merge per call"]
    body = []
    for row in sorted(select("bench_lora", "tokens"), key=lambda row: len(row["case"])):
        times = row["milliseconds"]
        ratios = [f"{times[name] / times['no LoRA']:.2f}x" for name in names]
        tokens = re.search(r"(\d+) tokens", row["case"]).group(1)
        body.append([f"{int(tokens):,}", f"{times['no LoRA']:.0f} ms", *ratios, origin(row)])
    head = ["tokens", "without", "auto", "stream", "bypass", *names[3:], "commit"]
    return with_machine(table(head, body), row)


def lora_effect() -> str:
    """What is left of a LoRA's effect on weights of few bits."""
    row = one("bench_lora", "error")
    errors = [f"{100 * row[way]['mean']:#.3g} %" for way in ("beside", "stream", "core")]
    body = [["error, 1 % of fp8 weights", *errors, device_of(row), origin(row)]]
    for row in select("bench_lora", "share that is kept"):
        delta = re.match(r"deltas of (\S+) %", row["case"])[1]
        kept = [f"{100 * row[way]['mean']:.0f} %" for way in ("stream", "core")]
        body.append([f"kept, {delta} % of bf16 weights", "all", *kept, device_of(row), origin(row)])
    head = ["delta", "`bypass`", "`stream`", "ComfyUI's loader", "machine", "commit"]
    return table(head, body)


def text() -> str:
    """Prompts through a text encoder, by way."""
    body = []
    for row in select("bench_text"):
        for way, ratio in row["cpu_ratios"].items():
            body.append([row["case"], way, f"{ratio:.2f}", origin(row)])
    return with_machine(table(["case", "way", "processor time", "commit"], body), row)


def devices() -> str:
    """Bands and shards on two devices."""
    body = []
    for name in ("bands", "shards"):
        for row in select(f"bench_{name}"):
            if row["commit"].endswith("dirty"):
                continue
            kind = "devices" if name == "bands" else "processes"
            cells = [f"{row[f'{name}_are_faster_by']:.2f}x", origin(row)]
            body.append([f"{name}, two {kind}", case_of(row["case"].split(",")[0]), *cells])
    head = ["", "case", "speed-up over one core", "commit"]
    return with_machine(table(head, body), row)


def bands() -> str:
    """Expected speed-ups of bands."""
    counts = (2, 3, 4, 8)
    ways = {
        "columns, from the layers on where tiles begin": (True, False),
        "columns, from right after the attention on": (True, True),
        "rows, from the layers on where tiles begin": (False, False),
        "rows, from right after the attention on": (False, True),
    }
    body = [
        [way, *(f"{speed_up(n, columns=columns, after_attention=after):.2f}x" for n in counts)]
        for way, (columns, after) in ways.items()
    ]
    return table(["bands of", *(f"{n} GPUs" for n in counts)], body)


def install() -> str:
    """From the published archive to the first clip, by stage."""
    stages = {
        "PyTorch (CPU)": "torch_s",
        "ComfyUI's requirements": "comfyui_s",
        "this pack": "pack_s",
        "boot": "boot_s",
        "first clip": "first_clip_s",
        "second clip": "second_clip_s",
    }
    row = one("bench_install")
    cells = [f"{row[key]:.0f}" for key in stages.values()]
    return with_machine(table(["seconds", *stages, "commit"], [["", *cells, origin(row)]]), row)


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "wan2.1": lambda: vae("wan2.1"),
    "wan2.2": lambda: vae("wan2.2"),
    "seedvr2": lambda: vae("seedvr2"),
    "static": static,
    "server": server,
    "gpu": gpu,
    "int8-gpu": int8_gpu,
    "int8-error": int8_error,
    "int8-cpu": int8_cpu,
    "bytes": count_bytes,
    "launches": launches,
    "cuda-kernels": cuda_kernels,
    "memory": memory,
    "peak": peak,
    "seams": seams,
    "tiny": tiny,
    "lora": lora,
    "lora-effect": lora_effect,
    "preview": preview,
    "text": text,
    "devices": devices,
    "bands": bands,
    "install": install,
}
