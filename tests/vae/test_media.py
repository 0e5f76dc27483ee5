"""Video files in and out: the frames, their colours, and whatever can be wrong with a file."""

import errno
import subprocess
import sys
import wave
from fractions import Fraction

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import module_command

av = pytest.importorskip("av", reason="PyAV is not installed")

from av.stream import Disposition  # noqa: E402

from fast_video_vae.vae.media import VideoWriter, frames_to_uint8, read_video  # noqa: E402

# What binds the checkout to its name, as in `module_command`, for a program of our own.
BIND = ";".join(module_command("")[2].split(";")[:2]) + "\n"
# Matrix numbers of ISO/IEC 23091-2 and their weights of red and blue.
WEIGHTS = {1: (0.2126, 0.0722), 2: (0.299, 0.114), 6: (0.299, 0.114), 9: (0.2627, 0.0593)}
COLORS = [
    (0, 0, 0), (255, 255, 255), (128, 128, 128), (255, 0, 0), (0, 255, 0), (0, 0, 255),
    (200, 120, 40), (20, 60, 180), (250, 3, 99),
]  # fmt: skip
# Half a level of rounding in each of Y, Cb and Cr, seen through the matrix: 1.164 + 2.11 halves.
RGB_ROUNDING = 2
CODEC = 1  # what x264 at crf 1 does to a picture of one colour


