"""The options of `encode` and `decode` for ranges, sizes, rates and formats of videos."""

import wave
from fractions import Fraction

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

import av  # noqa: E402

from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory  # noqa: E402
from fast_video_vae.tests.videos import moving_clip, psnr, stacked, write, write_clip, write_with  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402
from fast_video_vae.vae.cli.progress_bar import ProgressBar  # noqa: E402
from fast_video_vae.vae.media import (  # noqa: E402
    Audio,
    frames_to_uint8,
    pictures_of,
    read_audio,
    read_video,
)


@pytest.fixture
def latents(tmp_path):
    """A latent file of 13 frames of 64x96 pixels."""
    path = tmp_path / "l.safetensors"
    save_file({"latent": torch.randn(1, 16, 4, 8, 12)}, path)
    return path


def decoded(vae_path, latents):
    vae = load_vae(vae_path, dtype=torch.float32)
    with safe_open(latents, framework="pt") as file:
        return frames_to_uint8(vae.decode(file.get_tensor("latent")))


@pytest.mark.parametrize(
    ("name", "options", "codec"),
    [
        ("a.mkv", ["--bit-depth", "8"], "ffv1"),
        ("a.mp4", ["--codec", "av1", "--video-quality", "90"], "av1"),
        ("a.mp4", ["--hardware"], "h264"),
        pytest.param("a.mp4", [], "h264", marks=pytest.mark.slow),
        pytest.param("a.webm", [], "vp9", marks=pytest.mark.slow),
        pytest.param("a.mov", [], "prores", marks=pytest.mark.slow),
        pytest.param("a.mkv", ["--codec", "hevc"], "hevc", marks=pytest.mark.slow),
    ],
)
def test_decode_writes_the_format_of_the_name_or_codec(
    tmp_path, done, vae_path, latents, name, options, codec
):
    movie = tmp_path / name
    lines = done("decode", latents, "-o", movie, *options)
    assert lines[-1] == f"wrote {movie}: 13 frames at 16 fps"
    with av.open(str(movie)) as container:
        found = container.streams.video[0].codec_context.name
    assert found == {"av1": "libdav1d"}.get(codec, codec)
    expected = decoded(vae_path, latents)
    if codec == "ffv1":
        # Chunks may round differently, which changes some values by one level.
        assert (stacked(movie).int() - expected.int()).abs().float().mean() < 0.01
    else:
        assert psnr(stacked(movie), expected) > 22  # noise; most formats halve its colours


def test_decode_writes_the_depth_of_the_options(tmp_path, done, vae_path, latents):
    vae = load_vae(vae_path, dtype=torch.float32)
    with safe_open(latents, "pt") as file:
        frames = vae.decode(file.get_tensor("latent"))
    expected = pictures_of(frames, torch.uint16).int()
    lines = done("decode", latents, "-o", tmp_path / "a.mkv")
    assert lines[-2] == "ffv1 in 16 bits (gbrp16le) encoded by ffv1"
    found = torch.stack(list(read_video(tmp_path / "a.mkv").frames())).int()
    assert (found - expected).abs().max() <= 1
    lines = done("decode", latents, "-o", tmp_path / "a.png", "--no-dither")
    assert lines[-1] == f"wrote {tmp_path / 'a'}: 13 frames at 16 fps"
    picture = next(read_video(tmp_path / "a" / "frame_00003.png").frames())
    assert (picture.int() - expected[3]).abs().max() <= 1
    done("decode", latents, "-o", tmp_path / "b.mp4", "--codec", "hevc", "--bit-depth", "auto")
    assert read_video(tmp_path / "b.mp4").bit_depth == 10


@pytest.mark.parametrize(
    ("text", "expected", "chunk"),
    [
        ("4-8", range(4, 9), 1),
        ("4-8", range(4, 9), -1),
        ("0-0", range(1), 1),
        ("12", range(12, 13), -1),
        ("0-12", range(13), 1),
    ],
)
def test_decode_takes_a_range_of_frames(tmp_path, done, vae_path, latents, text, expected, chunk):
    movie = tmp_path / "a.mkv"
    options = ["--frames", text, "--chunk", chunk, "--bit-depth", 8]
    lines = done("decode", latents, "-o", movie, *options)
    count = f"{len(expected)} frame{'s' * (len(expected) > 1)}"
    assert lines[-1] == f"wrote {movie}: {count} at 16 fps"
    wanted = decoded(vae_path, latents)[expected.start : expected.stop]
    assert (stacked(movie).int() - wanted.int()).abs().float().mean() < 0.01


