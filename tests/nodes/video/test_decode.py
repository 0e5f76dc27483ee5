"""Latents to files of 8 to 16 bits, with alpha and sound, through ComfyUI's own nodes; errors."""

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
    decode,
    encode,
    frames_of,
    from_file,
    image,
    tone,
)
from fast_video_vae.tests.videos import av
from fast_video_vae.vae.media import convert_pictures, read_video

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

LEVEL = 1 / 1023  # of 10 bits


@pytest.mark.parametrize(
    ("codec", "suffix", "bits"),
    [
        ("h264", ".mp4", 8),
        ("prores", ".mov", 10),  # not for mp4
        ("ffv1", ".mkv", 16),  # RGB
        ("exr", "", 16),
    ],
)
def test_a_gradient_passes_through_comfyuis_nodes(stock, output, monkeypatch, codec, suffix, bits):
    """Get Video Components, Trim Video, Save Video and our encode get all bits of the file."""
    steps = torch.linspace(0.1, 0.9, 1024)[:, None] * torch.tensor([1, 0.7, 0.4])
    images, given, audio = steps.expand(10, 64, 1024, 3), [], tone(2) if suffix else None
    monkeypatch.setattr(stock, "decode", lambda latent: images)
    monkeypatch.setattr(stock, "encode", lambda pixels: given.append(pixels) or latents(3))
    options = {"codec": codec, "fps": 20, "filename_prefix": "x/y", "bit_depth": str(bits)}
    video = decode(stock, latents(3, 8, 8), audio=audio, **options)
    assert [path.name for path in (output / "x").iterdir()] == [f"y_00001_{suffix}"]
    trim = {"start_time": 0.1, "duration": 0.25, "strict_duration": False}
    (part,) = v3_node("nodes_video", "VideoSlice", video=video, **trim)
    limit = {8: 6, 10: 0.6, 16: 0.05}[bits] * LEVEL
    for each, count in ((video, 10), (part, 5)):
        encode(stock, each)
        found, sound, fps = components(each)
        for exact in (found, given.pop()):
            assert len(exact) == count
            assert (exact - images[0]).abs().mean() < limit
            assert bits == 8 or len(exact[0, 8, :, 0].unique()) > 600
        assert fps == 20
        assert not suffix or abs(sound["waveform"].shape[-1] / 44100 - count / 20) < 0.05
        for form in ("auto", "webm"):
            name = f"{form}{count}"
            v3_node("nodes_video", "SaveVideo", video=each, filename_prefix=name, format=form)
            file = next(output.glob(f"{name}_*"))
            again = convert_pictures(torch.stack([*read_video(file).frames()]), torch.float32)
            assert len(again) == count
            assert (again - images[0]).abs().mean() < limit + 2.5 * LEVEL
            assert bits == 8 or len(again[0, 8, :, 0].unique()) > 600
            with av.open(str(file)) as container:
                stream = container.streams.video[0]
                assert len(container.streams.audio) == bool(suffix)
                assert abs(stream.average_rate - 20) < 0.1  # ComfyUI rounds times
                is_rgb = stream.codec.name == "ffv1"
                assert stream.codec_context.colorspace == (0 if is_rgb else 1)


def test_more_quality_is_more_accurate_and_a_rate_is_a_number(fast, output):
    expected, found, rate = image(fast, latents(3)), [], Fraction(30000, 1001)
    for quality in (10, 90):
        video = decode(fast, latents(3), quality=quality, fps=float(rate))
        images, *_ = components(video)
        assert torch.equal(images, components(from_file(video.get_stream_source()))[0])
        size = Path(video.get_stream_source()).stat().st_size
        found.append((size, -(images - expected).square().mean()))
    assert found == sorted(found, key=lambda each: each[0]) == sorted(found, key=lambda x: x[1])
    assert video.get_frame_rate() == rate
    assert decode(fast, latents(3), fps=encode(fast, video)[1]).get_frame_rate() == rate


def test_a_range_has_the_bytes_and_the_sound_of_its_frames(fast, output):
    """A range includes both ends."""
    whole, sound = as_saved(image(fast, latents(5))), tone(3)
    for text, chunk, first, last in (
        ("  ", 3, 0, 17),
        ("0-0", -1, 0, 1),
        (" 4 - 9 ", 1, 4, 10),  # over the borders of latents
        ("12-", 0, 12, 17),
        ("7", 2, 7, 8),
    ):
        options = {"codec": "ffv1", "bit_depth": "8", "frames": text, "chunk": chunk}
        video = decode(fast, latents(5), audio=sound, **options)
        assert torch.equal(frames_of(video), whole[first:last])
        expected = sound["waveform"][..., round(first * 44100 / 16) : round(last * 44100 / 16)]
        assert torch.allclose(components(video)[1]["waveform"], expected, atol=2**-15)


