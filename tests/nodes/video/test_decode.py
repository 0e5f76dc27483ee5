"""Latents to files of 8 to 16 bits, with alpha and sound, against ComfyUI's own nodes; errors."""

import json
import logging
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.vae.pairs import as_saved, latents, ours, v3_node
from fast_video_vae.tests.nodes.video.clips import (
    components,
    decibels,
    decode,
    encode,
    frames_of,
    image,
    tone,
)
from fast_video_vae.tests.videos import av
from fast_video_vae.vae.media import convert_pictures

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.fixture(scope="module")
def demo(comfyui):
    """The bundled VAE, and a latent of nine frames of the bundled clip: pictures, not noise."""
    with torch.inference_mode():
        (vae,) = ours("Load", vae_name="bundled demo").args
        images = ours("DemoClip").args[0]
        return vae, vae.encode(images[:9, 64:160, 64:160])


def is_empty(folder):
    """Return whether the folder has no file: neither a video nor a partial one."""
    return not [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("codec", "suffix"),
    [("h264", "mp4"), ("hevc", "mp4"), ("vp9", "webm"), ("av1", "mp4"), ("prores", "mov")],
)
def test_a_file_is_as_accurate_as_save_video(demo, output, codec, suffix):
    fast, latent = demo
    video = decode(fast, latent, codec=codec, fps=24)
    assert Path(video.get_stream_source()).suffix == f".{suffix}"
    images, _, fps = components(video)
    assert fps == 24
    expected = image(fast, latent)
    (stock,) = v3_node("nodes_video", "CreateVideo", images=expected, fps=24.0)
    v3_node("nodes_video", "SaveVideo", video=stock, filename_prefix="stock", format="auto")
    (file,) = output.glob("stock_*")
    from comfy_api.latest import InputImpl

    error = decibels(images, expected)
    assert error >= decibels(components(InputImpl.VideoFromFile(str(file)))[0], expected)
    assert error > 35


def test_higher_quality_gives_a_larger_file(demo, output):
    videos = [decode(*demo, quality=quality).get_stream_source() for quality in (10, 50, 90)]
    sizes = [Path(video).stat().st_size for video in videos]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("text", "shown", "chunk"),
    [
        ("  ", slice(17), 0),
        ("", slice(17), 3),
        ("0-0", slice(1), -1),
        ("16", slice(16, 17), 0),
        (" 4 - 9 ", slice(4, 10), 1),  # over the borders of latents
        ("12-", slice(12, 17), 0),
    ],
)
def test_a_lossless_file_has_the_bytes_of_a_range_of_the_image(fast, output, text, shown, chunk):
    """A range includes both ends."""
    whole = as_saved(image(fast, latents(5)))
    video = decode(fast, latents(5), codec="ffv1", bit_depth="8", frames=text, chunk=chunk)
    assert torch.equal(frames_of(video), whole[shown])
    assert video.get_frame_rate() == 16


@pytest.mark.parametrize("text", ["17-18", "3-17", "9-4"])
def test_a_range_outside_of_the_video_is_an_error(fast, output, text):
    with refused(f"^frames is '{text}'; "):
        decode(fast, latents(5), frames=text)
    assert is_empty(output)


def test_file_numbers_continue_and_the_frontend_gets_them(fast, output):
    import folder_paths

    given = {"samples": {"samples": latents(1)}, "filename_prefix": "clips/%width%x%height%"}
    for save_to, name in (
        ("output", "72x48_00001_.mp4"),
        ("output", "72x48_00002_.mp4"),
        ("temp", "72x48_00001_.mp4"),
    ):
        result = ours("DecodeVideo", vae=fast, save_to=save_to, **given)
        shown = result.ui.as_dict()
        assert shown["animated"] == (True,)
        assert shown["images"] == [{"filename": name, "subfolder": "clips", "type": save_to}]
        file = Path(folder_paths.get_directory_by_type(save_to)) / "clips" / name
        assert Path(result.args[0].get_stream_source()) == file
        assert file.is_file()


