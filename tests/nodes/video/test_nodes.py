"""Latents to video files and back: beside ComfyUI's own nodes, and when something goes wrong."""

import io
import json
import logging
import re
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.checkout import PACK, why_unavailable
from fast_video_vae.tests.nodes.server import PromptError, Server, Workflow
from fast_video_vae.tests.nodes.vae.pairs import (
    clip,
    fast_vae,
    latents,
    node,
    relative_error,
    stock_vae,
    v3_node,
)
from fast_video_vae.tests.wan22 import random_qwen21

pytestmark = pytest.mark.comfyui

# What a server may use more after a decode: the allocator's leftovers.
SLACK_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def _as_in_a_node(request):
    """ComfyUI runs nodes in inference mode."""
    if {"comfyui", "vae", "demo"} & set(request.fixturenames):
        with torch.inference_mode():
            yield
    else:
        yield


@pytest.fixture(scope="module")
def state(comfyui):
    return random_state_dict(8)


@pytest.fixture(scope="module")
def vae(comfyui, state, tmp_path_factory):
    return fast_vae(state, tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def picture_vae(comfyui, tmp_path_factory):
    return fast_vae(random_qwen21(), tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def demo(comfyui):
    """The bundled VAE, and a latent of nine frames of the bundled clip: pictures, not noise."""
    from fast_video_vae.nodes.vae.nodes import DemoClip, Load

    with torch.inference_mode():
        (vae,) = Load.execute("bundled demo", "auto", "auto", 0).args
        images = DemoClip.execute().args[0]
        return vae, vae.encode(images[:9, 64:192, 64:192])


@pytest.fixture
def output(comfyui, tmp_path, monkeypatch):
    """The folder that ComfyUI's nodes that save put files in."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


def run(name, hidden=None, **inputs):
    """Execute a node of ours as ComfyUI does, with the defaults of its widgets."""
    from fast_video_vae.nodes.video import nodes as video_nodes

    cls = getattr(video_nodes, name)
    inputs = {
        each.id: each.default
        for each in cls.define_schema().inputs
        if getattr(each, "default", None) is not None
    } | inputs
    return cls.PREPARE_CLASS_CLONE({"hidden_inputs": hidden or {}}).execute(**inputs)


def decode(vae, latent, **options):
    """The VIDEO of a latent."""
    return run("DecodeVideo", vae=vae, samples={"samples": latent}, **options).args[0]


def encode(vae, video, **options):
    """The samples, fps, count of frames and sound of a VIDEO."""
    latent, *rest = run("EncodeVideo", vae=vae, video=video, **options).args
    return latent["samples"], *rest


def frames_of(video):
    """The bytes of every frame `[N, H, W, 3]`, by PyAV alone."""
    import av

    with av.open(video.get_stream_source()) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.stack([torch.from_numpy(picture) for picture in pictures])


def components(video):
    """What Get Video Components gives."""
    images, audio, fps, *_ = v3_node("nodes_video", "GetVideoComponents", video=video)
    return images, audio, fps


def image(vae, latent):
    return node("VAEDecode", vae=vae, samples={"samples": latent})[0]


def as_saved(images):
    """The bytes that ComfyUI's saver makes of an IMAGE: the fraction is dropped."""
    return (images * 255).clamp(0, 255).byte()


def written(frames, path, **options):
    """A VIDEO that is a file of these bytes."""
    from comfy_api.latest import InputImpl

    from fast_video_vae.vae.media import VideoWriter

    with VideoWriter(path, 16, codec="ffv1", **options) as writer:
        writer.write(frames)
    return InputImpl.VideoFromFile(str(path))


def decibels(images, expected):
    assert images.shape == expected.shape
    return -10 * torch.log10(((images - expected) ** 2).mean()).item()


def smooth(frames, height=64, width=64):
    """Bytes `[N, H, W, 3]` of something that moves, which codecs take as they take videos."""
    time = torch.arange(frames).view(-1, 1, 1, 1)
    y, x = torch.arange(height).view(1, -1, 1, 1), torch.arange(width).view(1, 1, -1, 1)
    phase = torch.tensor([0.0, 2.0, 4.0])
    return ((torch.sin(x / 9 + y / 13 + time / 3 + phase) * 0.4 + 0.5) * 255).byte()


def tone(seconds, rate=44100, channels=2):
    time = torch.arange(round(seconds * rate)) / rate
    waves = [torch.sin(2 * torch.pi * (220 + 110 * n) * time) * 0.5 for n in range(channels)]
    return {"waveform": torch.stack(waves).unsqueeze(0), "sample_rate": rate}


# --- latent to file


def test_a_lossless_file_holds_the_bytes_of_the_image(vae, output):
    latent = latents(5)
    video = decode(vae, latent, codec="ffv1")
    assert torch.equal(frames_of(video), as_saved(image(vae, latent)))
    assert video.get_frame_rate() == 16


@pytest.mark.parametrize(
    ("codec", "suffix"),
    [("h264", "mp4"), ("hevc", "mp4"), ("vp9", "webm"), ("av1", "mp4"), ("prores", "mov")],
)
def test_a_file_is_as_near_to_the_image_as_that_of_save_video(demo, output, codec, suffix):
    vae, latent = demo
    video = decode(vae, latent, codec=codec, fps=24)
    assert Path(video.get_stream_source()).suffix == f".{suffix}"
    images, _, fps = components(video)
    assert fps == 24
    expected = image(vae, latent)
    (stock,) = v3_node("nodes_video", "CreateVideo", images=expected, fps=24.0)
    v3_node("nodes_video", "SaveVideo", video=stock, filename_prefix="stock", format="auto")
    (file,) = output.glob("stock_*")
    from comfy_api.latest import InputImpl

    error = decibels(images, expected)
    assert error >= decibels(components(InputImpl.VideoFromFile(str(file)))[0], expected)
    assert error > 35


def test_better_quality_is_larger_and_nearer(demo, output):
    vae, latent = demo
    expected = image(vae, latent)
    sizes, errors = [], []
    for quality in (10, 50, 90):
        video = decode(vae, latent, quality=quality)
        sizes.append(Path(video.get_stream_source()).stat().st_size)
        errors.append((components(video)[0] - expected).abs().mean().item())
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", range(17)),
        ("  ", range(17)),
        ("0-0", range(1)),
        ("4-9", range(4, 10)),
        (" 4 - 9 ", range(4, 10)),
        ("12-", range(12, 17)),
        ("16", range(16, 17)),
        ("0-16", range(17)),
    ],
)
def test_a_range_of_frames_is_that_of_the_whole_video(vae, output, text, expected):
    latent = latents(5)
    whole = as_saved(image(vae, latent))
    video = decode(vae, latent, codec="ffv1", frames=text)
    assert torch.equal(frames_of(video), whole[expected.start : expected.stop])


