"""Reading video files: pieces, crops, colors, rotation, errors of bad files, and memory."""

import sys

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import refused, script_command, succeeded
from fast_video_vae.tests.videos import (
    av,
    moving_clip,
    stacked,
    write,
    write_with,
)
from fast_video_vae.vae.media import read_video


def test_pieces_hold_consecutive_frames_which_are_cropped_about_the_center(tmp_path):
    for frames, count, expected in ((1, 4, [1]), (9, 4, [4, 4, 1])):
        # An odd size, which is no multiple of swscale's block size.
        clip = moving_clip(frames, 33, 21)
        path = write_with(tmp_path / "a.mkv", clip, "matroska", "ffv1", pix_fmt="bgr0")
        video = read_video(path)
        assert (video.height, video.width) == (33, 21)
        pieces = list(video.pieces(frames=count, multiple=8))
        assert [piece.shape for piece in pieces] == [(1, 3, each, 32, 16) for each in expected]
        assert pieces[0].dtype == torch.uint8
        kept = clip[:, 0:32, 2:18]
        assert torch.equal(torch.cat(pieces, 2)[0].permute(1, 2, 3, 0), kept)  # FFV1 is lossless
        assert torch.equal(stacked(video), clip)


def test_a_colon_in_a_name_does_not_select_a_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("take:1.mp4", moving_clip(2))
    assert len(list(read_video("take:1.mp4").frames())) == 2


def song(path):
    """Write an audio file with a cover image."""
    with av.open(str(path), "w", format="mp4") as output:
        sound = output.add_stream("aac", rate=8000)
        cover = output.add_stream("mjpeg", rate=25)
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic.value  # PyAV 16 needs a number
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
        silence.sample_rate = 8000
        output.mux([*sound.encode(silence), *sound.encode(None)])
        picture = av.VideoFrame.from_ndarray(moving_clip(1)[0].numpy(), format="rgb24")
        output.mux([*cover.encode(picture.reformat(format="yuvj420p")), *cover.encode(None)])


def truncated(container="mp4", **options):
    def make(path):
        whole = write_with(path, moving_clip(60), container, options=options).read_bytes()
        path.write_bytes(whole[: 6 * len(whole) // 10])

    return make


def damaged(path):
    options = {"movflags": "faststart"}
    whole = write_with(path, moving_clip(60), "mp4", options=options).read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + b"\xff" * 200 + whole[middle + 200 :])


@pytest.mark.parametrize(
    ("name", "make", "error", "message"),
    [
        ("none.mp4", lambda path: None, FileNotFoundError, "No such file"),
        ("folder", lambda path: path.mkdir(), IsADirectoryError, "Is a directory"),
        ("empty.mp4", lambda path: path.touch(), ValueError, "is empty; expected a video"),
        ("song.m4a", song, ValueError, "has no video stream, only audio, cover"),
        # the index was at the end, so it is missing
        ("cut.mp4", truncated(), ValueError, "is not a video that .* or it is truncated"),
        # the index is at the front, and lists missing data
        (
            "cut.mp4",
            truncated(movflags="faststart"),
            ValueError,
            r"is truncated: it has \d+ bytes; expected at least \d+|truncated after frame",
        ),
        ("damaged.mp4", damaged, ValueError, r"is broken or truncated after frame \d+"),
        ("cut.mkv", truncated("matroska"), ValueError, r"ends at \d\.\d+ s; expected 2\.50 s"),
    ],
)
def test_the_error_for_a_bad_file_is_one_line_with_its_name(tmp_path, name, make, error, message):
    path = tmp_path / name
    make(path)
    with refused(message, path.name, error=error):
        list(read_video(path).frames())


PEAKS = """
import resource, sys
from fast_video_vae.tests.videos import moving_clip
from fast_video_vae.vae.media import BackgroundWriter, VideoWriter, read_video
side, *lengths = map(int, sys.argv[2:])
picture = moving_clip(1, side, side)
for frames in lengths:
    with VideoWriter(sys.argv[1], 24, overwrite=True) as writer:
        with BackgroundWriter(writer.write) as background:
            for shift in range(frames):
                background.put(picture.roll(shift, 2))
    video = read_video(sys.argv[1])
    assert frames == sum(piece.shape[2] for piece in video.pieces(fps=24, size=(side, side // 2)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Python measures no peak memory on Windows")
def test_memory_does_not_grow_with_length(tmp_path):
    command = script_command(PEAKS, tmp_path / "a.mp4", 256, 33, 161)
    peaks = list(map(int, succeeded(command).stdout.split()))
    # In KiB: half the YUV bytes of the additional frames, a quarter of their RGB bytes.
    assert peaks[1] - peaks[0] < 256 * 256 * 1.5 / 1024 / 2 * (161 - 33)
