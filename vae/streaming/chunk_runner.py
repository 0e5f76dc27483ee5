"""The steps of one video: chunk after chunk through the layers, in the modes that they need."""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers import cudnn
from ..layers.memory_format import canonical, to_unit
from ..layers.oom import Relief
from . import cuda_graph as graphs
from .compile_guard import eager
from .executor import Route
from .precision import full_float32
from .static_frames import Changes


@dataclass
class Steps:
    """Runs the chunks of one video.

    Attributes:
        route: The way through the layers, with the state of the video.
        enter: What a chunk goes through first.
        device: Where the layers are.
        dtype: Of the computation.
        full: Compute float32 in float32, whatever PyTorch's switches allow.
        learns: There are parameters that want a gradient.
        graphs: Replay chunks that repeat as CUDA graphs.
        network: What tells this network from others.
        skips: Leave out what frames that do not change make no difference to.
        relief: Makes room when memory runs out.
    """

    route: Route
    enter: Callable[[Tensor], Tensor]
    device: torch.device
    dtype: torch.dtype
    full: bool
    learns: bool
    graphs: bool
    network: Hashable
    skips: bool
    relief: Relief

    def __post_init__(self) -> None:
        self._last: tuple[torch.Size, bool, bool] | None = None
        self._repeats = 0  # chunks before this one that were like it, one after the other
        self._searches = False
        self._recording: graphs.Recording | None = None
        self._changes = Changes()
        self._still = False

    def go_by(self, route: Route) -> None:
        """Go on by another route."""
        self.route, self._recording, self._repeats, self._last = route, None, 0, None

    def end(self) -> None:
        """Let go of what was recorded, which refers to this."""
        self._recording = None

    def run(self, chunk: Tensor) -> Iterator[Tensor]:
        """Run one chunk; between results the modes (grad, inference, ...) are the caller's.

        Args:
            chunk: `[B, C, T, H, W]`, of any float dtype or uint8 in 0-255, on any device.

        Yields:
            What the route makes of each run of frames as it leaves the last layer.
        """
        shape = chunk.shape, self.route.lanes[0].cache.first
        self._searches = cudnn.pays((*shape, self.network, self.dtype, self.device))
        kind = *shape, self._searches  # nothing can be searched for while a graph is recorded
        self._repeats = self._repeats + 1 if kind == self._last else 0
        if self._repeats == 0:
            self._recording = None
        self._last = kind
        records = torch.is_grad_enabled() and (chunk.requires_grad or self.learns)
        watches = self.skips and not records
        if not watches:
            self._changes = Changes()
        alike = self.relief.attempt(lambda: self._changes.alike(chunk)) if watches else 0
        wanted = self.route.takes(chunk.shape[2], alike)
        self._still = wanted is not None
        if wanted is not None:
            chunk, self._searches = chunk[:, :, :wanted], False
        results: Iterator[Tensor] | None = None
        while True:
            results, result = self._next(results, chunk, records)
            if result is None:
                return
            yield result

    @eager
    def _next(
        self, results: Iterator[Tensor] | None, chunk: Tensor, records: bool
    ) -> tuple[Iterator[Tensor], Tensor | None]:
        """One result more; None after the last. All that is computed is computed in here."""
        with contextlib.ExitStack() as modes:
            # Outside of inference mode, so that tails and derived weights can be used in it and out
            # of it.
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.set_grad_enabled(records))
            modes.enter_context(torch.autocast(self.device.type, enabled=False))
            if self.full:
                modes.enter_context(full_float32(self.device))
            if self._searches:
                modes.enter_context(cudnn.searching(self.device))
            if results is None:
                x = self.relief.attempt(lambda: self._input(chunk))
                results = iter(self._results(x, records))
            result = next(results, None)
            return results, None if result is None else self.route.finish(result)

    def _input(self, chunk: Tensor) -> Tensor:
        x = to_unit(chunk.to(self.device)) if chunk.dtype == torch.uint8 else chunk
        x = x.to(self.device, self.dtype).contiguous(memory_format=torch.channels_last_3d)
        return canonical(self.enter(canonical(x)))

    def _results(self, x: Tensor, records: bool) -> Iterable[Tensor]:
        if self._still:
            return self._advance(x)
        # The first of like chunks sets up memory and whatever else is set up once.
        recorded = self.graphs and self.route.records and not records
        if self._repeats and recorded and graphs.takes(self.device):
            try:
                if self._recording is None:
                    self._recording = graphs.Recording(self._advance, x)
                return self._recording.replay(x)
            except RuntimeError as error:
                self.graphs = False
                graphs.complain(error)
        return self._advance(x)

    def _advance(self, x: Tensor) -> Iterator[Tensor]:
        return self.route.advance(x)
