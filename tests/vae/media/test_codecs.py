"""Every codec: pixel format and color tags, quality, frame sizes, and a missing encoder."""

from fractions import Fraction

import pytest
import torch

from fast_video_vae.tests.videos import av, moving_clip, psnr, stacked, write
from fast_video_vae.vae.media import (
    CODECS,
    Audio,
    VideoWriter,
    available_codecs,
    check_size,
    codec_named,
    read_video,
)

VIDEOS = [name for name in CODECS if not codec_named(name).is_sequence]
PAIRS = [(name, suffix) for name in VIDEOS for suffix in codec_named(name).suffixes]
# Least PSNR in dB for `moving_clip`. PyAV's wheels include an encoder for each codec.
LEAST_DB = {"h264": 42, "hevc": 42, "vp9": 40, "av1": 42, "prores": 45, "prores4444": 45}
PIXELS = {"ffv1": "bgr0", "prores": "yuv422p10le", "prores4444": "yuv444p12le"}


def textured(frames, height=96, width=128):
    """A moving texture, equal in all channels, which is hard to encode."""
    generator = torch.Generator().manual_seed(0)
    grain = torch.randn(height + frames, width + frames, 1, generator=generator)
    base = moving_clip(frames, height, width).float()
    moved = [grain[i : i + height, i : i + width] for i in range(frames)]
    return (base + 12 * torch.stack(moved)).clamp(0, 255).to(torch.uint8)


def test_every_codec_is_found_by_its_name():
    videos = ("h264", "hevc", "vp9", "av1", "ffv1", "prores", "prores4444")
    assert (*videos, "png", "exr") == CODECS
    assert set(available_codecs()) <= set(CODECS)
    for name in CODECS:
        assert codec_named(name).name == name
    with pytest.raises(ValueError, match="codec is 'divx'; expected one of h264, hevc"):
        codec_named("divx")


@pytest.mark.parametrize(("codec", "suffix"), PAIRS)
def test_every_codec_round_trips(tmp_path, capfd, codec, suffix):
    frames = moving_clip(9, 72, 96)
    path = write(tmp_path / f"a{suffix}", frames, Fraction(30000, 1001), codec=codec)
    assert capfd.readouterr() == ("", "")  # no banner of an encoder
    video = read_video(path)
    assert (video.height, video.width, video.estimated_frames) == (72, 96, 9)
    # PyAV before 18 has no rate for the packets of another process; Matroska rounds times to 1 ms.
    known = codec != "av1" or suffix == ".mp4" or int(av.__version__.partition(".")[0]) >= 18
    assert abs(video.fps / Fraction(30000, 1001) - 1) <= (0 if known else 0.004)
    back = stacked(path)
    assert back.shape == frames.shape
    if codec == "ffv1":
        assert torch.equal(back, frames)
    else:
        assert psnr(back, frames) > LEAST_DB[codec]
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert context.name == {"av1": "libdav1d", "prores4444": "prores"}.get(codec, codec)
        assert context.pix_fmt == PIXELS.get(codec, "yuv420p")
        first = next(container.decode(video=0))
        rgb, transfer = codec == "ffv1", 1 if "prores" in codec else 13
        tags = (context.colorspace, context.color_primaries, context.color_trc)
        assert tags == (0 if rgb else 1, 1, transfer)
        assert first.color_range == (2 if rgb else 1)


@pytest.mark.parametrize(
    "codec",
    [
        "h264",
        "prores",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("hevc", "vp9", "av1")),
    ],
)
def test_higher_quality_gives_better_and_larger_files(tmp_path, codec):
    frames = textured(6)
    suffix = codec_named(codec).suffix
    found = []
    for quality in (0, 40, None, 100):
        path = write(tmp_path / f"{quality}{suffix}", frames, codec=codec, quality=quality)
        found.append((psnr(stacked(path), frames), path.stat().st_size))
    assert found == sorted(found)
    if codec != "prores":  # ProRes has four quality steps
        assert len({size for _, size in found}) == 4
    same = write(tmp_path / f"70{suffix}", frames, codec=codec, quality=70)
    assert same.stat().st_size == pytest.approx(found[2][1], rel=0.01)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 7), (33, 21), (64, 66)])
def test_ffv1_is_lossless_in_any_size(tmp_path, height, width):
    frames = torch.randint(256, (3, height, width, 3), dtype=torch.uint8)
    check_size("ffv1", height, width)
    assert torch.equal(stacked(write(tmp_path / "a.mkv", frames, codec="ffv1")), frames)


@pytest.mark.parametrize(
    ("codec", "height", "width", "message"),
    [
        ("h264", 64, 65, "65x64; h264 needs even width and height: crop or pad them, or use ffv1"),
        ("hevc", 65, 64, "64x65; hevc needs even"),
        ("vp9", 65, 65, "65x65; vp9 needs even"),
        ("av1", 64, 127, "127x64; av1 needs even"),
        ("prores", 64, 65, "65x64; prores needs an even width"),
        ("hevc", 32, 64, "64x32; hevc needs at least 64x64"),
        ("av1", 128, 16, "16x128; av1 needs at least 64x64"),
        ("h264", 0, 64, "64x0; h264 needs at least"),
    ],
)
def test_an_unsupported_size_is_refused(tmp_path, codec, height, width, message):
    with pytest.raises(ValueError, match=message):
        check_size(codec, height, width)
    if height:
        frames = torch.zeros(1, height, width, 3, dtype=torch.uint8)
        with pytest.raises(ValueError, match=message):
            write(tmp_path / f"a{codec_named(codec).suffix}", frames, codec=codec)
    assert not list(tmp_path.iterdir())


def test_the_error_for_a_missing_encoder_lists_the_available_ones(tmp_path, monkeypatch):
    from fast_video_vae.vae.media import codecs

    monkeypatch.setattr(codecs, "_built_in", lambda name: name in ("libx264", "ffv1"))
    assert available_codecs() == ("h264", "ffv1")
    with pytest.raises(ValueError, match=r"no encoder for hevc; .*: h264, ffv1$"):
        VideoWriter(tmp_path / "a.mp4", 24, codec="hevc")
    with pytest.raises(ValueError, match=r"no encoder aac for the audio of .*a\.mp4"):
        VideoWriter(tmp_path / "a.mp4", 24, audio=Audio(torch.zeros(1, 9), 8000))
