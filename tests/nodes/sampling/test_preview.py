"""The preview of Wan Sampler (Fast) in this process: pictures, other packs, errors, stops."""

import functools
import threading
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.sampling.sampler_models import STEPS, clip, expert, sampled
from fast_video_vae.tests.tiny import TinyOracle, random_tiny

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


def bytes_of(images):
    return {image.tobytes() for image in images}


def threads():
    return [each.name for each in threading.enumerate() if each.name == "fast-vae-preview"]


def test_every_step_plays_its_latent_frames(queue, bars, method):
    from protocol import BinaryEventTypes

    method("auto")
    sampled()
    events = {event for event, _, _ in queue.sent}
    assert events == {BinaryEventTypes.UNENCODED_PREVIEW_IMAGE}
    assert {sid for _, _, sid in queue.sent} == {"client"}
    played = bytes_of(image for _, (_, image, _), _ in queue.sent)
    stepped = bytes_of(preview[1] for _, preview in bars)
    assert len(played | stepped) == 3 * STEPS
    assert [value for value, _ in bars] == list(range(1, STEPS + 1))
    assert threads() == []


def levels_of(image):
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float()


def assert_played(queue, bars, expected):
    """Check that pictures of these levels were sent; one more level is rounding."""
    sent = [image for _, (_, image, _), _ in queue.sent] + [bars[-1][1][1]]
    played = torch.stack([levels_of(image) for image in sent])
    for levels in expected:
        assert (played - levels.flatten()).abs().amax(1).min() <= 1.01


def test_the_colors_are_comfyuis(queue, bars, method):
    """Of the denoised latent, frame by frame, as ComfyUI shows the first one."""
    import latent_preview

    method("latent2rgb")
    result = sampled()
    model = expert()
    x0 = model.model.process_latent_in(result["denoised"]["samples"])
    previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)
    make = previewer.decode_latent_to_preview_image
    expected = [make("JPEG", x0[:, :, at : at + 1])[1] for at in range(x0.shape[2])]
    assert_played(queue, bars, map(levels_of, expected))


def test_nothing_plays_with_previews_off_or_for_an_image(queue, bars, method):
    method("none")
    sampled()
    assert {preview for _, preview in bars} == {None}
    bars.clear()
    method("auto")
    sampled(latent_image=clip(frames=1))
    assert all(preview is not None for _, preview in bars)  # ComfyUI's own
    assert queue.sent == []


@pytest.mark.parametrize("kind", ["RuntimeError", "InterruptProcessingException"])
def test_no_thread_is_left_after_an_error(queue, method, monkeypatch, kind):
    import comfy.utils
    from comfy.model_management import InterruptProcessingException

    error = RuntimeError("planted") if kind == "RuntimeError" else InterruptProcessingException()
    seen = []

    def hook(value, total, preview, node_id=None):
        threading.Event().wait(0.05)
        seen.append(threads())
        if value == 2:
            raise error

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    method("auto")
    with pytest.raises(type(error)):
        sampled()
    assert seen == [["fast-vae-preview"]] * 2
    assert threads() == []
    count = len(queue.sent)
    threading.Event().wait(0.05)
    assert count
    assert len(queue.sent) == count


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, torch.OutOfMemoryError])
def test_a_preview_that_fails_does_not_end_the_run(
    queue, bars, method, approx, monkeypatch, caplog, kind
):
    from fast_video_vae.nodes.preview import live
    from fast_video_vae.vae.preview import TinyDecoder

    save_file(random_tiny(16), approx / "taew2_1.safetensors")
    method("none")
    expected = sampled()["LATENT"]["samples"]
    monkeypatch.setattr(TinyDecoder, "decode_stream", Mock(side_effect=kind("planted")))
    method("taesd")
    bars.clear()
    assert torch.equal(sampled()["LATENT"]["samples"], expected)
    assert caplog.text.count("making a preview failed; using latent2rgb: planted") == 1
    assert {preview[1].size for _, preview in bars} == {(8, 8)}
    monkeypatch.setattr(live, "color", Mock(side_effect=kind("planted too")))
    bars.clear()
    method("auto")
    assert torch.equal(sampled()["LATENT"]["samples"], expected)
    assert caplog.text.count("the run goes on without: planted too") == 1
    assert [preview for _, preview in bars] == [None] * len(bars)


