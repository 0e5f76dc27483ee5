"""Parts of a video, at another rate and size, from a path or from memory."""

import io
from fractions import Fraction

import pytest
import torch

from fast_video_vae.tests.videos import (
    av,
    moving_clip,
    numbered_clip,
    numbers,
    stacked,
    write,
    write_with,
)
from fast_video_vae.vae.media import read_video

CONTAINERS = [
    ("mp4", "h264", "mp4"),
    ("matroska", "h264", "mkv"),
    ("webm", "libvpx", "webm"),
    ("mpegts", "h264", "ts"),
    ("avi", "mpeg4", "avi"),
]


@pytest.mark.parametrize(("container", "codec", "suffix"), CONTAINERS)
@pytest.mark.parametrize(
    ("start", "duration", "expected"),
    [
        (0.0, 1.0, range(24)),
        (1.0, 1.0, range(24, 48)),  # stretches that meet
        (5 / 24, 1 / 24, range(5, 6)),  # a lone frame
        (1.26, 0.5, range(31, 43)),  # between two frames
        (3.0, None, range(72, 100)),
        (99 / 24, 9.0, range(99, 100)),  # past the end
    ],
)
def test_a_stretch_is_exact(tmp_path, container, codec, suffix, start, duration, expected):
    def short_groups(stream):
        stream.codec_context.gop_size = 10

    path = tmp_path / f"a.{suffix}"
    write_with(path, moving_clip(100), container, codec, prepare=short_groups)
    video = read_video(path)
    found = torch.stack(list(video.frames(start, duration)))
    assert torch.equal(found, stacked(video)[expected.start : expected.stop])
    assert video.estimate(start=start, duration=duration) == len(expected)


def test_a_stretch_skips_what_lies_before(tmp_path):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (300, 48, 64, 3), dtype=torch.uint8, generator=generator)
    path = write_with(
        tmp_path / "a.mp4",
        noise,
        "mp4",
        prepare=lambda stream: setattr(stream.codec_context, "gop_size", 10),
    )
    whole = path.read_bytes()

    class Counted(io.BytesIO):
        taken = 0

        def read(self, count=-1):
            data = super().read(count)
            self.taken += len(data)
            return data

    file = Counted(whole)
    video = read_video(file)
    file.taken = 0
    assert len(list(video.frames(295 / 24))) == 5
    assert file.taken < len(whole) / 4


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_stretch_counts_from_the_first_frame_of_a_late_video(tmp_path, container):
    path = tmp_path / "late"
    with av.open(str(path), "w", format=container) as output:
        stream = output.add_stream("h264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index, picture in enumerate(numbered_clip(48).contiguous().numpy()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = index + 240, Fraction(1, 24)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    found = list(read_video(path).frames(1.0, 0.25))
    assert numbers(torch.stack(found)) == [24, 25, 26, 27, 28, 29]


@pytest.mark.parametrize("container", ["matroska", "mp4"])
def test_a_varying_rate_is_shown_as_it_was_timed(tmp_path, container):
    times = [0, 40, 80, 500, 1000, 1040, 2000]
    path = tmp_path / "a"
    write_with(path, numbered_clip(7), container, times=times)
    video = read_video(path)
    (piece,) = video.pieces(frames=99, fps=Fraction(10), duration=2.0)
    # At 0, 100, ... 1900 ms the nearest of the times above; the last is past the end.
    expected = [
        min(range(6), key=lambda i: abs(times[i] - moment)) for moment in range(0, 2000, 100)
    ]
    assert numbers(piece[0].permute(1, 2, 3, 0)) == expected


@pytest.mark.parametrize(("suffix", "codec"), [("mp4", "h264"), ("mkv", "ffv1"), ("webm", "vp9")])
@pytest.mark.parametrize(
    ("fps", "expected"),
    [
        (24, list(range(24))),
        (12, list(range(0, 24, 2))),
        (48, [number for number in range(24) for _ in range(2)]),
        (16, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22]),
    ],
)
def test_another_rate_repeats_or_leaves_out(tmp_path, suffix, codec, fps, expected):
    path = write(tmp_path / f"a.{suffix}", numbered_clip(24), codec=codec)
    video = read_video(path)
    pieces = list(video.pieces(fps=Fraction(fps)))
    assert numbers(torch.cat(pieces, dim=2)[0].permute(1, 2, 3, 0)) == expected
    assert video.estimate(fps=Fraction(fps)) == len(expected)


