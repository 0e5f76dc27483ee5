"""Latents to files of more than 8 bits, with alpha, and to folders of images."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.vae.pairs import as_saved, latents, v3_node
from fast_video_vae.tests.nodes.video.clips import components, decode, encode, frames_of, image
from fast_video_vae.tests.videos import av
from fast_video_vae.vae.media import convert_pictures

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


def deep(path):
    """The values of every frame of a file, as `[T, H, W, C]` uint16."""
    with av.open(str(path)) as container:
        name = "rgba64le" if "a" in container.streams.video[0].pix_fmt else "rgb48le"
        found = [frame.to_ndarray(format=name) for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(found).astype(np.int32))


def expected_of(images):
    """The same of an IMAGE."""
    return convert_pictures(images, torch.uint16).int()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_lossless_file_has_sixteen_bits_of_the_image(fast, stock, output, is_ours):
    vae, latent = fast if is_ours else stock, latents(3)
    video = decode(vae, latent, codec="ffv1")
    assert torch.equal(deep(video.get_stream_source()), expected_of(image(vae, latent)))
    assert video.get_bit_depth() == 16


def test_alpha_is_kept_refused_or_dropped(picture_vae, output, monkeypatch, caplog):
    latent = torch.randn(3, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = image(picture_vae, latent)
    assert expected.shape == (3, 64, 64, 4)
    video = decode(picture_vae, latent, codec="ffv1")
    assert torch.equal(deep(video.get_stream_source()), expected_of(expected))
    for text in ("", "1-2"):
        options = {"codec": "ffv1", "bit_depth": "8", "frames": text, "alpha": "off"}
        video = decode(picture_vae, latent, **options)
        wanted = as_saved(expected)[1 if text else 0 :, ..., :3]
        assert torch.equal(frames_of(video), wanted)
    with caplog.at_level(logging.INFO):
        video = decode(picture_vae, latent)
    assert len(components(video)[0]) == 3
    assert caplog.text.count("h264 stores no alpha channel; that of the frames is dropped") == 1
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", pytest.fail)
    with refused("^codec: h264 stores no alpha channel; expected one of ffv1, prores4444, png"):
        decode(picture_vae, latent, alpha="on")


@pytest.mark.parametrize(
    ("codec", "pixels"),
    [("hevc", "yuv420p10le"), ("h264", "yuv420p"), ("prores", "yuv422p10le")],
)
def test_auto_is_the_depth_of_the_codec(fast, output, codec, pixels):
    video = decode(fast, latents(2, height=8, width=8), codec=codec)
    with av.open(video.get_stream_source()) as container:
        assert container.streams.video[0].pix_fmt == pixels


@pytest.mark.parametrize("codec", ["png", "exr"])
def test_a_sequence_of_images_is_a_video_too(fast, output, codec):
    latent = latents(2, height=8, width=8)
    expected = image(fast, latent)
    video = decode(fast, latent, codec=codec, filename_prefix="shots/one", fps=24)
    folder = output / "shots" / "one_00001_"
    assert [path.name for path in sorted(folder.iterdir())] == [
        f"frame_{n:05}.{codec}" for n in range(len(expected))
    ]
    images, _, fps = components(video)
    assert (fps, video.get_frame_count(), video.get_dimensions()) == (24, len(expected), (64, 64))
    assert (images - expected).abs().max() <= (1 / 65535 if codec == "png" else 2**-11)
    assert video.get_bit_depth() == 16
    (whole,) = v3_node("nodes_video", "SaveVideo", video=video, filename_prefix="w", format="auto")
    assert whole.get_bit_depth() == 16
    (file,) = output.glob("w_*")
    with av.open(str(file)) as container:
        assert container.streams.video[0].pix_fmt == "yuv420p10le"
    again = decode(fast, latent, codec=codec, filename_prefix="shots/one", fps=24)
    assert Path(again.paths[0]).parent.name == "one_00002_"
    assert (encode(fast, video)[0] - encode(fast, again)[0]).abs().max() == 0