@pytest.mark.parametrize("text", ["17-18", "3-17", "9-4", "a-b", "-4", "1-2-3", "1.5"])
def test_a_range_that_is_none_is_told(vae, output, text):
    with pytest.raises(ValueError, match=rf"^frames is {re.escape(repr(text))}; ") as caught:
        decode(vae, latents(5), frames=text)
    assert "\n" not in str(caught.value)
    assert not list(output.rglob("*"))


def test_names_count_on_and_the_frontend_is_told(vae, output):
    names = []
    for _ in range(2):
        result = run(
            "DecodeVideo",
            vae=vae,
            samples={"samples": latents(1)},
            filename_prefix="clips/%width%x%height%",
        )
        shown = result.ui.as_dict()
        (file,) = shown["images"]
        assert shown["animated"] == (True,)
        assert file["type"] == "output"
        assert file["subfolder"] == "clips"
        assert Path(result.args[0].get_stream_source()) == output / "clips" / file["filename"]
        names.append(file["filename"])
    assert names == ["72x48_00001_.mp4", "72x48_00002_.mp4"]
    assert sorted(path.name for path in (output / "clips").iterdir()) == names


def test_a_file_for_now_goes_to_the_temporary_folder(vae, output):
    import folder_paths

    result = run("DecodeVideo", vae=vae, samples={"samples": latents(1)}, save_to="temp")
    (file,) = result.ui.as_dict()["images"]
    assert file["type"] == "temp"
    assert Path(folder_paths.get_temp_directory(), file["subfolder"], file["filename"]).is_file()
    assert not list(output.rglob("*"))


def test_the_workflow_is_in_the_file_as_save_video_has_it(vae, output, monkeypatch):
    import av
    from comfy.cli_args import args
    from comfy_api.latest import io as comfy_io

    hidden = {
        comfy_io.Hidden.prompt: {"1": {"class_type": "FastVAE_Load"}},
        comfy_io.Hidden.extra_pnginfo: {"workflow": {"nodes": [], "name": "ä"}},
    }

    def tags(codec):
        samples = {"samples": latents(1)}
        video, _ = run("DecodeVideo", hidden, vae=vae, samples=samples, codec=codec).args
        with av.open(video.get_stream_source()) as container:
            return {key.lower(): value for key, value in container.metadata.items()}

    for codec in ("h264", "ffv1", "prores"):
        found = tags(codec)
        assert json.loads(found["prompt"]) == hidden[comfy_io.Hidden.prompt]
        assert json.loads(found["workflow"]) == hidden[comfy_io.Hidden.extra_pnginfo]["workflow"]
    monkeypatch.setattr(args, "disable_metadata", True)
    assert not {"prompt", "workflow"} & tags("h264").keys()


