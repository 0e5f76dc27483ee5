"""Stand-ins on a played GPU: Triton's kernels, which count and use the reference; a network."""

import contextlib
import functools
from collections import Counter

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import Fused, Prepared, dispatch, modules, routes, use_backend
from fast_video_vae.kernels.backends import SIGNATURES, Kernel
from fast_video_vae.kernels.ready import facts, sample_inputs, serving, variants
from fast_video_vae.kernels.ready import proof as proofs
from fast_video_vae.kernels.tables import Kind
from fast_video_vae.tests.played_devices import played

CUBE = Kind(8, 8, (3, 3, 3), (1, 1, 1), video=True)
CHIP = (9, 0)


class OwnKernels:
    """The backend `triton`.

    Attributes:
        ran: Calls by op.
        change: Changes a result `[...]` of an op.
    """

    def __init__(self):
        self.ran, self.change = Counter(), lambda op, y: y

    def refuse(self, x):
        pass

    def launches(self):
        return {op: functools.partial(self._run, op) for op in SIGNATURES}

    def _run(self, op, *args):
        self.ran[op] += 1
        if op == "conv3d":
            x, weight, *terms, tail, out, stride, padding, _ = args
            route = routes.Route(stride, (routes.Candidate(Kernel("reference", 0), Fused()),))
            with use_backend("reference"):  # for the terms too
                y = dispatch.convolve(route, x, weight, *terms, tail, out, padding)
        else:
            y = modules.ask("reference", op, *args)
        return self.change(op, y)


def restart(monkeypatch):
    """Begin another process: what is on the disk remains."""
    for module, name, value in (
        (serving, "_found", {}), (serving, "_asked", set()), (serving, "_tiled", {}),
        (routes, "_proofs", {}), (proofs, "_calls", Counter()), (proofs, "_begun", set()),
        (facts, "_opened", {}), (facts, "_BUSY_S", 0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    facts.of_kernels.cache_clear()


@contextlib.contextmanager
def playing(monkeypatch, tmp_path, chip=CHIP, table=None):
    own = OwnKernels()
    restart(monkeypatch)
    with played("nvidia", monkeypatch, tmp_path) as device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: chip)
        monkeypatch.setitem(modules._loaded, "triton", own)
        entries = {CHIP: {CUBE: Kernel("triton", 0)}} if table is None else table
        monkeypatch.setattr(routes, "KERNELS", entries)
        monkeypatch.setattr(variants, "_ELEMENTS", 1 << 12)  # of a check: less time
        monkeypatch.setattr(sample_inputs, "_LARGE", (3, 8))
        yield device, own
    facts.of_kernels.cache_clear()


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    with playing(monkeypatch, tmp_path) as both:
        yield both


class Network:
    """A norm and a convolution, as layers of a VAE; `prepared` builds its kernels."""

    def __init__(self, dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(s, generator=generator) for s in ((1, 3, 4, 6, 8), (8, 3, 3, 3, 8))
        )
        self._given = [x.movedim(-1, 1), weight.movedim(-1, 1) / 15, torch.ones(8)]
        self._given = [each.to(dtype) for each in self._given]
        meta = [each.to("meta") for each in self._given]
        self._given = [each.to("cuda") for each in self._given]
        self.prepared = Prepared(torch.device("cuda"), lambda: self._run(*meta))

    def _run(self, x, weight, gamma):
        return kernels.conv3d(kernels.rms_norm_silu(x, gamma), weight, padding=(1, 1))

    def video(self, seen=None, steps=4, room=1 << 30, most=9):
        """Return the bits of a video, which sees what is there, and can prove tiles."""
        self.prepared.renew()
        proved = proofs.Proofs(room, most)
        with kernels.seeing(seen or self.prepared.seen()), kernels.proving(proved):
            found = torch.stack([self._run(*self._given) for _ in range(steps)])
        proved.close()
        return found.cpu().contiguous().view(torch.uint8).numpy().tobytes()
