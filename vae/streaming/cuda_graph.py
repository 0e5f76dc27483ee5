"""The steps of one chunk as a CUDA graph: recorded once, then started by one call."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...kernels import log_once, preparing


class Recording:
    """What a chunk of frames goes through, to be replayed for others of its shape.

    Recording runs the Python code and nothing on the GPU: the state of the video is untouched, and
    the first `replay` is the first run. All memory between input and results is the recording's.

    Args:
        steps: From the input to the results. Its state must lie in memory that stays where it is;
            it has run with such an input before, so that nothing is left to be set up.
        x: An input, as it will come.

    Raises:
        RuntimeError: Something in it cannot be recorded, or there is no memory.
    """

    def __init__(self, steps: Callable[[Tensor], Iterable[Tensor]], x: Tensor) -> None:
        self._input = x.clone()
        self._graph = torch.cuda.CUDAGraph()
        # What other threads do to the device meanwhile is no error of this recording.
        with (
            preparing("graph capture", "VAE"),
            torch.cuda.device(x.device),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._results = list(steps(self._input))

    def replay(self, x: Tensor) -> Iterable[Tensor]:
        """Run it for an input like the first one; results are in memory of their own."""
        self._input.copy_(x)
        self._graph.replay()
        for result in self._results:
            yield result.clone()


def takes(device: torch.device) -> bool:
    """Whether there are such graphs on a device."""
    return device.type == "cuda"


def complain(error: RuntimeError) -> None:
    """Tell once that chunks run one kernel at a time, and why."""
    reason = str(error).strip().partition("\n")[0]
    log_once(f"no CUDA graph of the VAE, so that its kernels are started one by one ({reason})")