@pytest.mark.parametrize("codec", ["ffv1", "prores", "h264"])
def test_the_sound_goes_with_its_frames_and_ends_with_the_video(vae, output, codec):
    sound = tone(3)
    whole = components(decode(vae, latents(5), codec=codec, audio=sound))[1]
    part = components(decode(vae, latents(5), codec=codec, audio=sound, frames="8-15"))[1]
    for found, start, seconds in ((whole, 0, 17 / 16), (part, 8 / 16, 8 / 16)):
        assert found["sample_rate"] == 44100
        expected = sound["waveform"][..., round(start * 44100) :][..., : round(seconds * 44100)]
        got = found["waveform"]
        assert 0 <= got.shape[-1] - expected.shape[-1] < 4096  # a packet or two of AAC
        if codec == "h264":  # lossy, and quiet at its ends
            middle = slice(4096, -4096)
            error = (got[..., : expected.shape[-1]] - expected)[..., middle].abs().mean()
            assert error < 0.05
        else:
            assert torch.allclose(got, expected, atol=2**-15)


@pytest.mark.parametrize("format_name", ["auto", "mp4", "mkv"])
@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_save_video_takes_the_video(demo, output, codec, format_name):
    from comfy_api.latest import InputImpl

    video = decode(*demo, codec=codec)
    v3_node(
        "nodes_video",
        "SaveVideo",
        video=video,
        filename_prefix="saved",
        format={"format": format_name, "codec": {"codec": "auto"}},
    )
    (file,) = output.glob("saved_*")
    saved = InputImpl.VideoFromFile(str(file))
    if format_name == "mkv":  # which it encodes again
        assert decibels(frames_of(saved) / 255, frames_of(video) / 255) > 30
    else:
        assert torch.equal(frames_of(saved), frames_of(video))


@pytest.mark.parametrize("text", ["", "1-2", "2"])
def test_an_alpha_channel_is_left_out_and_the_log_says_so(picture_vae, output, caplog, text):
    latent = torch.randn(3, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.INFO):
        video = decode(picture_vae, latent, codec="ffv1", frames=text)
    expected = image(picture_vae, latent)
    assert expected.shape == (3, 64, 64, 4)
    first = int(text[0]) if text else 0
    assert torch.equal(frames_of(video), as_saved(expected)[first:, ..., :3])
    assert caplog.text.count("alpha") == 1


def test_another_vae_decodes_as_it_does_and_is_written(state, output, caplog):
    stock = stock_vae(state)
    latent = latents(5)
    with caplog.at_level(logging.INFO):
        video = decode(stock, latent, codec="ffv1", chunk=2, frames="3-5")
    assert torch.equal(frames_of(video), as_saved(image(stock, latent))[3:6])
    assert "unused: chunk" in caplog.text


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(
    ("latent", "options", "reason"),
    [
        (latents(2, batch=3), {}, "samples: they are 3 videos"),
        (latents(2), {"frames": "x"}, "frames is 'x'"),
        (latents(2), {"audio": {"waveform": torch.zeros(5), "sample_rate": 8000}}, "audio: "),
        (latents(2), {"audio": tone(1, channels=3)}, "audio: .*3 channels"),
        (
            latents(2),
            {"audio": [torch.zeros(1, 1, 5)]},
            "audio: got a list of 1; expected an AUDIO",
        ),
        (
            latents(2),
            {"audio": {"waveform": None, "sample_rate": 8000}},
            "audio: its waveform is None",
        ),
        (latents(2), {"audio": {"sample_rate": 8000}}, "audio: got a dict.*expected an AUDIO"),
        (latents(2), {"filename_prefix": "a\0b"}, r"filename_prefix is 'a\\x00b'"),
        (latents(2), {"filename_prefix": "../../x"}, "filename_prefix is '../../x'"),
    ],
)
def test_an_input_that_does_not_fit_is_told_in_a_line(
    vae, state, output, is_ours, latent, options, reason
):
    with pytest.raises(ValueError, match=f"^{reason}") as caught:
        decode(vae if is_ours else stock_vae(state), latent, **options)
    assert "\n" not in str(caught.value)
    assert not [path for path in output.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("latent", "reason"),
    [
        (torch.zeros(1, 4, 1, 8, 8), "4 channels; this VAE needs 16"),
        (torch.zeros(16, 8, 8), "3 dimensions"),
        (torch.full((1, 16, 1, 8, 8), torch.nan), "NaN"),
    ],
)
def test_a_bad_latent_is_told_before_anything_is_loaded(vae, output, latent, reason):
    import comfy.model_management as management

    management.unload_all_models()
    with pytest.raises(ValueError, match=rf"^samples: .*{reason}"):
        decode(vae, latent)
    assert vae.first_stage_model not in [each.model.model for each in management.loaded_models()]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_size_that_a_codec_cannot_store_is_told_before_the_decode(
    vae, state, output, monkeypatch, is_ours
):
    import comfy.sd

    from fast_video_vae.vae import media

    def no_decode(*_, **__):
        raise AssertionError("it decodes")

    monkeypatch.setattr(comfy.sd.VAE, "decode", no_decode)
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", no_decode)
    # Sizes of latents are even, so a codec is made to want more.
    monkeypatch.setattr(media, "check_size", refuse_odd_sixteens)
    with pytest.raises(ValueError, match=r"^codec: frames are 72x48"):
        decode(vae if is_ours else stock_vae(state), latents(2))


