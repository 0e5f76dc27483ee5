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
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import av
from av.container import OutputContainer
from av.error import FFmpegError
from av.packet import Packet

from .encoder_process import Settings

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
# have Python import at its start can print to the pipe.
_COMMAND = (
    "import runpy, sys; sys.path.append(sys.argv[2]); runpy.run_path(sys.argv[1], None, '__main__')"
)


class SegmentEncoder:
    """Encodes frames as a video stream of PyAV does, by a process with settings for it."""

    def __init__(
        self, settings: Settings, container: OutputContainer, begin: Callable[[], None]
    ) -> None:
        """Prepare; `begin` is called when the stream has been added to `container`."""
        self._settings, self._container, self._begin = settings, container, begin
        self._kept: list[list[bytes]] = []  # the frames of a segment
        self._sent, self._done = 0, 0  # of them, frames that the process has; frames before them
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = self._hung = False
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
            least = max(_LEAST_FRAMES, round(_SECONDS * self._settings.rate))
            most = max(1, _MOST_BYTES // sum(map(len, self._kept[0])))
            if len(self._kept) < min(least, most):
                self._send(end=False)
                return []
        packets = self._packets(self._send(end=True)) if self._kept else []
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
        self._process, self._sent = None, 0

    def _send(self, *, end: bool) -> bytes:
        """Send the kept frames, and return the segment at its `end`, in several attempts."""
        what = f"{self._settings.encoder} at frames {self._done}-{self._done + len(self._kept) - 1}"
        reason = ""
        for patience in PATIENCE_S:
            if reason:
                LOG.info("Fast Video VAE: %s; they are encoded again with fewer threads", reason)
            self._process = self._process or _started()
            try:
                for planes in self._kept[self._sent :]:
                    given = [planes] if self._sent else [tuple(self._settings), planes]
                    self._ask(self._process, given, patience)
                    self._sent += 1
                reply = self._ask(self._process, [None], patience) if end else None
                while end and reply is None:
                    reply = self._ask(self._process, [], patience)
                return reply or b""
            except (OSError, EOFError, pickle.UnpicklingError):
                code = self._process.wait()
                ended = f"made no progress for {patience:g} s" if self._hung else f"ended ({code})"
                reason, self._hung = f"{what} {ended}", False
                self.close()
                if self._cancelled:
                    break
                # The least threads that wait for each other; the bits are the same.
                params = {*self._settings.options.get(_PARAMS, "").split(":"), "lp=1"} - {""}
                options = self._settings.options | {_PARAMS: ":".join(sorted(params))}
                self._settings = self._settings._replace(options=options)
        raise FFmpegError(0, reason)

    def _ask(
        self, process: "subprocess.Popen[bytes]", given: list[Any], patience: float
    ) -> bytes | None:
        """Return the reply to what is `given`; the process is ended after some seconds."""
        requests, replies = cast(Any, process.stdin), cast(Any, process.stdout)
        timer = threading.Timer(patience, self._give_up, [process])
        timer.daemon = True
        timer.start()
        try:
            for each in given:
                pickle.dump(each, requests)
            requests.flush()
            reply = pickle.load(replies)
        finally:
            timer.cancel()
        if isinstance(reply, tuple):
            self.close()
            raise FFmpegError(*reply)
        return reply

    def _give_up(self, process: "subprocess.Popen[bytes]") -> None:
        self._hung = True
        process.kill()

    def _packets(self, segment: bytes) -> list[Packet]:
        """Return the packets of a segment, with the times of the video."""
        packets = []
        rate = self._settings.rate
        with av.open(io.BytesIO(segment)) as file:
            own = file.streams.video[0]
            if self._stream is None:
                stream: Any = self._container.add_stream_from_template(own, opaque=True)
                stream.time_base = 1 / rate
                # PyAV before 18 does not store it: players take the rate from the times.
                stream.codec_context.framerate = rate
                self._stream = stream
                self._begin()
            for packet in file.demux(own):
                if packet.size:
                    packet.pts = packet.dts = self._done + len(packets)
                    packet.time_base, packet.duration = 1 / rate, 1
                    packet.stream = self._stream
                    packets.append(packet)
        if len(packets) != len(self._kept):
            raise FFmpegError(0, f"{len(packets)} of {len(self._kept)} frames were encoded")
        self._done, self._sent = self._done + len(packets), 0
        self._kept.clear()
        return packets


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
