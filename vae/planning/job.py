"""The stream to plan: its network, size and device, with the rates and the memory of the device."""

import functools
import math
from dataclasses import dataclass

import torch

from ...kernels import adds_in_place, tensor_limit
from ..models.base import Network
from ..models.config import VAEConfig
from ..models.receptive_field import Size, is_encoder
from .layer_specs import NetworkSpec, network_spec
from .ledger import Setting

# Shares of the free memory for a plan. More than the first only instead of tiles, which compute
# their halos twice: libraries need some, and freed blocks of other sizes are not always usable. On
# a CPU other programs need it too.
_SHARES = (0.8, 0.9)
_CPU_SHARES = (0.5, 0.9)


@dataclass(frozen=True)
class Rates:
    """Rates of a device, for the seconds of a plan."""

    products_per_s: float  # multiply-adds of the convolutions
    bytes_per_s: float  # that other passes read and write
    host_bytes_per_s: float  # between device and host
    launch_s: float  # between two kernels


# An RTX 4090: 130 TFLOPS of cuDNN in 16 bits, 0.8 of its bandwidth, PCIe 4. Only ratios matter,
# because plans are compared with each other: 70 to 100 products per byte from a 4090 to an H100.
_DEVICE_RATES = Rates(65e12, 0.8e12, 20e9, 4e-6)

# On a CPU steps are cut to stay in its cache, so only the products count.
_CPU_RATES = Rates(1e12, math.inf, math.inf, 0.0)


@dataclass(frozen=True)
class StreamJob:
    """The stream to plan."""

    network: Network
    latent_size: tuple[int, int, int]  # batch, height, width
    dtype: torch.dtype
    device: torch.device
    single_frame: bool = False
    pixels: int = 1  # of an image per pixel of the network's frames
    coded: frozenset[str] = frozenset()  # names of the convolutions that read codes

    @functools.cached_property
    def spec(self) -> NetworkSpec:
        """The numbers of the network."""
        return network_spec(self.network, self.coded, self.dtype.itemsize)

    @property
    def setting(self) -> Setting:
        """The conditions of the stream."""
        return Setting(
            self.latent_size[0],
            self.dtype.itemsize,
            self.single_frame,
            self.device.type == "cpu",
            adds_in_place(self.device, self.dtype),
            next(self.network.parameters()).dtype != self.dtype,
            tensor_limit(self.device, self.dtype.itemsize),
        )

    @property
    def start(self) -> Size:
        """Height and width of the input of the first layer."""
        height, width = self.latent_size[1:]
        return self.end if self.spec.encodes else (height, width)

    @property
    def end(self) -> Size:
        """Height and width of the frames, which tiles divide."""
        height, width = self.latent_size[1:]
        ups, downs = zip(*(layer.scale for layer in self.spec.layers), strict=True)
        scale = max(math.prod(ups), math.prod(downs))
        return height * scale, width * scale

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """Height and width before each layer and after the last."""
        shapes = self.spec.shapes(self.start, single_frame=True)
        return [(shape.height, shape.width) for shape in shapes]

    @property
    def rates(self) -> Rates:
        """Rates of the device."""
        return _CPU_RATES if self.device.type == "cpu" else _DEVICE_RATES

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the free memory: the usual one, and the largest."""
        return _CPU_SHARES if self.device.type == "cpu" else _SHARES


def job_of(
    network: Network,
    config: VAEConfig,
    latent_size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    single_frame: bool,
    coded: frozenset[str] = frozenset(),
) -> StreamJob:
    """Return the job of a stream of latents of this batch, height and width."""
    pixels = config.patch_size
    if not is_encoder(network):
        pixels *= config.output_scale
    single_frame = single_frame or config.is_of_pictures
    return StreamJob(network, latent_size, dtype, device, single_frame, pixels, coded)
