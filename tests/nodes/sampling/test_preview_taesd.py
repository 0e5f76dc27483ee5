"""The preview of Wan Sampler (Fast) by a tiny decoder: pictures, time, files that do not work."""

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.sampling.sampler_models import STEPS, clip, expert, sampled
from fast_video_vae.tests.tiny import TinyOracle, random_tiny

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


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
    expected = frames.mul(255).clamp(0, 255)
    played = [image for _, (_, image, _), _ in queue.sent] + [bars[-1][1][1]]
    found = [torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8) for one in played]
    assert {image.size for image in (bars[-1][1][1], *played)} == {(64, 64)}
    for frame in expected:
        assert min((each.view(64, 64, 3) - frame).abs().max() for each in found) <= 1.01


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