def test_a_limit_ends_the_reading(tmp_path):
    video = read_video(write(tmp_path / "a.mp4", numbered_clip(24)))
    assert [piece.shape[2] for piece in video.pieces(limit=6)] == [4, 2]
    (piece,) = video.pieces(limit=3, fps=Fraction(8), start=0.5)
    assert numbers(piece[0].permute(1, 2, 3, 0)) == [12, 15, 18]
    assert video.estimate(limit=6) == 6


@pytest.mark.parametrize(
    ("size", "multiple", "shape"),
    [
        ((48, 64), 1, (48, 64)),
        ((24, 32), 1, (24, 32)),  # half of it
        ((24, 24), 1, (24, 24)),  # the sides are cut off
        ((24, 64), 1, (24, 64)),  # top and bottom are
        ((96, 128), 1, (96, 128)),  # grown
        ((37, 51), 8, (32, 48)),  # then cropped to multiples
    ],
)
def test_a_size_is_covered_and_cropped(tmp_path, size, multiple, shape):
    frames = moving_clip(2)
    path = write(tmp_path / "a.mkv", frames, codec="ffv1")
    (piece,) = read_video(path).pieces(size=size, multiple=multiple)
    assert piece.shape == (1, 3, 2, *shape)
    # The mean over the pixels that each one covers, taken by PyTorch: the picture is smooth.
    scale = max(size[0] / 48, size[1] / 64)
    full = [max(side, round(of * scale)) for side, of in zip(size, (48, 64), strict=True)]
    images = frames.permute(0, 3, 1, 2).float()
    grown = torch.nn.functional.interpolate(images, full, mode="bilinear", antialias=True)
    top, left = (full[0] - shape[0]) // 2, (full[1] - shape[1]) // 2
    expected = grown[:, :, top : top + shape[0], left : left + shape[1]]
    assert (piece[0].permute(1, 0, 2, 3).float() - expected).abs().mean() < 2


def test_a_shrunk_picture_does_not_flicker(tmp_path):
    stripes = torch.zeros(1, 96, 96, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    path = write(tmp_path / "a.mkv", stripes, codec="ffv1")
    (piece,) = read_video(path).pieces(size=(24, 24))
    assert (piece.float() - 127.5).abs().max() < 3


def test_a_file_in_memory_is_read_as_one_on_the_disk(tmp_path):
    path = write(tmp_path / "a.mp4", moving_clip(30))
    file = io.BytesIO(path.read_bytes())
    file.read(100)  # wherever it stands
    video, expected = read_video(file), read_video(path)
    assert (video.height, video.width, video.fps, video.estimated_frames) == (48, 64, 24, 30)
    assert torch.equal(stacked(video), stacked(expected))
    assert torch.equal(stacked(video), stacked(expected))
    # Two readers at once, each at a place of its own.
    for first, second in zip(video.frames(), video.frames(0.5), strict=False):
        assert not torch.equal(first, second)
    assert len(list(video.frames(0.5))) == 18
    assert not file.closed
    with path.open("rb") as opened:
        assert len(list(read_video(opened).frames())) == 30


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "the video is empty"), (b"no" * 999, "the video is not a video that FFmpeg can read")],
)
def test_a_bad_file_in_memory_is_one_line(data, message):
    with pytest.raises(ValueError, match=message):
        read_video(io.BytesIO(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1.0}, "start is -1.0 s; expected 0 or more"),
        ({"start": float("nan")}, "start is nan s"),
        ({"start": 60.0}, r"a\.mp4 lasts 0\.50 s; start is 60\.0 s"),
        ({"duration": 0.0}, "duration is 0.0 s; expected more than 0"),
        ({"fps": 0}, "fps is 0; expected more than 0"),
        ({"limit": 0}, "limited to 0; expected at least 1"),
        ({"frames": 0}, "frames are 0"),
        ({"size": (4, 4), "multiple": 8}, r"a\.mp4 is 64x48 and the wanted size is 4x4; expected"),
    ],
)
def test_what_cannot_be_read_is_told_before_any_work(tmp_path, options, message):
    video = read_video(write(tmp_path / "a.mp4", moving_clip(12)))
    with pytest.raises(ValueError, match=message):
        video.pieces(**options)


def test_a_stretch_behind_the_last_frame_is_an_error(tmp_path):
    video = read_video(write(tmp_path / "a.mp4", moving_clip(12)))
    with pytest.raises(ValueError, match=r"a\.mp4 has no frame at 0\.6 s or later"):
        next(video.pieces(start=0.6))
