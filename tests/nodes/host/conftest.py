"""The timing in its initial state, with clocks that only advance on request."""

import pytest

from fast_video_vae.tests.nodes.host.clocks import Clock, FakeDevice, end


@pytest.fixture
def timing(comfyui, monkeypatch):
    """The timing module without measurements."""
    from fast_video_vae.nodes.host import timing

    for name in list(timing._prompts):  # left open by earlier tests
        end(name)
    monkeypatch.setattr(timing, "_outside", timing._Outside())
    monkeypatch.setattr(timing, "_prompts", {})
    yield timing
    from comfy_execution import cache_provider

    if timing._prompts:
        timing._ends.stop()
    assert not cache_provider._has_cache_providers()


@pytest.fixture
def clock(timing, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("fast_video_vae.nodes.host.instants.clock", clock)
    return clock


@pytest.fixture
def device(timing, monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr("fast_video_vae.nodes.host.instants.record_event", device.record)
    return device