def test_the_workflow_is_stored_as_by_save_video(fast, output, monkeypatch):
    import av
    from comfy.cli_args import args
    from comfy_api.latest import io as comfy_io

    hidden = {
        comfy_io.Hidden.prompt: {"1": {"class_type": "FastVAE_Load"}},
        comfy_io.Hidden.extra_pnginfo: {"workflow": {"nodes": [], "name": "ä", "text": 'a"\\{'}},
    }

    def tags():
        video, _ = ours("DecodeVideo", hidden, vae=fast, samples={"samples": latents(1)}).args
        with av.open(video.get_stream_source()) as container:
            return {key.lower(): value for key, value in container.metadata.items()}

    found = tags()
    assert json.loads(found["prompt"]) == hidden[comfy_io.Hidden.prompt]
    assert json.loads(found["workflow"]) == hidden[comfy_io.Hidden.extra_pnginfo]["workflow"]
    # The frontend counts braces in WebM, those of texts included.
    assert found["workflow"].count("{") == found["workflow"].count("}")
    monkeypatch.setattr(args, "disable_metadata", True)
    assert not {"prompt", "workflow"} & tags().keys()


def test_audio_matches_the_frames_and_ends_with_the_video(fast, output):
    sound = tone(3)
    for frames, start, seconds in (("", 0, 17 / 16), ("8-15", 8 / 16, 8 / 16)):
        found = components(
            decode(fast, latents(5), codec="ffv1", bit_depth="8", audio=sound, frames=frames)
        )[1]
        expected = sound["waveform"][..., round(start * 44100) :][..., : round(seconds * 44100)]
        assert found["sample_rate"] == 44100
        assert torch.allclose(found["waveform"], expected, atol=2**-15)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"latent": latents(2, batch=3)}, "samples: got 3 videos"),
        (
            {"latent": latents(2, height=1, width=1), "codec": "hevc"},
            "codec: frames are 8x8; hevc needs at least",
        ),
        ({"bit_depth": "16"}, "codec: bit depth is 16; h264 stores 8 or 10 bits per component"),
        ({"codec": "prores", "bit_depth": "8"}, "codec: bit depth is 8; prores stores 10 bits"),
        ({"codec": "png", "audio": tone(1)}, "audio: png is a sequence of images"),
        *(({"frames": text}, f"frames is '{text}'; ") for text in ("a-b", "-4", "1-2-3", "1.5")),
        ({"audio": tone(1, channels=3)}, "audio: .*3 channels"),
        ({"audio": [torch.zeros(1, 1, 5)]}, "audio: got a list of 1; expected an AUDIO"),
        ({"audio": {"waveform": None, "sample_rate": 8000}}, "audio: its waveform is None"),
        ({"filename_prefix": "../../x"}, "filename_prefix is '../../x'"),
    ],
)
def test_a_bad_input_is_refused_before_the_decode(
    fast, stock, output, monkeypatch, is_ours, options, reason
):
    monkeypatch.setattr("comfy.sd.VAE.decode", pytest.fail)
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", pytest.fail)
    given = {"latent": latents(2)} | options
    with refused(f"^{reason}"):
        decode(fast if is_ours else stock, **given)
    assert is_empty(output)


@pytest.mark.parametrize("rate", [Fraction(30000, 1001), Fraction(24000, 1001), Fraction(25, 2)])
def test_a_rate_is_passed_on_as_a_number(fast, output, rate):
    video = decode(fast, latents(3), fps=float(rate))
    assert video.get_frame_rate() == rate
    assert decode(fast, latents(3), fps=encode(fast, video)[1]).get_frame_rate() == rate


