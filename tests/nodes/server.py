"""A real ComfyUI server on loopback, and what the tests ask of it over HTTP."""

import asyncio
import atexit
import functools
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import boot
from .checkout import PACK, find_comfyui

Prompt = Mapping[str, Mapping[str, Any]]
Link = list  # the id of a node, and which of its outputs

# Our nodes and their names, in the order of the menu.
NODES = {
    "FastVAE_Load": "Load VAE (Fast)",
    "FastVAE_Accelerate": "Accelerate VAE (Fast)",
    "FastVAE_Encode": "VAE Encode (Fast)",
    "FastVAE_Decode": "VAE Decode (Fast)",
    "FastVAE_EncodeVideo": "VAE Encode Video (Fast)",
    "FastVAE_DecodeVideo": "VAE Decode to Video (Fast)",
    "FastVAE_UpscaleVideo": "Upscale Video (Fast)",
    "FastVAE_JoinLatents": "Join Latents (Fast)",
    "FastVAE_PreviewLatent": "Preview Video Latent (Fast)",
    "FastVAE_DemoClip": "Demo Clip (Fast)",
    "FastVAE_LoraStack": "LoRA Stack (Fast)",
    "FastVAE_ApplyLora": "Apply LoRA (Fast)",
    "FastVAE_TextEncode": "Text Encode Batched (Fast)",
    "FastVAE_WanSampler": "Wan Sampler (Fast)",
    "FastVAE_FuseMLP": "Fuse SwiGLU MLPs (Fast)",
    "FastVAE_ToWanVideoWrapper": "To WANVAE (Fast)",
    "FastVAE_Benchmark": "VAE Benchmark (Fast)",
}

# The default widgets of Load VAE (Fast) and Accelerate VAE (Fast).
AUTO = {"dtype": "auto", "encode_dtype": "auto", "chunk": 0}

# The widgets of VAE Decode to Video (Fast), for a file with a unique name.
VIDEO = {"fps": 16.0, "codec": "h264", "quality": 70, "filename_prefix": "x", "save_to": "temp"}

# The widgets of Upscale Video (Fast), for windows of two latents of a small video.
UPSCALE = {
    **{"multiplier": 1.0, "shorter_side": 0, "seed": 42, "window": 5, "overlap": 1},
    **{"cuts": "auto", "color": "lab", "codec": "h264", "quality": 70},
    **{"filename_prefix": "x", "save_to": "temp"},
}

# A small VAE with random weights, where the loaders of each server of the tests find it.
VAE_FILE = "random.safetensors"

# Booting takes 10 s on two cores; the first time after an installation compiles every file.
_BOOT_TIMEOUT_S = 240


class Workflow(dict):
    """A prompt that grows node by node."""

    def add(self, kind: str, **inputs: object) -> Link:
        """Add a node; what it returns is its first output, as an input of other nodes."""
        name = str(len(self) + 1)
        self[name] = {"class_type": kind, "inputs": inputs}
        return [name, 0]

    def latent(self, side: int, frames: int) -> Link:
        """Zeros for a number of frames and a height and width in pixels."""
        size = {"width": side, "height": side, "length": frames, "batch_size": 1}
        return self.add("EmptyHunyuanLatentVideo", **size)

    def load(self, vae_name: str = "bundled demo") -> Link:
        """Our VAE of a file."""
        return self.add("FastVAE_Load", vae_name=vae_name, **AUTO)


class PromptError(Exception):
    """A prompt that failed or was interrupted while it ran, or that the server refused."""

    def __init__(self, text: str, messages: Any = (), node_errors: Any = None) -> None:
        super().__init__(text)
        self.messages = messages  # the server's `[kind, details]`
        self.node_errors = node_errors or {}  # what is wrong with each node

    @property
    def interrupted(self) -> bool:
        return any(kind == "execution_interrupted" for kind, _ in self.messages)


