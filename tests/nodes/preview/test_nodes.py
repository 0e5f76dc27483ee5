"""Preview Video Latent (Fast): frames of ComfyUI's network, colors, pictures, and errors."""

from pathlib import Path

import pytest
import torch
from PIL import Image, ImageSequence
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.tiny import random_tiny, stock_frames
from fast_video_vae.tests.vae.planning.live_bytes import LiveBytes

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference", "approx")]


@pytest.fixture
def tiny(approx):
    """Put a random tiny decoder of a name into models/vae_approx; its state dict."""

    def saved(name, channels=16, changed=None, seed=0):
        state = random_tiny(channels, seed)
        content = {"encoder.0.weight": torch.zeros(64, 3, 3, 3)} | state | (changed or {})
        save = torch.save if name.endswith("pth") else save_file
        save({key: each for key, each in content.items() if each is not None}, approx / name)
        return state

    return saved


def shown(samples, decoder="auto", fps=16.0):
    """Return images, frames per second, and of the animation on the node size, count, seconds."""
    import folder_paths

    from fast_video_vae.nodes.preview.nodes import PreviewLatent

    given = {"samples": {"samples": samples}, "decoder": decoder, "fps": fps}
    output = PreviewLatent.PREPARE_CLASS_CLONE(None).execute(**given)
    files = output.ui.as_dict()
    (saved,) = files["images"]
    assert saved["type"] == "temp"
    path = Path(folder_paths.get_temp_directory()) / saved["subfolder"] / saved["filename"]
    picture, milliseconds = Image.open(path), 0
    assert picture.format == "WEBP"
    assert files.get("animated", (False,)) == (picture.n_frames > 1,)
    for frame in ImageSequence.Iterator(picture):
        frame.load()
        milliseconds += frame.info["duration"]
    return *output.args, (picture.size, picture.n_frames, milliseconds / 1000)


def latent(channels=16, frames=3, batch=1):
    generator = torch.Generator().manual_seed(channels)
    return torch.randn(batch, channels, frames, 6, 7, generator=generator)


def wan(channels):
    import comfy.latent_formats

    return {16: comfy.latent_formats.Wan21, 48: comfy.latent_formats.Wan22}[channels]()


def stock(state, samples, name="light"):
    """The IMAGE of ComfyUI's network for latents as a file of this name expects them."""
    given = samples if name.startswith("light") else wan(samples.shape[1]).process_in(samples)
    return stock_frames(state, given).movedim(1, -1).flatten(0, 1).clamp(0, 1)


