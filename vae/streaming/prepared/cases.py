"""What a device must compute rightly: small networks of all families, and blocks of large frames.

The bundled VAE decodes a stored latent and encodes a stored clip. All else is from a formula, whose
numbers are exact in every dtype. Large frames have more than 65,536 pixels, and attention more than
4,096, because libraries were wrong from there on (ComfyUI#16433, #15793).

`expected.safetensors` has the sketches of the results, which the reference computed in float64 on a
CPU (`tests/tools/expected.py`).
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ....kernels import Snapshot, seeing, unsearched
from ...demo import VAE_PATH
from ...layers.causal_layer import CausalLayer
from ...layers.temporal_cache import TemporalCache, canonical
from ...models.base import Network
from ...models.build import make_decoder, make_encoder
from ...models.config import VAEConfig, read_configs
from ...models.seedvr2 import (
    SeedVR2Decoder,
    SeedVR2Downsample,
    SeedVR2Encoder,
    SeedVR2ResidualBlock,
    SeedVR2Upsample,
)
from ...models.wan21 import Wan21Decoder, Wan21Encoder
from ...models.wan22 import Wan22Decoder, Wan22Encoder
from ...models.wan_blocks import AttentionBlock, Downsample, Head, ResidualBlock, Upsample
from ..executor import advance
from ..output import Output, background_writer
from ..precision import layer_modes
from ..upload import Upload, to_unit
from .sketches import difference, formula, sketch

# Results, and the latent and the clip of the bundled VAE.
EXPECTED = Path(__file__).with_name("expected.safetensors")

# Allowed errors of a sum, as a share of the root mean square of all: of networks, and of blocks and
# single functions. Right devices have a third of them at most, from roundings of the dtype, or in
# float64 of the file.
_NETWORK = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.06, torch.bfloat16: 0.5}
_BLOCK = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.08}

# Of images in 256 levels.
_LEVELS = 0.01

_WIDTHS = (16,) * 5
_SEEDVR2 = (64, 32, 32, 32, 32)
_LATENTS = 16


@dataclass(frozen=True)
class Case:
    """What is computed, from a fixed input.

    Attributes:
        name: What it is, for people.
        run: Returns the result `[B, C, T, H, W]` on the host, with what a device runs.
        bounds: Allowed errors by dtype.
        used: The VAEs use it; otherwise other nodes of ComfyUI do.
    """

    name: str
    run: Callable[[torch.device, torch.dtype, Snapshot], Tensor]
    bounds: Mapping[torch.dtype, float] = field(default_factory=lambda: _BLOCK)
    used: bool = True

    def error(self, device: torch.device, dtype: torch.dtype, seen: Snapshot) -> float:
        """Return the error on a device: about the largest relative one of 256 values."""
        with layer_modes(device, full=dtype == torch.float32), seeing(seen):
            return difference(sketch(self.run(device, dtype, seen)), expected()[self.name])


@dataclass(frozen=True)
class _Layers:
    """Layers, and what they are given.

    Attributes:
        make: Makes the network, without weights.
        shape: Channels, height and width of its input.
        steps: Frames of each step.
        batch: Videos.
        given: Name of its stored input; empty: the formula.
        pictures: Every frame is a picture.
    """

    make: Callable[[], Network]
    shape: tuple[int, int, int]
    steps: tuple[int, ...]
    given: str = ""
    pictures: bool = False
    batch: int = 1

    def __call__(self, device: torch.device, dtype: torch.dtype, seen: Snapshot) -> Tensor:
        """Return the result as of `Case.run`."""
        network, outputs = self._network(device, dtype), list[Tensor]()
        cache = TemporalCache(route_token=network.route_token(seen, device))
        for frames in self._input().split(self.steps, 2):
            x = frames.to(device, dtype).contiguous(memory_format=torch.channels_last_3d)
            outputs += [y.cpu() for y in advance(network.chains(), canonical(x), cache)]
            cache.first = self.pictures
        return torch.cat(outputs, 2)

    def _input(self) -> Tensor:
        """Return the frames `[B, C, T, H, W]` of all steps."""
        if self.given:
            x = expected()[self.given]
            return to_unit(x) if x.dtype == torch.uint8 else x
        channels, height, width = self.shape
        return formula((self.batch, channels, sum(self.steps), height, width))

    def _network(self, device: torch.device, dtype: torch.dtype) -> Network:
        """Return the network with its weights."""
        orders = {4: torch.channels_last, 5: torch.channels_last_3d}
        with torch.device("meta"):
            network = self.make()
        if self.given:
            name = "decoder." if self.given == "latent" else "encoder."
            kept = load_file(VAE_PATH).items()
            state = {key.removeprefix(name): x.float() for key, x in kept if key.startswith(name)}
        else:
            named = enumerate(network.named_parameters(), 1)
            state = {name: _weight(name, x.shape, number) for number, (name, x) in named}
        placed = {
            name: x.to(device, dtype, memory_format=orders.get(x.ndim, torch.contiguous_format))
            for name, x in state.items()
        }
        network.load_state_dict(placed, assign=True)
        return network.requires_grad_(False).eval()


class Block(Network):
    """A network of one layer, which `make` makes."""

    def __init__(self, make: Callable[[], CausalLayer]) -> None:
        super().__init__()
        self.layer = make()


def cases() -> list[Case]:
    """Return what is checked: copies, networks, blocks, and functions of PyTorch."""
    return [
        Case("copy to the host", _copied),
        Case("images on the host", _imaged, dict.fromkeys(_BLOCK, _LEVELS)),
        Case("pixels on the device", _uploaded),
        *(Case(name, layers, _NETWORK) for name, layers in _networks()),
        *(Case(name, layers) for name, layers in _small_blocks()),
        *(Case(f"{name} at {x.shape[1]} x {x.shape[2]}", x) for name, x in _blocks()),
        *(Case(name, run, used=False) for name, run in _functions().items()),
    ]


def _networks() -> Iterator[tuple[str, _Layers]]:
    """Yield the networks by name."""
    for name, shape, steps, given in (
        ("decoder", (_LATENTS, 6, 8), (1, 2), "latent"),
        ("encoder", (3, 48, 64), (1, 8), "clip"),
    ):
        made = functools.partial(_bundled, name)
        yield f"{name} of the bundled VAE", _Layers(made, shape, steps, given)
    for family, decoder, encoder, channels in (
        ("Wan 2.1", Wan21Decoder, Wan21Encoder, 3),
        ("Wan 2.2", Wan22Decoder, Wan22Encoder, 12),
        ("SeedVR2", SeedVR2Decoder, SeedVR2Encoder, 3),
    ):
        taps = () if family == "SeedVR2" else (3,)
        widths = _WIDTHS if taps else _SEEDVR2
        made = functools.partial(decoder, widths, channels, _LATENTS, *taps)
        yield f"decoder of {family}", _Layers(made, (_LATENTS, 5, 4), (1, 2))
        made = functools.partial(encoder, widths[::-1], channels, _LATENTS, *taps)
        yield f"encoder of {family}", _Layers(made, (channels, 40, 32), (1, 8))
    for name, network, shape in (
        ("decoder", Wan22Decoder, (_LATENTS, 3, 2)),
        ("encoder", Wan22Encoder, (3, 48, 32)),
    ):
        made = functools.partial(network, _WIDTHS[:1] * 6, 3, _LATENTS, 1)
        yield f"{name} of Qwen-Image 2.1", _Layers(made, shape, (1, 1), pictures=True)


def _blocks() -> Iterator[tuple[str, _Layers]]:
    """Yield the blocks of large frames by name."""
    wide, half, even = (16, 257, 258), (16, 129, 130), (16, 258, 260)
    for name, layer, shape, steps in (
        ("attention", lambda: AttentionBlock(16), (16, 65, 66), (1, 1)),
        ("residual block of Wan", lambda: ResidualBlock(16, 16), wide, (1, 2)),
        ("upsampling of Wan", lambda: Upsample(16, 16, temporal=True), half, (1, 1, 1)),
        ("downsampling of Wan", lambda: Downsample(16, temporal=True), even, (1, 2)),
        ("last layer of Wan", lambda: Head(16, 3), wide, (1, 2)),
        ("residual block of SeedVR2", lambda: SeedVR2ResidualBlock(32, 32), (32, 257, 258), (1,)),
        ("upsampling of SeedVR2", lambda: SeedVR2Upsample(16, temporal=True), half, (1, 1)),
        ("downsampling of SeedVR2", lambda: SeedVR2Downsample(16, temporal=True), even, (1, 2)),
    ):
        yield name, _Layers(functools.partial(Block, layer), shape, steps)


def _small_blocks() -> Iterator[tuple[str, _Layers]]:
    """Yield blocks of many frames, of two videos, and of many channels."""
    long = (1, 33)
    for name, layer, shape, steps, batch in (
        ("33 frames of Wan in a batch of 2", lambda: ResidualBlock(16, 16), (16, 17, 18), long, 2),
        ("a batch of 2 of SeedVR2", lambda: SeedVR2ResidualBlock(32, 32), (32, 17, 18), (1, 2), 2),
        ("192 channels of Wan", lambda: ResidualBlock(192, 192), (192, 17, 18), (1, 2), 1),
        ("attention of 384 channels", lambda: AttentionBlock(384), (384, 17, 18), (1,), 2),
    ):
        yield name, _Layers(functools.partial(Block, layer), shape, steps, batch=batch)


def _functions() -> dict[str, Callable[[torch.device, torch.dtype, Snapshot], Tensor]]:
    """Return functions of PyTorch that other VAEs of ComfyUI call, with large frames."""

    def given(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
        return [formula(shape, seed).to(device, dtype) for seed, shape in enumerate(shapes)]

    def padded(device: torch.device, dtype: torch.dtype, _: Snapshot) -> Tensor:
        (x,) = given(device, dtype, (1, 16, 1, 257, 258))
        return F.pad(x, (0, 0, 0, 0, 2, 0)).cpu()

    def convolved(device: torch.device, dtype: torch.dtype, _: Snapshot) -> Tensor:
        x, weight = given(device, dtype, (1, 16, 4, 257, 258), (4, 16, 3, 3, 3))
        with unsearched(device):
            return F.conv3d(x, weight, padding=(0, 1, 1)).cpu()

    def normed(device: torch.device, dtype: torch.dtype, _: Snapshot) -> Tensor:
        (x,) = given(device, dtype, (2, 64, 65, 66))
        return F.group_norm(x, 32).cpu()[:, :, None]

    def attended(device: torch.device, dtype: torch.dtype, _: Snapshot) -> Tensor:
        q, k, v = given(device, dtype, *[(1, 1, 4290, 16)] * 3)
        return F.scaled_dot_product_attention(4 * q, 4 * k, v).cpu()[:, None]

    return {
        "torch.nn.functional.pad in time": padded,
        "torch.nn.functional.conv3d": convolved,
        "torch.nn.functional.group_norm": normed,
        "torch.nn.functional.scaled_dot_product_attention": attended,
    }


def _copied(device: torch.device, dtype: torch.dtype, _: Snapshot) -> Tensor:
    """Return numbers that were on a device, copied as frames are and as other results are."""
    x = formula((1, 3, 2, 129, 130)).to(device, dtype)
    written = torch.zeros(x.shape, dtype=dtype)
    writer = background_writer(device, written)
    if writer is None:
        written = x.cpu()
    else:
        with writer:
            writer.put(x, written)
    return torch.cat([x.cpu(), written], 2)


def _imaged(device: torch.device, dtype: torch.dtype, _: Snapshot) -> Tensor:
    """Return images in uint8 of numbers that were on a device, as a decode writes them."""
    x = (
        formula((2, 3, 2, 33, 34))
        .to(device, dtype)
        .contiguous(memory_format=torch.channels_last_3d)
    )
    images = torch.zeros(2, 2, 33, 34, 3, dtype=torch.uint8)
    writer = background_writer(device, images)
    with writer or contextlib.nullcontext():
        Output(_bundled_config(), dtype, images=images, writer=writer).write(canonical(x))
    return images.movedim(-1, 1).float() / 255


def _uploaded(device: torch.device, dtype: torch.dtype, _: Snapshot) -> Tensor:
    """Return the pixels of the stored clip as an encode takes them, twice."""
    upload = Upload(device, dtype, None)
    return torch.cat([upload(expected()["clip"]).cpu() for _ in range(2)], 2)


@functools.cache
def expected() -> dict[str, Tensor]:
    """Return the sketches of the results by case, and the stored inputs."""
    return load_file(EXPECTED)


@functools.cache
def _bundled_config() -> VAEConfig:
    shapes = {key: tuple(value.shape) for key, value in load_file(VAE_PATH).items()}
    return read_configs(shapes)[0]


def _bundled(name: str) -> Network:
    """Return the `decoder` or `encoder` of the bundled VAE."""
    config = _bundled_config()
    network = make_decoder(config) if name == "decoder" else make_encoder(config)
    assert network is not None
    return network


def _weight(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return a parameter; weights keep the size of their inputs, and attention is sharp."""
    numbers = formula(shape, seed)
    if "gamma" in name or ("norm" in name and name.endswith("weight")):
        return 1 + (numbers * 64).round() / 128
    if name.endswith("bias"):
        return numbers / 4
    inputs = math.prod(shape[1:])
    size = 2.0 ** round(math.log2(1.7 / math.sqrt(inputs)))
    return numbers * size * (2 if re.search("to_(qkv|q|k)[.]", name) else 1)
