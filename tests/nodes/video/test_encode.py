"""Video files to latents, whole and in pieces, against ComfyUI's own nodes; errors."""

import logging

import pytest

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.vae.pairs import as_saved, clip, fast_vae, v3_node
from fast_video_vae.tests.nodes.video.clips import (
    assert_encoded,
    components,
    decode,
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


@pytest.mark.parametrize(
    ("kind", "most", "chunk"),
    [("fast", 1, 0), ("fast", 7, -1), ("stock", 99, 1), ("picture_vae", 7, 1)],
)
def test_a_file_gives_the_latent_of_its_frames(request, kind, tmp_path, caplog, most, chunk):
    """In the depth of the file; frames are pictures for `picture_vae`, and opaque."""
    vae, pictures, read = request.getfixturevalue(kind), moving_clip(10, 64, 64), min(most, 10)
    count = read if kind == "picture_vae" else read - (read - 1) % 4
    video = written(pictures, tmp_path / "x.mkv")
    with caplog.at_level(logging.INFO):
        samples, *rest = encode(vae, video, chunk=chunk, max_frames=most)
    assert_encoded(samples, vae, pictures[:count].float() / 255)
    assert rest == [16, count, None]
    left_out = f"the last {read - count} of {read} frames are dropped; the VAE needs 4 n + 1"
    assert caplog.text.count(left_out) == (read != count and kind == "fast")
    assert ("unused: chunk" in caplog.text) == (kind == "stock" and chunk != 0)
    if most == 1:
        deep = (clip(5) * 65535).round() / 65535
        samples, *_ = encode(vae, deep_file(deep, tmp_path / "deep.mkv"))
        assert_encoded(samples, vae, deep)


def test_images_of_a_video_are_encoded_without_a_file(fast):
    images = clip(10)  # floats, which keep all of their bits
    (video,) = v3_node("nodes_video", "CreateVideo", images=images, fps=12.0, audio=tone(1))
    samples, fps, count, audio = encode(fast, video)
    assert_encoded(samples, fast, images)
    assert (fps, count) == (12, 9)
    assert audio["waveform"].equal(tone(1)["waveform"])
    assert encode(fast, video, max_frames=6)[3]["waveform"].shape[-1] == 44100 // 2


@pytest.mark.parametrize(("start", "duration"), [(0, 0.5), (0.51, 0.9), (-0.75, 0.5)])
def test_a_trimmed_video_matches_get_video_components(fast, tmp_path, start, duration):
    pictures, wave = moving_clip(33, 64, 64), tone(2)["waveform"][0]
    whole = written(pictures, tmp_path / "x.mkv", audio=Audio(wave, 44100))
    video = whole.as_trimmed(start, duration, strict_duration=False)
    images, *_ = components(video)
    # Its values differ by about one level, because FFmpeg converts RGB to float through 16 bits.
    close = [(pictures - each * 255).abs().amax(dim=(1, 2, 3)) < 2 for each in images]
    shown = [each.nonzero().item() for each in close]
    samples, _, count, heard = encode(fast, video)
    assert_encoded(samples, fast, pictures[shown].float() / 255)
    assert count == len(images) - (len(images) - 1) % 4
    # The tone marks the start of the audio: ComfyUI mistakes milliseconds for samples.
    begin = round(shown[0] / 16 * 44100 if start < 0 else start * 44100)
    # Matroska's times are milliseconds.
    assert abs(heard["waveform"].shape[-1] - round(duration * 44100)) <= 45
    middle = heard["waveform"][0, 0, 100:-100]
    starts = range(max(0, begin + 55), begin + 146)
    assert min((wave[0, at : at + len(middle)] - middle).abs().max() for at in starts) < 1e-3


@pytest.mark.parametrize("is_file", [True, False])
def test_another_rate_repeats_or_drops_frames_and_another_size_is_center_cropped(
    fast, tmp_path, is_file
):
    pictures = moving_clip(17, 64, 96)
    video = written(pictures, tmp_path / "x.mkv") if is_file else held(pictures)
    # Of two equally near frames the earlier.
    for fps, shown in ((8.0, range(0, 9, 2)), (32.0, [0, 0, 1, 1, 2])):
        samples, *rest = encode(fast, video, fps=fps, max_frames=len(shown))
        assert rest == [fps, len(shown), None]
        assert_encoded(samples, fast, pictures[list(shown)].float() / 255)
    for width, height, expected in (
        (48, 0, (4, 6)),  # the height follows the aspect ratio
        (0, 32, (4, 6)),
        (50, 50, (6, 6)),  # cropped to multiples of eight
        (64, 64, (8, 8)),  # the sides are cropped, no pixel is resized
    ):
        samples, *_ = encode(fast, video, width=width, height=height, max_frames=1)
        assert samples.shape[-2:] == expected
    assert_encoded(samples, fast, pictures[:1, :, 16:80].float() / 255)


def test_a_file_that_is_not_a_video_is_a_one_line_error(fast, tmp_path):
    (tmp_path / "bad.mkv").write_bytes(b"no video")
    small, whole = moving_clip(1, 6, 6), written(moving_clip(5), tmp_path / "y.mkv")
    for video, reason, error in (
        (from_file(tmp_path / "bad.mkv"), r".*bad\.mkv", ValueError),
        (from_file(tmp_path / "gone.mp4"), "", FileNotFoundError),
        (written(small, tmp_path / "x.mkv"), ".*expected at least 8x8", ValueError),
        (held(small), ".*expected at least 8x8", ValueError),
        (whole.as_trimmed(9, 0, strict_duration=False), ".* start is 9.0 s", ValueError),
    ):
        with refused(f"^video: {reason}", error=error):
            encode(fast, video)


def test_latents_of_seedvr2_are_scaled_as_in_comfyui(tmp_path, output):
    vae, images = fast_vae(random_seedvr2(), tmp_path), clip(5)
    latent = encode(vae, held(images * 255))[0]
    assert_encoded(latent, vae, images)
    made = decode(vae, latent, codec="ffv1", bit_depth="8")
    assert frames_of(made).equal(as_saved(image(vae, latent)))
