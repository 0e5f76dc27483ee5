"""How a video goes on after a failure: with the next setting, from the result that comes next.

A step of a video knows nothing of failures. What has failed is dropped as a whole, and the next run
begins as much earlier as its first result needs, which costs at most one more run. Memory runs out
in the first full step in nearly every case.
"""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from ...kernels import first_line, is_out_of_memory
from ..layers.inputs.coding import Coding
from ..weights import VAEWeights
from .bands.banded_executor import DeviceError
from .bands.ranks import RankError
from .memory import bare, exhausted, make_room
from .output import Sink, Wanted, Watch, background_writer
from .precision import eager
from .session import VideoJob, VideoSession
from .settings import RangeError, Setting, after_overflow
from .source import OPEN_END, Part, Source

_logger = logging.getLogger(__name__)

_Setting = TypeVar("_Setting")
_Result = TypeVar("_Result")


def resumed(
    settings: Iterable[_Setting],
    run: Callable[[_Setting], Generator[_Result, None, None]],
    failed: Callable[[Exception], bool],
    task: str = "",
) -> Generator[_Result, None, None]:
    """Yield the results of a run, and after a failure those of a run with the next setting.

    `run` begins with the first result that was not yielded yet, and `failed` says whether another
    setting may help. Without one the error is raised; for memory in a `task`, `ExhaustedError`.
    """
    first: Exception | None = None
    for setting in settings:
        with contextlib.closing(run(setting)) as results:
            while True:
                try:
                    result = next(results)
                except StopIteration:
                    return
                except Exception as error:
                    if not failed(error):
                        if task and is_out_of_memory(error):
                            raise exhausted(error, task) from None
                        raise
                    bare(error)
                    if first is None or not is_out_of_memory(first):
                        first = error  # a lack of memory comes before other reasons
                    break
                yield result
                del result
    if first is None:
        raise RuntimeError("there is no setting; expected at least one")
    try:
        raise exhausted(first, task) if task and is_out_of_memory(first) else first
    finally:
        del first  # its traceback has this frame


class Pieces(Iterator[Tensor]):
    """The pieces of a video; they are computed without `torch.compile`, and refer to no cycle."""

    def __init__(self, pieces: Generator[Tensor, None, None], park: Callable[[], None]) -> None:
        self._pieces, self._park = pieces, park

    @eager
    def __next__(self) -> Tensor:
        """Return the next piece."""
        return next(self._pieces)

    def park(self) -> None:
        """Move what the next piece needs to the host until it is requested, for other models.

        For SeedVR2 at 1280 x 720 in 16 bits that is 3 GB of an encode and 7 GB of a decode. Whole
        frames on one device are parked; tiles and shared videos stay.
        """
        self._park()

    def close(self) -> None:
        """End the video, and free what it holds."""
        self._pieces.close()