def test_a_stop_while_pictures_are_made_ends_the_run(queue, method, monkeypatch):
    from comfy.model_management import InterruptProcessingException

    from fast_video_vae.nodes.preview import live

    monkeypatch.setattr(live, "color", Mock(side_effect=InterruptProcessingException()))
    method("auto")
    with pytest.raises(InterruptProcessingException):
        sampled()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("LatentPreviewer", "decode_latent_to_preview_image"),
        ("Latent2RGBPreviewer", "decode_latent_to_preview"),
        (None, "preview_to_image"),
        (None, "get_previewer"),
    ],
)
def test_the_preview_of_another_pack_is_used(queue, bars, method, monkeypatch, owner, name):
    """It patches a part of ComfyUI's, or gives its own previewer, as VideoHelperSuite does."""
    import latent_preview

    class Other(latent_preview.LatentPreviewer):
        def __init__(self, previewer):
            self.decode_latent_to_preview = previewer.decode_latent_to_preview

    owner = getattr(latent_preview, owner) if owner else latent_preview
    core, calls = getattr(owner, name), []

    @functools.wraps(core)
    def patched(*given, **options):
        calls.append(given)
        result = core(*given, **options)
        return Other(result) if name == "get_previewer" else result

    monkeypatch.setattr(owner, name, patched)
    method("auto")
    sampled()
    assert calls
    assert len(calls) == STEPS or name == "get_previewer"
    assert queue.sent == []


def test_the_thread_ends_with_the_server(queue, bars, method, monkeypatch):
    monkeypatch.setattr(queue, "send_sync", Mock(side_effect=RuntimeError("Event loop is closed")))
    method("auto")
    sampled()
    assert [value for value, _ in bars] == list(range(1, STEPS + 1))
    assert threads() == []


@pytest.mark.parametrize("name", ["lighttaew2_1.safetensors", "taew2_1.safetensors"])
def test_taesd_plays_the_frames_of_a_tiny_decoder(queue, bars, method, approx, monkeypatch, name):
    from fast_video_vae.nodes.preview import live

    state = random_tiny(16)
    save_file(state, approx / name)
    monkeypatch.setattr(live, "_SHARE", 1e9)  # every step may decode
    method("taesd")
    result = sampled()["denoised"]["samples"]
    model = expert()
    given = model.model.process_latent_in(result) if name.startswith("taew") else result
    frames = TinyOracle(state)(given)[0, :, ::4].movedim(0, -1)
    assert frames.shape == (3, 64, 64, 3)
    assert_played(queue, bars, frames.mul(255).clamp(0, 255))


def test_taesd_without_a_usable_file_plays_colors(queue, bars, method, approx, caplog):
    method("taesd")
    why = "no tiny decoder for previews; using latent2rgb: "
    sampled()
    assert f"{why}models/vae_approx has no lighttaew2_1" in caplog.text
    (approx / "taew2_1.safetensors").write_bytes(b"no")
    sampled()
    assert f"{why}taew2_1.safetensors is of an unknown kind" in caplog.text
    save_file(random_tiny(48), approx / "taew2_1.safetensors")
    sampled()
    assert f"{why}taew2_1.safetensors is for latents of 48 channels; expected" in caplog.text
    (approx / "taew2_1.safetensors").unlink()
    approx.rmdir()
    sampled()
    assert caplog.text.count(why) == 4
    assert {image.size for _, (_, image, _), _ in queue.sent} == {(8, 8)}


class Clock:
    """The time for a preview, in seconds."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def step(bars, method, approx, monkeypatch):
    """Do a step of a second; a latent frame takes 0.15 s to decode. Its picture."""
    from fast_video_vae.nodes.preview import live
    from fast_video_vae.vae.preview import TinyDecoder

    save_file(random_tiny(16), approx / "taew2_1.safetensors")
    clock, decode = Clock(), TinyDecoder.decode_stream

    def slow(self, *given, **options):
        for piece in decode(self, *given, **options):
            clock.now += 0.15
            yield piece

    def done(number, wait_s=0.0):
        clock.now += 1 + wait_s
        step_done(number, torch.randn(1, 16, 3, 8, 8), None, STEPS)
        return bars[-1][1][1]

    done.clock = clock
    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(TinyDecoder, "decode_stream", slow)
    method("taesd")
    with torch.inference_mode(), live.playing(expert(), STEPS, {}, clip()["samples"]) as step_done:
        yield done


def test_decodes_take_a_tenth_of_the_time_from_the_first_step_on(step):
    # The first one is given up after a latent frame: 0.15 s of 0.1.
    assert step(0).size == (8, 8)
    # The next one begins when there is twice that, and the one after it when its time fits again.
    assert [step(number).size for number in range(1, 4)] == [(8, 8)] * 3
    assert step(4, wait_s=1.0).size == (64, 64)
    before = step.clock.now
    assert step(5).size == (64, 64)
    assert step.clock.now == before + 1
