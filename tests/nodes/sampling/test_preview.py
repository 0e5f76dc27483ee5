"""The preview of Wan Sampler (Fast) in this process: pictures, other packs, errors, stops."""

import functools
import threading
from collections import namedtuple
from types import SimpleNamespace
from unittest.mock import Mock

import numpy
import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.sampling import sampler_models as models
from fast_video_vae.tests.nodes.sampling.sampler_models import expert
from fast_video_vae.tests.tiny import random_tiny, stock_frames

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

THREAD = "fast-vae-preview"
STEPS = 4

# A call of ComfyUI's hook of progress: by a step, or by the thread that plays.
Shown = namedtuple("Shown", ["value", "picture", "is_played", "node"])


@pytest.fixture
def shown(monkeypatch):
    """The calls of the hook, 50 ms in a step; a clip plays at 200 pictures per second."""
    import comfy.utils
    import latent_preview
    from comfy_execution.utils import CurrentNodeContext, get_executing_context

    from fast_video_vae.nodes.preview import live

    seen = []

    def hook(value, total, preview, node_id=None):
        is_played = threading.current_thread().name == THREAD
        if not is_played:
            threading.Event().wait(0.05)
        node = get_executing_context().node_id
        seen.append(Shown(value, preview and preview[1], is_played, node))

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    monkeypatch.setitem(live._FPS, 16, 800)
    with CurrentNodeContext("prompt", "node"):
        yield seen
    latent_preview.set_preview_method()
    assert THREAD not in [each.name for each in threading.enumerate()]


def clip(frames=3):
    """A latent of a video whose preview plays."""
    return {"samples": torch.zeros(1, 16, frames, 8, 8)}


def run(method, **given):
    """Return the outputs of a run with a method of preview, as a prompt sets it."""
    import latent_preview

    latent_preview.set_preview_method(method)
    return models.run(steps=STEPS, **({"latent_image": clip()} | given))


def sizes(shown):
    return {each.picture and each.picture.size for each in shown}


@pytest.mark.parametrize(("name", "file"), [("auto", None), ("taesd", "lighttaew2_1.safetensors")])
def test_every_step_plays_a_picture_of_each_latent_frame(shown, approx, monkeypatch, name, file):
    """ComfyUI's colors, or its tiny decoder's frames, of the denoised latent."""
    import latent_preview

    from fast_video_vae.nodes.preview import live

    monkeypatch.setattr(live, "_SHARE", 1e9)  # every step may decode
    state, model = random_tiny(16), expert()
    if file:
        save_file(state, approx / file)
    raw = run(name)["denoised"]["samples"]
    assert [each.value for each in shown if not each.is_played] == list(range(1, STEPS + 1))
    assert any(each.is_played for each in shown)
    assert {each.node for each in shown} == {"node"}
    x0 = model.model.process_latent_in(raw)
    if file:
        frames = stock_frames(state, raw)[0, :, ::4]
        expected = frames.movedim(0, -1).mul(255).clamp(0, 255)
    else:
        previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)
        colors = [previewer.decode_latent_to_preview(each) for each in x0.split(1, 2)]
        expected = torch.from_numpy(numpy.stack(colors))
        for step in range(1, STEPS):
            assert len({each.picture.tobytes() for each in shown if each.value == step}) == 3
    last = [numpy.asarray(each.picture) for each in shown if each.value == STEPS]
    played = torch.from_numpy(numpy.stack(last)).float()
    for picture in expected:  # one more level is rounding
        assert (played - picture).abs().amax((1, 2, 3)).min() <= 1.01


@pytest.mark.parametrize(
    ("name", "frames", "decoder"),
    [("none", 3, "lighttaew2_1"), ("auto", 1, "lighttaew2_1"), ("taesd", 3, "lighttaehy1_5")],
)
def test_previews_off_images_and_other_models_play_nothing(
    shown, monkeypatch, name, frames, decoder
):
    known = expert("wan21-t2v", 0).model.latent_format
    monkeypatch.setattr(known, "taesd_decoder_name", decoder)
    run(name, latent_image=clip(frames))
    assert not any(each.is_played for each in shown)
    assert (None in sizes(shown)) == (name == "none")  # ComfyUI's own