class Video:
    """One encode or decode, of which each result is delivered once.

    `vae` remembers an overflow. `sink` makes the destination of a run, with `wanted`, `writer` and
    `watch` of `Output`, for frames in the caller's `target` or in new tensors; `axis` is that of
    the frames in a piece.
    """

    def __init__(
        self,
        vae: VAEWeights,
        job: VideoJob,
        source: Source,
        part: Part,
        setting: Setting,
        sink: Callable[..., Sink],
        target: Tensor | None = None,
        axis: int = 2,
    ) -> None:
        self._vae, self._job, self._source, self._part = vae, job, source, part
        self._sink, self._target, self._axis = sink, target, axis
        self._at = self._before = part.wanted.start  # the next result, and that of the run's start
        self._session: VideoSession | None = None
        self._failure: Exception | None = None
        self._is_logged = False
        self._setting = setting

    def pieces(self) -> "Pieces":
        """Return the pieces, which are computed when they are requested."""
        runs = resumed(self._settings(), self._run, self._failed, self._job.task)
        return Pieces(runs, lambda: self._session and self._session.park())

    def _run(self, setting: Setting) -> Generator[Tensor, None, None]:
        """Yield the pieces under a setting from the next result on."""
        job, device = self._job, setting.device
        start, stop = self._part.start(self._at), self._part.wanted.stop
        coding = Coding(setting.coded, device) if setting.coded else None
        watched = (setting.watched and self._vae.is_finite) or setting.is_narrow
        watched = watched and not job.encodes and device.type != "meta"
        watch = Watch(coding) if watched else None
        writer = background_writer(device, self._target)
        wanted = Wanted(range(self._at, stop), start.result, self._part.wanted.start)
        sink = self._sink(wanted=wanted, writer=writer, watch=watch)
        self._session = session = VideoSession(job, setting, sink, coding)
        source = self._source.read(start.given, self._part.stop)
        stream = session.run(source, begins=start.begins)
        ahead = self._ahead(device, writes=writer is not None, watches=watch is not None)
        waiting: deque[tuple[Tensor, int]] = deque()
        missing, failure = stop - self._at, None

        def arrived() -> Tensor:
            piece, queued = waiting.popleft()
            if writer is not None:
                writer.wait(queued)
            if watch is not None and watch.overflowed():
                raise RangeError
            self._at += piece.shape[self._axis]
            if job.video is None:
                self._source.release(self._part.start(self._at).given)
            return piece

        with contextlib.closing(stream), writer or contextlib.nullcontext(), job.left(setting):
            while missing:
                try:
                    piece = next(stream, None)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    failure, piece = bare(error), None  # what is on its way arrives first
                if piece is None:
                    break
                count = piece.shape[self._axis]
                if count:
                    waiting.append((piece, writer.queued if writer else 0))
                del piece  # without a wanted frame it is a view of the others
                missing -= count
                if len(waiting) > ahead and missing:
                    yield arrived()
            stream.close()
            while waiting:
                yield arrived()
        if failure is not None:
            raise failure
        if stop != OPEN_END:
            self._part.check_end(self._at)

    def _ahead(self, device: torch.device, *, writes: bool, watches: bool) -> float:
        """Return how many pieces are computed before the first of them is delivered."""
        # Where a piece takes a wait for the device, it computes the next one meanwhile.
        if device.type != "cpu" and self._job.options.whole:
            return math.inf
        waits = writes or (watches and device.type != "cpu")
        return 1 if waits and self._job.video is not None else 0

    def _settings(self) -> Iterator[Setting]:
        """Yield the setting of the first run, and after each failure that of the next one."""
        following: Setting | None = self._setting
        while following is not None:
            setting, self._before = following, self._at
            if setting.is_narrow and not setting.coded and not self._vae.allow_fp16:
                setting = setting.widened()  # another video has overflowed meanwhile
            setting = self._job.proved(setting)
            yield setting
            following = self._next(setting)

    def _failed(self, error: Exception) -> bool:
        """Note why a run ended; return whether another setting may help."""
        plan = self._session and self._session.plan
        # The VAE's own device may do what several do not.
        helps = (plan and plan.bands) or isinstance(error, RangeError) or is_out_of_memory(error)
        if self._source.failed or isinstance(error, RankError) or not helps:
            return False
        if self._session is not None:
            self._session.check()  # pixels that the next run does not read
        self._failure = error
        return True

    def _next(self, setting: Setting) -> Setting | None:
        """Return the setting after `setting` failed; None: there is none."""
        failure, session, job = self._failure, self._session, self._job
        plan, planned = session and session.plan, session and session.planned
        del session  # whose memory is free before the caller's is released
        self._failure = self._session = None
        if failure is None:
            return None
        if isinstance(failure, RangeError):
            return after_overflow(self._vae, self._at, setting)
        if plan and plan.bands:
            own = next(each for each in plan.bands.members if each.device == setting.device)
            if isinstance(failure, DeviceError) and failure.number != own.number:
                job.team.fail(failure.number)
                following = setting
            else:
                following = setting.alone()
        else:
            make_room(setting.device, job.options.release)
            following = setting.smaller(planned, plan, delivered=self._at > self._before)
        if following is not None:
            self._log(failure, following)
        return following

    def _log(self, failure: Exception, following: Setting) -> None:
        """Log why and how the video goes on: one warning, then debug messages."""
        is_short = is_out_of_memory(failure) and not isinstance(failure, DeviceError)
        reason = "memory ran out" if is_short else first_line(failure)
        frame = self._job.config.frames(self._at) if self._job.encodes and self._at else self._at
        left = self._job.team.members(following.device) if following.is_open else {}
        words = ", ".join(map(str, left.values())) or following.words
        _logger.log(
            logging.DEBUG if self._is_logged else logging.WARNING,
            "Fast Video VAE: %s in %s at frame %d; going on with %s",
            reason,
            self._job.task,
            frame,
            words,
        )
        self._is_logged = True
