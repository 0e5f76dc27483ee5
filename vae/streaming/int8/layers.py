"""The convolutions that run in int8: those that save most for what they cost in precision.

That depends on the weights, so a short video is computed in float32, in bfloat16, and once with
each convolution in int8. The errors of convolutions are independent, and add up. Those with the
smallest error per multiplication are taken, until the error of all is that of bfloat16 and 1 dB
more; not those that cost 1 dB alone. Group norms measure whole frames, and those below 128 x 128
have other errors: SeedVR2 can lose more there.
"""

import functools
import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels import Job, facts_of, is_out_of_memory
from ...layers.conv import Conv
from ...layers.conv_weights import marks_of
from ...layers.inputs.coding import Coding, name_convolutions
from ...layers.temporal_cache import TemporalCache, canonical
from ...models.base import Network
from ...models.executor import advance
from ...models.replicas import copied
from ..precision import layer_modes

# Decibels below bfloat16. The asked bound is 1.5: another video has other errors.
LOSS_DB = 1.0

# A convolution with a smaller share of the multiplications gains nothing that could be measured.
_LEAST_SHARE = 0.005

# Part of the name of a kept choice. A choice by other rules needs another one.
_VERSION = 1

_TINY = 1e-300

# Frames of the video: nine frames have two steps after the first one.
_LATENTS = 3

# Part of the values of a latent that neighbours share: videos are smooth.
_SMOOTH = 0.5


class LayerLoss(NamedTuple):
    """What one convolution costs and saves in int8."""

    name: str
    share: float  # of the multiplications of all convolutions
    loss_db: float  # with this convolution alone, in addition to what bfloat16 loses
    error: float  # mean squared error that it adds
    chosen: bool


@dataclass(frozen=True)
class Int8Layers:
    """What each convolution of a decoder costs, in the order of the layers."""

    rows: tuple[LayerLoss, ...]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Names of the convolutions in int8; none where int8 costs too much."""
        return frozenset(row.name for row in self.rows if row.chosen)

    @property
    def share(self) -> float:
        """Share of the multiplications of the convolutions that run in int8."""
        return sum(row.share for row in self.rows if row.chosen)


# Dtype of the other layers, and device.
Choice = tuple[torch.dtype, torch.device]


class Int8Choices:
    """The choices of a VAE, which are kept on disk by the checksum of its weights."""

    def __init__(self) -> None:
        self.jobs: dict[Choice, Job] = {}  # in the background, which make them
        self._known: dict[Choice, tuple[int, Int8Layers]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Int8Choices"], tuple[()]]:
        return Int8Choices, ()

    def find(self, network: Network, choice: Choice) -> Int8Layers | None:
        """Return what is known of a decoder; None: nothing. No rows: the measurement failed."""
        checksum, known = _checksum(network), self._known.get(choice)
        if known is None or known[0] != checksum:
            value = facts_of(choice[1]).get(_fact(choice, checksum))
            layers = _read(value, name_convolutions(network))
            if layers is None:
                return None
            known = self._known[choice] = checksum, layers
        return known[1]

    def of(
        self,
        network: Network,
        x: Tensor,
        choice: Choice,
        needed: Callable[[], bool] = lambda: True,
    ) -> Int8Layers:
        """Return what is known, measured with `x` `[B, C, T, H, W]` while it is `needed`."""
        with self._lock, torch.inference_mode(False):
            facts_of(choice[1]).read()
            found = self.find(network, choice)
            if found is None or not found.rows:
                checksum = _checksum(network)
                try:
                    found = choose(copied(network, choice[1]), x, choice[0], needed)
                except CancelledError:
                    raise
                except Exception as error:
                    if not is_out_of_memory(error):
                        self._known[choice] = checksum, Int8Layers(())
                    raise
                self._known[choice] = checksum, found
                facts_of(choice[1]).put(_fact(choice, checksum), [[*row] for row in found.rows])
            return found

    def known(self, choice: Choice) -> frozenset[str]:
        """Return what is known of a `choice`, for any weights: the convolutions in int8."""
        known = self._known.get(choice)
        return frozenset() if known is None else known[1].names


def _checksum(network: Network) -> int:
    """Return the checksum of the weights, by value: a host may move them away and back."""
    with torch.inference_mode(False), torch.no_grad():
        marks = torch.stack(marks_of([weight.detach() for weight in network.parameters()]))
        digest = hashlib.sha256(marks.cpu().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def _fact(choice: Choice, checksum: int) -> str:
    """Return the name under which the choice for weights with a checksum is kept."""
    return f"int8 layers {_VERSION}, decoder, {choice[0]}, {checksum:x}"


def _read(value: object, names: Iterable[str]) -> Int8Layers | None:
    """Return the kept choice of a network with the convolutions `names`; None: it is not one."""
    if not isinstance(value, list):
        return None
    types = tuple(LayerLoss.__annotations__.values())
    for row in value:
        fits = isinstance(row, list) and len(row) == len(types)
        if not (fits and all(map(isinstance, row, types)) and row[0] in names):
            return None
    return Int8Layers(tuple(LayerLoss(*row) for row in value))


def probe(channels: int, size: int, *, frames: int = _LATENTS) -> Tensor:
    """Return a smooth random video `[1, C, T, size, size]`, of deviation 1, always the same."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, channels, 1, -(-size // 2), -(-size // 2), generator=generator)
    fixed = F.interpolate(half, scale_factor=(1, 2, 2))[..., :size, :size]
    moving = torch.randn(1, channels, frames, size, size, generator=generator)
    return _SMOOTH**0.5 * fixed + (1 - _SMOOTH) ** 0.5 * moving


