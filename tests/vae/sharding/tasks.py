"""What the ranks of a pool do: encodes and decodes of a narrow VAE."""

import contextlib
import functools

import torch

from fast_video_vae.tests.vae.families import STATES, joined
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning import candidates


@functools.cache
def _vae(family, dtype):
    return load_vae(STATES[family](), dtype=dtype)


@contextlib.contextmanager
def sharded(family, group, dtype=torch.float64, axis=None):
    """The VAE of a family, shared by the ranks of a group."""
    vae = _vae(family, dtype)
    vae.shard(group, axis)
    try:
        yield vae
    finally:
        vae.unshard()


def convert(group, *, family, x, encode=False, dtype=torch.float64, axis=None, chunk=None, **given):
    """Encode or decode `x` as a stream; the result, and the counts of the operations."""
    with sharded(family, group, dtype, axis) as vae:
        stream = vae.encode_stream if encode else vae.decode_stream
        return joined(stream(x, StreamOptions(chunk), **given)), dict(vae.shards.counts)


def decode_pieces(group, *, family, x):
    """Decode latents that arrive one by one."""
    with sharded(family, group) as vae:
        return joined(vae.decode_stream(iter(x.split(1, dim=2))))


def decode_images(group, *, family, x):
    """Decode to images in uint8, in float32."""
    with sharded(family, group, torch.float32) as vae:
        batch, channels, *size = vae.config.decoded_shape(x.shape)
        images = torch.empty(batch, *size, channels, dtype=torch.uint8)
        for _ in vae.decode_stream(x, images=images):
            pass
        return images


def decode_state(group, *, state, x):
    """Decode with the VAE of these weights."""
    vae = load_vae(state, dtype=torch.float64)
    vae.shard(group)
    try:
        return vae.decode(x)
    finally:
        vae.unshard()


def decode_in_parts(group, *, family, x, part_bytes):
    """Decode in parts of this size."""
    usual, candidates._CPU_PART_BYTES = candidates._CPU_PART_BYTES, part_bytes
    try:
        with sharded(family, group) as vae:
            return vae.decode(x)
    finally:
        candidates._CPU_PART_BYTES = usual


def error_of(group, *, family, x, axis=None, records=False):
    """Decode, which fails; the error, and the counts of the operations."""
    with sharded(family, group, axis=axis) as vae:
        try:
            vae.decode(x.requires_grad_(records))
        except ValueError as error:
            return str(error), dict(vae.shards.counts)
        raise AssertionError("it did not fail")


def decode_after_error(group, *, family, bad, good):
    """Decode after a decode that failed on all ranks."""
    with sharded(family, group) as vae:
        try:
            vae.decode(bad)
        except ValueError:
            return vae.decode(good)
        raise AssertionError("it did not fail")
