"""The preview of Wan Sampler (Fast) in this process: methods, other packs, errors, interrupts."""

import functools
import threading

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.sampling.sampler_models import STEPS, clip, expert, failing, sampled
from fast_video_vae.tests.tiny import random_tiny

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


def test_the_colors_are_comfyuis(queue, bars, method):
    """Of the denoised latent, frame by frame, as ComfyUI shows the first one."""
    import latent_preview

    method("latent2rgb")
    result = sampled()
    model = expert()
    x0 = model.model.process_latent_in(result["denoised"]["samples"])
    previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)
    expected = [
        previewer.decode_latent_to_preview_image("JPEG", x0[:, :, at : at + 1])[1]
        for at in range(x0.shape[2])
    ]
    played = [image for _, (_, image, _), _ in queue.sent] + [bars[-1][1][1]]
    for image in expected:
        levels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).int()
        near = [
            (torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8).int() - levels)
            .abs()
            .max()
            for one in played
        ]
        assert min(near) <= 1


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
    monkeypatch.setattr(TinyDecoder, "decode_stream", failing(kind("planted")))
    method("taesd")
    bars.clear()
    assert torch.equal(sampled()["LATENT"]["samples"], expected)
    assert caplog.text.count("making a preview failed; using latent2rgb: planted") == 1
    assert {preview[1].size for _, preview in bars} == {(8, 8)}
    monkeypatch.setattr(live, "color", failing(kind("planted too")))
    bars.clear()
    method("auto")
    assert torch.equal(sampled()["LATENT"]["samples"], expected)
    assert caplog.text.count("the run goes on without: planted too") == 1
    assert [preview for _, preview in bars] == [None] * len(bars)


def test_a_stop_while_pictures_are_made_ends_the_run(queue, method, monkeypatch):
    from comfy.model_management import InterruptProcessingException

    from fast_video_vae.nodes.preview import live

    monkeypatch.setattr(live, "color", failing(InterruptProcessingException()))
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
    monkeypatch.setattr(queue, "send_sync", failing(RuntimeError("Event loop is closed")))
    method("auto")
    sampled()
    assert [value for value, _ in bars] == list(range(1, STEPS + 1))
    assert threads() == []
