"""Frames that do not change: an encoder computes them until they make no difference any more.

Behind its reach a causal layer gives the same for the same. So in a clip whose end stands still (as
ComfyUI's WanImageToVideo makes them: a picture, then grey) the first layers are done a few frames
after the last change, those behind them a little later, and in the end a latent is the one before.
What a layer gave last is then what it gives next, and what is before it need not run.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .cache import TemporalCache
from .causal import CausalConv3d
from .inputs import canonical
from .network import Layer, sublayers
from .stream import advance

# Numbers of a frame that are compared before all of them are.
_SAMPLES = 4096


class Changes:
    """Tells whether the frames of a chunk are all like the last one before it."""

    def __init__(self) -> None:
        self._frame: Tensor | None = None

    def none(self, chunk: Tensor) -> bool:
        """Compare a chunk, and remember its last frame.

        Args:
            chunk: `[B, C, T, H, W]`; its memory may be another's afterwards.
        """
        before, last = self._frame, chunk[:, :, -1:]
        same = before is not None and _like(before, chunk)
        if not same:
            self._frame = last.clone()
        return same


class Stillness:
    """How far into a network a still end has come.

    Args:
        chains: The layers, as for `advance`.
    """

    def __init__(self, chains: Sequence[Sequence[Layer]]) -> None:
        self._chains = chains
        self._places = [(c, i) for c, chain in enumerate(chains) for i in range(len(chain))]
        self._steps = [_step(chains[c][i]) for c, i in self._places]
        self._length = 0  # frames that are alike, up to now
        self._done = 0  # layers that need not run
        self._held: Tensor | None = None  # the last frame that the last of those gave

    def changed(self) -> None:
        """Another frame has come, and run through all layers."""
        self._length, self._done, self._held = 1, 0, None

    def advance(self, x: Tensor, cache: TemporalCache, part_bytes: int) -> Iterator[Tensor]:
        """`advance` for a chunk whose frames are all like the last one before it."""
        self._length += x.shape[2]
        first, settled = self._done, self._settled()
        if self._held is not None:
            frames = x.shape[2]
            for _, stride in self._steps[:first]:
                frames //= stride
            # A copy, because a layer may write into its input.
            x = self._held.expand(-1, -1, frames, -1, -1)
            x = canonical(x.clone(memory_format=torch.channels_last_3d))
        if first == len(self._places):
            yield x
            return
        chains = [list(chain) for chain in self._chains]
        if settled > first:
            chain, index = self._places[settled - 1]
            chains[chain][index] = self._noting(chains[chain][index])
            self._done = settled
        yield from advance(chains, x, cache, part_bytes, start=self._places[first])

    def _settled(self) -> int:
        """Layers whose last frame was made of frames that are alike."""
        length = self._length
        for count, (reach, stride) in enumerate(self._steps):
            length = (length - reach) // stride
            if length < 1:
                return count
        return len(self._steps)

    def _noting(self, layer: Layer) -> Layer:
        """A layer whose last frame is remembered."""

        def noted(x: Tensor, cache: TemporalCache) -> Tensor:
            y = layer(x, cache)
            self._held = y[:, :, -1:].clone()
            return y

        noted.growth = getattr(layer, "growth", 1)  # type: ignore[attr-defined]
        return noted


def _step(layer: Layer) -> tuple[int, int]:
    """Frames before one that a layer sees, at most, and frames that become one."""
    reach, stride = 0, 1
    for part in sublayers(layer):
        for module in part.modules():
            if isinstance(module, CausalConv3d):
                reach += module.weight.shape[2] - 1
                stride *= module.stride
    return reach, stride


def _like(frame: Tensor, chunk: Tensor) -> bool:
    """Whether all frames of a chunk are `frame`, `[B, C, 1, H, W]`."""
    if frame.shape[:2] != chunk.shape[:2] or frame.shape[3:] != chunk.shape[3:]:
        return False
    if frame.dtype != chunk.dtype or frame.device != chunk.device:
        return False
    step = max(1, frame.shape[3] * frame.shape[4] // _SAMPLES)
    few = (frame.flatten(3)[..., ::step], chunk.flatten(3)[..., ::step])
    return bool((few[0] == few[1]).all()) and all(
        torch.equal(frame, each) for each in chunk.split(1, dim=2)
    )
