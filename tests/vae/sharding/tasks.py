"""What the ranks of a pool do: encodes and decodes of a narrow VAE."""

import contextlib
import functools
import os
import signal
import time
from unittest import mock

import torch
import torch.distributed as dist

from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.tests.vae.families import STATES, joined
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning import candidates
from fast_video_vae.vae.sharding import connection

# Errors of a rank that ends in the middle of a video.
ENDS = {"fail": OSError("the disk is gone"), "interrupt": KeyboardInterrupt()}


@functools.cache
def vae_of(family, dtype=torch.float64, device="cpu"):
    return load_vae(STATES[family](), dtype=dtype, device=device)


@contextlib.contextmanager
def sharded(vae, group, axis=None):
    """A VAE, shared by the ranks of a group."""
    vae.shard(group, axis)
    try:
        yield vae
    finally:
        vae.unshard()


def streamed(vae, x, *, encode=False, chunk=None, in_pieces=False, frames=None):
    """Encode or decode `x` as a stream."""
    x = iter(x.split(1, dim=2)) if in_pieces else x
    options = StreamOptions(chunk)
    if encode:
        return vae.encode_stream(x, options)
    return vae.decode_stream(x, options, frames=frames)


def convert(
    group, *, family, x, dtype=torch.float64, axis=None, device="cpu", part_bytes=None,
    stops_before=False, **given,
):  # fmt: skip
    """Encode or decode `x`; the result, the counts of the operations, and the ranks on a device."""
    part_bytes = part_bytes or candidates._CPU_PART_BYTES
    shared = sharded(vae_of(family, dtype, device), group, axis)
    with mock.patch.object(candidates, "_CPU_PART_BYTES", part_bytes), shared as vae:
        if stops_before:  # another video, on all ranks
            for _ in streamed(vae, x, **given):
                break
        found = joined(streamed(vae, x, **given)).cpu()
        return found, dict(vae.shards.counts), vae.shards.sharers


def make_calls(group, *, family, calls, axis=None):
    """Make the calls of this rank; their results, or errors as text, and the operations of each."""
    results = []
    with sharded(vae_of(family), group, axis) as vae:
        for name, inputs, switches in calls[dist.get_rank(group)]:
            vae.shards.counts.clear()
            with mock.patch.dict(vars(vae), switches):
                try:
                    result = getattr(vae, name)(inputs, 1)
                except (ValueError, OSError) as error:
                    result = f"{type(error).__name__}: {error}"
            results.append((result, dict(vae.shards.counts)))
    return results


def ends_early(group, *, family, x, victim, how):
    """Decode while one rank ends after its first piece, or all ranks leave.

    Returns:
        The error of this rank, and the seconds from then on.
    """
    vae, is_victim = vae_of(family), dist.get_rank(group) == victim
    start = time.monotonic()

    def latents():
        for number, piece in enumerate(x.split(1, dim=2)):
            if number == 1 and is_victim and how in ENDS:
                raise ENDS[how]
            yield piece

    try:
        with sharded(vae, group), contextlib.ExitStack() as stack:
            stream = vae.decode_stream(x if how == "memory" else latents(), StreamOptions(1))
            next(stream)
            if how == "leave":
                vae.unshard()
            if is_victim and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if is_victim and how == "stop":
                stream.close()
                return "", 0.0
            if is_victim and how == "memory":
                stack.enter_context(FailingMemory(20))
            joined(stream)
    except (OSError, KeyboardInterrupt, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    raise AssertionError("it did not end early")


def error_of_shard(group, *, family, axes, absent=None):
    """Share the videos along the axis of this rank, unless it is absent; the error."""
    rank = dist.get_rank(group)
    if rank == absent:
        return ""
    try:
        with mock.patch.object(connection, "WAIT_S", 0.5):
            vae_of(family).shard(group, axes[rank])
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")


def in_pairs(group, *, family, width, x, encode=False, rounds=3):
    """Time rank 0 alone, and all ranks together, in turn; the seconds of both."""
    vae = load_vae(random_weights(family, width, width), dtype=torch.float32)
    run = vae.encode if encode else vae.decode
    seconds, results = {"one": [], "shards": []}, {}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for name, times in seconds.items():
                if name == "shards":
                    vae.shard(group)
                dist.barrier(group)
                start = time.perf_counter()
                if name == "shards" or dist.get_rank(group) == 0:
                    results[name] = run(x)
                dist.barrier(group)
                times.append(time.perf_counter() - start)
                vae.unshard()
    if dist.get_rank(group) > 0:
        return None
    error, largest = (results["one"] - results["shards"]).abs().max(), results["one"].abs().max()
    if error > 1e-4 * largest:
        raise ValueError(f"the results differ by {error}; expected rounding")
    return {name: times[1:] for name, times in seconds.items()}