def refuse_odd_sixteens(codec, height, width):
    if width % 16:
        raise ValueError(f"frames are {width}x{height}; {codec} needs multiples of 16")


@pytest.mark.parametrize("rate", [Fraction(30000, 1001), Fraction(24000, 1001), Fraction(25, 2)])
def test_a_rate_goes_through_as_a_number(vae, output, rate):
    video = decode(vae, latents(3), fps=float(rate))
    assert video.get_frame_rate() == rate
    assert decode(vae, latents(3), fps=encode(vae, video)[1]).get_frame_rate() == rate


# --- file to latent


@pytest.mark.parametrize("frames", [1, 4, 5, 17, 18])
@pytest.mark.parametrize("chunk", [0, 1, -1])
def test_a_lossless_file_encodes_as_its_frames(vae, tmp_path, frames, chunk):
    pictures = smooth(frames)
    video = written(pictures, tmp_path / "x.mkv")
    samples, fps, count, audio = encode(vae, video, chunk=chunk)
    (expected,) = node("VAEEncode", vae=vae, pixels=pictures.float() / 255)
    assert relative_error(samples, expected["samples"]) <= 1e-5
    assert (fps, count, audio) == (16, frames - (frames - 1) % 4, None)


def test_there_and_back_is_the_same_latent_as_by_images(demo, output):
    vae, latent = demo
    samples, *_ = encode(vae, decode(vae, latent, codec="ffv1"))
    pixels = as_saved(image(vae, latent)).float() / 255
    (expected,) = node("VAEEncode", vae=vae, pixels=pixels)
    assert relative_error(samples, expected["samples"]) <= 1e-5


def test_a_file_in_memory_is_as_one_on_the_disk(vae, tmp_path):
    from comfy_api.latest import InputImpl

    video = written(smooth(9), tmp_path / "x.mkv")
    held = InputImpl.VideoFromFile(io.BytesIO((tmp_path / "x.mkv").read_bytes()))
    for _ in range(2):  # it can be read again
        assert torch.equal(encode(vae, held)[0], encode(vae, video)[0])


def test_tensors_are_encoded_as_they_are(vae):
    images = clip(18)
    (video,) = v3_node("nodes_video", "CreateVideo", images=images, fps=12.0, audio=tone(1))
    samples, fps, count, audio = encode(vae, video)
    (expected,) = node("VAEEncode", vae=vae, pixels=images)
    assert relative_error(samples, expected["samples"]) <= 1e-5
    assert (fps, count) == (12, 17)
    assert torch.equal(audio["waveform"], tone(1)["waveform"])


