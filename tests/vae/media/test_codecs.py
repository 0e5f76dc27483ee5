"""Every codec: pixel format and color tags, quality, frame sizes, and a missing encoder."""

from fractions import Fraction

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.videos import av, moving_clip, psnr, stacked, write
from fast_video_vae.vae.media import (
    CODECS,
    Audio,
    VideoWriter,
    available_codecs,
    check_size,
    codec_named,
    codecs,
    read_video,
)

VIDEOS = [name for name in CODECS if not codec_named(name).is_sequence]
# Least PSNR in dB for `moving_clip`. PyAV's wheels include an encoder for each codec.
LEAST_DB = {"h264": 42, "hevc": 42, "vp9": 40, "av1": 42, "prores": 45, "prores4444": 45}


@pytest.mark.parametrize("codec", VIDEOS)
def test_every_codec_round_trips(tmp_path, capfd, codec):
    frames = moving_clip(5, 72, 96)
    path = tmp_path / f"a{codec_named(codec).suffix}"
    write(path, frames, Fraction(30000, 1001), codec=codec)
    assert capfd.readouterr() == ("", "")  # no banner of an encoder
    video = read_video(path)
    assert (video.height, video.width, video.estimated_frames) == (72, 96, 5)
    assert video.fps == Fraction(30000, 1001)
    back = stacked(path)
    assert back.shape == frames.shape
    assert torch.equal(back, frames) if codec == "ffv1" else psnr(back, frames) > LEAST_DB[codec]
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert context.name == {"av1": "libdav1d", "prores4444": "prores"}.get(codec, codec)
        assert context.color_primaries == 1  # the other tags are in `test_depth.py`


def test_quality_is_linear_from_the_worst_value_to_70_and_to_the_best():
    x264, prores = (codecs.find_encoding(codec_named(name)) for name in ("h264", "prores"))
    expected = {0: "51", 35: "33.5", 60: "21", None: "16", 70: "16", 85: "8.5", 100: "1"}
    assert {each: x264.options(each)["crf"] for each in expected} == expected
    x265 = codecs.find_encoding(codec_named("hevc"), 8)  # of another slope on each side
    assert [x265.options(each)["crf"] for each in (60, 85)] == ["21.8571", "9"]
    assert x264.options(70, dithered=True) == {"crf": "15", "aq-strength": "2", "mbtree": "0"}
    assert [prores.options(each)["profile"] for each in (0, 24, 70, 100)] == ["0", "1", "3", "3"]


@pytest.mark.parametrize(
    ("codec", "height", "width", "message"),
    [
        ("h264", 64, 65, "65x64; h264 needs even width and height: crop or pad them, or use ffv1"),
        ("hevc", 65, 64, "64x65; hevc needs even"),
        ("prores", 64, 65, "65x64; prores needs an even width"),
        ("hevc", 32, 64, "64x32; hevc needs at least 64x64"),
        ("av1", 128, 16, "16x128; av1 needs at least 64x64"),
        ("h264", 0, 64, "64x0; h264 needs at least"),
    ],
)
def test_an_unsupported_size_is_refused(codec, height, width, message):
    with refused(message):
        check_size(codec, height, width)
    check_size("ffv1", height or 1, width)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the encoder of a GPU may work")
def test_a_hardware_encoder_that_fails_gives_way_to_software(tmp_path, monkeypatch, caplog):
    codecs._report_software.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert codecs.find_encoding(codec_named("h264"), hardware=True).encoder == "libx264"
        said = "no hardware encoder for h264 works here; software is used"
        assert caplog.text.count(said) == 1
        # Each is tried before; one can fail with a video.
        monkeypatch.setattr(codecs, "_works", lambda encoding: encoding.encoder == "h264_nvenc")
        monkeypatch.setattr(codecs, "_pixel_formats", lambda _: ("yuv420p",))
        writer = VideoWriter(tmp_path / "a.mp4", 24, hardware=True)
        assert writer.encoding.encoder == "h264_nvenc"
        with writer:
            writer.write(moving_clip(2, 64, 64))
        assert "h264_nvenc failed at 64x64; using software" in caplog.text
    assert len(stacked(writer.path)) == 2


def test_the_error_for_a_missing_encoder_lists_the_available_ones(tmp_path, monkeypatch):
    assert CODECS == ("h264", "hevc", "vp9", "av1", "ffv1", "prores", "prores4444", "png", "exr")
    with refused("codec is 'divx'; expected one of h264, hevc"):
        codec_named("divx")
    monkeypatch.setattr(codecs, "_built_in", lambda name: name in ("libx264", "ffv1"))
    assert available_codecs() == ("h264", "ffv1")
    with refused(r"no encoder for hevc; .*: h264, ffv1$"):
        VideoWriter(tmp_path / "a.mp4", 24, codec="hevc")
    with refused(r"no encoder aac for the audio of .*a\.mp4"):
        VideoWriter(tmp_path / "a.mp4", 24, audio=Audio(torch.zeros(1, 9), 8000))
