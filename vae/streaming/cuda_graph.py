"""The steps of one chunk as a CUDA graph: captured once, then launched by one call."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ...kernels import first_line, is_out_of_memory, log_once, preparing


class Recording:
    """The work on one chunk, to be replayed for other chunks of its shape.

    Capturing runs the Python code but nothing on the GPU. The state of `steps` must not move in
    memory, and they have run for this shape before, so that everything is set up.
    """

    def __init__(self, steps: Callable[[Tensor], Iterable[Tensor]], x: Tensor) -> None:
        self._input, self._graph = x.clone(), torch.cuda.CUDAGraph()
        # Work of other threads must not fail this capture. PyTorch does not leave the stream of one
        # that fails, so the stream is restored here.
        try:
            with (
                preparing("graph capture", "VAE"),
                torch.cuda.device(x.device),
                torch.cuda.stream(torch.cuda.current_stream(x.device)),
                torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
            ):
                self._results = list(steps(self._input))
        except (AssertionError, MemoryError, TypeError, ValueError) as error:
            raise RuntimeError(str(error)) from error

    def replay(self, x: Tensor) -> Iterator[Tensor]:
        """Run the graph on `x`, and return copies; a `RuntimeError` leaves the video unchanged."""
        try:
            copies = [torch.empty_like(result) for result in self._results]
            self._input.copy_(x)
            self._graph.replay()
        except RuntimeError:
            self._results = []
            self._graph.reset()
            raise
        return (copy.copy_(result) for copy, result in zip(copies, self._results, strict=True))


def takes(device: torch.device) -> bool:
    """Return whether `device` supports CUDA graphs."""
    return device.type == "cuda"


def complain(error: RuntimeError) -> None:
    """Log once why chunks run without a graph: `error`."""
    # Without the sizes, which differ.
    reason = "memory is short" if is_out_of_memory(error) else first_line(error)
    log_once(f"no CUDA graph of the VAE; its kernels are launched one by one ({reason})")
