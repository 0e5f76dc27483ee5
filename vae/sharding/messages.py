"""Messages between ranks outside of their operations: which one stopped, and which is gone.

An operation waits for a rank that never takes part, for as long as its time-out. So each rank
listens to every other one on a connection of its own, which breaks at once if a process is killed.
All ranks then name the rank that ended, and not a neighbour that ended because of it.
"""

import atexit
import contextlib
import datetime
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ...kernels import is_out_of_memory

# Whether the rank left, number of its video, and number of the next operation in it; then text.
_HEAD = struct.Struct("<?qq")
_MESSAGE_BYTES = 512
_TAG, _UNUSED_TAG = 0x7E11, 0x7E12

# A broken connection is noticed by the operation that it breaks; the reason arrives meanwhile.
_GRACE_S = 10.0

# Gloo closes the connections of a group in which an operation times out.
_AT_ONCE = datetime.timedelta(milliseconds=1)


# A group as PyTorch's backends have it: a `ProcessGroup`, or a `ProcessGroupGloo` of our own.
Group = Any


class ShardError(ConnectionError):
    """The ranks cannot go on together; the message is one line and says which rank ended."""


class _End(NamedTuple):
    """The end of a rank: whether it left, the first operation that it misses, and the reason."""

    left: bool
    video: int
    operation: int
    reason: str


