"""Devices in other processes, or on other machines: the ranks of `torch.distributed`.

Rank 0 has the video. It sends each chunk to the others and receives their parts of the results.
Each computes its band as a device of one process does, so nothing else is exchanged, and tensors
travel over the host (gloo). The video goes on without a device that fails; a rank whose process
ends, ends all of them.
"""

import contextlib
import datetime
import hashlib
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ....kernels import Snapshot, first_line, is_out_of_memory, new_video
from ...layers.inputs.coding import Coding
from ...layers.temporal_cache import canonical
from ...models.base import Network
from ...models.config import VAEConfig
from ...models.receptive_field import Span
from ...models.replicas import Replicas
from ...planning.bands import Band
from ...planning.device_memory import free_bytes
from ...planning.tiling import cut_tiles
from ..memory import bare
from ..tiled_executor import Target
from .member import Announced, Member, Work

# The others wait for rank 0 while it reads or writes a file; the end of a process is noticed.
_TIMEOUT = datetime.timedelta(days=7)

# Kind, values, and a tensor on the host.
_Message = tuple[str, tuple[Any, ...], Tensor | None]


class SharedVAE(Protocol):
    """What this module needs of a `VideoVAE`; see there."""

    config: VAEConfig
    device: torch.device
    decoder: Network
    replicas: Replicas
    encoding: Callable[[], Network]
    built_kernels: Callable[..., Snapshot]
    state_dict: Callable[[], dict[str, Tensor]]


class RankError(ConnectionError):
    """The ranks cannot go on together; the message is one line and names the one that ended."""