def test_a_preview_that_fails_does_not_end_the_run(shown, approx, monkeypatch, caplog):
    from fast_video_vae.nodes.preview import live
    from fast_video_vae.nodes.preview.tiny_decoder import TinyDecoder

    def logs_once(text, size):
        caplog.clear()
        shown.clear()
        assert torch.equal(run("taesd" if size else "auto")["LATENT"]["samples"], expected)
        assert caplog.text.count("making a preview failed; ") == caplog.text.count(text) == 1
        assert sizes(shown) == {size}

    expected = run("none")["LATENT"]["samples"]
    logs_once("using latent2rgb: models/vae_approx has no lighttaew2_1", (8, 8))
    (approx / "taew2_1.safetensors").write_bytes(b"no")
    logs_once("using latent2rgb: taew2_1.safetensors is damaged", (8, 8))
    save_file(random_tiny(16), approx / "taew2_1.safetensors")
    monkeypatch.setattr(TinyDecoder, "frames", Mock(side_effect=torch.OutOfMemoryError("planted")))
    logs_once("using latent2rgb: planted", (8, 8))
    monkeypatch.setattr(live, "colors", Mock(side_effect=ValueError("planted too")))
    logs_once("the run goes on without: planted too", None)


@pytest.mark.parametrize("name", ["get_previewer", "preview_to_image"])
def test_the_preview_of_another_pack_is_used(shown, monkeypatch, name):
    """It gives its own previewer, as VideoHelperSuite does, or patches a part of ComfyUI's."""
    import latent_preview

    core, calls = getattr(latent_preview, name), []

    @functools.wraps(core)
    def patched(*given, **options):
        calls.append(given)
        result = core(*given, **options)
        return Mock(wraps=result) if name == "get_previewer" else result

    monkeypatch.setattr(latent_preview, name, patched)
    run("auto")
    assert calls
    assert not any(each.is_played for each in shown)


def test_decodes_take_a_tenth_of_the_time_from_the_first_step_on(shown, approx, monkeypatch):
    """A step takes a second, and a latent frame 0.15 s to decode."""
    import latent_preview

    from fast_video_vae.nodes.preview import live
    from fast_video_vae.nodes.preview.tiny_decoder import TinyDecoder

    save_file(random_tiny(16), approx / "taew2_1.safetensors")
    now, frames = [0.0], TinyDecoder.frames

    def slow(self, *given):
        for at, frame in enumerate(frames(self, *given)):
            now[0] += 0.0 if at % 4 else 0.15
            yield frame

    def step(number, seconds=1.0):
        now[0] = before = now[0] + seconds
        step_done(number, torch.randn(1, 16, 3, 8, 8), None, STEPS)
        last = next(each.picture.size for each in reversed(shown) if not each.is_played)
        return last, round(now[0] - before, 2)

    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(TinyDecoder, "frames", slow)
    latent_preview.set_preview_method("taesd")
    with torch.inference_mode(), live.playing(expert(), STEPS, {}, clip()["samples"]) as step_done:
        # The first one is given up after a latent frame: 0.15 s of 0.1.
        assert step(0) == ((8, 8), 0.15)
        # The next one begins when there is twice that, and the one after when its time fits again.
        assert [step(number) for number in range(1, 4)] == [((8, 8), 0.0)] * 3
        assert step(4, seconds=2.0) == ((64, 64), 0.45)
        assert step(5) == ((64, 64), 0.0)
        monkeypatch.setattr(TinyDecoder, "peak_bytes", lambda self, shape: 1e30)
        assert step(6, seconds=100.0) == ((64, 64), 0.0)
