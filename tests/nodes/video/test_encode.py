"""Video files to latents, whole and in pieces, against ComfyUI's own nodes; errors."""

import itertools
import logging

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.vae.pairs import (
    as_saved,
    clip,
    fast_vae,
    relative_error,
    v3_node,
)
from fast_video_vae.tests.nodes.video.clips import (
    assert_encoded,
    components,
    deep,
    deep_file,
    encode,
    held,
    image,
    smooth,
    tone,
    written,
)
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.vae import StreamOptions

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.mark.parametrize(("frames", "chunk"), [(1, 0), (4, 1), (5, -1), (17, 1), (18, 0)])
def test_a_lossless_file_gives_the_latent_of_its_frames(fast, tmp_path, frames, chunk):
    pictures = smooth(frames)
    video = written(pictures, tmp_path / "x.mkv")
    samples, fps, count, audio = encode(fast, video, chunk=chunk)
    assert_encoded(samples, fast, pictures.float() / 255)
    assert (fps, count, audio) == (16, frames - (frames - 1) % 4, None)


def test_images_of_a_video_are_encoded_without_a_file(fast):
    images = clip(18)
    (video,) = v3_node("nodes_video", "CreateVideo", images=images, fps=12.0, audio=tone(1))
    samples, fps, count, audio = encode(fast, video)
    assert_encoded(samples, fast, images)
    assert (fps, count) == (12, 17)
    assert torch.equal(audio["waveform"], tone(1)["waveform"])


@pytest.mark.parametrize(
    ("start", "duration"),
    [(0, 0), (0, 0.5), (0.5, 0), (0.51, 0.9), (-0.75, 0), (-0.75, 0.5)],
)
def test_a_trimmed_video_matches_get_video_components(fast, tmp_path, start, duration):
    from fast_video_vae.vae.media import Audio

    pictures = smooth(33)
    sound = Audio(tone(2)["waveform"][0], 44100)
    whole = written(pictures, tmp_path / "x.mkv", audio=sound)
    video = whole.as_trimmed(start, duration, strict_duration=False)
    images, audio, _ = components(video)
    # Its values differ by up to one level, because FFmpeg converts RGB to float through 16 bits.
    shown = [matching(each * 255, pictures.float(), 1) for each in images]
    assert shown == list(range(shown[0], shown[0] + len(shown)))
    samples, _, count, heard = encode(fast, video)
    assert_encoded(samples, fast, pictures[shown].float() / 255)
    assert count == len(images) - (len(images) - 1) % 4
    # The tone marks the start of the audio: ComfyUI mistakes milliseconds for samples.
    begin = round(shown[0] / 16 * 44100 if start < 0 else start * 44100)
    length = round(min(duration or 2, 2 - begin / 44100) * 44100)
    ours = heard["waveform"][0, 0]
    assert heard["sample_rate"] == audio["sample_rate"] == 44100
    assert abs(len(ours) - length) <= 45  # Matroska's times are milliseconds
    middle = ours[100:-100]
    wave = tone(2)["waveform"][0, 0]
    starts = range(max(0, begin + 55), begin + 146)
    distances = [(wave[at : at + len(middle)] - middle).abs().max() for at in starts]
    assert min(distances) < 1e-3


def matching(picture, pictures, tolerance):
    """Return the index of the most similar picture."""
    distances = (pictures - picture).abs().amax(dim=(1, 2, 3))
    (found,) = (distances <= tolerance).nonzero()
    return found.item()