def test_decode_adds_the_audio_of_the_range(tmp_path, done, latents):
    sound = tmp_path / "s.wav"
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(8000) + b"\xff\x1f" * 16000)  # a quarter of a second of silence
    movie = tmp_path / "a.mkv"
    done("decode", latents, "-o", movie, "--audio", sound, "--frames", "2-11")
    found = read_audio(movie)
    # Frames 2 to 11 at 16 per second: from 0.125 s to 0.75 s.
    assert found.waveform.shape == (1, 10_000)
    assert found.sample_rate == 16000
    assert not found.waveform[:, :1999].any()
    assert (found.waveform[:, 2001:] > 0.2).all()


def test_the_audio_of_a_video_is_read(tmp_path):
    t = torch.arange(96_000) / 48_000
    tone = torch.stack([torch.sin(2000 * t), torch.cos(1000 * t)]) / 2
    path = tmp_path / "a.mkv"
    write(path, moving_clip(48), audio=Audio(tone, 48_000))
    found = read_audio(path, 0.5)
    assert found.waveform.shape == (2, 72_000)
    assert (found.waveform - tone[:, 24_000:]).abs().max() <= 1 / 32768  # FLAC of 16 bits


@pytest.mark.parametrize(
    ("options", "frames", "shape", "fps"),
    [
        (["--start", "0.5"], range(12, 33), (6, 4, 6), 24),  # 21 of 33
        (["--duration", "0.4"], range(9), (3, 4, 6), 24),
        (["--frames-limit", "5"], range(5), (2, 4, 6), 24),
        (["--fps", "12"], range(0, 33, 2), (5, 4, 6), 12),
        (["--size", "32x16"], range(33), (9, 2, 4), 24),
        (["--size", "40x20", "--frames-limit", "1"], range(1), (1, 2, 5), 24),
    ],
)
def test_encode_reads_a_range(tmp_path, done, vae_path, options, frames, shape, fps):
    source, file = write_clip(tmp_path / "a.mkv", 33, codec="ffv1"), tmp_path / "l.safetensors"
    done("encode", source, "-o", file, *options)
    with safe_open(file, framework="pt") as stored:
        latent, metadata = stored.get_tensor("latent"), stored.metadata()
    assert latent.shape == (1, 16, *shape)
    assert Fraction(metadata["fps"]) == fps
    if "--size" not in options:
        vae = load_vae(vae_path, dtype=torch.float32)
        pictures = moving_clip(33, 32, 48)[list(frames)].permute(3, 0, 1, 2).unsqueeze(0)
        torch.testing.assert_close(latent, vae.encode(pictures), rtol=1e-4, atol=1e-4)


def test_a_varying_rate_keeps_its_timing_through_encode_and_decode(tmp_path, run, done, vae_path):
    source, file, movie = (tmp_path / name for name in ("a.mkv", "l.safetensors", "b.mp4"))
    times = [0, 40, 80, 500, 1000, 1040, 1500, 1900, 1920]
    write_with(source, moving_clip(9), "matroska", times=times)
    code, lines, errors = run("encode", source, "--vae", vae_path, "-o", file, "--dtype", "fp32")
    assert code == 0
    assert lines[-1].endswith("for 49 frames at 25 fps")
    assert sum("a.mkv has a varying frame rate" in line for line in errors) == 1
    done("decode", file, "-o", movie)
    video = read_video(movie)
    assert abs(video.estimated_frames / video.fps - Fraction(times[-1] + 40, 1000)) <= 1 / video.fps
    done("demo", source, "--out", tmp_path / "out")
    shown = read_video(next((tmp_path / "out").glob("*.mp4")))
    assert (shown.fps, shown.estimated_frames) == (25, 49)


def test_encode_reads_the_file_again_when_memory_runs_out(tmp_path, done, monkeypatch):
    movie, made = write_clip(tmp_path / "a.mp4", 17), tmp_path / "l.safetensors"
    encode = ("encode", movie, "-o", made, "--overwrite", "--chunk", "1")
    done(*encode)
    expected = load_file(made)["latent"]
    with FailingMemory() as memory:
        done(*encode)
    update, counts = ProgressBar.update, []
    noted = lambda bar, count: counts.append(count) or update(bar, count)  # noqa: E731
    monkeypatch.setattr(ProgressBar, "update", noted)
    for later in (250, 150, 50):  # allocations, after the load of the VAE
        counts.clear()
        with FailingMemory(memory.seen - later) as failing:
            done(*encode)
        assert failing.failed == 1
        assert (load_file(made)["latent"] - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert sum(counts) == 17
