"""Written files: a gradient through every codec and back, dither, alpha, folders, what is refused.

Colors are read with this pack's reader, which `test_deep_video.py` compares with the formulas.
"""

import json

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.videos import av, write
from fast_video_vae.vae.media import (
    VideoWriter,
    available_codecs,
    codec_named,
    codecs,
    convert_pictures,
    pictures_of,
    read_video,
)

HEIGHT, WIDTH, FRAMES = 96, 832, 6
STEP = 0.25 / 255  # of a component in [0, 1] per pixel


def gradient(frames=FRAMES, height=HEIGHT, width=WIDTH):
    """A gray gradient of 1 / 4 of an 8-bit level per pixel, `[T, H, W, 3]` float64."""
    along = (np.arange(width) * STEP).clip(0, 1)[:, None]
    return np.broadcast_to(along, (frames, height, width, 3))


def planes(frame):
    """The planes of a frame in float64."""
    kind = {"f32le": "<f4", "f16le": "<f2"}.get(frame.format.name[-5:])
    bits = frame.format.components[0].bits
    name = kind or ("u1" if bits == 8 else ">u2" if frame.format.name.endswith("be") else "<u2")
    found = []
    for plane in frame.planes:
        rows = np.frombuffer(plane, name).reshape(plane.height, -1)
        count = 1 if len(frame.planes) > 1 else len(frame.format.components)
        found.append(rows[:, : plane.width * count].astype(np.float64))
    return found


def images(path):
    """The files of a video: itself, or the images of a folder."""
    return [path] if path.is_file() else sorted(path.with_suffix("").iterdir())


def read(path):
    """All frames of a file or folder, `[T, H, W, C]` float64 in [0, 1]; alpha if it has any."""
    found = []
    for file in images(path):
        frames = torch.stack([*read_video(file).frames()])
        pictures = frames.numpy() / float(torch.iinfo(frames.dtype).max)
        with av.open(str(file)) as container:
            for picture, frame in zip(pictures, container.decode(video=0), strict=True):
                *_, last = frame.format.components
                if frame.format.name == "yuv420p":  # of gray frames, before RGB is rounded
                    picture = (planes(frame)[0][..., None] - 16).repeat(3, -1) / 219
                if not last.is_alpha:
                    found.append(picture)
                    continue
                *_, alpha = planes(frame)
                alpha = alpha if len(frame.planes) > 1 else alpha[:, 3::4]
                found.append(np.concatenate([picture, alpha[..., None] / (2**last.bits - 1)], -1))
    return np.stack(found)


def written(tmp_path, codec, pictures, **options):
    """The path of a file of decoded frames, through the conversion and the writer of a decode."""
    path = tmp_path / f"a{codec_named(codec).suffix}"
    with VideoWriter(path, 24, codec=codec, overwrite=True, **options) as writer:
        for piece in torch.from_numpy(pictures * 2 - 1).float().movedim(-1, 0)[None].split(4, 2):
            writer.write(writer.pictures(piece))
    return path


