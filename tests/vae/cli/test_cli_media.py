"""The options of `encode` and `decode` for ranges, sizes, rates and formats of videos."""

import wave

import pytest
import torch
from safetensors.torch import load_file, save_file

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

import av  # noqa: E402

from fast_video_vae.tests.videos import moving_clip, psnr, stacked, write_clip  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402
from fast_video_vae.vae.media import load_latent, pictures_of, read_audio, read_video  # noqa: E402


@pytest.fixture
def latents(tmp_path):
    """A latent file of ComfyUI, of 13 frames of 64x96 pixels and no rate."""
    path, version = tmp_path / "l.latent", {"latent_format_version_0": torch.zeros(0)}
    save_file({"latent_tensor": torch.randn(1, 16, 4, 8, 12), **version}, path)
    return path


def decoded(vae_path, latents, dtype=torch.uint8):
    vae = load_vae(vae_path, dtype=torch.float32)
    return pictures_of(vae.decode(load_latent(latents).latent), dtype)


@pytest.mark.parametrize(
    ("name", "options", "codec", "depth"),
    [
        ("a.mkv", [], "ffv1 in 16 bits (gbrp16le) encoded by ffv1", 16),
        ("a.png", ["--no-dither"], "png in 16 bits", 16),
        ("a.mp4", ["--codec", "hevc", "--bit-depth", "8"], "hevc in 8 bits", 8),
    ],
)
def test_decode_writes_the_format_of_the_name_or_the_options(
    tmp_path, done, vae_path, latents, name, options, codec, depth
):
    movie = tmp_path / name
    *_, about, last = done("decode", latents, "-o", movie, *options)
    assert about.startswith(codec)
    movie = tmp_path / name.removesuffix(".png")
    assert last == f"wrote {movie}: 13 frames at 16 fps"
    found = read_video(movie / "frame_00000.png" if movie.is_dir() else movie)
    assert found.bit_depth == depth
    if "in 16" in codec:
        first = next(found.frames()).int()
        expected = decoded(vae_path, latents, torch.uint16)[0].int()
        assert (first - expected).abs().max() <= 1
    else:
        with av.open(str(movie)) as container:
            kind = container.streams.video[0].codec_context.name
        assert kind.replace("libdav1d", "av1") == codec.split()[0]
        frames = torch.stack([*found.frames(dtype=torch.uint8)])
        assert psnr(frames, decoded(vae_path, latents)) > 22  # noise; most halve its colours


def test_decode_takes_a_range_of_frames_and_its_audio(tmp_path, done, vae_path, latents):
    sound, movie = tmp_path / "s.wav", tmp_path / "a.mkv"
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(8000) + b"\xff\x1f" * 16000)  # a quarter of a second of silence
    options = "--audio", sound, "--frames", "2-11", "--chunk", 1, "--bit-depth", 8
    lines = done("decode", latents, "-o", movie, *options)
    assert lines[-1] == f"wrote {movie}: 10 frames at 16 fps"
    wanted = decoded(vae_path, latents)[2:12]
    # Chunks may round differently, which changes some values by one level.
    assert (stacked(movie).int() - wanted.int()).abs().float().mean() < 0.01
    found = read_audio(movie)
    # Frames 2 to 11 at 16 per second: from 0.125 s to 0.75 s.
    assert (found.waveform.shape, found.sample_rate) == ((1, 10_000), 16000)
    assert not found.waveform[:, :1999].any()
    assert (found.waveform[:, 2001:] > 0.2).all()


@pytest.mark.parametrize(
    ("options", "frames", "shape", "fps"),
    [
        (["--start", "0.25", "--fps", "12"], range(6, 24, 2), (3, 4, 6), 12),
        (["--size", "40x20", "--frames-limit", "5"], range(5), (2, 2, 5), 24),
    ],
)
def test_encode_reads_a_range(tmp_path, done, vae_path, options, frames, shape, fps):
    source, file = write_clip(tmp_path / "a.mkv", 23, codec="ffv1"), tmp_path / "l.safetensors"
    done("encode", source, "-o", file, *options)
    found = load_latent(file)
    assert (found.latent.shape, found.fps) == ((1, 16, *shape), fps)
    if "--size" not in options:
        vae = load_vae(vae_path, dtype=torch.float32)
        pictures = moving_clip(23, 32, 48)[list(frames)].permute(3, 0, 1, 2).unsqueeze(0)
        torch.testing.assert_close(found.latent, vae.encode(pictures), rtol=1e-4, atol=1e-4)


def test_devices_that_share_a_video_write_the_same_files(tmp_path, done):
    clip, files, movies = write_clip(tmp_path / "clip.mp4", 5, 64, 96), [], []
    for options in ((), ("--devices", "cpu, cpu")):
        files.append(tmp_path / f"{len(files)}.safetensors")
        movies.append(tmp_path / f"{len(movies)}.mkv")
        encoded = done("encode", clip, "-o", files[-1], *options)
        decoded = done("decode", files[0], "-o", movies[-1], *options)
    assert all(any("on cpu, cpu" in line for line in lines) for lines in (encoded, decoded))
    assert torch.equal(*(load_file(path)["latent"] for path in files))
    assert torch.equal(*map(stacked, movies))