@pytest.mark.parametrize(
    ("fps", "shown"),
    [
        (16.0, range(0, 17)),
        (8.0, range(0, 17, 2)),
        (32.0, [0, 0, 1, 1, 2, 2, 3, 3, 4]),  # the earlier of two equally near frames
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_another_rate_repeats_or_drops_frames(fast, tmp_path, fps, shown, is_file):
    pictures = smooth(17)
    video = written(pictures, tmp_path / "x.mkv") if is_file else held(pictures)
    samples, rate, count, _ = encode(fast, video, fps=fps, max_frames=len(shown))
    assert (rate, count) == (fps, len(shown))
    assert_encoded(samples, fast, pictures[list(shown)].float() / 255)


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (0, 0, (64, 96)),
        (48, 0, (32, 48)),  # the height follows the aspect ratio
        (0, 32, (32, 48)),
        (64, 64, (64, 64)),  # the sides are cropped
        (192, 96, (96, 192)),
        (50, 50, (48, 48)),  # to multiples of eight
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_another_size_is_covered_and_center_cropped(
    fast, tmp_path, width, height, expected, is_file
):
    pictures = smooth(5, 64, 96)
    video = written(pictures, tmp_path / "x.mkv") if is_file else held(pictures)
    samples, *_ = encode(fast, video, width=width, height=height)
    assert samples.shape[-2:] == (expected[0] // 8, expected[1] // 8)
    if (width, height) == (64, 64):  # no pixel is resized
        assert_encoded(samples, fast, pictures[:, :, 16:80].float() / 255)


@pytest.mark.parametrize(("most", "count"), [(1, 1), (4, 1), (5, 5), (12, 9), (99, 17)])
def test_max_frames_limits_the_latent(fast, tmp_path, most, count, caplog):
    video = written(smooth(17), tmp_path / "x.mkv")
    with caplog.at_level(logging.INFO):
        samples, _, found, _ = encode(fast, video, max_frames=most)
    assert found == count
    assert samples.shape[2] == (count - 1) // 4 + 1
    read = min(most, 17)
    left_out = f"the last {read - count} of {read} frames are dropped; the VAE needs 4 n + 1"
    assert (left_out in caplog.text) == (read != count)
    assert caplog.text.count("are dropped") == (read != count)


def test_another_vae_encodes_with_its_own_method(stock, tmp_path, caplog):
    pictures, images = smooth(18), deep(5)
    with caplog.at_level(logging.INFO):
        samples, fps, count, _ = encode(stock, written(pictures, tmp_path / "x.mkv"), chunk=1)
    assert torch.equal(samples, stock.encode(pictures.float() / 255))
    assert (fps, count) == (16, 17)
    assert "unused: chunk" in caplog.text
    samples, *_ = encode(stock, deep_file(images, tmp_path / "deep.mkv"))
    assert torch.equal(samples, stock.encode(images))


def test_a_file_of_16_bits_is_encoded_in_full_depth(fast, tmp_path):
    images = deep(9)
    samples, *_ = encode(fast, deep_file(images, tmp_path / "x.mkv"))
    assert_encoded(samples, fast, images)
    rounded = (images * 255).round().byte()
    small, *_ = encode(fast, written(rounded, tmp_path / "small.mkv"))
    assert relative_error(small, samples) > 1e-3


def test_an_image_vae_encodes_each_frame_as_opaque(picture_vae, tmp_path):
    pictures, images = smooth(3), deep(2)
    samples, _, count, _ = encode(picture_vae, written(pictures, tmp_path / "x.mkv"))
    assert count == 3
    assert_encoded(samples, picture_vae, pictures.float() / 255)
    samples, *_ = encode(picture_vae, deep_file(images, tmp_path / "deep.mkv"))
    assert_encoded(samples, picture_vae, images)


def test_a_file_that_is_not_a_video_is_a_one_line_error(fast, tmp_path):
    from comfy_api.latest import InputImpl

    (tmp_path / "bad.mkv").write_bytes(b"no video")
    with refused(r"^video: .*bad\.mkv"):
        encode(fast, InputImpl.VideoFromFile(str(tmp_path / "bad.mkv")))
    with refused(r"^video: .*expected at least 8x8"):
        encode(fast, written(smooth(1, 6, 6), tmp_path / "small.mkv"))
    with refused(r"^video: ", error=FileNotFoundError):
        encode(fast, InputImpl.VideoFromFile(str(tmp_path / "gone.mp4")))


@pytest.fixture(scope="module")
def seedvr2_vae(comfyui, tmp_path_factory):
    return fast_vae(random_seedvr2(), tmp_path_factory.mktemp("vae"))


def decoded(vae, latent, **options):
    from fast_video_vae.nodes.video.stream import decode_pictures

    return torch.cat(list(decode_pictures(vae, latent, **options)))


def encoded(vae, pieces, chunk=None, **options):
    from fast_video_vae.nodes.video.stream import encode_video

    return encode_video(vae, lambda: iter(pieces), options=StreamOptions(chunk), **options)


def cut(images, lengths):
    """Pieces `[1, C, n, H, W]` in [-1, 1] of an IMAGE."""
    ends = list(itertools.accumulate(lengths))
    video = (images * 2 - 1).movedim(-1, 0).unsqueeze(0)
    return [video[:, :, end - length : end] for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [
        ([1], None),  # a picture
        ([1, 4], 2),
        ([4, 1], None),  # the first group ends in the second piece
        ([1] * 9, 2),
        ([3, 8, 6], None),
        ([3, 8, 6], 2),
    ],
)
def test_pieces_of_any_length_give_the_same_latent(fast, lengths, chunk):
    images = clip(sum(lengths))
    assert_encoded(encoded(fast, cut(images, lengths), chunk=chunk), fast, images)
    with pytest.raises(ValueError, match="the video has no frames"):
        encoded(fast, [])


@pytest.mark.parametrize("frames", [1, 5])
def test_latents_of_seedvr2_are_scaled_as_in_comfyui(seedvr2_vae, frames):
    images = clip(frames)
    latent = encoded(seedvr2_vae, cut(images, [frames]))
    assert_encoded(latent, seedvr2_vae, images)
    assert torch.equal(decoded(seedvr2_vae, latent), as_saved(image(seedvr2_vae, latent)))


def test_a_video_is_checked_and_read_once_unless_memory_runs_out(fast):
    from fast_video_vae.nodes.video.stream import encode_video

    images, reads = clip(9), []

    def pieces():
        reads.append([])
        for piece in cut(images, [1, 4, 4]):
            reads[-1].append(piece)
            yield piece

    assert_encoded(encode_video(fast, pieces), fast, images)
    assert [len(each) for each in reads] == [3]
    with FailingMemory() as memory:
        encode_video(fast, pieces)
    reads.clear()
    with FailingMemory(memory.seen * 3 // 4):
        assert_encoded(encode_video(fast, pieces), fast, images)
    assert len(reads) == 2
    assert len(reads[-1]) == 3