def test_file_numbers_continue_and_files_have_their_workflow(fast, output, monkeypatch):
    import folder_paths
    from comfy.cli_args import args
    from comfy_api.latest import io as comfy_io

    hidden = {
        comfy_io.Hidden.prompt: {"1": {"class_type": "FastVAE_Load"}},
        comfy_io.Hidden.extra_pnginfo: {"workflow": {"nodes": [], "name": "ä", "text": 'a"\\{'}},
    }
    given = {"samples": {"samples": latents(1)}, "filename_prefix": "clips/%width%x%height%"}
    for save_to, name in (("output", "72x48_00001_"), ("output", "72x48_00002_"), ("temp", None)):
        name = f"{name or '72x48_00001_'}.mp4"
        result = ours("DecodeVideo", hidden, vae=fast, save_to=save_to, **given)
        shown = result.ui.as_dict()
        assert shown["animated"] == (True,)
        assert shown["images"] == [{"filename": name, "subfolder": "clips", "type": save_to}]
        file = Path(folder_paths.get_directory_by_type(save_to)) / "clips" / name
        assert Path(result.args[0].get_stream_source()) == file
        with av.open(str(file)) as container:
            tags = {key.lower(): value for key, value in container.metadata.items()}
        assert ("workflow" in tags) == ("prompt" in tags) == (save_to == "output")
        if save_to == "output":
            assert json.loads(tags["prompt"]) == hidden[comfy_io.Hidden.prompt]
            assert json.loads(tags["workflow"])["text"] == 'a"\\{'
            # The frontend counts braces in WebM, those of texts included.
            assert tags["workflow"].count("{") == tags["workflow"].count("}")
        monkeypatch.setattr(args, "disable_metadata", name == "72x48_00002_.mp4")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"latent": latents(2, batch=3)}, "samples: got 3 videos"),
        ({"latent": latents(2, 1, 1), "codec": "hevc"}, "codec: frames are 8x8; hevc needs at"),
        ({"bit_depth": "16"}, "codec: bit depth is 16; h264 stores 8 or 10 bits per component"),
        ({"codec": "png", "audio": tone(1)}, "audio: png is a sequence of images"),
        *(({"frames": text}, f"frames is '{text}'; ") for text in ("a-b", "1-2-3")),
        ({"audio": tone(1, channels=3)}, "audio: .*3 channels"),
        ({"audio": [torch.zeros(1, 1, 5)]}, "audio: got a list of 1; expected an AUDIO"),
        ({"filename_prefix": "../../x"}, "filename_prefix is '../../x'"),
    ],
)
def test_a_bad_input_is_refused_before_the_decode(
    fast, stock, output, monkeypatch, options, reason
):
    monkeypatch.setattr("comfy.sd.VAE.decode", pytest.fail)
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", pytest.fail)
    for vae in (fast, stock):
        with refused(f"^{reason}"):
            decode(vae, **{"latent": latents(2)} | options)
    for text in ("5-6", "3-5", "4-2"):
        with refused(f"^frames is '{text}'; the video has the frames 0-4"):
            decode(fast, latents(2), frames=text)
    assert not any(output.rglob("*"))


def test_an_interrupt_leaves_no_file_and_the_next_run_succeeds(fast, output, monkeypatch):
    import comfy.model_management as management
    import comfy.utils

    def show(value, total, preview, node_id=None):
        if value >= 2:
            management.interrupt_current_processing()

    latent = latents(9, 2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", show)
        with pytest.raises(management.InterruptProcessingException):
            decode(fast, latent, chunk=1)
    assert not any(path.is_file() for path in output.rglob("*"))
    assert "fast-video-vae-writer" not in [thread.name for thread in threading.enumerate()]
    video = decode(fast, latent, codec="ffv1", bit_depth="8", chunk=1)
    assert torch.equal(frames_of(video), as_saved(image(fast, latent)))


@pytest.mark.parametrize("kind", ["fast", "stock", "picture_vae"])
def test_a_lossless_file_has_sixteen_bits_and_alpha_of_the_image(request, output, kind, caplog):
    vae, latent = request.getfixturevalue(kind), latents(3)
    if kind == "picture_vae":
        latent = latents(1, 4, 4, batch=5, channels=64)[:, :, 0]
    with caplog.at_level(logging.INFO):
        video = decode(vae, latent, codec="ffv1", chunk=2, frames="3-4")
    expected = convert_pictures(image(vae, latent)[3:5], torch.uint16)
    assert expected.shape[-1] == (4 if kind == "picture_vae" else 3)
    with av.open(video.get_stream_source()) as container:
        name = "rgba64le" if kind == "picture_vae" else "rgb48le"
        found = [frame.to_ndarray(format=name) for frame in container.decode(video=0)]
    assert np.array_equal(np.stack(found), expected.numpy())
    assert video.get_bit_depth() == 16
    assert ("unused: chunk" in caplog.text) == (kind == "stock")


def test_alpha_is_dropped_or_refused(picture_vae, output, monkeypatch, caplog):
    latent = latents(1, 4, 4, batch=3, channels=64)[:, :, 0]
    video = decode(picture_vae, latent, codec="ffv1", bit_depth="8", alpha="off")
    assert torch.equal(frames_of(video), as_saved(image(picture_vae, latent))[..., :3])
    with caplog.at_level(logging.INFO):
        decode(picture_vae, latent)
    assert caplog.text.count("h264 stores no alpha channel; that of the frames is dropped") == 1
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", pytest.fail)
    with refused("^codec: h264 stores no alpha channel; expected one of ffv1, prores4444, png"):
        decode(picture_vae, latent, alpha="on")


def test_a_sequence_of_images_is_a_video_too(fast, output):
    latent = latents(2, height=8, width=8)
    video, again = (decode(fast, latent, codec="png", filename_prefix="s/one") for _ in range(2))
    assert [path.name for path in video.paths] == [f"frame_{n:05}.png" for n in range(5)]
    assert [each.paths[0].parent.name for each in (video, again)] == ["one_00001_", "one_00002_"]
    assert (video.get_frame_count(), video.get_dimensions()) == (5, (64, 64))
    assert (video.get_bit_depth(), video.get_duration()) == (16, 5 / 16)
    assert video.as_trimmed(-2 / 16).paths == video.paths[-2:]
    assert video.as_trimmed(0, 1, strict_duration=True) is video.as_trimmed(9) is None
    assert torch.equal(encode(fast, video)[0], encode(fast, again)[0])
