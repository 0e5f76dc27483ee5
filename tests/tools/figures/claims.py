"""The figures in the sentences of the texts, each with its source.

A claim is a sentence or a part of one. Its figures are values of committed rows or of the code,
written into the template; or they are the bounds of a test, which the claim names.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from fast_video_vae.lora.precision import LEAST_KEPT
from fast_video_vae.tests.builders import wan_shapes
from fast_video_vae.vae.streaming.int8.layers import LOSS_DB

from .rows import ROOT, Row, one, select

README = ROOT / "README.md"
DOCS = ROOT / "docs"
HELP = ROOT / "web" / "docs"
TEXTS: list[Path] = [
    README,
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(HELP.glob("*.md")),
]


_ENCODERS = ("wan", "z_image")


@dataclass(frozen=True)
class Claim:
    """A part of a text, and where its figures are from.

    Attributes:
        text: What the page says; with `values` a template.
        values: Returns the figures of the template; None: tests hold them.
        tests: `path::name` of those tests; empty: the values are the source.
    """

    text: str
    values: Callable[[], Sequence[object]] | None = None
    tests: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The text with its figures."""
        return self.text.format(*self.values()) if self.values else self.text


def _seams(name: str, tile: str) -> Row:
    return one("bench_seams", f"tiles of {tile}", implementation=name)


def _server(case: str) -> float:
    return one("bench_comfyui", case, implementation="comfyui")["ours_is_faster_by"]


def _stream(frames: int) -> float:
    latents = (frames + 3) // 4
    return one("bench_memory", f"wan2.1, decode, width 24, 1 x {latents} latents")["peak_mib"]


def _gpu(name: str) -> Row:
    return one("bench_gpu", "Wan2.1 decode 720x1280x81", implementation=name)


def _planned(free_gib: int) -> int:
    row = one("count_bytes", f"decode 81x720x1280 bfloat16 wan2.1, {free_gib} GiB free")
    return int(re.search(r"about (\d+) MiB", row["plan"])[1])


def _backend(backend: str) -> tuple[float, float]:
    case = f"decode 81x720x1280 bfloat16 wan2.1, {backend}"
    row = next(row for row in select("count_backends", case) if row["case"] == case)
    return row["gigabytes_without_convolutions"], row["launches"]


def _kept(delta: str) -> float:
    return 100 * one("bench_lora", f"deltas of {delta} %")["stream"]["mean"]


def _bank() -> Row:
    return one("bench_lora", "three LoRAs")


def _constant(path: str, name: str) -> float:
    """A constant of a file that imports ComfyUI: a number, or a shifted one."""
    source = (ROOT / path).read_text(encoding="utf-8")
    number, bits = re.search(rf"(?m)^{name} = ([\d.]+)(?: << (\d+))?$", source).groups("0")
    return float(number) * 2 ** int(bits)


def _text(name: str) -> Row:
    return one("bench_text", f"{name}, 8 layers")


def _timed() -> float:
    """Seconds of timed kernels in each decode of the first run on a GPU."""
    row = one("int8", "Wan 2.1 decode 720x1280x81", implementation="auto")
    return float(re.match(r"([0-9.]+) s of each are trials", row["note"])[1])


def _weights_megabytes() -> float:
    """The published VAE of Wan 2.1 in 16 bits."""
    shapes = wan_shapes(96, 96, latents=16, channels=3, out_channels=3, flat=True)
    return 2 * sum(map(prod, shapes.values())) / 1e6


def _image_gigabytes(frames: int, height: int, width: int) -> float:
    return frames * height * width * 3 * 4 / 1e9  # float32


_INT8 = [
    Claim("where that costs least, about {:.0f} dB below bf16", lambda: [LOSS_DB]),
    Claim("the frames have at most about {:.0f} dB less than in bf16", lambda: [LOSS_DB]),
]
_IMAGE = [
    Claim(
        "{:.0f} MB for each frame of 1280 x 720, which is {:.0f} GB for two minutes.",
        lambda: [1e3 * _image_gigabytes(1, 720, 1280), _image_gigabytes(120 * 16, 720, 1280)],
    )
]