@pytest.mark.parametrize("start", [0, 0.5, 0.51, -0.75])
@pytest.mark.parametrize("duration", [0, 0.5, 0.9])
def test_a_trimmed_video_is_what_get_video_components_gives(vae, tmp_path, start, duration):
    from fast_video_vae.vae.media import Audio

    pictures = smooth(33)
    sound = Audio(tone(2)["waveform"][0], 44100)
    video = written(pictures, tmp_path / "x.mkv", audio=sound).as_trimmed(
        start, duration, strict_duration=False
    )
    images, audio, _ = components(video)
    # Its bytes are up to one off, because FFmpeg's RGB becomes float by way of 16 bits.
    shown = [matching(each * 255, pictures.float(), 1) for each in images]
    assert shown == list(range(shown[0], shown[0] + len(shown)))
    samples, _, count, heard = encode(vae, video)
    pixels = pictures[shown].float() / 255
    (expected,) = node("VAEEncode", vae=vae, pixels=pixels)
    assert relative_error(samples, expected["samples"]) <= 1e-5
    assert count == len(images) - (len(images) - 1) % 4
    # Where the sound begins is told by the tone itself: ComfyUI takes milliseconds for samples.
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


@pytest.mark.parametrize("start", [0, 0.51])
@pytest.mark.parametrize("duration", [0, 0.9])
def test_sound_is_what_get_video_components_gives(vae, output, start, duration):
    video = decode(vae, latents(9), audio=tone(3)).as_trimmed(
        start, duration, strict_duration=False
    )
    *_, heard = encode(vae, video)
    _, expected, _ = components(video)
    assert heard["sample_rate"] == expected["sample_rate"]
    ours, theirs = heard["waveform"], expected["waveform"]
    assert abs(ours.shape[-1] - theirs.shape[-1]) <= 1
    length = min(ours.shape[-1], theirs.shape[-1])
    best = min(
        (ours[..., 1 + late : length - 1 + late] - theirs[..., 1 : length - 1]).abs().max()
        for late in (-1, 0, 1)
    )
    assert best < 1e-6


def matching(picture, pictures, tolerance):
    """Which of some pictures it is."""
    distances = (pictures - picture).abs().amax(dim=(1, 2, 3))
    (found,) = (distances <= tolerance).nonzero()
    return found.item()