class Server:
    """A ComfyUI process on loopback with all its files in `base`, and this pack only.

    `boot_log` is the output of the process until its first response.
    """

    name = "ComfyUI-FastVideoVAE"  # of the pack's folder in `custom_nodes`

    def __init__(
        self, base: Path, *flags: str, cpu: bool = True, threads: int | None = None
    ) -> None:
        self.base = base.absolute()
        self.input, self.output = self.base / "input", self.base / "output"
        self.client_id = uuid.uuid4().hex
        self.url = self.boot_log = ""
        self._flags = [*flags, *(["--cpu"] if cpu else [])]
        self._threads = threads
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Boot, and wait until it answers."""
        for folder in ("custom_nodes", "input", "output"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        if not (self.base / "custom_nodes" / self.name).exists():
            (self.base / "custom_nodes" / self.name).symlink_to(PACK)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        environment.pop("TRITON_INTERPRET", None)  # for the tests of the kernels, not for users
        environment |= {"OMP_NUM_THREADS": str(self._threads)} if self._threads else {}
        with (self.base / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(port), cwd=self.base, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        atexit.register(self.stop)
        self._until(self._answers, _BOOT_TIMEOUT_S, "boot")
        self.boot_log = self.log()

    def stop(self) -> None:
        """End it, whatever it does at the moment; nothing of it stays."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def models(self, kind: str) -> Path:
        """The folder of one kind of models, such as `vae`."""
        folder = self.base / "models" / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self) -> str:
        """The output so far, without colors."""
        text = (self.base / "server.log").read_text(encoding="utf-8", errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def memory(self) -> Any:
        """The bytes that it uses at the moment: `rss`; and `vms`, also what it has not touched."""
        import psutil

        return psutil.Process(self._process.pid).memory_info()

    def get(self, path: str, body: bytes | None = None) -> Any:
        """The JSON, or else the bytes, behind a path."""
        request = urllib.request.Request(f"{self.url}{path}", data=body)
        request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
        with opener.open(request, timeout=60) as answer:
            content, kind = answer.read(), answer.headers.get_content_type()
        return json.loads(content) if content and kind == "application/json" else content

    def post(self, path: str, **body: object) -> Any:
        """Send JSON; the answer as in `get`."""
        return self.get(path, json.dumps(body).encode())

    @functools.cached_property
    def events(self) -> "Events":
        """Messages about prompts of this object, from the first access on."""
        return self.listen(self.client_id)

    def listen(self, client_id: str, **features: bool) -> "Events":
        """Messages about prompts of a client that supports `features`."""
        return Events(f"{self.url}/ws?clientId={client_id}", **features)

    def run(self, prompt: Prompt, timeout_s: float = 300) -> dict[str, dict[str, list]]:
        """Run a prompt to its end; for every output node what it showed: lists of files, mostly."""
        return self.wait(self.queue(prompt), timeout_s)

    def queue(self, prompt: Prompt, client_id: str | None = None, **extra: object) -> str:
        """Put a prompt into the queue and return its id; `extra` is its `extra_data`."""
        whose = {"client_id": client_id or self.client_id, "extra_data": extra}
        try:
            answer = self.post("/prompt", prompt=prompt, **whose)
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            text = error.read().decode()
            raise PromptError(text, node_errors=json.loads(text)["node_errors"]) from error
        return answer["prompt_id"]

    def queued(self, before: Collection[str], timeout_s: float = 30) -> str:
        """Return the id of the prompt that a browser queues; `before` has ids of the history."""

        def new() -> list[str]:
            queue = self.get("/queue")
            waiting = [entry[1] for entry in queue["queue_running"] + queue["queue_pending"]]
            return [*waiting, *(self.get("/history").keys() - before)]

        return self._until(new, timeout_s, "a prompt of the browser")[0]

    def wait(self, prompt_id: str, timeout_s: float = 300) -> dict[str, dict[str, list]]:
        """Wait for the end of a queued prompt; results and errors as in `run`."""
        entry = self._until(
            lambda: self.get(f"/history/{prompt_id}").get(prompt_id), timeout_s, prompt_id
        )
        messages = entry["status"]["messages"]
        if entry["status"]["status_str"] != "success":
            raise PromptError(json.dumps(messages[-1], indent=1), messages)
        return entry["outputs"]

    def interrupted(self, prompt: Prompt, **extra: object) -> tuple[PromptError, float]:
        """Stop a prompt in the middle of its first progress: how it ended, and after how long."""
        events, prompt_id = self.events, self.queue(prompt, **extra)
        events.wait("progress", timeout_s=60, prompt_id=prompt_id)
        time.sleep(1)  # in the middle of it
        start = time.monotonic()
        self.post("/interrupt")
        try:
            self.wait(prompt_id, timeout_s=30)
        except PromptError as error:
            return error, time.monotonic() - start
        raise RuntimeError("the prompt ran to its end; expected it to be interrupted")

    def files(self, shown: Mapping[str, list]) -> list[Path]:
        """The files that an output node has written, from what `run` returns for it."""
        items = [each for items in shown.values() for each in items if isinstance(each, dict)]
        parts = [[item.get(key) for key in ("type", "subfolder", "filename")] for item in items]
        return [self.base.joinpath(*each) for each in parts if each[2]]

    def pictures(self, shown: Mapping[str, list]) -> Any:
        """`[N, H, W, 3]` of what SaveImage shows, as an array of integers."""
        import numpy as np
        from PIL import Image

        opened = [Image.open(file).convert("RGB") for file in self.files(shown)]
        return np.stack([np.asarray(each, int) for each in opened])

    def _command(self, port: int) -> list[str]:
        flags = f"--listen 127.0.0.1 --port {port} --disable-auto-launch --disable-api-nodes "
        flags += "--database-url sqlite:///:memory: --base-directory"
        start = [sys.executable, str(Path(boot.__file__).resolve()), str(find_comfyui())]
        return [*start, *flags.split(), str(self.base), *self._flags]

    def _answers(self) -> Any:
        try:
            return self.get("/system_stats")
        except OSError:
            return None

    def _until(self, found: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Return what `found` returns as soon as it is something."""
        deadline = time.monotonic() + timeout_s
        while not (result := found()):
            code = self._process.poll()
            if code is not None:
                raise RuntimeError(f"ComfyUI ended with {code}\n{self.log()[-4000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout_s} s\n{self.log()[-4000:]}")
            time.sleep(0.05)
        return result


@dataclass(frozen=True)
class Event:
    """A message: `progress`, `executing`, ..., a node's `text`, or a `preview` with its `image`."""

    time_s: float  # of arrival, from `time.perf_counter`
    kind: str
    data: dict[str, Any]


class Events:
    """Listens at the address of a websocket, in a thread until the server ends the connection."""

    def __init__(self, url: str, **features: bool) -> None:
        self._events: list[Event] = []
        self._changed = threading.Condition()
        listening = [self._listen(url, features)]
        threading.Thread(target=asyncio.run, args=listening, daemon=True).start()
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
        events = [event for event in [*self._events] if event.kind == kind]
        return [event for event in events if data.items() <= event.data.items()]

    def node_seconds(self, prompt_id: str, timeout_s: float = 30) -> dict[str, float]:
        """Return the seconds of every node of a prompt: to the next node's start, or to the end."""
        self.wait("executing", timeout_s, node=None, prompt_id=prompt_id)
        starts = itertools.pairwise(self.all("executing", prompt_id=prompt_id))
        return {start.data["node"]: end.time_s - start.time_s for start, end in starts}

    async def _listen(self, url: str, features: dict[str, bool]) -> None:
        import aiohttp  # installed with ComfyUI; other tests run without it

        async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
            if features:
                await socket.send_json({"type": "feature_flags", "data": features})
            async for message in socket:
                is_text = message.type is aiohttp.WSMsgType.TEXT
                content = json.loads(message.data) if is_text else _binary(message.data)
                with self._changed:
                    self._events.append(
                        Event(time.perf_counter(), content["type"], content["data"])
                    )
                    self._changed.notify_all()


def _binary(message: bytes) -> dict[str, Any]:
    """The content of a binary message: its kind, the length of a first part, and the parts."""
    kind, size = (int.from_bytes(message[at : at + 4], "big") for at in (0, 4))
    first, second = message[8 : 8 + size], message[8 + size :]
    if kind == 3:
        return {"type": "text", "data": {"node": first.decode(), "text": second.decode()}}
    if kind == 4:
        return {"type": "preview", "data": {**json.loads(first), "image": second}}
    # Of a preview without metadata, the second number is the format of the picture.
    return {"type": "preview" if kind == 1 else f"binary {kind}", "data": {"image": message[8:]}}
