"""Video files to latents, whole and in pieces, against ComfyUI's own nodes; errors."""

import logging

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.vae.pairs import as_saved, clip, fast_vae, relative_error, v3_node
from fast_video_vae.tests.nodes.video.clips import (
    assert_encoded,
    components,
    decode,
    deep,
    deep_file,
    encode,
    frames_of,
    from_file,
    held,
    image,
    tone,
    written,
)
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.videos import moving_clip
from fast_video_vae.vae.media import Audio

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.mark.parametrize(("frames", "chunk"), [(1, 0), (4, 1), (5, -1), (18, 1)])
def test_a_lossless_file_gives_the_latent_of_its_frames(fast, tmp_path, frames, chunk):
    pictures = moving_clip(frames, 64, 64)
    video = written(pictures, tmp_path / "x.mkv")
    samples, fps, count, audio = encode(fast, video, chunk=chunk)
    assert_encoded(samples, fast, pictures.float() / 255)
    assert (fps, count, audio) == (16, frames - (frames - 1) % 4, None)


def test_images_of_a_video_are_encoded_without_a_file(fast):
    images = clip(18)  # floats, which keep all of their bits
    (video,) = v3_node("nodes_video", "CreateVideo", images=images, fps=12.0, audio=tone(1))
    samples, fps, count, audio = encode(fast, video)
    assert_encoded(samples, fast, images)
    assert (fps, count) == (12, 17)
    assert torch.equal(audio["waveform"], tone(1)["waveform"])
    assert encode(fast, video, max_frames=6)[3]["waveform"].shape[-1] == 44100 // 2


@pytest.mark.parametrize(("start", "duration"), [(0, 0.5), (0.51, 0.9), (-0.75, 0), (-0.75, 0.5)])
def test_a_trimmed_video_matches_get_video_components(fast, tmp_path, start, duration):
    pictures, wave = moving_clip(33, 64, 64), tone(2)["waveform"][0]
    whole = written(pictures, tmp_path / "x.mkv", audio=Audio(wave, 44100))
    video = whole.as_trimmed(start, duration, strict_duration=False)
    images, *_ = components(video)
    # Its values differ by about one level, because FFmpeg converts RGB to float through 16 bits.
    close = [(pictures - each * 255).abs().amax(dim=(1, 2, 3)) < 2 for each in images]
    shown = [each.nonzero().item() for each in close]
    assert shown == list(range(shown[0], shown[0] + len(shown)))
    samples, _, count, heard = encode(fast, video)
    assert_encoded(samples, fast, pictures[shown].float() / 255)
    assert count == len(images) - (len(images) - 1) % 4
    # The tone marks the start of the audio: ComfyUI mistakes milliseconds for samples.
    begin = round(shown[0] / 16 * 44100 if start < 0 else start * 44100)
    length = round(min(duration or 2, 2 - begin / 44100) * 44100)
    assert heard["sample_rate"] == 44100
    assert abs(heard["waveform"].shape[-1] - length) <= 45  # Matroska's times are milliseconds
    middle = heard["waveform"][0, 0, 100:-100]
    starts = range(max(0, begin + 55), begin + 146)
    assert min((wave[0, at : at + len(middle)] - middle).abs().max() for at in starts) < 1e-3


