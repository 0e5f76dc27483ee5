"""Narrow VAEs of each family, what they are given, and how two results are compared."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.kernels import slow_on_cpu
from fast_video_vae.kernels.convolution import cudnn
from fast_video_vae.kernels.ready import facts
from fast_video_vae.tests.benchmarks.peers import PeerUnavailableError, comfyui_vae
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.layers.inputs.coding import name_convolutions
from fast_video_vae.vae.models.wan21 import Wan21Decoder
from fast_video_vae.vae.planning.job import job_of
from fast_video_vae.vae.streaming import precision
from fast_video_vae.vae.streaming.int8 import layers as int8_layers
from fast_video_vae.vae.streaming.int8 import settings as int8_settings

STATES = {
    "wan2.1": lambda: random_state_dict(8),
    "wan2.2": lambda: random_wan22(8, 8),
    "seedvr2": lambda: random_seedvr2((32, 32, 32, 32)),
    "qwen-image-2.1": random_qwen21,
}
VIDEO = ("wan2.1", "wan2.2", "seedvr2")  # those whose layers remember frames
WAN = ("wan2.1", "wan2.2")  # those that are cut into tiles


def random_frames(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def random_latent(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def latent_for(vae, frames, height, width, batch=1):
    """A latent of frames of this size."""
    step = vae.config.spatial_compression
    return random_latent(batch, vae.config.latent_channels, frames, height // step, width // step)


def prepared(vae):
    """The VAE, after the wait for the choice of its layers in int8."""
    assert vae.wait_until_prepared(300)  # it takes 90 s at published widths
    return vae


def computes_16_bits(patch):
    """Compute in 16 bits also on a CPU that is slow in them: by oneDNN in float32, rounded."""
    convolve, has_onednn = cudnn.convolve, torch.backends.mkldnn.is_available()

    def rounded(x, weight, bias, stride, padding):
        is_narrow = x.dtype in (torch.bfloat16, torch.float16)
        if not (is_narrow and has_onednn and slow_on_cpu(x.dtype)):
            return convolve(x, weight, bias, stride, padding)
        wide = [None if each is None else each.float() for each in (x, weight, bias)]
        ones = (1,) * len(stride)
        return torch.mkldnn_convolution(*wide, padding, stride, ones, 1).to(x.dtype)

    patch.setattr(precision, "_is_slow", lambda dtype: False)
    patch.setattr(cudnn, "convolve", rounded)


def all_layers_in_int8(patch, folder):
    """Int8 pays on this CPU, and all convolutions after a norm are chosen, not measured."""

    def every(network, x, dtype, needed):
        names = name_convolutions(network)
        rows = (int8_layers.LayerLoss(name, 1 / len(names), 0.0, 0.0, True) for name in names)
        return int8_layers.Int8Layers(tuple(rows))

    found = facts.Facts(folder / "facts.json", {})
    patch.setattr(int8_layers, "facts_of", lambda device: found)
    patch.setattr(int8_settings, "int8_lacks", lambda device, dtype: "")
    patch.setattr(int8_layers, "choose", every)


@functools.cache
def published_decode():
    """The job of a decode of 720 x 1280 by Wan 2.1 in its published widths, on the meta device."""
    vae, cpu = load_vae(STATES["wan2.1"](), dtype=torch.float32), torch.device("cpu")
    with torch.device("meta"):
        decoder = Wan21Decoder((384, 384, 384, 192, 96), 3, 16)
    size = 1, 90, 160
    job = job_of(vae.decoder, vae.config, size, torch.float32, cpu, single_frame=False)
    return replace(job, network=decoder)


def stock(state, **options):
    """ComfyUI's VAE of these weights, where it is there."""
    try:
        return comfyui_vae(state, **options)
    except PeerUnavailableError as error:
        pytest.skip(str(error))


def overwritten(pieces):
    """Return an iterator of pieces in one memory, which the next one overwrites."""
    # Allocated here: a stream cannot go on after an iterator that raises.
    memory = torch.empty_like(max(pieces, key=torch.Tensor.numel))
    return (memory[:, :, : piece.shape[2]].copy_(piece) for piece in pieces)


def joined(stream):
    return torch.cat(list(stream), dim=2)


def relative_error(actual, expected):
    """The largest difference over the largest number expected."""
    assert actual.shape == expected.shape
    return ((actual.double() - expected.double()).abs().max() / expected.abs().max()).item()


def close(actual, expected):
    assert relative_error(actual, expected) <= 1e-5


class Convolutions(TorchDispatchMode):
    """Counts convolutions and their products; the dimensions of what each reads.

    Attributes:
        ops: The names of all ops that ran.
        largest: Elements of the largest of what they read of five dimensions.
    """

    def __init__(self):
        super().__init__()
        self.ops, self.dimensions, self.products, self.largest = [], [], 0, 0

    @property
    def count(self):
        return len(self.dimensions)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        if "convolution" in str(func) and "reorder" not in str(func):
            at = int("binary" in str(func))  # behind what oneDNN's adds to
            self.dimensions.append(args[at].ndim)
            if args[at].ndim == 5:
                self.largest = max(self.largest, args[at].numel())
            self.products += result.numel() * args[at + 1].shape[1:].numel()
        return result


class Pads(TorchDispatchMode):
    """Keeps the pads over time, or over the dimensions before it, of five-dimensional tensors."""

    # In inference mode a pad is not taken apart before it is seen.
    NAMES = ("pad", "_pad", "constant_pad", "reflection_pad", "replication_pad")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(self.NAMES) and args[0].ndim == 5 and any(args[1][4:]):
            self.seen.append((name, list(args[1])))
        return func(*args, **(kwargs or {}))
