"""Messages of a ComfyUI server over its websocket, with the time of arrival."""

import asyncio
import itertools
import json
import threading
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One message.

    Its kind is `execution_start`, `executing`, `progress`, ..., `text` for the text that a node
    shows, or `preview`, whose data are the bytes of a JPEG, `image`, and metadata if asked for.
    """

    time_s: float  # of arrival, from `time.perf_counter`
    kind: str
    data: dict[str, Any]


# Prefix of binary messages with the text of a node: length of the node's id, the id, the text.
_TEXT = (3).to_bytes(4, "big")


# Prefixes of preview pictures: the kind of image, the image; or the length of metadata in JSON, the
# metadata, the image.
_PREVIEW, _PREVIEW_WITH_METADATA = ((number).to_bytes(4, "big") for number in (1, 4))


def _binary(message: bytes) -> dict[str, Any] | None:
    """The content of a binary message, or None for one of an unknown kind."""
    kind, rest = message[:4], message[4:]
    if kind == _TEXT:
        return _text_of_node(rest)
    if kind == _PREVIEW:
        return {"type": "preview", "data": {"image": rest[4:]}}
    if kind == _PREVIEW_WITH_METADATA:
        end = 4 + int.from_bytes(rest[:4], "big")
        return {"type": "preview", "data": {**json.loads(rest[4:end]), "image": rest[end:]}}
    return None


def _text_of_node(message: bytes) -> dict[str, Any]:
    end = 4 + int.from_bytes(message[:4], "big")
    data = {"node": message[4:end].decode(), "text": message[end:].decode()}
    return {"type": "text", "data": data}


class Events:
    """Listens at the address of a websocket, in a thread until the server ends the connection.

    `features` is what this client supports, such as `supports_preview_metadata`.
    """

    def __init__(self, url: str, **features: bool) -> None:
        self._url, self._features = url, features
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=asyncio.run, args=[self._listen()], daemon=True)
        self._thread.start()
        self.wait("status", timeout_s=30)  # the server's greeting: the connection is registered

    def wait(self, kind: str, timeout_s: float, **data: object) -> Event:
        """Return the first message of a kind with this data, now or within `timeout_s`."""
        with self._changed:
            found = self._changed.wait_for(lambda: self.all(kind, **data), timeout_s)
        if not found:
            raise TimeoutError(f"no {kind} with {data} within {timeout_s} s")
        return found[0]

    def all(self, kind: str, **data: object) -> list[Event]:
        """Return the received messages of a kind with this data."""
        with self._changed:
            events = [event for event in self._events if event.kind == kind]
        return [event for event in events if data.items() <= event.data.items()]

    def node_seconds(self, prompt_id: str, timeout_s: float = 30) -> dict[str, float]:
        """Return the seconds of every node of a prompt: to the next node's start, or to the end."""
        self.wait("executing", timeout_s, node=None, prompt_id=prompt_id)
        starts = itertools.pairwise(self.all("executing", prompt_id=prompt_id))
        return {start.data["node"]: end.time_s - start.time_s for start, end in starts}

    async def _listen(self) -> None:
        import aiohttp  # installed with ComfyUI; other tests run without it

        async with aiohttp.ClientSession() as session, session.ws_connect(self._url) as socket:
            if self._features:
                await socket.send_json({"type": "feature_flags", "data": self._features})
            async for message in socket:
                is_text = message.type is aiohttp.WSMsgType.TEXT
                content = json.loads(message.data) if is_text else _binary(message.data)
                if content is None:
                    continue
                event = Event(time.perf_counter(), content["type"], content["data"])
                with self._changed:
                    self._events.append(event)
                    self._changed.notify_all()