@pytest.mark.parametrize(
    ("fps", "shown"),
    [
        (8.0, range(0, 17, 2)),
        (32.0, [0, 0, 1, 1, 2, 2, 3, 3, 4]),  # the earlier of two equally near frames
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_another_rate_repeats_or_drops_frames(fast, tmp_path, fps, shown, is_file):
    pictures = moving_clip(17, 64, 64)
    video = written(pictures, tmp_path / "x.mkv") if is_file else held(pictures)
    samples, rate, count, _ = encode(fast, video, fps=fps, max_frames=len(shown))
    assert (rate, count) == (fps, len(shown))
    assert_encoded(samples, fast, pictures[list(shown)].float() / 255)


@pytest.mark.parametrize("is_file", [True, False])
def test_another_size_is_covered_and_center_cropped(fast, tmp_path, is_file):
    pictures = moving_clip(5, 64, 96)
    video = written(pictures, tmp_path / "x.mkv") if is_file else held(pictures)
    for width, height, expected in (
        (0, 0, (8, 12)),
        (48, 0, (4, 6)),  # the height follows the aspect ratio
        (0, 32, (4, 6)),
        (64, 64, (8, 8)),  # the sides are cropped
        (192, 96, (12, 24)),
        (50, 50, (6, 6)),  # to multiples of eight
    ):
        samples, *_ = encode(fast, video, width=width, height=height)
        assert samples.shape[-2:] == expected
        if (width, height) == (64, 64):  # no pixel is resized
            assert_encoded(samples, fast, pictures[:, :, 16:80].float() / 255)


@pytest.mark.parametrize(("most", "count"), [(4, 1), (5, 5), (12, 9), (99, 17)])
def test_max_frames_limits_the_latent(fast, tmp_path, most, count, caplog):
    video = written(moving_clip(17, 64, 64), tmp_path / "x.mkv")
    with caplog.at_level(logging.INFO):
        samples, _, found, _ = encode(fast, video, max_frames=most)
    assert (found, samples.shape[2]) == (count, (count - 1) // 4 + 1)
    read = min(most, 17)
    left_out = f"the last {read - count} of {read} frames are dropped; the VAE needs 4 n + 1"
    assert caplog.text.count("are dropped") == caplog.text.count(left_out) == (read != count)


@pytest.mark.parametrize("kind", ["fast", "stock", "picture_vae"])
def test_files_of_8_and_16_bits_are_encoded_in_full_depth(request, kind, tmp_path, caplog):
    """Frames are pictures for `picture_vae`, and opaque."""
    vae, pictures, images = request.getfixturevalue(kind), moving_clip(18, 64, 64), deep(5)
    with caplog.at_level(logging.INFO):
        samples, fps, count, _ = encode(vae, written(pictures, tmp_path / "x.mkv"), chunk=1)
    assert ("unused: chunk" in caplog.text) == (kind == "stock")
    assert_encoded(samples, vae, pictures[:count].float() / 255)
    assert (fps, count) == (16, 18 if kind == "picture_vae" else 17)
    samples, *_ = encode(vae, deep_file(images, tmp_path / "deep.mkv"))
    assert_encoded(samples, vae, images)
    rounded = written((images * 255).round().byte(), tmp_path / "small.mkv")
    assert relative_error(encode(vae, rounded)[0], samples) > 1e-3


def test_a_file_that_is_not_a_video_is_a_one_line_error(fast, tmp_path):
    (tmp_path / "bad.mkv").write_bytes(b"no video")
    with refused(r"^video: .*bad\.mkv"):
        encode(fast, from_file(tmp_path / "bad.mkv"))
    for video in (written(moving_clip(1, 6, 6), tmp_path / "x.mkv"), held(moving_clip(1, 6, 6))):
        with refused(r"^video: .*expected at least 8x8"):
            encode(fast, video)
    whole = written(moving_clip(5), tmp_path / "x.mkv")
    with refused(r"^video: .* start is 9.0 s"):
        encode(fast, whole.as_trimmed(9, 0, strict_duration=False))
    with refused(r"^video: ", error=FileNotFoundError):
        encode(fast, from_file(tmp_path / "gone.mp4"))


def test_latents_of_seedvr2_are_scaled_as_in_comfyui(tmp_path, output):
    vae = fast_vae(random_seedvr2(), tmp_path)
    for frames in (1, 5):
        images = clip(frames)
        (video,) = v3_node("nodes_video", "CreateVideo", images=images, fps=16.0)
        latent = encode(vae, video)[0]
        assert_encoded(latent, vae, images)
        made = decode(vae, latent, codec="ffv1", bit_depth="8")
        assert torch.equal(frames_of(made), as_saved(image(vae, latent)))
