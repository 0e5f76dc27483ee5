"""The preview of Wan Sampler (Fast) in this process: pictures, other packs, errors, stops."""

import functools
import threading
from typing import NamedTuple
from unittest.mock import Mock

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.sampling.sampler_models import STEPS, clip, expert, sampled
from fast_video_vae.tests.tiny import random_tiny, stock_frames

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

THREAD = "fast-vae-preview"


class Shown(NamedTuple):
    """A call of ComfyUI's hook of progress: of a step, or played by the thread."""

    value: int
    picture: Image.Image | None
    is_played: bool
    node: str


@pytest.fixture
def shown(monkeypatch):
    """The calls of the hook, 50 ms in a step; a clip plays at 200 pictures per second."""
    import comfy.utils
    from comfy_execution.utils import CurrentNodeContext, get_executing_context

    from fast_video_vae.nodes.preview import live

    seen = []

    def hook(value, total, preview, node_id=None):
        is_played = threading.current_thread().name == THREAD
        if not is_played:
            threading.Event().wait(0.05)
        seen.append(
            Shown(value, preview and preview[1], is_played, get_executing_context().node_id)
        )

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    monkeypatch.setitem(live._FPS, 16, 800)
    with CurrentNodeContext("prompt", "node"):
        yield seen
    assert THREAD not in [each.name for each in threading.enumerate()]


@pytest.fixture
def method(monkeypatch):
    """Set ComfyUI's method for a prompt."""
    import latent_preview

    yield latent_preview.set_preview_method
    latent_preview.set_preview_method()


def sizes(shown):
    return {each.picture and each.picture.size for each in shown}


def assert_played(shown, expected):
    """Check that the last step showed these pictures `[T, H, W, 3]`; one more level is rounding."""
    last = [numpy.asarray(each.picture) for each in shown if each.value == STEPS]
    played = torch.from_numpy(numpy.stack(last)).float()
    for picture in expected:
        assert (played - picture).abs().amax((1, 2, 3)).min() <= 1.01


@pytest.mark.parametrize("name", ["auto", "latent2rgb"])
def test_every_step_plays_comfyuis_colors_of_its_latent_frames(shown, method, name):
    """Of the denoised latent, frame by frame, as ComfyUI shows the first one."""
    import latent_preview

    method(name)
    result = sampled()
    assert [each.value for each in shown if not each.is_played] == list(range(1, STEPS + 1))
    assert any(each.is_played for each in shown)
    assert {each.node for each in shown} == {"node"}
    for step in range(1, STEPS):
        assert len({each.picture.tobytes() for each in shown if each.value == step}) == 3
    model = expert()
    x0 = model.model.process_latent_in(result["denoised"]["samples"])
    previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)
    expected = [previewer.decode_latent_to_preview(each) for each in x0.split(1, 2)]
    assert_played(shown, torch.from_numpy(numpy.stack(expected)))


def test_nothing_plays_with_previews_off_for_an_image_or_another_model(shown, method, monkeypatch):
    method("none")
    sampled()
    assert sizes(shown) == {None}
    shown.clear()
    method("auto")
    sampled(latent_image=clip(frames=1))
    method("taesd")
    known = expert("wan21-t2v", 0).model.latent_format
    monkeypatch.setattr(known, "taesd_decoder_name", "lighttaehy1_5")
    sampled()
    assert None not in sizes(shown)  # ComfyUI's own
    assert not any(each.is_played for each in shown)


@pytest.mark.parametrize("is_stop", [False, True])
@pytest.mark.parametrize("is_played", [False, True])
def test_an_error_or_a_stop_ends_the_thread(shown, method, monkeypatch, is_stop, is_played):
    """In a step it ends the run. In the thread a stop does so too; an error is the server's end."""
    import comfy.model_management as management
    import comfy.utils

    hook, ended = comfy.utils.PROGRESS_BAR_HOOK, []

    def failing(value, *given, **options):
        hook(value, *given, **options)
        if value == 2 and shown[-1].is_played == is_played:
            ended.append(len(shown))
            management.interrupt_current_processing(is_stop)
            management.throw_exception_if_processing_interrupted()
            raise RuntimeError("planted")
        management.throw_exception_if_processing_interrupted()

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", failing)
    method("auto")
    if is_played and not is_stop:
        sampled()
        assert [each.value for each in shown if not each.is_played] == list(range(1, STEPS + 1))
    else:
        with pytest.raises(management.InterruptProcessingException if is_stop else RuntimeError):
            sampled()
    assert len(ended) == 1
    assert not any(each.is_played for each in shown[ended[0] :])
    assert not management.processing_interrupted()