@pytest.mark.parametrize(("channels", "frames", "batch"), [(16, 2, 2), (48, 1, 1)])
def test_auto_takes_the_tiny_decoder_of_the_channels(
    tiny, approx, progress, channels, frames, batch
):
    """The light one first, then the other one, then colors; never one of another layout."""
    from fast_video_vae.nodes.preview.nodes import PreviewLatent

    names = ["LightTAEw2_1_fp16.pth", "lighttaew2_2.pth", "taew2_1.safetensors", "taew2_2.pth"]
    for name in ("taehv.pth", "taew2_1_super.pth", *names):
        tiny(name, 48 if "2_2" in name else 16)
    assert PreviewLatent.define_schema().inputs[1].options == ["auto", "latent2rgb", *names]
    samples = latent(channels, frames, batch)
    for name in names[channels // 32 :: 2]:
        for seed in (1, 2):  # a file that changed is read again
            state = tiny(name, channels, seed=seed)
            progress.clear()
            images, fps, (_, count, seconds) = shown(samples)
            assert (images.dtype, fps) == (torch.float32, 16.0)
            assert (images - stock(state, samples, name.lower())).abs().max() <= 1e-5
            assert count == len(images) == batch * (4 * frames - 3)
            assert seconds == (pytest.approx(count / 16, rel=0.01) if count > 1 else 0)
            assert progress == [(done, count) for done in range(1, count + 1)]
        (approx / name).unlink()
    assert len(shown(samples)[0]) == batch * frames


def test_decoders_and_latents_of_other_dtypes_are_shown(tiny, monkeypatch):
    from fast_video_vae.nodes.preview import tiny_decoder

    monkeypatch.setattr(tiny_decoder, "dtype_on", lambda device: torch.bfloat16)
    state, narrow = tiny("lighttaew2_1.pth"), latent().to(torch.float8_e4m3fn)
    for decoder in ("latent2rgb", "lighttaew2_1.pth"):
        images, *_ = shown(narrow, decoder)
        assert torch.equal(images, shown(narrow.float(), decoder)[0])
    expected = stock(state, narrow.float())
    # 24 convolutions, each rounded twice.
    assert (
        0 < (images - expected).abs().max() <= 24 * torch.finfo(torch.bfloat16).eps * expected.max()
    )


def test_the_memory_for_frames_is_known_and_does_not_grow(tiny):
    from fast_video_vae.nodes.preview import tiny_decoder

    tiny("lighttaew2_1.pth")
    decoder, peaks = tiny_decoder.tiny_model("lighttaew2_1.pth", 16).model, []
    for count in (4, 12):
        samples, counter = latent(frames=count), LiveBytes()
        for tensor in (samples, *decoder.state_dict().values()):
            counter.ignore(tensor)
        with counter:
            for frame in decoder.frames(samples, torch.device("cpu")):
                del frame
        peaks.append(counter.peak)
    assert peaks[1] <= 1.02 * peaks[0]
    assert peaks[1] <= decoder.peak_bytes(samples.shape) <= 1.5 * peaks[1]


@pytest.mark.parametrize(("channels", "scale"), [(16, 8), (48, 16)])
def test_colors_are_those_of_comfyuis_factors(channels, scale):
    """One picture per latent frame, of the latent as the model sees it."""
    samples, kind = latent(channels), wan(channels)
    images, fps, animation = shown(samples, fps=24.0)
    assert images.shape == (3, 6 * scale, 7 * scale, 3)
    assert (fps, animation) == (6.0, ((7 * scale, 6 * scale), 3, pytest.approx(0.5, rel=0.01)))
    factors, bias = map(torch.tensor, (kind.latent_rgb_factors, kind.latent_rgb_factors_bias))
    x = kind.process_in(samples)[0].permute(1, 2, 3, 0)
    expected = ((x @ factors + bias + 1) / 2).clamp(0, 1)
    # Bilinear pixels at the center of a latent are nearest to its color.
    center = images[:, scale // 2 :: scale, scale // 2 :: scale]
    assert (center - expected).abs().mean() < 6 / 255


@pytest.mark.parametrize("decoder", ["auto", "latent2rgb", "taew2_1.pth"])
def test_images_of_16_channels_are_decoded_as_wan_only_on_request(tiny, caplog, decoder):
    """Without a dimension for time they are mostly those of SD3 or Flux."""
    tiny("taew2_1.pth")
    samples = torch.randn(2, 16, 6, 6)
    images, fps, _ = shown(samples, decoder)
    assert (images.shape, fps) == ((2, 48, 48, 3), 16.0)
    assert ("colors of this preview are those of Wan" in caplog.text) == (decoder[0] != "t")
    assert torch.equal(shown(samples.unsqueeze(2), decoder)[0], images) == (decoder != "auto")


def test_latents_of_other_models_work_if_their_colors_are_certain():
    assert shown(torch.randn(1, 12, 2, 4, 4))[0].shape == (2, 32, 32, 3)  # Mochi
    with refused("^samples: got 4 channels; .* formats with different colors", "SD15", "SDXL"):
        shown(torch.randn(1, 4, 8, 8))
    with refused("^samples: got 5 channels; .* but none has them"):
        shown(torch.randn(1, 5, 1, 8, 8))
    with refused("^samples: got 3 dimensions; expected those of a video or of images"):
        shown(torch.randn(1, 16, 8))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"22.bias": None}, "is not a tiny decoder: .* decoder.22.bias is missing"),
        ({"8.weight": torch.zeros(64, 256, 3, 3)}, r"decoder.8.weight is \[64, 256, 3, 3\]"),
        ({"1.weight": torch.zeros(256, 32, 3, 3)}, "is for 32 latent channels; expected"),
        ({"22.bias": torch.full((3,), torch.nan)}, "decoder.22.bias holds NaN or infinity"),
        ({"function": random_tiny}, "its pickle is damaged, or holds more than tensors"),
        (None, ""),  # not even a file of tensors
    ],
)
def test_a_file_that_does_not_fit_is_named_in_one_line(tiny, approx, changed, words):
    tiny("taew2_1.pth", changed={f"decoder.{key}": each for key, each in (changed or {}).items()})
    if changed is None:
        (approx / "taew2_1.pth").write_bytes(b"no")
    with refused(f"^decoder: .*taew2_1.pth.*{words}"):
        shown(latent())
    tiny("taew2_1.pth", 48)  # whatever its name says
    with refused("^decoder: taew2_1.pth is for latents of 48 channels; expected one for 16"):
        shown(latent())


@pytest.mark.parametrize(
    ("frames", "height", "width", "fps", "expected", "seconds"),
    [
        (322, 2, 3, 16.0, ((16, 24), (24, 16), 161), 322 / 4),  # every second picture
        (2, 10, 1030, 8.0, ((5, 512), (512, 5), 2), 1),
        # The milliseconds of a WebP do not fit into 32 bits if a clip takes many days.
        (5400, 1, 1, 0.01, ((8, 8), (8, 8), 318), 2**31 / 1000),
    ],
)
def test_a_long_or_large_clip_is_shown_in_a_small_file(
    frames, height, width, fps, expected, seconds
):
    # Not random anew in each run: equal neighbors would be one picture of the file.
    generator = torch.Generator().manual_seed(frames)
    samples = torch.randn(1, 16, frames, height, width, generator=generator)
    images, shown_fps, (*size_and_count, length) = shown(samples, "latent2rgb", fps)
    assert (images.shape[1:3], *size_and_count) == expected
    assert (len(images), shown_fps, length) == (frames, fps / 4, pytest.approx(seconds, rel=1e-3))


def test_memory_that_runs_out_is_freed_and_the_decode_repeated_at_last_on_the_cpu(
    tiny, monkeypatch, caplog
):
    from fast_video_vae.nodes.preview.tiny_decoder import TinyDecoder

    state, frames, used = tiny("lighttaew2_1.safetensors"), TinyDecoder.frames, []

    def failing(self, *given):
        used.append(self)
        if len(used) <= 2:
            raise torch.OutOfMemoryError("planted")
        return frames(self, *given)

    monkeypatch.setattr(TinyDecoder, "frames", failing)
    assert (shown(latent())[0] - stock(state, latent())).abs().max() <= 1e-5
    assert [each is used[0] for each in used] == [True, True, False]
    for way in ("with all models unloaded", "on the CPU"):
        assert f"memory ran out in a preview; trying again, {way}" in caplog.text
