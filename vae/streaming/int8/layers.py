"""The convolutions that run in int8: those that save most for what they cost in precision.

What int8 costs depends on the weights: on how large a residual branch is next to its stream, and on
how far the largest weight is from the others. So it is measured with the weights at hand: a short
video is computed in float32, in bfloat16, and once with each convolution in int8. The errors of
convolutions are independent, and add up. Those with the smallest error per multiplication are
taken, until the error of all is that of bfloat16 and 1 dB more; not those that cost 1 dB alone. A
result in int8 is therefore at most about 1 dB below one in bfloat16, with any weights. Group norms
measure whole frames, and those below 128 x 128 have other errors: SeedVR2 can lose more there.
"""

import contextlib
import functools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.conv import Conv
from ...layers.conv_weights import checksum_of
from ...layers.inputs.coding import Coding, name_convolutions
from ...layers.temporal_cache import TemporalCache
from ...layers.workspace import canonical
from ...models.base import Network
from ..executor import advance
from ..precision import layer_modes

# Decibels below bfloat16. The asked bound is 1.5: another video has other errors.
LOSS_DB = 1.0

# A convolution with a smaller share of the multiplications gains nothing that could be measured.
_LEAST_SHARE = 0.005

# Larger than any activation, so that no frames are divided.
_WHOLE = 1 << 62

_TINY = 1e-300

# Frames of the video: nine frames have two steps after the first one.
_LATENTS = 3

# Part of the values of a latent that neighbours share: videos are smooth.
_SMOOTH = 0.5


@dataclass(frozen=True)
class LayerLoss:
    """What one convolution costs and saves in int8.

    Attributes:
        name: Name in the network.
        share: Its share of the multiplications of the convolutions.
        loss_db: Decibels that the result loses with this convolution alone, in addition to what
            bfloat16 loses.
        error: Mean squared error that it adds.
        chosen: It runs in int8.
    """

    name: str
    share: float
    loss_db: float
    error: float
    chosen: bool


@dataclass(frozen=True)
class Int8Layers:
    """The convolutions of a network that run in int8.

    Attributes:
        names: Their names; none where int8 costs too much.
        rows: What each convolution costs, in the order of the layers.
    """

    names: frozenset[str]
    rows: tuple[LayerLoss, ...]

    @property
    def share(self) -> float:
        """Share of the multiplications of the convolutions that run in int8."""
        return sum(row.share for row in self.rows if row.chosen)


