"""A device whose tensors are on the CPU, for the order of copies between host and device.

Its streams record what each operation may follow. An access to memory that another stream may be
using is a race.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from fast_video_vae.kernels import errors

CUDA = torch.device("cuda")


class Stream:
    """Operations that ran before the next one of this stream, by number."""

    def __init__(self, device=None):
        self.done = set()

    def wait_stream(self, other):
        self.done |= other.done

    def wait_event(self, event):
        self.done |= event.done

    def synchronize(self):
        Event.host.wait_stream(self)


class Event:
    host = None  # the stream that waits in `synchronize`

    def record(self, stream):
        self.done = set(stream.done)

    def synchronize(self):
        self.host.wait_event(self)


class FakeGPU(TorchFunctionMode):
    """The copies between the host and a fake device; `races` used memory of another stream."""

    def __init__(self, monkeypatch, *, refuses=False):
        super().__init__()
        self._stream = Stream()  # of the computation
        self.host = Event.host = Stream()  # what the host did, and what it waited for
        # Bytes of the pinned allocations; `refuses` pins none.
        self.pins, self.refuses, self.races, self.blocking = [], refuses, [], set()
        self._operations, self._uses, self._kept = 0, {}, []
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": self._on,
            "current_stream": lambda _: self._stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        monkeypatch.setattr(errors, "_logged", set())

    @contextlib.contextmanager
    def _on(self, stream):
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def use(self, name, *memory):
        """Run operation `name` on `memory` in the current stream."""
        self._operations += 1
        self._kept += memory  # an address stands for one tensor
        self._stream.wait_stream(self.host)  # which has queued it
        for tensor in memory:
            earlier = self._uses.setdefault(tensor.data_ptr(), [])
            self.races += [(before, name) for number, before in earlier if number not in self.done]
            earlier.append((self._operations, name))
        self.done.add(self._operations)

    @property
    def done(self):
        return self._stream.done

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        if name == "empty" and kwargs.pop("pin_memory", False):
            if self.refuses:
                raise RuntimeError("CUDA error: operation not permitted\nand a long story")
            self.pins.append(args[0])
        elif name == "to" and args[1:] == (CUDA,):
            self.use("fetch", args[0])
            self.blocking.add(not kwargs.get("non_blocking"))
            copy = args[0].clone()
            self.use("fetch", copy)
            return copy
        elif name == "copy_" and "non_blocking" in kwargs:
            self.use("park", *args)
            self.blocking.add(not kwargs["non_blocking"])
        elif name == "copy_" and not args[0].is_meta:
            with self._on(self.host):
                self.use("stage", args[0])
        return func(*args, **kwargs)
