"""Writing video files: colors, tags, invalid options, and the files left after a failure."""

import errno
import json
from contextlib import nullcontext

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.videos import av, moving_clip, stacked, write
from fast_video_vae.vae.media import BackgroundWriter, VideoWriter, pictures_of


def test_written_colors_are_those_of_their_tags(tmp_path):
    """By the reader, which `test_deep_video.py` compares with the formula of BT.709."""
    colors = torch.tensor([[0, 0, 0], [20, 60, 180], [250, 3, 99]], dtype=torch.uint8)
    path = write(tmp_path / "a.mp4", colors[:, None, None].expand(3, 32, 48, 3), quality=100)
    # Half a level of rounding and one of x264 at crf 1, in Y, Cb and Cr, times the matrix.
    assert (stacked(path).float().mean((1, 2)) - colors).abs().max() <= 3


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "no frames were written"),
        ([torch.zeros(0, 64, 64, 3)], "no frames were written"),
        ([moving_clip(2), moving_clip(2, 32)], "frames are 64x32; expected 64x48"),
        ([torch.zeros(1, 32, 32, 4, dtype=torch.uint8)], r"\[1, 32, 32, 4\]"),
        ([torch.zeros(32, 32, 3, dtype=torch.uint8)], r"\[32, 32, 3\]"),
        ([torch.zeros(1, 32, 32, 3, dtype=torch.int16)], "int16; expected"),
    ],
)
def test_missing_or_invalid_frames_are_refused(tmp_path, pieces, message):
    def work():
        with VideoWriter(tmp_path / "a.mp4", 24) as writer:
            for each in pieces:
                writer.write(each)

    with pytest.raises(ValueError, match=message):
        work()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("threaded", [False, True])
def test_a_full_disk_leaves_only_the_old_file(tmp_path, limited_files, threaded):
    """It is full while frames are written, or at the last byte, when the index moves."""
    noise = torch.randint(256, (40, 64, 64, 3), dtype=torch.uint8)
    codec, suffix = ("prores", ".mov") if threaded else ("h264", ".mp4")
    whole = write(tmp_path / f"whole{suffix}", noise, codec=codec).stat().st_size
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"old")

    def work():
        with (
            VideoWriter(path, 24, codec=codec, overwrite=True) as writer,
            BackgroundWriter(writer.write) if threaded else nullcontext() as thread,
        ):
            for piece in noise.split(4):
                thread.put(piece) if threaded else writer.write(piece)

    with (
        limited_files(20_000 if threaded else whole - 1),
        pytest.raises(OSError, match=rf"File too large: .*a\{suffix}") as caught,
    ):
        work()
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert {file.name for file in tmp_path.iterdir()} == {f"a{suffix}", f"whole{suffix}"}


# 4 channels: alpha is dropped.
@pytest.mark.parametrize(("dtype", "channels"), [(torch.float32, 3), (torch.bfloat16, 4)])
def test_frames_are_rounded_as_in_comfyui(dtype, channels):
    generator = torch.Generator().manual_seed(0)
    frames = torch.empty(1, channels, 3, 8, 6).uniform_(-1.4, 1.4, generator=generator).to(dtype)
    # VAE.decode followed by SaveVideo in ComfyUI 0.33.
    image = ((frames.float() + 1) / 2).clamp(0, 1)[0].movedim(0, -1)
    pictures = pictures_of(frames, torch.uint8)
    assert torch.equal(pictures, (image * 255).clamp(0, 255).byte()[..., :3])
    assert (pictures.min(), pictures.max()) == (0, 255)
    for wrong in (frames.expand(2, -1, -1, -1, -1), frames[:, :2], frames[0]):
        with refused("expected \\[1, 3 or 4, T, H, W\\]"):
            pictures_of(wrong, torch.uint8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.mp4", {"fps": 0}, "fps is 0"),
        ("a.gif", {}, "a.gif is not a video file; expected a name such as"),
        ("a.png", {}, "a.png is not a file for h264; expected .mp4 or .mov"),
        ("a.mp4", {"codec": "ffv1"}, "a.mp4 is not a file for ffv1; expected .mkv"),
        ("a.mp4", {"quality": 101}, "quality is 101; expected 0 to 100"),
        ("a.mp4", {"quality": -1}, "quality is -1"),
    ],
)
def test_invalid_options_are_refused_before_any_work(tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        VideoWriter(tmp_path / name, **{"fps": 24, **options})


# One per container: tags do not depend on the codec.
@pytest.mark.parametrize(
    ("codec", "suffix"), [("h264", ".mp4"), ("prores", ".mov"), ("vp9", ".webm"), ("ffv1", ".mkv")]
)
def test_tags_of_any_content_are_kept(tmp_path, codec, suffix):
    tags = {"prompt": json.dumps({"text": 'ü"\n' * 20_000}), "workflow": "{}"}
    path = write(tmp_path / f"a{suffix}", moving_clip(2, 64, 64), codec=codec, metadata=tags)
    with av.open(str(path)) as container:
        found = {key.lower(): value for key, value in container.metadata.items()}
    assert {key: found[key] for key in tags} == tags