@pytest.mark.parametrize(
    ("fps", "shown"),
    [
        (16.0, range(0, 17)),
        (8.0, range(0, 17, 2)),
        (32.0, [0, 0, 1, 1, 2, 2, 3, 3, 4]),  # of two that are as near, the earlier
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_another_rate_repeats_frames_or_leaves_them_out(vae, tmp_path, fps, shown, is_file):
    from comfy_api.latest import InputImpl, Types

    pictures = smooth(17)
    if is_file:
        video = written(pictures, tmp_path / "x.mkv")
    else:
        images = pictures.float() / 255
        parts = Types.VideoComponents(images=images, frame_rate=Fraction(16), audio=None)
        video = InputImpl.VideoFromComponents(parts)
    samples, rate, count, _ = encode(vae, video, fps=fps, max_frames=len(shown))
    pixels = pictures[list(shown)].float() / 255
    assert (rate, count) == (fps, len(shown))
    (expected,) = node("VAEEncode", vae=vae, pixels=pixels)
    assert relative_error(samples, expected["samples"]) <= 1e-5


@pytest.mark.parametrize("fps", [5.0, 11.5, 23.976, 30.0])
def test_tensors_and_files_agree_on_a_rate(vae, tmp_path, fps):
    pictures = smooth(33)
    (tensors,) = v3_node("nodes_video", "CreateVideo", images=pictures.float() / 255, fps=16.0)
    ours, theirs = (
        encode(vae, video, fps=fps) for video in (tensors, written(pictures, tmp_path / "x.mkv"))
    )
    assert ours[1:] == theirs[1:]
    assert relative_error(ours[0], theirs[0]) <= 1e-5


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (0, 0, (64, 96)),
        (48, 0, (32, 48)),  # as wide as asked, as high as the shape of the video asks
        (0, 32, (32, 48)),
        (64, 64, (64, 64)),  # the sides are cropped
        (192, 96, (96, 192)),
        (50, 50, (48, 48)),  # to multiples of eight
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_another_size_is_covered_and_cropped_about_the_centre(
    vae, tmp_path, width, height, expected, is_file
):
    from comfy_api.latest import InputImpl, Types

    pictures = smooth(5, 64, 96)
    images = pictures.float() / 255
    if is_file:
        video = written(pictures, tmp_path / "x.mkv")
    else:
        parts = Types.VideoComponents(images=images, frame_rate=Fraction(16), audio=None)
        video = InputImpl.VideoFromComponents(parts)
    samples, *_ = encode(vae, video, width=width, height=height)
    assert samples.shape[-2:] == (expected[0] // 8, expected[1] // 8)
    if (width, height) == (64, 64):  # no pixel is resized
        (latent,) = node("VAEEncode", vae=vae, pixels=images[:, :, 16:80])
        assert relative_error(samples, latent["samples"]) <= 1e-5


@pytest.mark.parametrize(("most", "count"), [(1, 1), (4, 1), (5, 5), (12, 9), (99, 17)])
def test_no_more_frames_than_asked_for(vae, tmp_path, most, count, caplog):
    video = written(smooth(17), tmp_path / "x.mkv")
    with caplog.at_level(logging.INFO):
        samples, _, found, _ = encode(vae, video, max_frames=most)
    assert found == count
    assert samples.shape[2] == (count - 1) // 4 + 1
    assert caplog.text.count("left out") == (min(most, 17) != count)


def test_a_vae_of_pictures_encodes_each_frame_as_opaque(picture_vae, tmp_path):
    pictures = smooth(3)
    samples, _, count, _ = encode(picture_vae, written(pictures, tmp_path / "x.mkv"))
    (expected,) = node("VAEEncode", vae=picture_vae, pixels=pictures.float() / 255)
    assert count == 3
    assert relative_error(samples, expected["samples"]) <= 1e-5


def test_another_vae_encodes_as_it_does(state, tmp_path, caplog):
    stock = stock_vae(state)
    pictures = smooth(18)
    with caplog.at_level(logging.INFO):
        samples, fps, count, _ = encode(stock, written(pictures, tmp_path / "x.mkv"), chunk=1)
    assert torch.equal(samples, stock.encode(pictures.float() / 255))
    assert (fps, count) == (16, 17)
    assert "unused: chunk" in caplog.text


def test_files_that_are_no_videos_are_told_in_a_line(vae, tmp_path):
    from comfy_api.latest import InputImpl

    for content in (b"", b"no video"):
        (tmp_path / "bad.mp4").write_bytes(content)
        with pytest.raises(ValueError, match=r"^video: .*bad\.mp4") as caught:
            encode(vae, InputImpl.VideoFromFile(str(tmp_path / "bad.mp4")))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^video: .*expected at least 8x8"):
        encode(vae, written(smooth(1, 6, 6), tmp_path / "small.mkv"))
    with pytest.raises(FileNotFoundError):
        encode(vae, InputImpl.VideoFromFile(str(tmp_path / "gone.mp4")))


@pytest.mark.parametrize("video", [None, [1], {"samples": 1}])
def test_what_is_no_video_is_told_in_a_line(vae, video):
    with pytest.raises(ValueError, match=r"^video: got .*; expected a VIDEO"):
        encode(vae, video)


def test_a_varying_rate_keeps_its_timing(vae, tmp_path, caplog):
    from comfy_api.latest import InputImpl

    from fast_video_vae.tests.videos import moving_clip, write_with

    times = [0, 40, 80, 500, 1000, 1040, 1500, 1900, 1920]
    path = write_with(tmp_path / "a.mkv", moving_clip(9), "matroska", times=times)
    with caplog.at_level(logging.INFO):
        _, fps, frames, _ = encode(vae, InputImpl.VideoFromFile(str(path)))
    assert (fps, frames) == (25.0, 49)
    assert sum("a.mkv has a varying frame rate" in line for line in caplog.messages) == 1


def test_a_vae_without_an_encoder_is_told(state, tmp_path):
    weights = {k: v for k, v in state.items() if not k.startswith(("encoder.", "conv1."))}
    decoder = fast_vae(weights, tmp_path)
    with pytest.raises(ValueError, match=r"^vae: the checkpoint has no encoder"):
        encode(decoder, written(smooth(1), tmp_path / "x.mkv"))


# --- when something goes wrong, and how much memory it takes


def is_empty(folder):
    """No file at all: no video, and nothing that a video was to become."""
    return not [path for path in folder.rglob("*") if path.is_file()]


def test_an_interrupt_leaves_no_file_and_the_next_run_is_whole(vae, output, monkeypatch):
    import comfy.model_management as management
    import comfy.utils

    def press_stop(value, total, preview, node_id=None):
        if 0 < value < total:
            management.interrupt_current_processing()

    latent = latents(9)
    with monkeypatch.context() as patch:
        patch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", press_stop)
        with pytest.raises(management.InterruptProcessingException):
            decode(vae, latent, chunk=1)
    assert is_empty(output)
    assert [
        thread.name for thread in threading.enumerate() if thread.name == "fast-video-vae-writer"
    ] == []
    video = decode(vae, latent, codec="ffv1", chunk=1)
    assert torch.equal(frames_of(video), as_saved(image(vae, latent)))


def test_an_interrupt_while_the_last_frames_are_written_leaves_no_file(vae, output, monkeypatch):
    import comfy.model_management as management
    import comfy.utils

    def press_stop(value, total, preview, node_id=None):
        if value == total:
            management.interrupt_current_processing()

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", press_stop)
    with pytest.raises(management.InterruptProcessingException):
        decode(vae, latents(3))
    assert is_empty(output)


def test_an_interrupt_ends_an_encode(vae, tmp_path, monkeypatch):
    import comfy.model_management as management
    import comfy.utils

    video = written(smooth(33), tmp_path / "x.mkv")

    def press_stop(value, total, preview, node_id=None):
        management.interrupt_current_processing()

    with monkeypatch.context() as patch:
        patch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", press_stop)
        with pytest.raises(management.InterruptProcessingException):
            encode(vae, video, chunk=1)
    assert encode(vae, video)[2] == 33


def test_a_full_disk_is_told_and_leaves_no_file(vae, output):
    resource = pytest.importorskip("resource", reason="this system has no limits of file sizes")
    latent = latents(9, height=16, width=16)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=r"fast_vae_00001_\.mkv"):
            decode(vae, latent, codec="ffv1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert is_empty(output)
    assert len(frames_of(decode(vae, latent, codec="ffv1"))) == 33


def test_an_encoder_that_fails_is_told_and_leaves_no_file(vae, output, monkeypatch):
    from fast_video_vae.vae.media import VideoWriter

    real_write = VideoWriter.write

    def write(self, frames):
        if self.frames:
            raise ValueError(f"{self.path} cannot be encoded")
        real_write(self, frames)

    with monkeypatch.context() as patch:
        patch.setattr(VideoWriter, "write", write)
        with pytest.raises(ValueError, match=r"fast_vae_00001_\.mp4 cannot be encoded"):
            decode(vae, latents(9), chunk=1)
    assert is_empty(output)
    assert len(frames_of(decode(vae, latents(9), chunk=1))) == 33


@pytest.mark.parametrize(
    ("codec", "latent", "reason"),
    [("hevc", latents(3, height=1, width=1), "8x8; hevc needs at least")],
)
def test_a_size_that_no_encoder_takes_is_told_before_the_decode(vae, output, codec, latent, reason):
    with pytest.raises(ValueError, match=rf"^codec: frames are {reason}"):
        decode(vae, latent, codec=codec)
    assert is_empty(output)


def test_a_broken_file_is_told_and_the_next_encode_is_whole(vae, tmp_path):
    from comfy_api.latest import InputImpl

    video = written(smooth(33), tmp_path / "x.mkv")
    content = (tmp_path / "x.mkv").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"^video: .*cut\.mkv.*truncated"):
        encode(vae, InputImpl.VideoFromFile(str(tmp_path / "cut.mkv")))
    assert encode(vae, video)[2] == 33


# Decodes so many latents of 128 x 128 pixels into a file, or encodes that file; prints the MiB that
# it took at most.
PEAK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import importlib.util
spec = importlib.util.spec_from_file_location("conftest", sys.argv[1] + "/tests/conftest.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import torch
torch.set_num_threads(1)
from fast_video_vae.tests.nodes.checkout import import_comfyui
import_comfyui(Path(sys.argv[2]))
from comfy_api.latest import InputImpl
from fast_video_vae.nodes.vae.nodes import Load
from fast_video_vae.nodes.video.nodes import DecodeVideo, EncodeVideo
file, count = Path(sys.argv[2], "output", "x_00001_.mp4"), int(sys.argv[4])
shape = (1, 16, (count - 1) // 4 + 1, 16, 16)
with torch.inference_mode():
    (vae,) = Load.execute("bundled demo", "auto", "auto", 0).args
    if sys.argv[3] == "decode":
        samples = {"samples": torch.randn(shape)}
        DecodeVideo.execute(samples, vae, 16.0, "h264", 70, "x", "output")
        assert file.is_file()
    else:
        samples, _, frames, _ = EncodeVideo.execute(InputImpl.VideoFromFile(str(file)), vae).args
        assert samples["samples"].shape == shape
        assert frames == count
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
def test_eight_times_the_frames_take_no_more_memory(tmp_path):
    pytest.importorskip("resource", reason="this system does not tell the peak of a process")
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    for task in ("decode", "encode"):
        few, many = (peak_mib(tmp_path / str(frames), task, frames) for frames in (129, 1025))
        # As an IMAGE 1,025 frames would be 168 MiB more than 129, and as bytes 42 MiB.
        assert many < 1.1 * few
        assert many - few < 30


def peak_mib(base, task, frames):
    """What a process of its own takes."""
    base.mkdir(exist_ok=True)
    command = [sys.executable, "-c", PEAK, str(PACK), str(base), task, str(frames)]
    done = subprocess.run(command, cwd=base, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


# --- over HTTP


AUTO = {"dtype": "auto", "encode_dtype": "auto", "chunk": 0}


def film(rate=16.0, **options):
    """The example workflow as the frontend sends it, at so many frames per second."""
    workflow = Workflow()
    clip, _ = workflow.add("FastVAE_DemoClip")
    vae = workflow.add("FastVAE_Load", vae_name="bundled demo", **AUTO)
    latent, _ = workflow.add("FastVAE_EncodeVideo", video=[clip, 1], vae=vae, fps=rate)
    video, _ = workflow.add(
        "FastVAE_DecodeVideo",
        samples=[latent, 0],
        vae=vae,
        fps=[latent, 1],
        audio=[latent, 3],
        **{"codec": "h264", "quality": 70, "filename_prefix": "film", "save_to": "output"},
        **options,
    )
    return workflow, latent, video


def test_the_example_runs_over_http(server):
    import av

    workflow, _, video = film()
    parts, _ = workflow.add("GetVideoComponents", video=[video, 0])
    last = workflow.add("ImageFromBatch", image=[parts, 0], batch_index=32, length=1)
    picture, _ = workflow.add("SaveImage", images=last, filename_prefix="last")
    copy, _ = workflow.add("SaveVideo", video=[video, 0], filename_prefix="copy", format="auto")
    shown = server.run(workflow)
    assert shown[video]["animated"] == [True]
    for kind in (video, copy):
        (file,) = server.files(shown[kind])
        with av.open(str(file)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            prompt = json.loads(container.metadata["prompt"])
        assert len(frames) == 33
        assert {each["class_type"] for each in prompt.values()} >= {"FastVAE_DecodeVideo"}
    (file,) = server.files(shown[picture])
    seen, played = torch.from_numpy(np.array(Image.open(file))), torch.from_numpy(frames[-1])
    assert decibels(seen / 255, played / 255) > 40
    (original,) = (PACK / "vae" / "demo").glob("*.mp4")
    with av.open(str(original)) as container:
        source = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert decibels(played / 255, torch.from_numpy(source[-1]) / 255) > 22


def test_a_range_that_is_none_fails_over_http_with_a_line(server):
    workflow, *_ = film(frames="90-")
    with pytest.raises(PromptError, match="frames is '90-'; the video has the frames 0-32"):
        server.run(workflow)


def test_an_interrupt_over_http_frees_the_memory_and_leaves_no_file(server, vae_file):
    def workflow(frames):
        prompt = Workflow()
        size = {"width": 256, "height": 256, "length": frames, "batch_size": 1}
        latent = prompt.add("EmptyHunyuanLatentVideo", **size)
        vae = prompt.add("FastVAE_Load", vae_name=vae_file, **AUTO)
        options = {"fps": 16.0, "codec": "h264", "quality": 70, "save_to": "output"}
        prefix = {"filename_prefix": f"stop/{frames}"}
        prompt.add("FastVAE_DecodeVideo", samples=latent, vae=vae, **options, **prefix)
        return prompt

    server.run(workflow(17))
    used_bytes = server.rss_bytes()
    error, seconds = server.interrupted(workflow(1001))  # a minute and more
    assert error.interrupted
    assert seconds < 3
    server.run(workflow(5))
    assert server.rss_bytes() < used_bytes + SLACK_BYTES
    names = sorted(path.name for path in (server.output / "stop").iterdir())
    assert names == [f"{frames}_00001_.mp4" for frames in (17, 5)]


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_a_whole_file_or_none(tmp_path):
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    with Server(tmp_path, threads=1) as server:
        workflow, _, video = film(160.0)  # ten times as many frames, to be in the midst of them
        events = server.events
        prompt_id = server.queue(workflow)
        events.wait("progress", timeout_s=240, prompt_id=prompt_id, node=video)
        server.kill()
        assert not list(server.output.glob("*.mp4"))
    with Server(tmp_path, threads=1) as server:
        workflow, _, video = film()
        shown = server.run(workflow)
        assert [file.name for file in server.files(shown[video])] == ["film_00001_.mp4"]
        assert len(frames_of_file(server.output / "film_00001_.mp4")) == 33


def frames_of_file(path):
    import av

    with av.open(str(path)) as container:
        return list(container.decode(video=0))
