"""The form of written files: alpha, pixel formats, tags, times, folders, and what is refused."""

import json

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.vae.media.gradients import (
    FRAMES,
    HEIGHT,
    WIDTH,
    gradient,
    planes,
    read,
    written,
)
from fast_video_vae.tests.videos import av, write
from fast_video_vae.vae.media import VideoWriter, codec_named, codecs


@pytest.mark.parametrize("codec", ["prores4444", "ffv1", "png", "exr"])
def test_alpha_is_kept(tmp_path, codec):
    ramp = np.linspace(0, 1, WIDTH)[None, None, :, None]
    expected = np.concatenate([gradient(), np.broadcast_to(ramp, (FRAMES, HEIGHT, WIDTH, 1))], -1)
    result = read(written(tmp_path, codec, expected))
    assert result.shape == expected.shape
    if codec == "exr":
        expected[:, :, 0, :3] = 0  # where alpha is 0
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
    with refused("shot exists already; expected the name of a new folder"):
        write(path, pictures, codec="png")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty.png", pictures, codec="png")

    for name in ("link", "dangling"):
        (tmp_path / name).symlink_to(tmp_path / f"target of {name}", target_is_directory=True)
    (tmp_path / "target of link").mkdir()
    for name in ("link", "dangling"):
        write(tmp_path / f"{name}.exr", pictures, codec="exr")
        assert (tmp_path / name).is_symlink()
        assert len(list((tmp_path / f"target of {name}").iterdir())) == 3

    def failing():
        with VideoWriter(tmp_path / "lost.exr", 24, codec="exr") as writer:
            writer.write(pictures)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"shot", "empty", "link", "dangling", "target of link", "target of dangling"}


@pytest.mark.parametrize("frames", [1, 2])
def test_short_videos_have_their_times(tmp_path, frames):
    for _ in range(3):  # x265 leaves them to chance
        path = write(tmp_path / "a.mp4", torch.zeros(frames, 64, 64, 3), codec="hevc")
        with av.open(str(path)) as container:
            times = [frame.time for frame in container.decode(video=0)]
        assert times == pytest.approx([n / 24 for n in range(frames)], abs=1e-3)
