"""Messages of a ComfyUI server over its websocket, with the time of arrival."""

import asyncio
import itertools
import json
import threading
import time
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One message.

    Its kind is `execution_start`, `executing`, `progress`, ..., `text` for the text that a node
    shows, or `preview`, whose data are the bytes of a JPEG, `image`, and metadata if asked for.
    """

    time_s: float  # of arrival, from `time.perf_counter`
    kind: str
    data: dict[str, Any]


def _binary(message: bytes) -> tuple[str, dict[str, Any]]:
    """The kind and the data of a binary message: text of a node, or a picture."""
    number, size = (int.from_bytes(message[at : at + 4], "big") for at in (0, 4))
    first, rest = message[8 : 8 + size], message[8 + size :]
    if number == 3:  # length of the node's id, the id, the text
        return "text", {"node": first.decode(), "text": rest.decode()}
    if number == 1:  # kind of the image, the image
        return "preview", {"image": message[8:]}
    if number == 4:  # length of the metadata, the metadata, the image
        return "preview", {**json.loads(first), "image": rest}
    return "unknown", {}


class Events:
    """Listens at the address of a websocket, in a thread until the server ends the connection.

    `features` is what this client supports, such as `supports_preview_metadata`.
    """

    def __init__(self, url: str, **features: bool) -> None:
        self._url, self._features = url, features
        self._events: list[Event] = []
        self._changed = threading.Condition()
        threading.Thread(target=asyncio.run, args=[self._listen()], daemon=True).start()
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
                if message.type is aiohttp.WSMsgType.TEXT:
                    kind, data = map(json.loads(message.data).get, ("type", "data"))
                else:
                    kind, data = _binary(message.data)
                with self._changed:
                    self._events.append(Event(time.perf_counter(), kind, data))
                    self._changed.notify_all()
