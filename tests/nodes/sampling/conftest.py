"""A prompt in a server that keeps what the preview of a sampler sends."""

import threading
import types

import pytest


class Queue:
    """A server that keeps what is sent to it."""

    def __init__(self):
        self.client_id, self.sockets_metadata, self.sent = "client", {}, []

    def send_sync(self, event, data, sid=None):
        self.sent.append((event, data, sid))

    def send_progress_text(self, text, node_id):
        pass


@pytest.fixture
def queue(monkeypatch):
    """A prompt runs in a server; the clip plays at 200 pictures per second."""
    import sys

    from comfy_execution.utils import CurrentNodeContext

    from fast_video_vae.nodes.preview import live

    found = Queue()
    server = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=found))
    monkeypatch.setitem(sys.modules, "server", server)
    monkeypatch.setitem(live._FPS, 16, 800)
    graph = types.SimpleNamespace(
        get_display_node_id=str, get_parent_node_id=lambda node: None, get_real_node_id=str
    )
    state = types.SimpleNamespace(dynprompt=graph)
    from comfy_execution import progress

    monkeypatch.setattr(progress, "global_progress_registry", state)
    with CurrentNodeContext("prompt", "node"):
        yield found


@pytest.fixture
def bars(monkeypatch):
    """The calls of ComfyUI's progress hook, each 30 ms long: value, and preview."""
    import comfy.utils

    seen = []

    def hook(value, total, preview, node_id=None):
        threading.Event().wait(0.03)
        seen.append((value, preview))

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    return seen


@pytest.fixture
def method(monkeypatch):
    """Set ComfyUI's method for a prompt."""
    import latent_preview

    yield latent_preview.set_preview_method
    latent_preview.set_preview_method()