SIXTEEN = torch.uint16
# Pixel format, and numbers of the matrix, the transfer and the range.
TAGS = {
    "h264": ("yuv420p", 1, 13, 1), "hevc": ("yuv420p10le", 1, 13, 1),
    "av1": ("yuv420p10le", 1, 13, 1), "ffv1": ("gbrp16le", 0, 13, 2),
    "prores": ("yuv422p10le", 1, 1, 1), "prores4444": ("yuv444p12le", 1, 1, 1),
    "png": ("rgb48be", 0, 13, 2),
    "exr": (f"gbrpf{16 if av.library_versions['libavcodec'] >= (62,) else 32}le", 2, 8, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "most", "levels"),
    [
        ("ffv1", 1 / 65535, 800),
        ("png", 1 / 65535, 800),
        ("exr", 2**-11, 700),  # half floats; the curve of sRGB flattens their steps
        ("prores", 1.5 / 1023, 256),
        ("prores4444", 1.5 / 1023, 256),
        ("hevc", 1.5 / 1023, 256),
        ("av1", 8 / 1023, 200),
        ("h264", 3 / 255, 100),
    ],
)
def test_a_gradient_keeps_its_depth(tmp_path, codec, most, levels):
    expected = gradient()
    path = written(tmp_path, codec, expected)
    result = read(path)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= most
    assert len(np.unique(result[0, ..., 1])) > levels
    with av.open(
        str(path if path.is_file() else next(path.with_suffix("").iterdir()))
    ) as container:
        frame = next(container.decode(video=0))
        context = container.streams.video[0].codec_context
        found = (context.colorspace, context.color_trc, frame.color_range)
        if codec != "png" or hasattr(frame, "color_trc"):  # PyAV before 17 cannot tag frames
            assert (frame.format.name, *found) == TAGS[codec]


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        ("h264", (96, 832)),
        ("png", (256, 512)),
        *(pytest.param(name, (96, 832), marks=pytest.mark.slow) for name in ("hevc", "vp9")),
    ],
)
def test_dither_keeps_the_mean_and_leaves_no_band(tmp_path, codec, size):
    expected = gradient(6, *size)
    result = read(written(tmp_path, codec, expected, bit_depth=8, dither=True))
    levels = (result - expected) * 255
    means = levels.reshape(6, size[0] // 16, 16, size[1] // 16, 16, 3).mean(axis=(2, 4))
    assert np.abs(means).mean() <= 0.05
    assert np.abs(means).max() <= 0.1
    changes = np.diff(np.rint(result[-1, ..., 1] * 255), axis=1) != 0
    edges = [np.flatnonzero(np.r_[True, row, True]) for row in changes]
    assert max(np.diff(each).max() for each in edges) <= 8  # the widest band in pixels


def test_dither_is_on_by_default_for_lossy_files_of_eight_bits_only():
    for codec in available_codecs():
        suffix, lossy = codec_named(codec).suffix, codec_named(codec).lossy
        for depth in codec_named(codec).formats:
            try:
                writer = VideoWriter(f"a{suffix}", 24, codec=codec, bit_depth=depth)
            except ValueError:
                continue  # this build of PyAV lacks the depth
            eight = torch.uint8 if depth == 8 and not lossy else SIXTEEN
            assert writer.dtype == (torch.float32 if codec == "exr" else eight)
    assert VideoWriter("a.mp4", 24, dither=False).dtype == torch.uint8
    assert VideoWriter("a.mkv", 24, codec="ffv1", bit_depth=8, dither=True).dtype == SIXTEEN


@pytest.mark.parametrize(
    ("bits", "size", "channels"),
    [(8, (33, 37), 4), (10, (64, 66), 4), (16, (5, 7), 3)],
)
def test_ffv1_stores_every_value_of_its_depth_in_any_size(tmp_path, bits, size, channels):
    top = 2**bits - 1
    values = np.random.default_rng(0).integers(0, top + 1, (2, *size, channels))
    pictures = torch.from_numpy(np.rint(values * (65535 / top)).astype(np.int32)).to(SIXTEEN)
    for dither in (False, True):  # which leaves what 8 bits hold
        path = write(tmp_path / "a.mkv", pictures, codec="ffv1", bit_depth=bits, dither=dither)
        assert (np.rint(read(path) * top) == values).all()


@pytest.mark.parametrize(
    ("codec", "bits", "dtype"),
    [("exr", 16, torch.float16), ("png", 16, torch.float64), ("ffv1", 8, torch.float32)],
)
def test_values_beyond_the_range_are_clamped_and_nan_is_black(tmp_path, codec, bits, dtype):
    values = torch.tensor([torch.nan, torch.inf, 2, -1, 1, 0]).to(dtype).requires_grad_()
    pictures = values.view(1, 1, 6, 1).expand(1, 1, 6, 3)
    path = write(tmp_path / f"a{codec_named(codec).suffix}", pictures, codec=codec, bit_depth=bits)
    assert read(path)[0, 0, :, 0] == pytest.approx([0, 1, 1, 0, 1, 0], abs=1e-9)


def test_pictures_are_converted_as_the_decoder_does():
    frames = torch.empty(1, 3, 2, 9, 7).uniform_(-1.2, 1.2)
    floats = pictures_of(frames, torch.float32)
    assert torch.equal(convert_pictures(floats, torch.uint8), pictures_of(frames, torch.uint8))
    assert torch.equal(convert_pictures(floats, SIXTEEN).int(), pictures_of(frames, SIXTEEN).int())
    eight = pictures_of(frames, torch.uint8)
    assert torch.equal(convert_pictures(convert_pictures(eight, SIXTEEN), torch.uint8), eight)


@pytest.mark.parametrize("codec", ["prores4444", "ffv1", "png"])
def test_alpha_is_kept(tmp_path, codec):
    ramp = np.linspace(0, 1, WIDTH)[None, None, :, None]
    expected = np.concatenate([gradient(), np.broadcast_to(ramp, (FRAMES, HEIGHT, WIDTH, 1))], -1)
    asked = True if codec == "ffv1" else None
    result = read(written(tmp_path, codec, expected, alpha=asked))
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= (1.6 / 1023 if "prores" in codec else 2**-10)


def test_exr_has_the_nearest_half_of_linear_light_times_alpha(tmp_path):
    values = np.random.default_rng(0).random((1, 33, 35, 4)).astype(np.float32)
    with VideoWriter(tmp_path / "a.exr", 24, codec="exr") as writer:
        writer.write(torch.from_numpy(values))
    with av.open(str(tmp_path / "a" / "frame_00000.exr")) as container:
        green, blue, red, alpha = planes(next(container.decode(video=0)))
    colors = values[0].astype(np.float64)
    light = np.where(
        colors <= 0.04045, colors / 12.92, ((np.maximum(colors, 0.04045) + 0.055) / 1.055) ** 2.4
    )
    for plane, number in ((red, 0), (green, 1), (blue, 2)):
        exact = light[..., number] * colors[..., 3]
        step = np.spacing(exact.astype(np.float16)).astype(np.float64)
        assert (np.abs(plane - exact) <= 0.51 * step).all()
    assert (alpha == colors[..., 3].astype(np.float16)).all()


@pytest.mark.parametrize(("codec", "alpha"), [("ffv1", False), ("hevc", None)])
def test_alpha_is_dropped_on_request_or_where_there_is_none(tmp_path, codec, alpha):
    expected = np.concatenate([gradient(), gradient()[..., :1]], -1)
    result = read(written(tmp_path, codec, expected, alpha=alpha))
    assert result.shape[-1] == 3
    assert np.abs(result - expected[..., :3]).max() <= 1.5 / 1023


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "h264", "bit_depth": 16}, "bit depth is 16; h264 stores 8 or 10 bits"),
        ({"codec": "prores", "bit_depth": 8}, "bit depth is 8; prores stores 10 bits"),
        ({"codec": "exr", "bit_depth": 8}, "exr stores 16 bits"),
        ({"codec": "vp9", "alpha": True}, "vp9 stores no alpha channel; expected one of ffv1, "),
    ],
)
def test_what_the_codec_lacks_is_refused(tmp_path, options, message):
    with refused(message):
        VideoWriter(tmp_path / f"a{codec_named(options['codec']).suffix}", 24, **options)


