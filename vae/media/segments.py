"""Encoding of a video in a process of its own, one closed segment at a time.

SVT-AV1 4.1 can wait for itself for ever, and the thread of an encoder cannot be ended. A process
can: a segment in which it makes no progress is encoded again by a new one, from frames that are
kept until their segment is complete, with as few threads as it can.
"""

import io
import logging
import pickle
import subprocess
import sys
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
from av.container import OutputContainer
from av.error import FFmpegError
from av.packet import Packet

from .encoder_process import HUNG, Settings

LOG = logging.getLogger(__name__)

# Encoders that are known to hang.
ENCODERS = ("libsvtav1",)
_PARAMS = "svtav1-params"
# Seconds without progress after which an encoder counts as hanging, by the attempt.
PATIENCE_S = (60.0, 120.0, 240.0)
# A segment has the seconds between key frames of SVT-AV1, and the least frames, unless they take
# more than the most bytes.
_SECONDS, _LEAST_FRAMES, _MOST_BYTES = 5, 65, 256 << 20

_SCRIPT = Path(__file__).with_name("encoder_process.py")
# As `python FILE` the modules next to it would hide those of Python. Isolated, because what users
# have Python import at its start can print to the pipe. A script that fails does not end as one
# that hangs.
_COMMAND = """
import os, runpy, sys
sys.path.append(sys.argv[2])
try:
    runpy.run_path(sys.argv[1], None, "__main__")
except BaseException:
    os._exit(2)
"""


class SegmentEncoder:
    """Encodes frames as a video stream of PyAV does, by a process with settings for it."""

    def __init__(self, container: OutputContainer, settings: Settings) -> None:
        """Prepare; the stream is added to `container` with the first packets."""
        self._container, self._settings = container, settings
        self._kept: list[list[bytes]] = []  # the frames of a segment
        self._done = 0  # frames before them
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False
        self._stream: Any = None

    @staticmethod
    def serves(encoder: str) -> bool:
        """Return whether `encoder`, FFmpeg's name, needs a process, and one can be started."""
        is_python = "python" in Path(sys.executable or "").name.lower()
        return encoder in ENCODERS and is_python and not getattr(sys, "frozen", False)

    def encode(self, frame: av.VideoFrame | None) -> list[Packet]:
        """Take a frame, or None at the end; return the packets of a segment that is complete."""
        if frame is not None:
            self._kept.append([bytes(cast(Any, plane)) for plane in frame.planes])
            self._process = self._process or _started()
            given = [(PATIENCE_S[0], *self._settings)] if len(self._kept) == 1 else []
            with suppress(OSError):  # the end of the segment shows that the process has ended
                self._give([*given, self._kept[-1]])
            least = max(_LEAST_FRAMES, round(_SECONDS * self._settings.rate))
            most = max(1, _MOST_BYTES // sum(map(len, self._kept[0])))
            if len(self._kept) < min(least, most):
                return []
        packets = self._packets(self._segment()) if self._kept else []
        if frame is None:
            self.close()
        return packets

    def cancel(self) -> None:
        """Make `encode` raise in another thread, even while the encoder hangs."""
        self._cancelled = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _give(self, requests: list[Any]) -> None:
        process = cast(Any, self._process)
        if self._cancelled:
            process.kill()  # it may have been started after `cancel`
        for each in requests:
            pickle.dump(each, process.stdin)
        process.stdin.flush()

    def _segment(self) -> bytes:
        """Return the segment of the kept frames, in several attempts."""
        what = f"{self._settings.encoder} at frames {self._done}-{self._done + len(self._kept) - 1}"
        reason, given = "", []
        for patience in PATIENCE_S:
            if reason:
                LOG.info("Fast Video VAE: %s; they are encoded again with fewer threads", reason)
                self._process, given = _started(), [(patience, *self._settings), *self._kept]
            process = cast(Any, self._process)
            try:
                self._give([*given, None])
                reply = pickle.load(process.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                code = process.wait()
                hung = f"made no progress for {patience:g} s"
                reason = f"{what} {hung if code == HUNG else f'ended ({code})'}"
                self.close()
                if self._cancelled:
                    break
                # The least threads that wait for each other; the bits are the same.
                params = {*self._settings.options.get(_PARAMS, "").split(":"), "lp=1"} - {""}
                options = self._settings.options | {_PARAMS: ":".join(sorted(params))}
                self._settings = self._settings._replace(options=options)
                continue
            if isinstance(reply, bytes):
                return reply
            self.close()
            raise FFmpegError(*reply)
        raise FFmpegError(0, reason)

    def _packets(self, segment: bytes) -> list[Packet]:
        """Return the packets of a segment, with the times of the video."""
        packets, rate = [], self._settings.rate
        with av.open(io.BytesIO(segment)) as file:
            own = file.streams.video[0]
            if self._stream is None:
                self._stream = copied_stream(self._container, own, rate)
            for packet in file.demux(own):
                if packet.size:
                    packet.pts = packet.dts = self._done
                    packet.time_base, packet.duration = 1 / rate, 1
                    packet.stream = self._stream
                    packets.append(packet)
                    self._done += 1
        self._kept.clear()
        return packets


def copied_stream(container: OutputContainer, like: Any, rate: Fraction) -> Any:  # noqa: ANN401
    """Add a video stream for packets of the stream `like`, with a time base of 1 / `rate`."""
    stream: Any = container.add_stream_from_template(like, opaque=True)
    stream.time_base = 1 / rate
    # PyAV before 18 does not store it: players take the rate from the times.
    stream.codec_context.framerate = rate
    return stream


def _started() -> "subprocess.Popen[bytes]":
    home = str(Path(av.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-IS", "-c", _COMMAND, str(_SCRIPT), home],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal is for the caller
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