@torch.no_grad()
def choose(
    network: Network, x: Tensor, dtype: torch.dtype, needed: Callable[[], bool]
) -> Int8Layers:
    """Measure each convolution with `x` `[B, C, T, H, W]`, and choose those in int8."""
    candidates, work = name_convolutions(network), Counter[str]()

    def run(dtype: torch.dtype, names: Iterable[str] = ()) -> Tensor:
        if not needed():
            raise CancelledError
        return _result(network, x, dtype, frozenset(names))

    def note(conv: nn.Module, _: object, y: Tensor) -> None:
        name = str(getattr(conv, "code_name", ""))
        work[name] += y.numel() * conv.weight[0].numel()  # type: ignore[index, union-attr]

    convs = [module for module in network.modules() if isinstance(module, Conv)]
    hooks = [conv.register_forward_hook(note) for conv in convs]
    try:
        exact = run(torch.float32)
    finally:
        for hook in hooks:
            hook.remove()
    narrow, plain = _error(run(torch.bfloat16), exact), _error(run(dtype), exact)
    shares = {name: work[name] / work.total() for name in candidates}
    errors = {
        name: _error(run(dtype, [name]), exact) - plain
        for name in candidates
        if shares[name] >= _LEAST_SHARE
    }
    budget = narrow * 10 ** (LOSS_DB / 10) - plain
    # What one convolution costs varies more between videos than what many cost.
    cheap = [name for name, error in errors.items() if _lost_db(error, narrow) <= LOSS_DB]
    names, total = list[str](), 0.0
    for name in sorted(cheap, key=lambda name: errors[name] / shares[name]):
        if total + max(0.0, errors[name]) <= budget:
            names.append(name)
            total += max(0.0, errors[name])
    # Errors add up approximately: what is chosen is measured as a whole.
    while names and _error(run(dtype, names), exact) - plain > budget:
        names = names[:-1]
    rows = (
        LayerLoss(name, shares[name], _lost_db(error, narrow), error, name in names)
        for name, error in errors.items()
    )
    return Int8Layers(tuple(rows))


def _result(network: Network, x: Tensor, dtype: torch.dtype, names: frozenset[str]) -> Tensor:
    """Return the float32 result with `names` in int8."""
    device = next(network.parameters()).device
    coding = Coding(names, device) if names else None
    cache, pieces, order = TemporalCache(coding=coding), [], torch.channels_last_3d
    x = x.to(device, dtype)
    with layer_modes(device, full=dtype == torch.float32):
        for part in filter(Tensor.numel, (x[:, :, :1], x[:, :, 1:])):
            entering = canonical(part.contiguous(memory_format=order))
            made = advance(network.chains(), entering, cache)
            pieces += [piece.float() for piece in made]
            cache.first = False
    return torch.cat(pieces, dim=2)


def _error(result: Tensor, exact: Tensor) -> float:
    """Return the mean squared error of a result `[...]`; infinite where it is not finite."""
    error = (result - exact).double().square().mean().item()
    return error if math.isfinite(error) else math.inf


def _lost_db(error: float, narrow: float) -> float:
    """Return the decibels that `error` costs in addition to that of bfloat16."""
    return 10 * math.log10(1 + max(0.0, error) / max(narrow, _TINY))
