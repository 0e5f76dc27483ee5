"""Static frames: an encoder computes them until its output is static, and then repeats it.

Once all frames in its reach are identical, a causal layer repeats its output: in a clip with a
static end (such as the picture and grey frames of ComfyUI's WanImageToVideo) the first layers a few
frames after the last change, finally every latent. Each layer only computes the frames before its
output is static (see `Settling`). Then its last output is repeated, and the layers before it rest.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..layers.causal_layer import CausalLayer
from ..layers.temporal_cache import Settling, TemporalCache, canonical
from ..models.receptive_field import causal_taps

# Elements of a frame that are compared first; only if they are equal, all are compared.
_SAMPLES = 4096

# Elements that a device compares at once; each takes a byte meanwhile.
_PIECE = 1 << 25

# Identical frames after which work is skipped: the reach of the first convolution and of a residual
# block. Shorter repetitions, such as frames shown twice, are computed normally.
_WORTH_IT = 6


class Changes:
    """Counts the identical frames at the end of a video so far."""

    # A whole video on a device that the host would wait for with each chunk is compared at once.

    def __init__(self, video: Tensor | None = None) -> None:
        self._video = video
        self._runs: Iterator[int] = iter(())
        self._frame: Tensor | None = None
        self._repeats_so_far = 0

    def repeats(self, chunk: Tensor) -> int:
        """Count the identical frames, at least 1, at the end of the video after `chunk`."""
        if self._video is not None:
            self._runs, self._video = iter(_runs_of(self._video)), None
        frames, last = chunk.shape[2], chunk[:, :, -1:]
        run = next(itertools.islice(self._runs, frames - 1, None), 0)
        if run:
            return run
        count = 1 + _equal_at_end(last, chunk[:, :, :-1])
        if count == frames and self._frame is not None and _equal_at_end(last, self._frame):
            self._repeats_so_far += count
        else:
            self._repeats_so_far, self._frame = count, last.clone()  # it may be overwritten
        return self._repeats_so_far


class StaticEnd:
    """The progress of a static end through a network."""

    def __init__(self, chains: Sequence[Sequence[CausalLayer]]) -> None:
        self._chains = chains
        self._places = [(c, i) for c, chain in enumerate(chains) for i in range(len(chain))]
        self._run = Settling(0, 0)
        self._done = 0  # first layers, which are static and do not run
        self._held: Tensor | None = None  # last output frame of the last static layer

    @functools.cached_property
    def _convs(self) -> list[list[tuple[int, int]]]:
        """Taps and strides of the layers at `_places`; most videos have no static end."""
        return [causal_taps(self._chains[c][i]) for c, i in self._places]

    def takes(self, frames: int, repeats: int) -> bool:
        """Announce the next chunk; return whether `advance` of this object skips work in it."""
        self._run = Settling(frames, frames - repeats + 1)
        if self._run.fresh > 0:
            self._done, self._held = 0, None
        return self._run.fresh <= 0 or repeats > _WORTH_IT

    @property
    def needed(self) -> int:
        """Number of first frames of the announced chunk that `advance` needs."""
        return max(1, self._run.needed)

    @property
    def behind(self) -> Settling:
        """The output of the last layer for the announced chunk."""
        return functools.reduce(_behind, self._convs, self._run)

    def advance(
        self, x: Tensor, cache: TemporalCache, push: Callable[..., Iterator[Tensor]]
    ) -> Iterator[Tensor]:
        """Push the `needed` frames through by `push`; yield runs of all frames of the chunk."""
        runs = list(itertools.accumulate(self._convs, _behind, initial=self._run))
        first, behind = self._done, runs[-1]
        if self._held is not None:
            x = _repeated(self._held, behind.frames if first == len(self._places) else 1)
        if first == len(self._places):
            yield x
            return
        layers = [
            _SettlingLayer(self._chains[chain][index], convs, run)
            for (chain, index), convs, run in zip(self._places, self._convs, runs, strict=False)
        ]
        # Layers whose next output frame equals their last one.
        done = sum(run.fresh <= run.frames for run in runs[1:])
        if done > first:
            layers[done - 1].keeps = True
        each = iter(layers)
        chains = [[next(each) for _ in chain] for chain in self._chains]
        repeats, last = behind.frames - max(1, behind.needed), x
        for y in push(chains, x, start=self._places[first]):
            last = y[:, :, -1:].clone() if repeats else y
            yield y
        if done > first:
            self._done, self._held = done, layers[done - 1].kept
        if repeats:
            yield _repeated(last, repeats)


class _SettlingLayer(CausalLayer):
    """A layer, and the frames of a chunk that it needs until its output is static."""

    repeats = True

    def __init__(self, layer: CausalLayer, convs: Sequence[tuple[int, int]], run: Settling) -> None:
        super().__init__()
        self.growth, self.pairs = layer.growth, layer.pairs
        self.keeps = False
        self.kept: Tensor | None = None
        self._layer = layer
        self._settles = layer.settles
        self._given = max(1, run.needed)
        # A layer that runs outputs at least one frame, even if it equals the one before.
        while _behind(run, convs).fresh < 1:
            run = Settling(run.frames, run.fresh + 1)
        self._run = run
        behind = _behind(run, convs)
        self._wanted = behind.needed * (run.frames // behind.frames)
        self._seen = 0

    def wants(self, frames: int) -> int:
        """Return the frames needed when `frames` have arrived, copies of the last included."""
        seen = self._seen
        return self._wanted - seen if seen + frames == self._given else frames

    def forward(self, x: Tensor, cache: TemporalCache) -> Tensor:
        """Run the layer for the next frames."""
        run = self._run.part(self._seen, x.shape[2])
        self._seen += x.shape[2]
        cache.settling = run if self._settles else None
        y = self._layer(x, cache)
        cache.settling = None
        if self.keeps and self._seen == self._wanted:
            self.kept = y[:, :, -1:].clone()
        return y


def _behind(run: Settling, convs: Sequence[tuple[int, int]]) -> Settling:
    for taps, stride in convs:
        run = run.behind(taps, stride)
    return run


def _repeated(frame: Tensor, frames: int) -> Tensor:
    """Repeat the last frame of `frame`; as a copy, because a layer may write into its input."""
    video = frame[:, :, -1:].expand(-1, -1, frames, -1, -1)
    return canonical(video.clone(memory_format=torch.channels_last_3d))


def _runs_of(video: Tensor) -> list[int]:
    """Return for each frame of `video` `[B, C, T, H, W]` how many up to it are identical."""
    size = max(1, _PIECE * video.shape[2] // max(1, video.numel()))
    equal = [
        (piece[:, :, 1:] == piece[:, :, :-1]).flatten(3).all(3).all(1).all(0)
        for start in range(0, video.shape[2] - 1, size)
        for piece in [video[:, :, start : start + size + 1]]
    ]
    flags = torch.cat(equal).tolist() if equal else []
    return list(itertools.accumulate(flags, lambda run, same: same * run + 1, initial=1))


def _equal_at_end(frame: Tensor, chunk: Tensor) -> int:
    """Return how many frames at the end of a chunk equal `frame` `[B, C, 1, H, W]`."""
    if frame.shape[:2] != chunk.shape[:2] or frame.shape[3:] != chunk.shape[3:]:
        return 0
    if frame.dtype != chunk.dtype or frame.device != chunk.device:
        return 0
    step = max(1, frame.shape[3] * frame.shape[4] // _SAMPLES)
    few = frame.flatten(3)[..., ::step] == chunk.flatten(3)[..., ::step]
    count = 0
    for index, equal in reversed(list(enumerate(few.all(3).all(1).all(0).tolist()))):
        if not equal or not torch.equal(frame, chunk[:, :, index : index + 1]):
            break
        count += 1
    return count
