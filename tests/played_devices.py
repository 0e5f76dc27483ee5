"""GPUs of each kind, played on the CPU: their tensors claim to be there, and lack what they lack.

A played tensor is a CPU tensor whose `device` is another one. A mode places the results of
factories and copies, and refuses what a real device of the kind refuses, with errors of the same
types. `torch.cuda` and `torch.mps` are replaced as far as the package uses them.
"""

import contextlib
import importlib
from collections import deque
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from fast_video_vae.kernels import constraints, warmup_log
from fast_video_vae.kernels.convolution import aten
from fast_video_vae.kernels.devices import memory
from fast_video_vae.kernels.ready import background, serving
from fast_video_vae.vae.streaming.prepared import device_check, preparation

TYPES = {"nvidia": "cuda", "amd": "cuda", "apple": "mps"}
# Calls that make or move memory.
MOVES = {
    "empty", "empty_strided", "new_empty", "view", "unflatten", "flatten", "reshape", "permute",
    "movedim", "unsqueeze", "squeeze", "narrow", "select", "split", "expand", "__getitem__",
    "detach", "copy_", "clone", "contiguous", "to", "cpu",
}  # fmt: skip
_GIB = 1 << 30

# The device that is played.
_playing = SimpleNamespace(device=torch.device("cpu"))

# Reads of results, for which a host waits.
_READS = {"tolist", "item", "__bool__", "__int__", "__float__", "equal"}


class Played(torch.Tensor):
    """A CPU tensor that claims to be on the played device."""

    device = property(lambda _: _playing.device)
    is_cpu = False
    is_cuda = property(lambda _: _playing.device.type == "cuda")
    is_mps = property(lambda _: _playing.device.type == "mps")

    def record_stream(self, stream):
        """The memory of a CPU is not reused before its time."""


class Event:
    """An event of a stream; the work is done before it is recorded."""

    def __init__(self, **options):
        self.timed = options.pop("enable_timing", False)

    def record(self, stream=None):
        pass

    synchronize = record

    def elapsed_time(self, end):
        assert self.timed
        assert end.timed
        return 1.0


class Stream:
    """A stream whose work is done at once."""

    cuda_stream = 0

    def wait_event(self, *_):
        pass

    wait_stream = synchronize = __init__ = wait_event


class Device(TorchFunctionMode):
    """Plays a device of a kind."""

    def __init__(self, kind, *, macos=15, conv3d_narrow=True):
        super().__init__()
        self.kind, self.device = kind, torch.device(TYPES[kind], 0)
        self.macos, self.conv3d_narrow = macos, conv3d_narrow
        self.calls = []  # the convolutions: address and shape of the weight, shape of x, options
        self.faults = []  # what a real device would not have survived, or not have done in time
        self.jobs = []  # what the background thread would build
        self.plant = None  # changes the result of a call there: name, arguments, result

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        tensors = list(_tensors((args, kwargs)))
        here = any(isinstance(each, Played) for each in tensors)
        wanted = torch.device("cpu") if name == "cpu" else _wanted(args, kwargs)
        args, kwargs = _on_cpu(args), _on_cpu(kwargs)
        if kwargs.pop("pin_memory", False) and self.kind == "apple":
            raise RuntimeError("pinning memory is not supported on this device")
        if name == "to" and wanted is None and len(tensors) > 1:  # to those of another tensor
            wanted = tensors[1].device
        placed = here if wanted is None else wanted.type == self.device.type
        if name in ("to", "cpu", "cuda") and placed != here:
            kwargs["copy"], func = True, torch.Tensor.to
            args = args if name == "to" else (args[0], "cpu")
        sixteen = any(isinstance(each, Played) and each.dtype == torch.uint16 for each in tensors)
        moves = name in ("copy_", "to", "cpu", "clone", "contiguous")
        if self.kind == "apple" and sixteen and moves:  # before PyTorch 2.9 (pytorch#159094)
            raise TypeError("Trying to convert UInt16 to the MPS backend")
        if here and name not in ("copy_", "to", "cpu", "__get__", "__set__"):
            self._check(name, tensors, args, kwargs)
        result = func(*args, **kwargs)
        if here and self.plant is not None:
            # Not in what the change itself calls.
            plant, self.plant = self.plant, None
            copies = name == "copy_" and not isinstance(args[0], Played)
            name = "to host" if copies or (name in ("to", "cpu") and not placed) else name
            result, self.plant = plant(name, args, result), plant
        if here or (placed and wanted is not None):
            self._refuse_dtypes(name, result, placed)
        return _placed(result, placed)

    def submit(self, name, work):
        self.jobs.append(background.Job(name, work))
        return self.jobs[-1]

    def build(self):
        """Run the jobs that wait, as the background thread of a real device would."""
        while self.jobs:
            assert self.jobs.pop(0).run()

    def _refuse_dtypes(self, name, result, placed):
        dtypes = {each.dtype for each in _tensors(result)} if placed else set()
        if torch.uint16 in dtypes and name not in MOVES:
            self.faults.append(f"{name} in uint16, in which few devices compute")
        if torch.float64 in dtypes and self.kind == "apple":
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        if torch.bfloat16 in dtypes and self.kind == "apple" and self.macos < 14:
            raise TypeError("BFloat16 is not supported on MPS")

    def _check(self, name, tensors, args, kwargs):
        strangers = [x for x in tensors if type(x) is torch.Tensor and x.ndim]
        if strangers and name not in ("set_", "data_ptr"):
            raise RuntimeError(f"Expected all tensors to be on the same device, in {name}")
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            self.faults.append(f"autograd records {name}")
        if any(not isinstance(x, Played) for x in tensors if x.ndim and x.is_floating_point()):
            self.faults.append(f"{name} mixes devices")
        if name in ("conv2d", "conv3d"):
            self._convolve(name, args, kwargs)
        if name == "cudnn_convolution" and self.kind != "nvidia":
            self.faults.append("cuDNN is called directly")
        if "out_dtype" in kwargs or (name == "baddbmm" and torch.float32 in args[3:]):
            raise RuntimeError("products with another dtype of the result are not supported")

    def _convolve(self, name, args, kwargs):
        x, weight = args[:2]
        if name == "conv3d" and x.dtype.itemsize == 2 and not self.conv3d_narrow:
            raise RuntimeError("Conv3D in 16 bits is not supported on MPS")
        largest = max(x.numel() * x.element_size(), weight.numel() * weight.element_size())
        if self.kind == "apple" and largest > memory._METAL_BYTES:
            self.faults.append(f"a tensor of {largest} bytes")
        given = [*args[3:5], *(kwargs.get(each) for each in ("stride", "padding"))]
        self.calls.append((weight.data_ptr(), weight.shape, x.shape, str(given)))
        # Newer versions of PyTorch have the immediate mode.
        immediate = getattr(getattr(torch.backends, "miopen", None), "immediate", True)
        if self.kind == "amd" and (torch.backends.cudnn.benchmark or not immediate):
            self.faults.append("MIOpen searches")


