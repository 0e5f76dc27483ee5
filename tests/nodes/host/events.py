"""What a ComfyUI server says over its websocket while it works, with the time of arrival."""

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

    Attributes:
        time_s: When it came, on the clock of `time.perf_counter`.
        kind: `execution_start`, `executing`, `progress`, `execution_success`, ...; `text` for what
            a node shows below itself.
        data: The rest of it.
    """

    time_s: float
    kind: str
    data: dict[str, Any]


# What binary messages begin with whose rest is the text of a node: its length, the node, the text.
_TEXT = (3).to_bytes(4, "big")


def _text_of_node(message: bytes) -> dict[str, Any]:
    end = 4 + int.from_bytes(message[:4], "big")
    data = {"node": message[4:end].decode(), "text": message[end:].decode()}
    return {"type": "text", "data": data}


class Events:
    """Listens in a thread until the server ends the connection."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=asyncio.run, args=[self._listen()], daemon=True)
        self._thread.start()
        self.wait("status", timeout_s=30)  # the server's greeting: it knows us

    def wait(self, kind: str, timeout_s: float, **data: object) -> Event:
        """The first message of a kind that carries this data, now or within `timeout_s`."""
        with self._changed:
            found = self._changed.wait_for(lambda: self.all(kind, **data), timeout_s)
        if not found:
            raise TimeoutError(f"no {kind} with {data} within {timeout_s} s")
        return found[0]

    def all(self, kind: str, **data: object) -> list[Event]:
        """The messages of a kind that have carried this data until now."""
        with self._changed:
            events = [event for event in self._events if event.kind == kind]
        return [event for event in events if data.items() <= event.data.items()]

    def node_seconds(self, prompt_id: str, timeout_s: float = 30) -> dict[str, float]:
        """How long every node of a prompt ran: from its start to the next one's, or to the end."""
        self.wait("executing", timeout_s, node=None, prompt_id=prompt_id)
        starts = itertools.pairwise(self.all("executing", prompt_id=prompt_id))
        return {start.data["node"]: end.time_s - start.time_s for start, end in starts}

    async def _listen(self) -> None:
        import aiohttp  # comes with ComfyUI; the other tests do without

        async with aiohttp.ClientSession() as session, session.ws_connect(self._url) as socket:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    content = json.loads(message.data)
                elif message.data[:4] == _TEXT:
                    content = _text_of_node(message.data[4:])
                else:
                    continue  # a preview picture
                event = Event(time.perf_counter(), content["type"], content["data"])
                with self._changed:
                    self._events.append(event)
                    self._changed.notify_all()
