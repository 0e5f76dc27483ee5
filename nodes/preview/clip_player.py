"""Sends the pictures of a clip to ComfyUI's frontend one after another, in a thread.

The messages are those of ComfyUI's own previews: server.py of 0.33 sizes, encodes and sends each in
its event loop, as an event `PREVIEW_IMAGE_WITH_METADATA` to clients that support it and as
`PREVIEW_IMAGE` to others. The thread only puts them into the queue.
"""

import sys
import threading
import time
from typing import Any, NamedTuple

import latent_preview
import numpy
from comfy_execution import progress
from comfy_execution.utils import get_executing_context
from PIL import Image
from protocol import BinaryEventTypes

from ..host.api import feature_flags

THREAD_NAME = "fast-vae-preview"

# A thread that is in the middle of a message ends within microseconds.
_JOIN_SECONDS = 5.0

Picture = tuple[str, Image.Image, int]


class ClipPlayer:
    """Plays the latest pictures in a loop, `rate` a second; without a server nothing is sent."""

    def __init__(self, rate: float) -> None:
        self._period_s = 1 / rate
        self._address = _address()
        self._pictures = numpy.empty((0, 1, 1, 3), numpy.uint8)
        self._at = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def play(self, pictures: numpy.ndarray) -> None:
        """Replace the pictures by `pictures`, `[T, H, W, 3]` uint8; the loop keeps its position."""
        self._pictures = pictures
        if self._thread is None and self._address is not None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            self._thread.start()

    @property
    def current(self) -> Picture | None:
        """The picture at this moment, in the form of ComfyUI's previews; None: there is none."""
        pictures = self._pictures  # another thread may replace them
        if not len(pictures):
            return None
        image = Image.fromarray(pictures[self._at % len(pictures)])
        return "JPEG", image, latent_preview.MAX_PREVIEW_RESOLUTION

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            # Pictures that are late are skipped.
            due = max(due + self._period_s, time.monotonic())
            if self._stopped.wait(due - time.monotonic()):
                return
            self._at += 1
            if (picture := self.current) is not None and self._address is not None:
                try:
                    self._address.send(picture)
                except RuntimeError:  # the server shuts down: its event loop is closed
                    return


class _Address(NamedTuple):
    """Where previews go: the client and the node of the running prompt."""

    server: Any
    client: str | None
    metadata: dict[str, Any]

    def send(self, picture: Picture) -> None:
        """Put a message into the queue of the server."""
        sockets = self.server.sockets_metadata
        if feature_flags.supports_feature(sockets, self.client, "supports_preview_metadata"):
            event, data = BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA, (picture, {**self.metadata})
        else:
            event, data = BinaryEventTypes.UNENCODED_PREVIEW_IMAGE, picture
        self.server.send_sync(event, data, self.client)


def _address() -> _Address | None:
    """Return where previews of the running node go; None: there is no server or no node."""
    host = getattr(sys.modules.get("server"), "PromptServer", None)
    context, server = get_executing_context(), getattr(host, "instance", None)
    if context is None or server is None:
        return None
    graph, node = progress.get_progress_state().dynprompt, context.node_id
    metadata = {
        "node_id": node,
        "prompt_id": context.prompt_id,
        "display_node_id": graph.get_display_node_id(node),
        "parent_node_id": graph.get_parent_node_id(node),
        "real_node_id": graph.get_real_node_id(node),
    }
    return _Address(server, server.client_id, metadata)
