"""State that the sections of a run share: device, sizes, VAEs, weights, measured limits."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fast_video_vae.kernels import measure
from fast_video_vae.tests.benchmarks import peers
from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.vae import load_vae

from .clock import Clock

# Base widths of the random weights of a small run: of the encoder, and of the decoder.
_SMALL_WIDTHS = {"wan2.1": (8, 8), "wan2.2": (8, 8), "seedvr2": (32, 32)}

_PEERS = {"diffusers": peers.diffusers_vae, "comfyui": peers.comfyui_vae}


class Session:
    """One process of a run: its device, clock, VAEs and peers; `small` selects tiny sizes."""

    def __init__(
        self, device: torch.device, *, small: bool, clock: Clock, path: Path | None = None
    ) -> None:
        self.device = device
        self.small = small
        self.clock = clock
        self.path = path  # of the rows; logs are written next to it
        self.dtype = torch.bfloat16  # of activations, unless a row names another
        # Seconds per FLOP of each implementation on earlier clips. They predict whether a larger
        # clip fits into the budget; they are never reported.
        self.rates: dict[tuple[str, ...], float] = {}
        self._built: dict[tuple[str, str], Any] = {}

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: Any, small: Any) -> Any:
        """Return `full`, or `small` in a small run."""
        return small if self.small else full

    def ours(self, family: str) -> Any:
        return self._once(
            (family, "ours"),
            lambda: load_vae(self._weights(family), dtype=self.dtype, device=self.device),
        )

    def peer(self, family: str, name: str) -> Any:
        """Return the peer `name` for `family`, on the same weights."""
        return self._once(
            (family, name),
            lambda: _PEERS[name](self._weights(family), dtype=self.dtype, device=self.device),
        )

    def expected_s(self, key: tuple[str, ...], flops: float, runs: int = 2) -> float:
        """Predict the seconds of `runs` runs from an earlier one of `key`; 0 if there is none."""
        return runs * self.rates.get(key, 0.0) * flops

    def version(self, name: str) -> str | None:
        """Return the version of the peer `name`, or None if it was not built."""
        return next(
            (peer.version for (_, built), peer in self._built.items() if built == name), None
        )

    @functools.cached_property
    def copy_bytes_per_s(self) -> float:
        """Bytes per second that a large copy on the device reads and writes."""
        return self.copied(self.pick(1 << 30, 1 << 22))

    @functools.cached_property
    def product_flops(self) -> float:
        """FLOP/s of a large matrix product in `dtype`."""
        return self.multiplied(self.pick(8192, 256), self.dtype)

    def copied(self, nbytes: int) -> float:
        source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * nbytes / self.seconds(lambda: target.copy_(source))

    def multiplied(self, size: int, dtype: torch.dtype) -> float:
        """Measure the FLOP/s of a product of two `[size, size]` matrices."""
        a, b = (self.normal(size, size, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * size**3 / self.seconds(lambda: torch.matmul(a, b, out=out))

    def seconds(self, call: Callable[[], object]) -> float:
        """Measure the seconds of a short call on the device, warm."""
        call()
        return measure.seconds({"": call}, self.device, launches=False)[""]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed values of a fixed seed, `[*shape]`."""
        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.empty(shape, dtype=torch.float32, device=self.device)
        return x.normal_(generator=generator).to(dtype or self.dtype)

    def _once(self, key: tuple[str, str], build: Callable[[], Any]) -> Any:
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]

    def _weights(self, family: str) -> dict[str, Tensor]:
        """Return the random weights of `family`, float32 in host memory."""
        widths = _SMALL_WIDTHS[family] if self.small else (None, None)
        return self._once((family, "weights"), lambda: random_weights(family, *widths))
