"""What the ranks of a pool do: encodes and decodes of a narrow VAE."""

import contextlib
import copy
import functools
import math
import os
import pickle
import signal
import time
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.tests.vae.families import STATES, joined
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.workspace import Workspace
from fast_video_vae.vae.planning import candidates
from fast_video_vae.vae.sharding import connection
from fast_video_vae.vae.sharding.messages import Messages

# Errors of a rank that ends in the middle of a video.
ENDS = {"fail": OSError("the disk is gone"), "interrupt": KeyboardInterrupt()}


@functools.cache
def _vae(family, dtype, device="cpu"):
    return load_vae(STATES[family](), dtype=dtype, device=device)


@contextlib.contextmanager
def sharded(family, group, dtype=torch.float64, axis=None, device="cpu"):
    """The VAE of a family, shared by the ranks of a group."""
    vae = _vae(family, dtype, device)
    vae.shard(group, axis)
    try:
        yield vae
    finally:
        vae.unshard()


def convert(
    group, *, family, x, encode=False, dtype=torch.float64, axis=None, device="cpu", chunk=None,
    **given,
):  # fmt: skip
    """Encode or decode `x` as a stream; the result, and the counts of the operations."""
    with sharded(family, group, dtype, axis, device) as vae:
        stream = vae.encode_stream if encode else vae.decode_stream
        return joined(stream(x, StreamOptions(chunk), **given)).cpu(), dict(vae.shards.counts)


def sharers(group):
    """The ranks on the device of this one."""
    with sharded("wan2.1", group) as vae:
        return vae.shards.sharers


def decode_pieces(group, *, family, x):
    """Decode latents that arrive one by one."""
    with sharded(family, group) as vae:
        return joined(vae.decode_stream(iter(x.split(1, dim=2))))


def decode_in_parts(group, *, family, x, part_bytes):
    """Decode in parts of this size."""
    usual, candidates._CPU_PART_BYTES = candidates._CPU_PART_BYTES, part_bytes
    try:
        with sharded(family, group) as vae:
            return vae.decode(x)
    finally:
        candidates._CPU_PART_BYTES = usual


def error_of(group, *, family, x, axis=None):
    """Decode, which fails; the error, and the counts of the operations."""
    with sharded(family, group, axis=axis) as vae:
        try:
            vae.decode(x)
        except ValueError as error:
            return str(error), dict(vae.shards.counts)
        raise AssertionError("it did not fail")


def error_of_other_videos(group, *, family, videos):
    """Decode another video on each rank; the error."""
    with sharded(family, group) as vae:
        try:
            vae.decode(videos[dist.get_rank(group)], 1)
        except (ValueError, OSError) as error:
            return str(error)
        return ""


def decode_after_error(group, *, family, bad, good):
    """Decode after a decode that failed on all ranks."""
    with sharded(family, group) as vae:
        try:
            vae.decode(bad)
        except ValueError:
            return vae.decode(good)
        raise AssertionError("it did not fail")


def with_failing_memory(group, *, family, x, victim, encode=False, **failing):
    """Convert while allocations of one rank fail; the result, and the allocations."""
    with sharded(family, group) as vae:
        stream = vae.encode_stream if encode else vae.decode_stream
        options = StreamOptions(1)
        joined(stream(x, options))  # derives the weights
        memory = FailingMemory(**(failing if dist.get_rank(group) == victim else {}))
        with memory:
            pieces = list(stream(x, options))
        memory = {"seen": memory.seen, "failed": memory.failed, "largest": memory.largest}
        return torch.cat(pieces, dim=2), memory


def with_failing_scratch(group, *, family, x, share):
    """Decode where scratch memory over a share of the largest fails on rank 0; the result."""
    sizes, usual = [], Workspace.scratch

    def scratch(workspace, shape, like):
        sizes.append(math.prod(shape))
        if limit and sizes[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return usual(workspace, shape, like)

    with sharded(family, group) as vae:
        limit = 0
        with mock.patch.object(Workspace, "scratch", scratch):
            vae.decode(x)
            limit = share * max(sizes) if dist.get_rank(group) == 0 else 0
            return vae.decode(x)


def ends_early(group, *, family, x, victim, how):
    """Decode while one rank is killed, stops or fails after its first piece.

    Returns:
        The error of this rank, and the seconds from then on.
    """
    vae = _vae(family, torch.float64)
    vae.shard(group)
    start = time.monotonic()

    def latents():
        for number, piece in enumerate(x.split(1, dim=2)):
            if number == 1 and dist.get_rank(group) == victim and how in ENDS:
                raise ENDS[how]
            yield piece

    try:
        for _ in vae.decode_stream(latents()):
            if dist.get_rank(group) == victim and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank(group) == victim and how == "stop":
                return "", 0.0
    except (OSError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    finally:
        vae.unshard()
    raise AssertionError("it did not end early")


class Late:
    """A group whose messages arrive late."""

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        return getattr(self._group, name)

    def recv(self, *arguments):
        work = self._group.recv(*arguments)

        def wait(*timeout):
            work.wait(*timeout)
            time.sleep(0.3)

        return SimpleNamespace(wait=wait)


def errors_of_different_calls(group, *, family, calls, late=False):
    """Make the calls of this rank, which fail; their errors, or "" for one that does not.

    With `late` the messages of other ranks reach rank 0 late.
    """
    errors, made = [], connection.Messages
    if late and dist.get_rank(group) == 0:
        made = lambda first, others: Messages(Late(first), others)  # noqa: E731
    with mock.patch.object(connection, "Messages", made), sharded(family, group) as vae:
        for name, inputs, switches in calls[dist.get_rank(group)]:
            with contextlib.ExitStack() as stack:
                for switch, value in switches.items():
                    stack.enter_context(mock.patch.object(vae, switch, value))
                try:
                    getattr(vae, name)(inputs)
                except (ValueError, OSError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                else:
                    errors.append("")
    return errors


def error_of_shard(group, *, family, axes, absent=None):
    """Share the videos along the axis of this rank, unless it is absent; the error."""
    rank = dist.get_rank(group)
    if rank == absent:
        return ""
    vae = _vae(family, torch.float64)
    try:
        with mock.patch.object(connection, "WAIT_S", 0.5):
            vae.shard(group, axes[rank])
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")


def error_after_leaving(group, *, family, x):
    """Leave the group in the middle of a video; the error of its next piece."""
    vae = _vae(family, torch.float64)
    vae.shard(group)
    stream = vae.decode_stream(x, StreamOptions(1))
    next(stream)
    vae.unshard()
    try:
        next(stream)
    except OSError as error:
        return str(error)
    raise AssertionError("it did not fail")


def copies(group, *, family):
    """Copy and pickle a VAE; the ranks of the copies."""
    with sharded(family, group) as vae:
        pickled = pickle.loads(pickle.dumps(vae))
        return [copy.deepcopy(vae).shards, pickled.shards, vae.shards is not None]


def stop_together(group, *, family, x):
    """Stop after the first piece on all ranks, then decode the whole video."""
    with sharded(family, group) as vae:
        for _ in vae.decode_stream(x, StreamOptions(1)):
            break
        return vae.decode(x)


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