@pytest.mark.parametrize("at", [2, 33])  # and while the last frames are written
def test_an_interrupt_leaves_no_file_and_the_next_run_succeeds(fast, output, monkeypatch, at):
    import comfy.model_management as management
    import comfy.utils

    def show(value, total, preview, node_id=None):
        if value >= at:
            management.interrupt_current_processing()

    latent = latents(9)
    with monkeypatch.context() as patch:
        patch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", show)
        with pytest.raises(management.InterruptProcessingException):
            decode(fast, latent, chunk=1)
    assert is_empty(output)
    assert "fast-video-vae-writer" not in [thread.name for thread in threading.enumerate()]
    video = decode(fast, latent, codec="ffv1", bit_depth="8", chunk=1)
    assert torch.equal(frames_of(video), as_saved(image(fast, latent)))


def deep(video):
    """The values of every frame of a file, as `[T, H, W, C]`."""
    with av.open(video.get_stream_source()) as container:
        name = "rgba64le" if "a" in container.streams.video[0].pix_fmt else "rgb48le"
        found = [frame.to_ndarray(format=name) for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(found).astype(np.int32))


def expected_of(images):
    """The same of an IMAGE."""
    return convert_pictures(images, torch.uint16).int()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_lossless_file_has_sixteen_bits_of_the_image(fast, stock, output, is_ours, caplog):
    vae, latent = fast if is_ours else stock, latents(3)
    with caplog.at_level(logging.INFO):
        video = decode(vae, latent, codec="ffv1", chunk=2, frames="3-5")
    assert torch.equal(deep(video), expected_of(image(vae, latent)[3:6]))
    assert video.get_bit_depth() == 16
    assert ("unused: chunk" in caplog.text) != is_ours


def test_alpha_is_kept_refused_or_dropped(picture_vae, output, monkeypatch, caplog):
    latent = torch.randn(3, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = image(picture_vae, latent)
    assert expected.shape == (3, 64, 64, 4)
    assert torch.equal(deep(decode(picture_vae, latent, codec="ffv1")), expected_of(expected))
    for text in ("", "1-2"):
        options = {"codec": "ffv1", "bit_depth": "8", "frames": text, "alpha": "off"}
        video = decode(picture_vae, latent, **options)
        wanted = as_saved(expected)[1 if text else 0 :, ..., :3]
        assert torch.equal(frames_of(video), wanted)
    with caplog.at_level(logging.INFO):
        assert len(components(decode(picture_vae, latent))[0]) == 3
    assert caplog.text.count("h264 stores no alpha channel; that of the frames is dropped") == 1
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", pytest.fail)
    with refused("^codec: h264 stores no alpha channel; expected one of ffv1, prores4444, png"):
        decode(picture_vae, latent, alpha="on")


@pytest.mark.parametrize("codec", ["png", "exr"])
def test_a_sequence_of_images_is_a_video_too(fast, output, codec):
    latent = latents(2, height=8, width=8)
    expected = image(fast, latent)
    video = decode(fast, latent, codec=codec, filename_prefix="shots/one", fps=24)
    folder = output / "shots" / "one_00001_"
    assert [path.name for path in sorted(folder.iterdir())] == [
        f"frame_{n:05}.{codec}" for n in range(len(expected))
    ]
    images, _, fps = components(video)
    assert (fps, video.get_frame_count(), video.get_dimensions()) == (24, len(expected), (64, 64))
    assert (images - expected).abs().max() <= (1 / 65535 if codec == "png" else 2**-11)
    assert video.get_bit_depth() == 16
    (whole,) = v3_node("nodes_video", "SaveVideo", video=video, filename_prefix="w", format="auto")
    assert whole.get_bit_depth() == 16
    (file,) = output.glob("w_*")
    with av.open(str(file)) as container:
        assert container.streams.video[0].pix_fmt == "yuv420p10le"
    again = decode(fast, latent, codec=codec, filename_prefix="shots/one", fps=24)
    assert Path(again.paths[0]).parent.name == "one_00002_"
    assert (encode(fast, video)[0] - encode(fast, again)[0]).abs().max() == 0
