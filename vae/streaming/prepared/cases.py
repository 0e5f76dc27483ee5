"""What a device must compute rightly: small networks of all families, and blocks of large frames.

The bundled VAE decodes a stored latent and encodes a stored clip. All else is from a formula, whose
numbers are exact in every dtype. Large frames have more than 65,536 pixels, and attention more than
4,096, because libraries were wrong from there on (ComfyUI#16433, #15793).

`expected.safetensors` has the sketches of the results, which the reference computed in float64 on a
CPU (`tests/tools/expected.py`). A sketch has the sum of each 256 values with random signs, which
errors change as their root mean square does: a projection as of Johnson and Lindenstrauss.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ....kernels import Snapshot, seeing
from ...demo import VAE_PATH
from ...layers.causal_layer import CausalLayer
from ...layers.temporal_cache import TemporalCache, canonical
from ...models.base import Network
from ...models.build import make_decoder, make_encoder
from ...models.config import VAEConfig, read_configs
from ...models.executor import advance
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
from ..output import Output, background_writer
from ..precision import layer_modes
from ..upload import Upload, to_unit

# Results, and the latent and the clip of the bundled VAE.
EXPECTED = Path(__file__).with_name("expected.safetensors")

# Allowed errors of a sum, as a share of the root mean square of all: of networks, and of blocks.
# Right devices have a third of them at most, from roundings of the dtype or, in float64, the file.
_NETWORK = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.06, torch.bfloat16: 0.5}
_BLOCK = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.08}

# Of images in 256 levels.
_LEVELS = 0.01

# Values of a result per sum of its sketch.
_VALUES = 256

# A prime number of random values, so that no power of two divides their period.
_PERIOD = 65537

_WIDTHS = (16,) * 5
_SEEDVR2 = (64, 32, 32, 32, 32)
_LATENTS = 16


@dataclass(frozen=True)
class Case:
    """What is computed, from a fixed input."""

    name: str  # for people
    # Returns the result `[B, C, T, H, W]` on the host, with what a device runs.
    run: Callable[[torch.device, torch.dtype, Snapshot], Tensor]
    bounds: Mapping[torch.dtype, float] = field(default_factory=lambda: _BLOCK)  # of errors

    def error(self, device: torch.device, dtype: torch.dtype, seen: Snapshot) -> float:
        """Return the error on a device: about the largest relative one of 256 values."""
        with layer_modes(device, full=dtype == torch.float32), seeing(seen):
            return difference(sketch(self.run(device, dtype, seen)), expected()[self.name])


@dataclass(frozen=True)
class _Layers:
    """Layers, and what they are given."""

    make: Callable[[], Network]  # without weights
    shape: tuple[int, int, int]  # channels, height and width of the input
    steps: tuple[int, ...]  # frames of each
    given: str = ""  # name of the stored input; empty: the formula
    pictures: bool = False  # every frame is one
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
    """Return what is checked: copies, networks and blocks."""
    return [
        Case("copy to the host", _copied),
        Case("images on the host", _imaged, dict.fromkeys(_BLOCK, _LEVELS)),
        Case("pixels on the device", _uploaded),
        *(Case(name, layers, _NETWORK) for name, layers in _networks()),
        *(Case(name, layers) for name, layers in _blocks()),
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
    """Yield blocks of large frames, of many frames, of two videos and of many channels."""
    wide, half, even, small = (16, 257, 258), (16, 129, 130), (16, 258, 260), (17, 18)
    pair, long = (1, 2), (1, 33)
    for name, layer, shape, steps in (
        ("attention", lambda: AttentionBlock(16), (16, 65, 66), (1, 1)),
        ("residual block of Wan", lambda: ResidualBlock(16, 16), wide, pair),
        ("upsampling of Wan", lambda: Upsample(16, 16, temporal=True), half, (1, 1, 1)),
        ("downsampling of Wan", lambda: Downsample(16, temporal=True), even, pair),
        ("last layer of Wan", lambda: Head(16, 3), wide, pair),
        ("residual block of SeedVR2", lambda: SeedVR2ResidualBlock(32, 32), (32, 257, 258), (1,)),
        ("upsampling of SeedVR2", lambda: SeedVR2Upsample(16, temporal=True), half, (1, 1)),
        ("downsampling of SeedVR2", lambda: SeedVR2Downsample(16, temporal=True), even, pair),
    ):
        made = _Layers(functools.partial(Block, layer), shape, steps)
        yield f"{name} at {shape[1]} x {shape[2]}", made
    for name, layer, channels, steps, batch in (
        ("33 frames of Wan in a batch of 2", lambda: ResidualBlock(16, 16), 16, long, 2),
        ("a batch of 2 of SeedVR2", lambda: SeedVR2ResidualBlock(32, 32), 32, pair, 2),
        ("192 channels of Wan", lambda: ResidualBlock(192, 192), 192, pair, 1),
        ("attention of 384 channels", lambda: AttentionBlock(384), 384, (1,), 2),
    ):
        made = functools.partial(Block, layer)
        yield name, _Layers(made, (channels, *small), steps, batch=batch)


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


def sketch(x: Tensor) -> Tensor:
    """Return the sketch of `x` `[B, C, T, H, W]`, which depends on the place of each value."""
    values = x.movedim(1, -1).flatten().to(torch.float64, copy=True)
    whole = values.numel() // _PERIOD * _PERIOD
    values[:whole].view(-1, _PERIOD).mul_(_signs())
    values[whole:].mul_(_signs()[: values.numel() - whole])
    whole = values.numel() // _VALUES * _VALUES
    sums, rest = values[:whole].view(-1, _VALUES).sum(1), values[whole:]
    return torch.cat([sums, rest.sum()[None]]) if rest.numel() else sums


def difference(actual: Tensor, right: Tensor) -> float:
    """Return the most of the difference over the root mean square of `right`; infinite with NaN."""
    right = right.double()
    share = (actual - right).abs().max() / right.square().mean().sqrt()
    return float(share) if share.isfinite() else math.inf


def formula(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return odd multiples of 1 / 128 in (-1, 1), float32, alike on every machine and exact."""
    count = math.prod(shape)
    repeats = -(-count // _PERIOD)
    return _period().roll(-4099 * seed).repeat(repeats)[:count].view(shape)


@functools.cache
def _signs() -> Tensor:
    return _period().sign().double()


@functools.cache
def _period() -> Tensor:
    """Return a period of the numbers: a multiplicative hash, splitmix64's, of their places."""
    with torch.inference_mode(False):
        x = torch.arange(1, _PERIOD + 1) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            x = (x ^ (x >> shift)) * factor
        return (((x >> 33) & 127) * 2 - 127).float() / 128