def test_a_depth_that_the_build_lacks_is_refused_and_not_chosen(monkeypatch):
    monkeypatch.setattr(codecs, "_pixel_formats", lambda name: ("yuv420p",))
    assert VideoWriter("a.mp4", 24, codec="hevc").encoding.bit_depth == 8
    with refused("bit depth is 10; libx265 of this build of PyAV stores 8 bits per component"):
        VideoWriter("a.mp4", 24, codec="hevc", bit_depth=10)
    monkeypatch.setattr(codecs, "_pixel_formats", lambda name: ("yuv444p10le",))
    with refused("bit depth is 10 with alpha; prores of this build of PyAV stores no bits"):
        VideoWriter("a.mov", 24, codec="prores4444").check(64, 64, 4)


def test_a_folder_of_images_is_whole_or_absent(tmp_path):
    pictures = torch.from_numpy(gradient(frames=3).copy())
    path = write(
        tmp_path / "shot.png", pictures, codec="png", metadata={"prompt": '{"a": "ü\U0001f600"}'}
    )
    names = [file.name for file in sorted((tmp_path / "shot").iterdir())]
    assert names == [f"frame_{n:05}.png" for n in range(3)]
    with pytest.importorskip("PIL.Image").open(tmp_path / "shot" / names[0]) as image:
        assert json.loads(image.text["prompt"]) == {"a": "ü\U0001f600"}
    with pytest.importorskip("PIL.Image").open(tmp_path / "shot" / names[1]) as image:
        assert not image.text
    with refused("shot exists already; expected the name of a new folder"):
        write(path, pictures, codec="png")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty.png", pictures, codec="png")

    def failing():
        with VideoWriter(tmp_path / "lost.exr", 24, codec="exr") as writer:
            writer.write(pictures)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert {each.name for each in tmp_path.iterdir()} == {"shot", "empty"}


@pytest.mark.parametrize("frames", [1, 2])
def test_short_videos_have_their_times(tmp_path, frames):
    for _ in range(3):  # x265 leaves them to chance
        path = write(tmp_path / "a.mp4", torch.zeros(frames, 64, 64, 3), codec="hevc")
        with av.open(str(path)) as container:
            times = [frame.time for frame in container.decode(video=0)]
        assert times == pytest.approx([n / 24 for n in range(frames)], abs=1e-3)