def _tensors(value):
    """Return the tensors in nested arguments or results."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def _wanted(args, kwargs):
    """Return the device that a call names, or None."""
    names = (*TYPES.values(), "cpu")
    found = [
        each
        for each in args
        if isinstance(each, torch.device) or (isinstance(each, str) and each in names)
    ]
    named = [kwargs["device"]] if kwargs.get("device") is not None else found
    return torch.device(named[0]) if named else None


def _on_cpu(value):
    """Replace the played device in arguments by the CPU."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value in TYPES.values()):
        return torch.device("cpu") if torch.device(value).type == _playing.device.type else value
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value


def _placed(result, placed):
    """Return a result with its tensors on the played device, or on the CPU."""
    if isinstance(result, torch.Tensor):
        if placed == isinstance(result, Played) or result.is_meta:
            return result
        return result.as_subclass(Played if placed else torch.Tensor)
    if type(result) in (list, tuple):
        return type(result)(_placed(each, placed) for each in result)
    return result


def functions_of(kind):
    """Return the functions of the runtime of a kind by name."""
    found = {
        "empty_cache": lambda: None,
        "is_available": lambda: True,
        "synchronize": lambda *_: None,
    }
    if kind == "apple":
        return found | {
            "recommended_max_memory": lambda: 8 * _GIB,
            "current_allocated_memory": lambda: _GIB,
            "driver_allocated_memory": lambda: 2 * _GIB,
        }
    properties = {"total_memory": 8 * _GIB, "gcnArchName": "gfx1100"}
    return found | {
        "Event": Event,
        "Stream": Stream,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "current_stream": Stream,
        "device": lambda _: contextlib.nullcontext(),
        "get_device_capability": lambda *_: (8, 9) if kind == "nvidia" else (11, 0),
        "get_device_name": lambda *_: f"a GPU ({kind})",
        "get_device_properties": lambda *_: SimpleNamespace(**properties),
        "get_per_process_memory_fraction": lambda *_: 1.0,
        "is_bf16_supported": lambda **_: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (6 * _GIB, 8 * _GIB),
        "memory_stats": lambda *_: dict.fromkeys(
            ("reserved_bytes.all.current", "active_bytes.all.current"), 0
        ),
        "stream": lambda _: contextlib.nullcontext(),
    }


@contextlib.contextmanager
def played(kind, monkeypatch, tmp_path, **options):
    """Play a device of a kind; yields it. What would be built for it waits in `device.jobs`."""
    device = Device(kind, **options)
    monkeypatch.setattr(_playing, "device", device.device)
    runtime = getattr(torch, device.device.type)
    for name, value in functions_of(kind).items():
        monkeypatch.setattr(runtime, name, value, raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4" if kind == "amd" else None)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *_: generator("cpu"))
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda a, _: device.macos >= a)
    known = constraints._has_address
    monkeypatch.setattr(constraints, "_has_address", lambda x: isinstance(x, Played) or known(x))
    attention = importlib.import_module("fast_video_vae.kernels.reference.attention")
    takes = attention._fused_attention_takes
    monkeypatch.setattr(
        attention,
        "_fused_attention_takes",
        lambda q, *others: q.device.type == "cpu" and takes(q, *others),
    )
    for name in ("TRITON", "CUDA"):
        monkeypatch.setenv(f"FAST_VIDEO_VAE_{name}", "0")
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path))
    monkeypatch.setattr(background, "submit", device.submit)
    for name, value in (("_found", {}), ("_asked", set()), ("_tiled", {})):
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(preparation, "_prepared", {})
    monkeypatch.setattr(device_check, "queue", device.jobs.append)
    monkeypatch.setattr(device_check, "_jobs", {})
    monkeypatch.setattr(device_check, "_verdicts", {})
    monkeypatch.setattr(aten, "_missing", set())
    monkeypatch.setattr(warmup_log, "_done", deque())
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda _, **given: autocast("cpu", **given))
    with device:
        yield device


class Waits(TorchFunctionMode):
    """Counts the reads of tensors on `device`, within its block."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.count, self._device = 0, device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in _READS:
            self.count += isinstance(args[0], torch.Tensor) and args[0].device.type == self._device
        return func(*args, **(kwargs or {}))