class Rank:
    """Another process, and for rank 0 its device.

    Each message is sent when the other one waits for it: rank 0 asks, and the others answer.
    """

    device: torch.device
    place: str  # of the memory, which can be that of other ranks

    def __init__(self, group: Any, number: int) -> None:  # noqa: ANN401, a group of any PyTorch
        self.name = f"rank {number} of {dist.get_world_size(group)}"
        self._group, self._number = group, number
        self._sending, self._is_broken = threading.Lock(), False

    def __str__(self) -> str:
        return self.name

    def send(self, kind: str, *values: object, tensor: Tensor | None = None) -> None:
        """Send a message; `tensor` is copied to the host."""
        # Errors of the device come before the message.
        data = None if tensor is None else tensor.detach().to("cpu").contiguous()
        head = kind, values, None if data is None else (data.shape, data.dtype)
        with self._sending, self._whole():
            dist.send_object_list([head], self._number, self._group)
            if data is not None:
                dist.send(data.flatten().view(torch.uint8), self._number, self._group)

    def receive(self) -> _Message:
        """Wait for the next message, or raise a `RankError` if the other one has ended."""
        head: list[Any] = [None]
        with self._whole():
            dist.recv_object_list(head, self._number, self._group)
            kind, values, form = head[0]
            data = None if form is None else torch.empty(form[0], dtype=form[1])
            if data is not None:
                dist.recv(data.flatten().view(torch.uint8), self._number, self._group)
        if kind == "end" and values[0]:
            raise RankError(values[0])
        return kind, values, data

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Raise a `RankError` if a message breaks off in the block: no other one can follow."""
        if self._is_broken:
            raise RankError(f"the connection to {self.name} is broken")
        try:
            yield
        except BaseException as error:
            self._is_broken = True
            if not isinstance(error, Exception):
                raise
            is_short = is_out_of_memory(error)
            how = "has a message without memory" if is_short else "ended unexpectedly"
            raise RankError(f"{self.name} {how}") from None

    def free_bytes(self) -> int:
        """Return the free memory of the device."""
        self.send("free")
        return self.receive()[1][0]


class Ranks:
    """All processes of `torch.distributed`; rank 0 has the videos, and the others work for it.

    Use it as a context manager. An error in the block, such as that of a file, ends all ranks. If
    the process of rank 0 is killed, the others remove `files`, which it has begun.
    """

    def __init__(self, files: Collection[Path] = ()) -> None:
        self._files = files
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self.number, self.size = dist.get_rank(), dist.get_world_size()
        others = range(1) if self.number else range(1, self.size)
        self._others = [Rank(group, number) for number in others]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.number and not isinstance(error, Exception):
            return
        text = "" if error is None else first_line(error) or type(error).__name__
        if error is not None and not isinstance(error, RankError):
            how = f"stopped: {text}" if isinstance(error, Exception) else "was interrupted"
            text = f"rank {self.number} of {self.size} {how}"
        for other in self._others:
            with contextlib.suppress(RankError):
                if self.number:
                    other.receive()
                other.send("end", text)

    def lead(self, vae: SharedVAE) -> list[torch.device | Rank]:
        """Return the devices of all ranks, or raise a `ValueError` if one has another VAE.

        One video at a time can use them.
        """
        own = _identity(vae)
        for other in self._others:
            other.send("who", *self._files)
            _, (identity, other.device, other.place), _ = other.receive()
            if identity != own:
                raise ValueError(f"{other.name} has another VAE; expected that of rank 0")
        return [vae.device, *self._others]

    def follow(self, vae: SharedVAE) -> None:
        """Work for rank 0 until its end."""
        follower = _Follower(self._others[0], vae)
        try:
            follower.serve()
        except RankError:
            for file in follower.files:
                file.unlink(missing_ok=True)
            raise


def place_of(device: torch.device) -> str:
    """Return a name of the memory of a device of this process."""
    return f"{socket.gethostname()} {device}"


def _identity(vae: SharedVAE) -> str:
    """Return a number of the configuration and the weights of a VAE."""
    found = hashlib.blake2b(repr(vae.config).encode())
    for name, weight in vae.state_dict().items():
        found.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        found.update(weight.to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class RankMember:
    """The band of another rank in one video, for rank 0."""

    caches = ()

    def __init__(self, rank: Rank, work: Work, band: Band) -> None:
        self._rank, self._is_stopped = rank, False
        # Of the frames of an encode it gets the part that its band sees.
        job, self._part = work.job, ()
        if job.encodes:
            _, tiles, _ = cut_tiles(job, band.tiles)
            seen = zip(*(tile.seen for tile in tiles), strict=True)
            bounds = [(min(x.start for x in each), max(x.stop for x in each)) for each in seen]
            self._part = tuple(slice(*each) for each in bounds)
        bare_job = replace(job, network=None)  # type: ignore[arg-type], each rank has its own
        rank.send("begin", job.encodes, bare_job, band, work.begins, self._part)
        self._finish(None)

    def stop(self) -> None:
        """End the work between two layers, and free what it holds there."""
        if not self._is_stopped:
            self._is_stopped = True
            with contextlib.suppress(RankError):
                self._rank.send("stop")

    def task(self, x: Tensor, target: Target, announced: Announced) -> Callable[[], None]:
        """Return the task to run the layers of the band on `x`, as `Member.task`."""

        def task() -> None:
            self._rank.send("run", x.shape, announced, tensor=x[(..., *self._part)])
            self._finish(target, x.device)

        return task

    def _finish(self, target: Target | None, device: torch.device | None = None) -> None:
        """Pass parts of the result to `target` until the rank is done, or raise its error."""
        while True:
            kind, values, part = self._rank.receive()
            if kind == "failed":
                raise values[0](values[1])
            if part is None or target is None:
                return
            part = part.to(device).contiguous(memory_format=torch.channels_last_3d)
            target.put(canonical(part), *values)


class _Follower:
    """The device of this rank, which works for rank 0; the target of its band in a chunk."""

    def __init__(self, rank: Rank, vae: SharedVAE) -> None:
        self._rank, self._vae = rank, vae
        self._stopped = threading.Event()
        self._member: Member | None = None
        self._part: tuple[slice, ...] = ()
        self.files: tuple[Path, ...] = ()

    def serve(self) -> None:
        """Do what rank 0 asks for until its end; the layers run in a thread meanwhile."""
        device, identity = self._vae.device, _identity(self._vae)
        working: Future[None] | None = None
        with ThreadPoolExecutor(1, "fast-video-vae-rank") as pool:
            try:
                while (message := self._rank.receive())[0] != "end":
                    if message[0] == "who":
                        self.files = message[1]
                        self._rank.send("here", identity, device, place_of(device))
                    elif message[0] == "free":
                        self._rank.send("free", free_bytes(device))
                    elif message[0] == "stop":
                        self._stopped.set()
                        if working is not None:
                            working.result()
                        self._member = working = None
                    else:
                        self._stopped.clear()
                        working = pool.submit(self._answered, message)
                    del message
            finally:
                self._stopped.set()

    def _answered(self, message: _Message) -> None:
        """Do a task, and send how it ended."""
        answer: tuple[Any, ...] = ("done",)
        try:
            kind, values, x = message
            if kind == "begin":
                self._begin(values)
            elif self._member is not None and x is not None:
                self._run(self._member, x, *values)
        except Exception as error:
            kinds = torch.OutOfMemoryError, InterruptedError, RuntimeError
            is_kind = is_out_of_memory(error), isinstance(error, InterruptedError), True
            text = str(error) or type(error).__name__
            answer = "failed", kinds[is_kind.index(True)], text
            bare(error)
        with contextlib.suppress(RankError):  # the next message shows it
            self._rank.send(*answer)

    def _begin(self, given: tuple[Any, ...]) -> None:
        """Prepare the band of a video."""
        encodes, job, band, begins, self._part = given
        vae, device = self._vae, self._vae.device
        network = vae.encoding() if encodes else vae.decoder
        seen = vae.built_kernels(device, job.dtype, job.coded, encodes=encodes)
        if seen.fallback.float32 or seen.fallback.cpu:
            raise ValueError(f"{device} computes {job.dtype} wrongly; expected another device")
        job = replace(job, network=network, device=device)
        work = Work(job, vae.replicas, lambda _: seen, begins)
        self._member = Member(work, replace(band, device=device), self._stopped)

    def _run(self, member: Member, x: Tensor, shape: torch.Size, announced: Announced) -> None:
        """Run the layers of the band on a chunk."""
        x = x.to(self._vae.device)
        if self._part:
            # The layers take whole frames, of which the band sees this part.
            x, part = new_video(x, tuple(shape)), x
            x[(..., *self._part)] = part
        x = canonical(x.contiguous(memory_format=torch.channels_last_3d))
        member.task(x, self, announced)()
        for cache in member.caches:
            cache.first = self._vae.config.is_of_pictures

    def put(
        self, x: Tensor, start: int, rows: Span, columns: Span, coding: Coding | None = None
    ) -> None:
        """Send a part `[B, C, n, h, w]`; one that is out of the range of `coding` is infinite."""
        x = x if coding is None else x + coding.verdict().to(x.dtype)
        self._rank.send("part", start, rows, columns, tensor=x)