class Int8Choices:
    """The choices of a VAE, each made when it is first needed; a copied VAE starts without any."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.dtype, torch.device], tuple[int, Int8Layers]] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> "Int8Choices":
        return Int8Choices()

    def __reduce__(self) -> tuple[type["Int8Choices"], tuple[()]]:
        return Int8Choices, ()

    def of(self, network: Network, part: str, x: Tensor, dtype: torch.dtype) -> Int8Layers:
        """Return the convolutions of a network that run in int8.

        Args:
            network: The encoder or the decoder.
            part: "encoder" or "decoder".
            x: `[B, C, T, H, W]`, float32: the input of the first layer, see `probe`.
            dtype: Dtype of the other layers.

        Returns:
            The choice, made anew when the weights have changed.
        """
        key = part, dtype, x.device
        with self._lock, torch.inference_mode(False):
            # By value: a host may move the weights away and back between two videos.
            checksum = int(checksum_of([weight.detach() for weight in network.parameters()]))
            known = self._known.get(key)
            if known is None or known[0] != checksum:
                known = self._known[key] = checksum, choose(network, x, dtype)
            return known[1]

    def known(self, part: str, dtype: torch.dtype, device: torch.device) -> frozenset[str]:
        """Return the convolutions in int8 as far as they are known, without a measurement.

        Args:
            part: "encoder" or "decoder".
            dtype: Dtype of the other layers.
            device: Device of the measurement.

        Returns:
            Their names; empty: they are not known.
        """
        known = self._known.get((part, dtype, device))
        return frozenset() if known is None else known[1].names


def probe(channels: int, size: int, *, frames: int = _LATENTS) -> Tensor:
    """Return a smooth random video, always the same.

    Args:
        channels: Its channels.
        size: Height and width.
        frames: Its frames.

    Returns:
        `[1, C, T, H, W]`, float32 on the CPU, with a mean of 0 and a deviation of about 1.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, channels, 1, -(-size // 2), -(-size // 2), generator=generator)
    fixed = F.interpolate(half, scale_factor=(1, 2, 2))[..., :size, :size]
    moving = torch.randn(1, channels, frames, size, size, generator=generator)
    return _SMOOTH**0.5 * fixed + (1 - _SMOOTH) ** 0.5 * moving


@torch.no_grad()
def choose(network: Network, x: Tensor, dtype: torch.dtype) -> Int8Layers:
    """Measure each convolution, and choose those that run in int8.

    Args:
        network: The encoder or the decoder.
        x: `[B, C, T, H, W]`, float32; `T` is 1 for a network of pictures.
        dtype: Dtype of the other layers.

    Returns:
        The choice.
    """
    shares: dict[str, float] = {}
    candidates = name_convolutions(network)
    run = functools.partial(_result, network, x)
    exact = run(torch.float32, count=shares)
    narrow = _error(run(torch.bfloat16), exact)
    plain = _error(run(dtype), exact)
    errors = {
        name: _error(run(dtype, frozenset([name])), exact) - plain
        for name in candidates
        if shares[name] >= _LEAST_SHARE
    }
    budget = narrow * 10 ** (LOSS_DB / 10) - plain
    # What one convolution costs varies more between videos than what many cost.
    cheap = [name for name, error in errors.items() if _lost_db(error, narrow) <= LOSS_DB]
    order = sorted(cheap, key=lambda name: errors[name] / shares[name])
    names = _within(budget, order, errors)
    # Errors add up approximately: what is chosen is measured as a whole.
    while names and _error(run(dtype, frozenset(names)), exact) - plain > budget:
        names = names[:-1]
    rows = (
        LayerLoss(name, shares[name], _lost_db(error, narrow), error, name in names)
        for name, error in errors.items()
    )
    _drop_forms(network, frozenset(names))
    return Int8Layers(frozenset(names), tuple(rows))


def _within(budget: float, order: Iterable[str], errors: dict[str, float]) -> list[str]:
    """Return the first names of `order` whose errors are `budget` at most together."""
    names, total = [], 0.0
    for name in order:
        if total + max(0.0, errors[name]) <= budget:
            names.append(name)
            total += max(0.0, errors[name])
    return names


def _result(
    network: Network,
    x: Tensor,
    dtype: torch.dtype,
    names: frozenset[str] = frozenset(),
    count: dict[str, float] | None = None,
) -> Tensor:
    """Return the result for `x` in `dtype` with the convolutions `names` in int8.

    Args:
        network: The network.
        x: `[B, C, T, H, W]`.
        dtype: Dtype of the other layers.
        names: Convolutions in int8.
        count: Receives the share of the multiplications of each convolution by name.

    Returns:
        `[B, C, T, H, W]`, float32.
    """
    device = next(network.parameters()).device
    coding = Coding(names, device) if names else None
    cache, pieces, order = TemporalCache(coding=coding), [], torch.channels_last_3d
    x = x.to(device, dtype)
    with layer_modes(device, full=dtype == torch.float32), _counting(network, count):
        for part in filter(Tensor.numel, (x[:, :, :1], x[:, :, 1:])):
            entering = canonical(part.contiguous(memory_format=order))
            made = advance(network.chains(), entering, cache, _WHOLE)
            pieces += [piece.float() for piece in made]
            cache.first = False
    return torch.cat(pieces, dim=2)


@contextlib.contextmanager
def _counting(network: Network, count: dict[str, float] | None) -> Iterator[None]:
    """Add the share of each convolution to `count`, by its name, if it is given."""
    if count is None:
        yield
        return
    numbers, own = Counter[str](), threading.get_ident()

    def note(conv: nn.Module, _: object, y: Tensor) -> None:
        if threading.get_ident() != own:  # another video
            return
        name = str(getattr(conv, "code_name", ""))
        numbers[name] += y.numel() * conv.weight[0].numel()  # type: ignore[index, union-attr]

    convs = [module for module in network.modules() if isinstance(module, Conv)]
    hooks = [conv.register_forward_hook(note) for conv in convs]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    count |= {name: number / numbers.total() for name, number in numbers.items()}


def _error(result: Tensor, exact: Tensor) -> float:
    """Return the mean squared error of a result `[...]`; infinite where it is not finite."""
    error = (result - exact).double().square().mean().item()
    return error if math.isfinite(error) else math.inf


def _lost_db(error: float, narrow: float) -> float:
    """Return the decibels that `error` costs in addition to that of bfloat16."""
    return 10 * math.log10(1 + max(0.0, error) / max(narrow, _TINY))


def _drop_forms(network: Network, names: frozenset[str]) -> None:
    """Free the weights that only the measurement needed."""
    for module in network.modules():
        if isinstance(module, Conv):
            kept = getattr(module, "code_name", "") in names
            forms = list(module.forms.items()) if kept else []
            module.forms.clear()
            module.forms.update((key, form) for key, form in forms if not key[1].is_floating_point)