CLAIMS: dict[Path, list[Claim]] = {
    README: [
        Claim(
            "within 1e-5 of ComfyUI's and diffusers' in fp32",
            tests=(
                "tests/vae/models/test_families.py::test_results_equal_comfyui",
                "tests/vae/test_any_way.py::test_any_way_gives_the_same_video",
                "tests/nodes/vae/test_comfy_vae.py::test_every_way_to_decode_equals_stock",
            ),
        ),
        Claim(
            "Its tiles differ from whole frames by {:.0f} of 255 levels, ComfyUI's by up to {:.0f} "
            "at their default size and {:.0f} at the smallest (above",
            lambda: [
                _seams("ours", "64")["max_levels"],
                _seams("comfyui", "512")["max_levels"],
                _seams("comfyui", "64")["max_levels"],
            ],
        ),
        Claim(
            "ComfyUI's VAE takes {:.1f} times as long for a picture and {:.1f} times for a video",
            lambda: [_server(case) for case in ("decode 1x512x512", "decode 17x192x192")],
        ),
        Claim(
            "this pack was slower, {:.2f} s to ComfyUI's {:.2f} s, at an older commit",
            lambda: [_gpu(name)["s"] for name in ("ours", "comfyui")],
        ),
        Claim(
            "a decode takes {:.0f} MiB above weights and images for 33 frames, and {:.0f} for 129",
            lambda: [_stream(frames) for frames in (33, 129)],
        ),
        Claim(
            "for 81 x 720 x 1280 in bf16 {:,} MiB, or {:,} MiB in tiles where 6 GiB are free",
            lambda: [_planned(free) for free in (22, 6)],
        ),
        Claim(
            "no download, {:.0f} s on two CPU cores during the build of its kernels, "
            "then {:.0f} s.",
            lambda: [one("bench_install")[f"{which}_clip_s"] for which in ("first", "second")],
        ),
        Claim("every decode timed\nkernels for about {:.1f} s.", lambda: [_timed()]),
        Claim("*: {:.1f} s for that row.", lambda: [_gpu("ours")["s"] - _timed()]),
    ],
    DOCS / "backends.md": [
        Claim(
            "for the GPU at hand, in {:.1f} s for a first decode",
            lambda: [one("compile_cuda", "first decode wan2.1")["seconds"]],
        ),
        Claim(
            "moves {:,.0f} GB between the convolutions in {:,} launches, as with Triton; the "
            "reference moves {:,.0f} GB in {:,} launches.",
            lambda: [*_backend("cuda"), *_backend("reference")],
        ),
        Claim("it is {:,.0f} GB in {:,} launches.", lambda: [*_backend("cuda with attention")]),
    ],
    DOCS / "troubleshooting.md": [
        Claim(
            "81 frames of 1280 x 720 are {:.1f} GB of RAM.",
            lambda: [_image_gigabytes(81, 720, 1280)],
        ),
    ],
    DOCS / "several-gpus.md": [
        Claim("the weights ({:.0f} MB for Wan 2.1 in bf16)", lambda: [_weights_megabytes()]),
        Claim(
            "bf16) exchanges 33 times with each neighbour",
            tests=("tests/vae/sharding/test_counts.py::test_operations_of_a_step",),
        ),
        Claim(
            "at most 0.35 of the activations of one",
            tests=("tests/vae/sharding/test_counts.py::test_memory_of_a_rank",),
        ),
        Claim(
            "at most 11 MB in total by columns and 19 MB by rows",
            tests=("tests/vae/sharding/test_counts.py::test_bytes_per_boundary_and_direction",),
        ),
    ],
    ROOT / "CHANGELOG.md": [
        Claim("lose least, at most about {:.0f} dB below\nbf16", lambda: [LOSS_DB]),
    ],
    DOCS / "figures.md": [
        Claim(
            "are {:,.0f} MB in bf16, and loading them takes {:.1f} MB more at most.",
            lambda: [_bank()["bank_mb"], _bank()["peak_mb"] - _bank()["bank_mb"]],
        ),
        Claim("timed convolutions for about {:.1f} s.", lambda: [_timed()]),
    ],
    HELP / "FastVAE_Load.md": _INT8,
    HELP / "FastVAE_Accelerate.md": _INT8,
    HELP / "FastVAE_Benchmark.md": [
        Claim(
            "In `fp32` it is above 60 dB.",
            tests=(
                "tests/nodes/benchmark/test_benchmark.py::test_both_networks_are_measured_and_agree",
            ),
        ),
        Claim("A decode with int8 loses at most about {:.0f} dB against bf16.", lambda: [LOSS_DB]),
    ],
    HELP / "FastVAE_ApplyLora.md": [
        Claim(
            "where rounding would lose more than {:.0f} % of a weak LoRA",
            lambda: [100 * (1 - LEAST_KEPT)],
        ),
        Claim(
            "of a delta of 1 / 0.3 / 0.1 / 0.03 % of the weights, `stream`, `merged` and ComfyUI's "
            "own loaders keep about {:.0f} / {:.0f} / {:.0f} / {:.0f} %.",
            lambda: [_kept(delta) for delta in ("1", "0.3", "0.1", "0.03")],
        ),
    ],
    HELP / "FastVAE_DecodeVideo.md": _IMAGE,
    HELP / "FastVAE_EncodeVideo.md": _IMAGE,
    HELP / "FastVAE_WanSampler.md": [
        Claim(
            "take at most {:.0f} % of the time since its start.",
            lambda: [100 * _constant("nodes/preview/live.py", "_SHARE")],
        ),
    ],
    HELP / "FastVAE_TextEncode.md": [
        Claim(
            "They take at most {:.0f} MiB",
            lambda: [_constant("nodes/text/cache.py", "MOST_BYTES") / 2**20],
        ),
        Claim(
            "took {:.2f} times the processor time of CLIP Text Encode for 2 prompts of umT5, and "
            "{:.2f} times for 6 prompts of Qwen3.",
            lambda: [_text(name)["cpu_ratios"]["one pass, bf16, compiled"] for name in _ENCODERS],
        ),
        Claim(
            "changes the results by about {:.0f} %.",
            lambda: [100 * max(_text(name)["error"]["one pass, bf16"] for name in _ENCODERS)],
        ),
    ],
}
