"""A machine with a GPU of sm_90, played on `meta`: its launches are recorded, not run."""

import contextlib
import importlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.kernels import routes
from fast_video_vae.kernels.cuda_ops import attention, hopper, norms, rows, runtime
from fast_video_vae.kernels.devices import kinds
from fast_video_vae.kernels.ready import background, selfcheck
from fast_video_vae.tests.benchmarks import count_bytes
from fast_video_vae.tests.kernels.own_kernels import restart
from fast_video_vae.tests.played_devices import functions_of
from fast_video_vae.vae import VideoVAE, validation
from fast_video_vae.vae.streaming import session
from fast_video_vae.vae.streaming.prepared import preparation

META = torch.device("meta")
TRITON = "fast_video_vae.kernels.triton_ops"
# The function of the same name hides the module in its package.
blocks = importlib.import_module("fast_video_vae.kernels.reference.attention")


class ChannelsLast(TorchDispatchMode):
    """Returns results of convolutions in channels-last memory, as cuDNN does, and reads zeros."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = func._schema.name == "aten::_local_scalar_dense"
        if args and getattr(args[0], "is_meta", False) and (read or _is_to_host(kwargs)):
            return 1 if read else torch.zeros(args[0].shape, dtype=kwargs.get("dtype"))
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::convolution":
            return count_bytes.channels_last(result)
        return result


def _is_to_host(kwargs):
    return str((kwargs or {}).get("device")) == "cpu"


class Machine:
    """A machine with a GPU of sm_90, played on `meta`, and a VAE on it.

    Attributes:
        compiled: Variants of kernels that were launched.
        jobs: What waits for the background thread.
    """

    def __init__(self, backend, monkeypatch, tmp_path, kernels=None):
        self.compiled, self.jobs, self._backend = set(), [], backend
        self._kernels = {(9, 0): kernels or {}}
        restart(monkeypatch)
        monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path))
        monkeypatch.setattr(preparation, "_prepared", {})
        monkeypatch.setattr(background, "submit", self._submit)
        monkeypatch.setattr(selfcheck, "checked", self._checked)
        monkeypatch.setitem(kinds._KINDS, "meta", "nvidia")
        monkeypatch.setattr(torch, "meta", SimpleNamespace(**functions_of("nvidia")), raising=False)
        monkeypatch.setattr(torch.meta, "mem_get_info", lambda *_: (22 << 30, 24 << 30))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch, "Generator", mock.MagicMock())
        monkeypatch.setattr(torch.Tensor, "normal_", lambda x, **_: x)
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
        monkeypatch.setattr(validation, "check_finite", lambda *_: None)
        monkeypatch.setattr(session, "drop_stale_forms", lambda *_: None)

    def _submit(self, name, work):
        self.jobs.append(background.Job(name, work))
        return self.jobs[-1]

    def _checked(self, names, op, sample):
        return selfcheck.running(names[0] if op == "conv3d" else self._backend, op, sample)

    def _launch(self, *args, **options):
        constants = tuple(sorted(options.items(), key=str))
        if self._backend == "cuda":  # a source has all kernels of an op
            self.compiled.add((args[0], args[2].dtype, constants))
            return
        values = (x.dtype if isinstance(x, torch.Tensor) else type(x) for x in args[2:])
        self.compiled.add((args[0].__name__, *values, constants))

    def _patches(self):
        """Return what lets a backend accept `meta` tensors, and describe its launches."""
        if self._backend == "triton":
            files = ("rows", "norms", "layout", "convolution", "ops")
            *owners, ops = (importlib.import_module(f"{TRITON}.{name}") for name in files)
            return [*((each, "launch") for each in owners), (ops, "refuse_device", lambda *_: None)]
        address = torch.Tensor.data_ptr
        return [
            *((each, "launch") for each in (rows, norms, attention, runtime)),
            (runtime, "refuse_device", lambda *_: None),
            # A kernel takes the address 0 for a missing tensor.
            (torch.Tensor, "data_ptr", lambda x: address(x) + (x.is_meta << 40)),
            *((each, "multiplies_mixed", lambda *_: True) for each in (attention, blocks)),
            (blocks, "_mixed_product", lambda a, b, _: torch.bmm(a, b, out_dtype=torch.float32)),
            (routes, "KERNELS", self._kernels), (hopper, "tensor_map", lambda _: b""),
            (hopper, "multiprocessors", lambda _: 9),
        ]  # fmt: skip

    @contextlib.contextmanager
    def running(self):
        with contextlib.ExitStack() as stack:
            for owner, name, *new in self._patches():
                stack.enter_context(mock.patch.object(owner, name, *new or [self._launch]))
            stack.enter_context(ChannelsLast())
            yield

    def build(self):
        with self.running():
            while self.jobs:
                assert self.jobs.pop(0).run()


def stream(vae, direction, frames, height, width):
    config, dtype = vae.config, vae.dtype
    if direction == "encode":
        vae.encode(torch.empty(1, 3, frames, height, width, device=META, dtype=dtype))
        return
    size = height // config.spatial_compression, width // config.spatial_compression
    shape = 1, config.latent_channels, config.latent_frames(frames), *size
    latent = torch.empty(shape, device=META, dtype=dtype)
    vae.decode(latent)
    for images in (torch.float32, torch.uint8):
        target = torch.empty(1, frames, height, width, 3, device=META, dtype=images)
        for _ in vae.decode_stream(latent, images=target):
            pass


def new_vae(family, dtype=torch.bfloat16):
    """Return the published VAE of `family` on `meta`, without weights."""
    config = count_bytes.configs()[family]
    with META:
        vae = VideoVAE(config, dtype, dtype)
    return vae.to(dtype).requires_grad_(False)