class Messages:
    """Listens to the other ranks, and ends operations that wait for one that is gone."""

    def __init__(self, connection: Group, others: list[Group]) -> None:
        self._connection, self._others = connection, others
        self._rank, self._size = connection.rank(), connection.size()
        self._video = self._operation = 0
        self._changed = threading.Condition()
        # The memory of a message exists from the start: a shortage of memory is one reason to send.
        self._text = bytearray(_MESSAGE_BYTES)
        self._message = torch.frombuffer(self._text, dtype=torch.uint8)
        self._none = torch.empty(1, dtype=torch.uint8)
        self._sending = threading.Lock()
        self._gone: set[int] = set()  # ranks that do not listen to this one any more
        self._ends: list[_End] = []
        self._reason: str | None = None  # why no operation is possible any more
        self._waits = self._leaves = False
        self._listeners = [
            threading.Thread(target=self._listen, args=(other,), daemon=True)
            for other in self._peers()
        ]
        for listener in self._listeners:
            listener.start()
        # A thread that waits outside of Python when the interpreter ends would abort the process.
        atexit.register(self.leave)

    def run(self, operate: Callable[[], object]) -> None:
        """Run an operation of all ranks; a `ShardError` names one that is gone or takes no part."""
        with self._changed:
            ended = self._note_ends()
            self._waits = not ended
        if ended:
            # No other rank shall wait for this one.
            self._break(self._others)
            raise ShardError(self._reason)
        try:
            operate()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            text = str(error).splitlines()[0]
            with self._changed:
                self._changed.wait_for(lambda: self._reason is not None, _GRACE_S)
                self._reason = self._reason or f"the connection to another rank broke: {text}"
            raise ShardError(self._reason) from None
        finally:
            self._waits = False
        self._operation += 1

    @property
    def place(self) -> tuple[int, int]:
        """The number of the video, and that of the next operation in it."""
        return self._video, self._operation

    def lose_step(self, *, is_ahead: bool) -> NoReturn:
        """End an operation that other ranks took for another one, with a `ShardError`."""
        with self._changed:
            if is_ahead:
                self._reason = self._reason or "this rank ended a video before the other ranks"
            else:
                self._changed.wait_for(self._note_ends, _GRACE_S)
            reason = self._reason = self._reason or "another rank ended this video before this rank"
        self._break(self._others)
        raise ShardError(reason)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Notify the other ranks if an error ends a video before its layers run."""
        try:
            yield
        except BaseException as error:
            self._end_video(self._ending(error))
            raise

    @contextlib.contextmanager
    def one_video(self) -> Iterator[None]:
        """Count the operations of a video, and notify the other ranks of its end."""
        # Noticed by ranks whose video is longer.
        ending = f"{self._name(self._rank)} is at the end of its video"
        try:
            yield
        except BaseException as error:
            ending = self._ending(error)
            # A GPU notices where the host waits for it that an operation was ended.
            if isinstance(error, RuntimeError) and self._reason and not is_out_of_memory(error):
                raise ShardError(self._reason) from None
            raise
        finally:
            self._end_video(ending)

    def _ending(self, error: BaseException) -> str:
        """Return the message about an error of this rank, or about one that it has heard of."""
        if isinstance(error, ShardError):
            return str(error)
        name = self._name(self._rank)
        if not isinstance(error, Exception):
            return f"{name} {'stopped' if isinstance(error, GeneratorExit) else 'was interrupted'}"
        return f"{name} stopped: {(str(error).splitlines() or [''])[0] or type(error).__name__}"

    def _end_video(self, reason: str) -> None:
        """Notify the other ranks of the end of a video; what follows belongs to the next one."""
        self._send(self._peers(), reason)
        self._video, self._operation = self._video + 1, 0

    def leave(self) -> None:
        """Notify the other ranks that no operation follows."""
        if self._leaves:
            return
        atexit.unregister(self.leave)
        self._leaves = True
        with self._changed:
            self._reason = self._reason or "this rank left the group"
        self._send(self._peers(), f"{self._name(self._rank)} left the group", left=True)
        deadline = time.monotonic() + _GRACE_S
        for listener in self._listeners:
            listener.join(max(0, deadline - time.monotonic()))
        self._break([self._connection])

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._size}"

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _send(self, ranks: list[int], reason: str, *, left: bool = False) -> None:
        """Send the end of this rank to those of `ranks` that are there."""
        head = _HEAD.pack(left, self._video, self._operation)
        data = (head + reason.encode())[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        with self._sending:
            self._text[:] = data
            for other in set(ranks) - self._gone:
                with contextlib.suppress(RuntimeError):
                    self._connection.send([self._message], other, _TAG).wait()
            if left:
                self._gone.update(ranks)

    def _listen(self, rank: int) -> None:
        """Receive the messages of a rank until it leaves or is gone."""
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        while True:
            try:
                self._connection.recv([message], rank, _TAG).wait()
            except RuntimeError:
                if not self._leaves:
                    with self._changed:
                        self._reason = self._reason or f"{self._name(rank)} ended unexpectedly"
                        self._changed.notify_all()
                    self._break(self._others)
                return
            data = bytes(message.tolist())
            reason = data[_HEAD.size :].rstrip(b"\0").decode(errors="replace")
            left, video, operation = _HEAD.unpack_from(data)
            end = _End(left, video, operation, reason)
            with self._changed:
                self._ends = [each for each in self._ends if each.left or each.video >= self._video]
                self._ends.append(end)
                # Operations of a GPU go on after the host has queued them.
                is_late = video == self._video and self._operation > end.operation
                breaks = (self._waits or is_late) and self._note_ends()
            if breaks:
                self._break(self._others)
            if end.left:
                if not self._leaves:
                    self._send([rank], "", left=True)  # which ends the thread that listens there
                return

    def _note_ends(self) -> bool:
        """Note whether a rank will not take part in the current operation."""
        at = self._video, self._operation
        for end in self._ends:
            known = end.left or end.video == self._video
            if self._reason is None and known and at >= (end.video, end.operation):
                self._reason = end.reason
                self._changed.notify_all()
        return self._reason is not None

    def _break(self, groups: list[Group]) -> None:
        """End the operations of `groups` that wait."""
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                # PyTorch 2.6 has no such function: its watchdog ends the process, later.
                abort = getattr(group, "abort", lambda: None)
                with contextlib.suppress(Exception):
                    abort()
                continue
            # A connection that is closed already does not time out, so each is tried.
            for rank in self._peers():
                with contextlib.suppress(RuntimeError):
                    group.recv([self._none], rank, _UNUSED_TAG).wait(_AT_ONCE)