def test_a_preview_that_fails_does_not_end_the_run(shown, method, approx, monkeypatch, caplog):
    from fast_video_vae.nodes.preview import live
    from fast_video_vae.nodes.preview.tiny_decoder import TinyDecoder

    save_file(random_tiny(16), approx / "taew2_1.safetensors")
    method("none")
    expected = sampled()["LATENT"]["samples"]
    monkeypatch.setattr(TinyDecoder, "frames", Mock(side_effect=torch.OutOfMemoryError("planted")))
    method("taesd")
    shown.clear()
    assert torch.equal(sampled()["LATENT"]["samples"], expected)
    assert caplog.text.count("making a preview failed; using latent2rgb: planted") == 1
    assert sizes(shown) == {(8, 8)}
    monkeypatch.setattr(live, "colors", Mock(side_effect=ValueError("planted too")))
    shown.clear()
    method("auto")
    sampled()
    assert caplog.text.count("the run goes on without: planted too") == 1
    assert sizes(shown) == {None}


@pytest.mark.parametrize(
    ("owner", "name", "is_on"),
    [
        ("LatentPreviewer", "decode_latent_to_preview_image", True),
        ("Latent2RGBPreviewer", "decode_latent_to_preview", True),
        (None, "preview_to_image", True),
        (None, "prepare_callback", True),
        (None, "get_previewer", True),
        (None, "get_previewer", False),  # it returns ComfyUI's own
    ],
)
def test_the_preview_of_another_pack_is_used(shown, method, monkeypatch, owner, name, is_on):
    """It patches a part of ComfyUI's, or gives its own previewer, as VideoHelperSuite does."""
    import latent_preview

    owner = getattr(latent_preview, owner) if owner else latent_preview
    core, calls = getattr(owner, name), []

    @functools.wraps(core)
    def patched(*given, **options):
        calls.append(given)
        result = core(*given, **options)
        return Mock(wraps=result) if name == "get_previewer" and is_on else result

    monkeypatch.setattr(owner, name, patched)
    method("auto")
    sampled()
    assert len(calls) == STEPS or name in ("get_previewer", "prepare_callback")
    assert calls
    assert any(each.is_played for each in shown) != is_on


@pytest.mark.parametrize("name", ["lighttaew2_1.safetensors", "taew2_1.safetensors"])
def test_taesd_plays_the_frames_of_a_tiny_decoder(shown, method, approx, monkeypatch, name):
    from fast_video_vae.nodes.preview import live

    state = random_tiny(16)
    save_file(state, approx / name)
    monkeypatch.setattr(live, "_SHARE", 1e9)  # every step may decode
    method("taesd")
    result = sampled()["denoised"]["samples"]
    model = expert()
    given = model.model.process_latent_in(result) if name.startswith("taew") else result
    frames = stock_frames(state, given)[0, :, ::4].movedim(0, -1)
    assert frames.shape == (3, 64, 64, 3)
    assert_played(shown, frames.mul(255).clamp(0, 255))


def test_taesd_without_a_usable_file_plays_colors(shown, method, approx, caplog):
    method("taesd")
    why = "making a preview failed; using latent2rgb: "
    sampled()
    assert f"{why}models/vae_approx has no lighttaew2_1" in caplog.text
    (approx / "taew2_1.safetensors").write_bytes(b"no")
    sampled()
    assert f"{why}taew2_1.safetensors is damaged" in caplog.text
    save_file(random_tiny(48), approx / "taew2_1.safetensors")
    sampled()
    assert f"{why}taew2_1.safetensors is for latents of 48 channels; expected" in caplog.text
    (approx / "taew2_1.safetensors").unlink()
    sampled()
    assert caplog.text.count(why) == 4
    assert sizes(shown) == {(8, 8)}


class Clock:
    """The time for a preview, in seconds."""

    now = 0.0

    def monotonic(self):
        return self.now


def test_decodes_take_a_tenth_of_the_time_from_the_first_step_on(
    shown, method, approx, monkeypatch
):
    """A step takes a second, and a latent frame 0.15 s to decode."""
    from fast_video_vae.nodes.preview import live
    from fast_video_vae.nodes.preview.tiny_decoder import TinyDecoder

    save_file(random_tiny(16), approx / "taew2_1.safetensors")
    clock, frames = Clock(), TinyDecoder.frames

    def slow(self, *given):
        for at, frame in enumerate(frames(self, *given)):
            clock.now += 0.0 if at % 4 else 0.15
            yield frame

    def step(number, seconds=1.0):
        clock.now += seconds
        step_done(number, torch.randn(1, 16, 3, 8, 8), None, STEPS)
        return next(each.picture.size for each in reversed(shown) if not each.is_played)

    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(TinyDecoder, "frames", slow)
    method("taesd")
    with torch.inference_mode(), live.playing(expert(), STEPS, {}, clip()["samples"]) as step_done:
        # The first one is given up after a latent frame: 0.15 s of 0.1.
        assert step(0) == (8, 8)
        # The next one begins when there is twice that, and the one after when its time fits again.
        assert [step(number) for number in range(1, 4)] == [(8, 8)] * 3
        assert step(4, seconds=2.0) == (64, 64)
        before = clock.now
        assert step(5) == (64, 64)
        assert clock.now == before + 1
        monkeypatch.setattr(TinyDecoder, "peak_bytes", lambda self, shape: 1e30)
        assert step(6, seconds=100.0) == (64, 64)
        assert clock.now == before + 101