def moving_clip(frames, height=48, width=64):
    """Smooth pictures that move, `[T, H, W, 3]` uint8; no two frames are equal."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    t = torch.arange(frames).view(-1, 1, 1) / 16
    gray = 0.5 + 0.4 * torch.sin(6 * (x + t)) * torch.cos(5 * (y - t))
    tint = 0.1 * torch.stack([x.expand_as(gray), y.expand_as(gray), -x.expand_as(gray)], dim=-1)
    return ((gray.unsqueeze(-1) + tint).clamp(0, 1) * 255).round().to(torch.uint8)


def write(path, frames, fps=24, **options):
    with VideoWriter(path, fps, **options) as writer:
        writer.write(frames)
    return path


def write_with(
    path, frames, container, codec="h264", options=None, pix_fmt="yuv420p", prepare=None
):
    """Write `[T, H, W, 3]` with PyAV alone, in any container."""
    with av.open(str(path), "w", format=container, options=options or {}) as output:
        stream = output.add_stream(codec, rate=24)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pix_fmt
        if prepare:
            prepare(stream)
        for picture in frames.numpy():
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            output.mux(stream.encode(frame.reformat(format=pix_fmt)))
        output.mux(stream.encode(None))
    return path


def yuv(color, matrix, full=False):
    """The formula of ITU-R BT.709 and BT.601: a colour of 0-255 to Y, Cb, Cr of 8 bits."""
    red, blue = WEIGHTS[matrix]
    r, g, b = (value / 255 for value in color)
    y = red * r + (1 - red - blue) * g + blue * b
    cb, cr = (b - y) / (2 - 2 * blue), (r - y) / (2 - 2 * red)
    return (255 * y, 128 + 255 * cb, 128 + 255 * cr) if full else (
        16 + 219 * y, 128 + 224 * cb, 128 + 224 * cr
    )  # fmt: skip


def stacked(video):
    return torch.stack(list(video.frames()))


def test_a_video_comes_back_frame_by_frame(tmp_path):
    frames = moving_clip(37)
    video = read_video(write(tmp_path / "a.mp4", frames, Fraction(30000, 1001)))
    assert (video.height, video.width, video.fps) == (48, 64, Fraction(30000, 1001))
    assert video.estimated_frames == 37
    for _ in range(2):  # a video can be read more than once
        back = stacked(video)
        assert back.shape == frames.shape
        # 8 bits of YUV and crf 16; a frame off by one would differ by about 8.
        assert (back.int() - frames.int()).abs().float().mean() < 1.5


@pytest.mark.parametrize(
    ("frames", "size", "expected"),
    [
        (1, 4, [1]),  # a lone frame
        (3, 4, [3]),  # one short of a piece
        (8, 4, [4, 4]),  # whole pieces
        (9, 4, [4, 4, 1]),
        (5, 1, [1] * 5),
    ],
)
def test_pieces_are_the_frames_in_runs(tmp_path, frames, size, expected):
    video = read_video(write(tmp_path / "a.mp4", moving_clip(frames)))
    pieces = list(video.pieces(frames=size))
    assert [piece.shape for piece in pieces] == [(1, 3, count, 48, 64) for count in expected]
    assert pieces[0].dtype == torch.uint8
    joined = torch.cat(pieces, dim=2)[0].permute(1, 2, 3, 0)
    assert torch.equal(joined, stacked(video))


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (48, 64, (48, 64)),
        (50, 70, (48, 64)),  # an even rim on both sides
        (33, 21, (32, 16)),  # odd, and no multiple of what swscale works in
    ],
)
def test_pieces_are_cropped_about_the_centre(tmp_path, height, width, expected):
    frames = moving_clip(3, height, width)
    path = write_with(tmp_path / "a.mkv", frames, "matroska", "ffv1", pix_fmt="bgr0")
    video = read_video(path)
    assert (video.height, video.width) == (height, width)
    top, left = (height - expected[0]) // 2, (width - expected[1]) // 2
    (piece,) = video.pieces(multiple=8)
    kept = frames[:, top : top + expected[0], left : left + expected[1]]
    assert torch.equal(piece[0].permute(1, 2, 3, 0), kept)  # lossless, so the very pixels


def test_a_picture_smaller_than_the_multiple_is_an_error(tmp_path):
    path = write(tmp_path / "a.mp4", moving_clip(1, 6, 64))
    with pytest.raises(ValueError, match=r"a\.mp4 is 64x6; expected at least 8x8"):
        next(read_video(path).pieces(multiple=8))


@pytest.mark.parametrize("color", COLORS)
def test_written_colors_are_bt709(tmp_path, color):
    path = write(
        tmp_path / "a.mp4",
        torch.tensor(color, dtype=torch.uint8).expand(2, 32, 48, 3),
        crf=1,
    )
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
        context = container.streams.video[0].codec_context
        tags = (context.colorspace, context.color_primaries, context.color_trc, context.color_range)
    assert tags == (1, 1, 1, 1)  # BT.709 three times, and the limited range
    assert frame.format.name == "yuv420p"
    planes = frame.to_ndarray()
    got = planes[5, 7], planes[32].reshape(2, 24)[0, 5], planes[40].reshape(2, 24)[0, 5]
    assert np.abs(np.subtract(got, yuv(color, 1), dtype=float)).max() <= 0.5 + CODEC
    back = stacked(read_video(path))[0].float().mean(dim=(0, 1))
    assert (back - torch.tensor(color)).abs().max() <= RGB_ROUNDING + CODEC


@pytest.mark.parametrize(
    ("matrix", "full"),
    [
        (1, False),  # BT.709, as HD video is
        (1, True),
        (6, False),  # BT.601, as SD video is
        (6, True),  # as JPEG is
        (9, False),  # BT.2020
        (2, False),  # no tag: FFmpeg takes BT.601
    ],
)
def test_reading_honours_the_tags_of_a_file(tmp_path, matrix, full):
    color = (200, 40, 90)  # BT.601 and BT.709 differ by more than 10 levels here
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("h264", rate=24, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.codec_context.colorspace = matrix
        stream.codec_context.color_range = 2 if full else 1
        frame = av.VideoFrame(48, 32, "yuv420p")
        for plane, value in zip(frame.planes, yuv(color, matrix, full), strict=True):
            plane.update(bytes([round(value)]) * plane.buffer_size)
        output.mux([*stream.encode(frame), *stream.encode(None)])
    back = stacked(read_video(path))[0].float().mean(dim=(0, 1))
    assert (back - torch.tensor(color)).abs().max() <= RGB_ROUNDING + CODEC


@pytest.mark.skipif(
    not hasattr(av.VideoStream, "set_display_rotation"), reason="PyAV before 17 writes no rotation"
)
@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_a_rotated_video_comes_upright(tmp_path, degrees):
    frames = moving_clip(2)
    path = tmp_path / "a.mp4"
    write_with(path, frames, "mp4", prepare=lambda stream: stream.set_display_rotation(degrees))
    with av.open(str(path)) as container:
        plain = next(container.decode(video=0)).to_ndarray(format="rgb24")
    upright = np.rot90(plain, degrees // 90)
    video = read_video(path)
    assert (video.height, video.width) == upright.shape[:2]
    # PyAV's default conversion, which `plain` is, is off by 2 at most.
    assert np.abs(next(video.frames()).numpy().astype(int) - upright).max() <= 4


@pytest.mark.parametrize(
    ("container", "codec", "suffix"),
    [
        ("mp4", "h264", "mp4"),
        ("matroska", "h264", "mkv"),  # announces no frames, but a duration
        ("webm", "libvpx", "webm"),
        ("mpegts", "h264", "ts"),
        ("avi", "mpeg4", "avi"),
    ],
)
def test_containers_tell_their_length(tmp_path, container, codec, suffix):
    path = write_with(tmp_path / f"a.{suffix}", moving_clip(30), container, codec)
    video = read_video(path)
    assert video.estimated_frames == 30
    assert video.fps == 24
    assert len(list(video.frames())) == 30


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_video_that_begins_late_is_whole(tmp_path, container):
    path = tmp_path / "late"
    with av.open(str(path), "w", format=container) as output:
        stream = output.add_stream("h264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index, picture in enumerate(moving_clip(24).numpy()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = index + 240, Fraction(1, 24)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    video = read_video(path)
    assert video.estimated_frames == len(list(video.frames())) == 24


def test_a_colon_in_a_name_is_no_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("take:1.mp4", moving_clip(2))
    assert len(list(read_video("take:1.mp4").frames())) == 2


def wav(path):
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(8000))


def song(path):
    """Sound and a picture of its cover."""
    with av.open(str(path), "w", format="mp4") as output:
        sound = output.add_stream("aac", rate=8000)
        cover = output.add_stream("mjpeg", rate=25)
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
        silence.sample_rate = 8000
        output.mux([*sound.encode(silence), *sound.encode(None)])
        picture = av.VideoFrame.from_ndarray(moving_clip(1)[0].numpy(), format="rgb24")
        output.mux([*cover.encode(picture.reformat(format="yuvj420p")), *cover.encode(None)])


def truncated(path, container="mp4", share=0.6, options=None):
    whole = write_with(path, moving_clip(60), container, options=options)
    path.write_bytes(whole.read_bytes()[: int(share * whole.stat().st_size)])


def damaged(path):
    whole = bytearray(
        write_with(
            path, moving_clip(60), "mp4", options={"movflags": "faststart"}
        ).read_bytes()
    )  # fmt: skip
    middle = len(whole) // 2
    whole[middle : middle + 200] = b"\xff" * 200
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "make", "error", "message"),
    [
        ("none.mp4", lambda path: None, FileNotFoundError, "No such file"),
        ("folder", lambda path: path.mkdir(), IsADirectoryError, "Is a directory"),
        ("empty.mp4", lambda path: path.touch(), ValueError, "is empty; expected a video"),
        ("text.mp4", lambda path: path.write_text("no" * 999), ValueError, "is not a video"),
        ("audio.wav", wav, ValueError, "has no video stream, only audio"),
        ("song.m4a", song, ValueError, "has no video stream, only audio, cover"),
        # the index is at the end, so it is gone
        ("cut.mp4", truncated, ValueError, "is not a video that .* or it is truncated"),
        # the index is at the front, and promises more
        (
            "cut.mp4",
            lambda path: truncated(path, options={"movflags": "faststart"}),
            ValueError,
            r"is truncated: it has \d+ bytes; expected at least \d+|truncated after frame",
        ),
        ("damaged.mp4", damaged, ValueError, r"is broken or truncated after frame \d+"),
        (
            "cut.mkv",
            lambda path: truncated(path, "matroska"),
            ValueError,
            r"is truncated: it ends at \d\.\d+ s; expected 2\.50 s",
        ),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, name, make, error, message):
    path = tmp_path / name
    make(path)
    with pytest.raises(error, match=message) as caught:
        list(read_video(path).frames())
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (torch.zeros(1, 32, 33, 3, dtype=torch.uint8), "33x32; H.264 needs even width and height"),
        (torch.zeros(1, 32, 32, 4, dtype=torch.uint8), r"\[1, 32, 32, 4\]"),
        (torch.zeros(32, 32, 3, dtype=torch.uint8), r"\[32, 32, 3\]"),
        (torch.zeros(1, 32, 32, 3), "float32; expected"),
    ],
)
def test_frames_that_do_not_fit_are_refused(tmp_path, frames, message):
    with pytest.raises(ValueError, match=message), VideoWriter(tmp_path / "a.mp4", 24) as writer:
        writer.write(frames)
    assert not list(tmp_path.iterdir())


def test_a_change_of_size_is_refused(tmp_path):
    def work():
        with VideoWriter(tmp_path / "a.mp4", 24) as writer:
            writer.write(moving_clip(2))
            writer.write(moving_clip(2, 32))

    with pytest.raises(ValueError, match="frames are 64x32; this video is 64x48"):
        work()
    assert not list(tmp_path.iterdir())


def test_a_video_without_frames_is_refused(tmp_path):
    with (
        pytest.raises(ValueError, match="no frames were written"),
        VideoWriter(tmp_path / "a.mp4", 24),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "fps", "message"),
    [("a.mp4", 0, "fps is 0"), ("a.mp4", -1.5, "fps is -1.5"), ("a.png", 24, "named as a video")],
)
def test_what_cannot_be_a_video_is_refused_before_any_work(tmp_path, name, fps, message):
    with pytest.raises(ValueError, match=message):
        VideoWriter(tmp_path / name, fps)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")

    def work():
        with VideoWriter(path, 24) as writer:
            writer.write(moving_clip(60))
            raise error

    with pytest.raises(type(error)):
        work()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    "limit_bytes",
    [
        20_000,  # full while frames are written
        None,  # full at the very last bytes, when the index moves to the front
    ],
)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, limited_files, limit_bytes):
    noise = torch.randint(256, (40, 64, 64, 3), dtype=torch.uint8)
    whole = write(tmp_path / "whole.mp4", noise).stat().st_size
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")
    with (
        limited_files(limit_bytes or whole - 1),
        pytest.raises(OSError, match=r"File too large: .*a\.mp4") as caught,
    ):
        write(path, noise)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert {file.name for file in tmp_path.iterdir()} == {"a.mp4", "whole.mp4"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [3, 4])  # 4: alpha is dropped
def test_pictures_are_rounded_as_comfyui_rounds_them(dtype, channels):
    generator = torch.Generator().manual_seed(0)
    frames = torch.empty(1, channels, 3, 8, 6).uniform_(-1.4, 1.4, generator=generator).to(dtype)
    # What VAE.decode and SaveVideo do, one after the other, in ComfyUI 0.33.
    image = ((frames.float() + 1) / 2).clamp(0, 1)[0].movedim(0, -1)
    expected = (image * 255).clamp(0, 255).byte()[..., :3]
    pictures = frames_to_uint8(frames)
    assert pictures.dtype == torch.uint8
    assert torch.equal(pictures, expected)
    assert pictures.min() == 0
    assert pictures.max() == 255


@pytest.mark.parametrize("shape", [(2, 3, 1, 8, 8), (1, 2, 1, 8, 8), (3, 1, 8, 8)])
def test_frames_of_another_shape_are_no_pictures(shape):
    with pytest.raises(ValueError, match="expected \\[1, 3 or 4, T, H, W\\]"):
        frames_to_uint8(torch.zeros(shape))


PEAKS = """
import resource, sys, torch
from fast_video_vae.vae.media import VideoWriter, read_video
for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
    video = read_video(source)
    with VideoWriter(target, video.fps) as writer:
        for piece in video.pieces():
            writer.write(piece[0].permute(1, 2, 3, 0))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Python measures no peak memory on Windows")
def test_memory_does_not_grow_with_length(tmp_path):
    paths = []
    for frames in (60, 260):
        picture = moving_clip(1, 256, 256)
        with VideoWriter(tmp_path / f"{frames}.mp4", 24) as writer:
            for shift in range(frames):
                writer.write(picture.roll(shift, 2))
        paths += [writer.path, tmp_path / "copy.mp4"]
    done = subprocess.run(
        [sys.executable, "-c", BIND + PEAKS, *map(str, paths)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    first, second = map(int, done.stdout.split())
    # In KiB. 200 frames more would be 38400 as bytes, 19200 as YUV.
    assert second - first < 10_000
