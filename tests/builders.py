"""Builders for several test files: random VAE weights, and commands of the package.

`from fast_video_vae.tests.builders import random_state_dict`; `conftest.py` sets up that name.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

_CONFTEST = Path(__file__).with_name("conftest.py")

# Root mean square of SiLU(x) for x ~ N(0, 1).
_SILU_RMS = 0.597

# From the original names, with the blocks of the decoder already in place; in this order.
_DIFFUSERS_RENAMES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.downsamples\.", ".down_blocks."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)


class Shapes(dict[str, tuple[int, ...]]):
    """Name and shape of every tensor; a convolution of a block of Wan sees `taps` frames."""

    def __init__(self, taps: int = 3) -> None:
        super().__init__()
        self._taps = taps

    def conv(self, name: str, out: int, into: int, *kernel: int) -> None:
        self[f"{name}.weight"] = (out, into, *kernel)
        self[f"{name}.bias"] = (out,)

    def residual(self, name: str, into: int, out: int) -> None:
        self[f"{name}.residual.0.gamma"] = (into, 1, 1, 1)
        self.conv(f"{name}.residual.2", out, into, self._taps, 3, 3)
        self[f"{name}.residual.3.gamma"] = (out, 1, 1, 1)
        self.conv(f"{name}.residual.6", out, out, self._taps, 3, 3)
        if into != out:
            self.conv(f"{name}.shortcut", out, into, 1, 1, 1)

    def middle(self, name: str, channels: int) -> None:
        self.residual(f"{name}.0", channels, channels)
        self[f"{name}.1.norm.gamma"] = (channels, 1, 1)
        self.conv(f"{name}.1.to_qkv", 3 * channels, channels, 1, 1)
        self.conv(f"{name}.1.proj", channels, channels, 1, 1)
        self.residual(f"{name}.2", channels, channels)

    def head(self, name: str, into: int, out: int) -> None:
        self[f"{name}.0.gamma"] = (into, 1, 1, 1)
        self.conv(f"{name}.2", out, into, self._taps, 3, 3)


def wan_shapes(
    encoder: int, decoder: int, *, latents: int, channels: int, out_channels: int,
    multiples: Sequence[int] = (1, 2, 4, 4), taps: int = 3, flat: bool = False,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Name and shape of every tensor, as in `Wan2.1_VAE.pth` (flat) and `Wan2.2_VAE.pth`.

    Wan 2.1, 2.2 and Qwen-Image 2.1 have the base widths 96 and 96, 160 and 256, 96 and 144; 16, 48
    and 64 latents; frames of 3, 12 (patches) and 4 channels; and convolutions of 3, 3 and 1 taps.
    Where it is flat, blocks are in one list, and upsampling halves the channels.
    `multiples` are the widths of the stages over the base width.
    """
    shapes = Shapes(taps)
    conv, residual = shapes.conv, shapes.residual
    last, shrink = len(multiples) - 1, 2 if flat else 1

    def blocks(part: str, stage: int, count: int) -> list[str]:
        start = f"{part}.{stage}.{part.partition('.')[2]}."
        return [f"{part}.{stage * count + n}" if flat else f"{start}{n}" for n in range(count)]

    widths = [encoder * each for each in (1, *multiples)]
    conv("encoder.conv1", widths[0], channels, taps, 3, 3)
    for stage, (into, out) in enumerate(pairwise(widths)):
        names = blocks("encoder.downsamples", stage, 3)
        residual(names[0], into, out)
        residual(names[1], out, out)
        if stage < last:
            conv(f"{names[2]}.resample.1", out, out, 3, 3)
            if stage:
                conv(f"{names[2]}.time_conv", out, out, taps, 1, 1)
    shapes.middle("encoder.middle", widths[-1])
    shapes.head("encoder.head", widths[-1], 2 * latents)
    conv("conv1", 2 * latents, 2 * latents, 1, 1, 1)
    conv("conv2", latents, latents, 1, 1, 1)
    widths = [decoder * each for each in (multiples[-1], *multiples[::-1])]
    conv("decoder.conv1", widths[0], latents, taps, 3, 3)
    shapes.middle("decoder.middle", widths[0])
    for stage, (into, out) in enumerate(pairwise(widths)):
        names = blocks("decoder.upsamples", stage, 4)
        residual(names[0], into // shrink if stage else into, out)
        residual(names[1], out, out)
        residual(names[2], out, out)
        if stage < last:
            conv(f"{names[3]}.resample.1", out // shrink, out, 3, 3)
            if stage < last - 1:
                conv(f"{names[3]}.time_conv", 2 * out, out, taps, 1, 1)
    shapes.head("decoder.head", widths[-1], out_channels)
    return shapes


def random_state_dict(
    width: int, *, image_channels: int = 3, out_channels: int = 3, seed: int = 0
) -> dict[str, Tensor]:
    """Return random float32 weights of a Wan 2.1 VAE under the original names.

    Activations stay of order 1 in all layers for inputs of order 1, so errors in low precision are
    meaningful. Norms and biases are not trivial. Frames are mostly within [-1, 1].
    """
    channels = {"channels": image_channels, "out_channels": out_channels}
    return spread(wan_shapes(width, width, latents=16, **channels, flat=True), seed)


def decoder_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return only the weights of the decoder."""
    return {k: v for k, v in state.items() if not k.startswith(("encoder.", "conv1."))}


def spread(
    shapes: dict[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random tensors of these shapes, as `random_state_dict` says."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.empty(shape).normal_(generator=generator)
        if name.endswith(
            ("gamma", "norm.weight", "norm1.weight", "norm2.weight", "norm_out.weight")
        ):
            noise.mul_(0.1).add_(1)
        elif name.endswith("bias"):
            noise.mul_(0.05)
        else:
            noise.mul_(_gain(name) * noise[0].numel() ** -0.5)
        state[name] = noise.to(dtype)
    return state


def diffusers_name(name: str) -> str:
    """A tensor's name in diffusers' `AutoencoderKLWan` and `AutoencoderKLQwenImage`."""
    decoder_block = re.match(r"decoder\.upsamples\.(\d+)\.", name)
    if decoder_block:
        stage, index = divmod(int(decoder_block[1]), 4)
        place = "upsamplers.0" if index == 3 else f"resnets.{index}"
        name = f"decoder.up_blocks.{stage}.{place}.{name[decoder_block.end() :]}"
    for pattern, replacement in _DIFFUSERS_RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `python -m module arguments` on this checkout, installed or not."""
    code = (
        f"import runpy, sys; runpy.run_path({str(_CONFTEST)!r}); sys.argv[0] = {module!r}; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code, *arguments]


def script_command(code: str, *arguments: object) -> list[str]:
    """The command that runs a program of a test on this checkout, installed or not."""
    bind = f"import runpy; runpy.run_path({str(_CONFTEST)!r})\n"
    return [sys.executable, "-c", bind + code, *map(str, arguments)]


def installed_command(*arguments: str, first: str = "") -> list[str]:
    """The command line of this checkout as an installed one starts, after the code `first`."""
    root = _CONFTEST.parents[1] / "__init__.py"
    code = (
        "import importlib.util as util, sys\n"
        f"spec = util.spec_from_file_location('fast_video_vae', {str(root)!r})\n"
        "sys.modules['fast_video_vae'] = util.module_from_spec(spec)\n"
        f"{first}\n"
        "from fast_video_vae.vae.cli.main import main\n"
        "sys.exit(main())"
    )
    return [sys.executable, "-c", code, *arguments]


def succeeded(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command without input, which has to succeed; `options` are those of `run`."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def pyproject() -> dict[str, dict]:
    """Return the content of pyproject.toml."""
    import pytest

    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    return tomllib.loads((_CONFTEST.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))


def _gain(name: str) -> float:
    """The spread of a convolution's output over the spread of its input."""
    if re.search(r"residual\.2\.weight$|resnets\.\d\.conv1\.weight$", name):
        return 1 / _SILU_RMS
    if re.search(r"residual\.6\.weight$|resnets\.\d\.conv2\.weight$", name):
        return 0.4 / _SILU_RMS  # a branch adds little, so that a sum of ten stays of order 1
    if name in ("encoder.head.2.weight", "encoder.conv_out.weight"):
        return 1 / _SILU_RMS
    if name in ("decoder.head.2.weight", "decoder.conv_out.weight"):
        return 0.3 / _SILU_RMS
    if name.endswith(("proj.weight", "to_out.0.weight")):
        return 0.4
    return 1.0


def one_line(error, *words):
    """Check what pytest caught: one line of at most 160 characters with these words in it."""
    message = str(error.value)
    assert message.isprintable()
    # The module names of a LoRA show which model it is for, so this error may be longer.
    assert len(message) <= (700 if " is for this model: " in message else 160)
    for word in words:
        assert word in message, message


@contextmanager
def refused(match, *words, error=ValueError):
    """Check that the body raises an error of one line that has a match and these words in it."""
    import pytest

    with pytest.raises(error, match=match) as caught:
        yield
    one_line(caught, *words)
