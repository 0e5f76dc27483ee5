"""The timing in its initial state, with clocks that only advance on request."""

import json
import logging

import pytest


class Clock:
    """A clock that only advances on request, and a device with its own clock and a queue."""

    def __init__(self):
        self.seconds, self.device, self.queue, self.waits = 100.0, 0.0, [], 0

    def __call__(self):
        return self.seconds

    def passes(self, seconds):
        self.seconds += seconds

    def works(self, seconds):
        self.queue.append(seconds)

    def event(self, enable_timing):
        return FakeEvent(self)


class FakeEvent:
    """The members of `torch.cuda.Event` that the timing uses."""

    def __init__(self, clock):
        self.clock, self.at = clock, None

    def record(self, stream):
        self.clock.queue.append(self)

    def synchronize(self):
        self.clock.waits += 1
        for each in self.clock.queue:
            if isinstance(each, FakeEvent):
                each.at = self.clock.device
            else:
                self.clock.device += each
        self.clock.queue.clear()

    def elapsed_time(self, last):
        if None in (self.at, last.at):
            raise RuntimeError("both events must be recorded")
        return (last.at - self.at) * 1e3


@pytest.fixture
def timing(comfyui, monkeypatch):
    """The timing module without measurements; the tests are within a prompt, "a"."""
    from comfy_execution import cache_provider
    from comfy_execution.utils import CurrentNodeContext

    from fast_video_vae.nodes.host import timing

    finish("of an earlier test")
    with CurrentNodeContext("a", "1"):
        yield timing
    finish("a")
    assert not timing._running
    assert not cache_provider._has_cache_providers()


@pytest.fixture
def clock(timing, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "clock", clock)
    monkeypatch.setattr("torch.cuda.Event", clock.event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: device)
    return clock


@pytest.fixture
def measured(timing, monkeypatch, caplog):
    """End the prompt, and return the report that it logs as JSON; None: it logs nothing."""

    def ended():
        monkeypatch.setenv("FAST_VIDEO_VAE_TIMING", "json")
        lines = logged(caplog)
        return json.loads(lines[-1]) if lines else None

    return ended


def finish(prompt):
    """Notify the providers of caches, as ComfyUI does at the end of every prompt."""
    from comfy_execution.cache_provider import _get_cache_providers

    for provider in [*_get_cache_providers()]:
        provider.on_prompt_end(prompt)


def logged(caplog, prompt="a"):
    """End a prompt, and return what it logs."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        finish(prompt)
    return [record.getMessage() for record in caplog.records if "timing" in record.name]
