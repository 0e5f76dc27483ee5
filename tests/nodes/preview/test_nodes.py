"""Preview Video Latent (Fast), called as ComfyUI calls it: pictures, files, and errors."""

import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.server import Workflow
from fast_video_vae.tests.tiny import random_tiny
from fast_video_vae.vae.models.latent_stats import latent_statistics

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference", "approx", "temp")]


@pytest.fixture
def temp(comfyui, tmp_path, monkeypatch):
    """An empty folder for temporary files."""
    import folder_paths

    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))


@pytest.fixture
def tiny(approx):
    """Put a random tiny decoder of a name into models/vae_approx; its state dict."""

    def saved(name, channels=16):
        state = random_tiny(channels, seed=len(name))
        save_file(state, approx / name)
        return state

    return saved


def shown(samples, **inputs):
    """Return images, frames per second, and the picture on the node."""
    import folder_paths

    from fast_video_vae.nodes.preview.nodes import PreviewLatent

    given = {"samples": {"samples": samples}, "decoder": "auto", "fps": 16.0} | inputs
    output = PreviewLatent.PREPARE_CLASS_CLONE(None).execute(**given)
    files = output.ui.as_dict()
    (saved,) = files["images"]
    assert saved["type"] == "temp"
    path = Path(folder_paths.temp_directory) / saved["subfolder"] / saved["filename"]
    picture = Image.open(io.BytesIO(path.read_bytes()))
    assert files.get("animated", (False,)) == (picture.n_frames > 1,)
    return *output.args, picture


def seconds(picture):
    total = 0
    for at in range(picture.n_frames):
        picture.seek(at)
        picture.load()
        total += picture.info["duration"]
    return total / 1000


def latent(channels=16, frames=3, side=6):
    generator = torch.Generator().manual_seed(channels)
    return torch.randn(1, channels, frames, side, side, generator=generator)


def stock(state, samples):
    """The IMAGE of ComfyUI's network."""
    from comfy.taesd.taehv import TAEHV

    network = TAEHV(samples.shape[1]).eval()
    assert not network.load_state_dict(state, strict=False).unexpected_keys
    return network.decode(samples)[0].movedim(0, -1).clamp(0, 1)


@pytest.mark.parametrize(
    ("name", "channels"),
    [("lighttaew2_1.safetensors", 16), ("taew2_1.safetensors", 16), ("taew2_2.safetensors", 48)],
)
def test_auto_takes_the_tiny_decoder_of_the_channels(tiny, name, channels):
    other = {16: "lighttaew2_2.safetensors", 48: "lighttaew2_1.safetensors"}
    tiny(other[channels], 64 - channels)
    state, samples = tiny(name, channels), latent(channels)
    given = samples
    if name.startswith("taew"):
        mean, std = (torch.tensor(v).view(-1, 1, 1, 1) for v in latent_statistics(channels))
        given = (samples - mean) / std
    images, fps, picture = shown(samples)
    assert (images.dtype, fps) == (torch.float32, 16.0)
    assert (images - stock(state, given)).abs().max() <= 1e-5
    assert picture.n_frames == 9
    assert seconds(picture) == pytest.approx(9 / 16, abs=0.002)


def test_the_light_decoder_is_preferred_and_wider_ones_are_not_listed(tiny):
    from fast_video_vae.nodes.preview.nodes import PreviewLatent

    tiny("taew2_1.safetensors")
    state = tiny("lighttaew2_1.safetensors")
    for name in ("taew2_2_super.safetensors", "taehv.safetensors"):
        tiny(name)
    decoder = PreviewLatent.define_schema().inputs[1]
    files = ["lighttaew2_1.safetensors", "taew2_1.safetensors"]
    assert decoder.options == ["auto", "latent2rgb", *files]
    images, *_ = shown(latent())
    assert (images - stock(state, latent())).abs().max() <= 1e-5


@pytest.mark.parametrize("channels", [16, 48])
def test_colors_are_those_of_comfyuis_previewer(channels):
    """One picture per latent frame, of the latent as the model sees it."""
    import comfy.latent_formats
    import latent_preview

    kind = {16: comfy.latent_formats.Wan21, 48: comfy.latent_formats.Wan22}[channels]()
    previewer = latent_preview.Latent2RGBPreviewer(
        kind.latent_rgb_factors, kind.latent_rgb_factors_bias
    )
    samples = latent(channels)
    images, fps, picture = shown(samples, fps=24.0)
    scale = {16: 8, 48: 16}[channels]
    assert images.shape == (3, 6 * scale, 6 * scale, 3)
    assert fps == 6.0
    assert picture.n_frames == 3
    assert seconds(picture) == pytest.approx(3 / 6, abs=0.002)
    x0 = kind.process_in(samples)
    for at, image in enumerate(images):
        _, expected, _ = previewer.decode_latent_to_preview_image("JPEG", x0[:, :, at : at + 1])
        small = torch.frombuffer(bytearray(expected.tobytes()), dtype=torch.uint8).view(6, 6, 3)
        inner = image.unflatten(0, (6, scale)).unflatten(2, (6, scale))
        center = inner[:, scale // 2 - 1 : scale // 2 + 1, :, scale // 2 - 1 : scale // 2 + 1]
        # Bilinear pixels at the center of a latent are nearest to its color.
        assert (center.mean((1, 3)) * 255 - small).abs().mean() < 6


@pytest.mark.parametrize("decoder", ["auto", "latent2rgb", "taew2_1.safetensors"])
def test_images_work_too(tiny, decoder):
    tiny("taew2_1.safetensors")
    for samples in (torch.randn(2, 16, 6, 6), torch.randn(2, 16, 1, 6, 6)):
        images, fps, _ = shown(samples, decoder=decoder)
        assert images.shape == (2, 48, 48, 3)
        assert fps == 16.0


def test_images_of_16_channels_are_decoded_as_wan_only_on_request(tiny, caplog):
    """Without a dimension for time they are mostly those of SD3 or Flux."""
    tiny("taew2_1.safetensors")
    samples = torch.randn(1, 16, 6, 6)
    chosen, *_ = shown(samples, decoder="taew2_1.safetensors")
    assert caplog.text == ""
    images, *_ = shown(samples)
    assert "colors of this preview are those of Wan" in caplog.text
    assert torch.equal(images, shown(samples, decoder="latent2rgb")[0])
    assert not torch.equal(images, chosen)
    caplog.clear()
    assert torch.equal(shown(samples.unsqueeze(2))[0], chosen)
    assert caplog.text == ""


def test_latents_of_other_models_work_if_their_colors_are_certain():
    images, *_ = shown(torch.randn(1, 12, 2, 4, 4))  # Mochi
    assert images.shape == (2, 32, 32, 3)
    with refused("samples: got 4 channels; .* formats with different colors", "SD15", "SDXL"):
        shown(torch.randn(1, 4, 8, 8))
    with refused("samples: got 5 channels; .* but none has them"):
        shown(torch.randn(1, 5, 1, 8, 8))
    with refused("samples: got 3 dimensions; expected those of a video or of images"):
        shown(torch.randn(1, 16, 8))


def test_a_file_that_does_not_fit_is_named(tiny, approx):
    tiny("taew2_2.safetensors", 48)
    with refused("decoder: taew2_2.safetensors is for latents of 48 channels; expected one for 16"):
        shown(latent(), decoder="taew2_2.safetensors")
    tiny("taew2_1.safetensors", 48)  # whatever its name says
    with refused("decoder: taew2_1.safetensors is for latents of 48 channels; expected one for 16"):
        shown(latent())
    (approx / "taew2_1.safetensors").write_bytes(b"no")
    with refused("decoder: ", "taew2_1.safetensors"):
        shown(latent())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
@pytest.mark.parametrize("decoder", ["latent2rgb", "lighttaew2_1.safetensors"])
def test_latents_of_any_float_dtype_are_shown(tiny, dtype, decoder):
    tiny("lighttaew2_1.safetensors")
    narrow = latent().to(dtype)
    images, *_ = shown(narrow, decoder=decoder)
    expected, *_ = shown(narrow.float(), decoder=decoder)
    assert torch.equal(images, expected)


def test_a_long_or_large_clip_is_shown_in_a_small_file():
    images, _, picture = shown(torch.randn(1, 16, 700, 2, 3), decoder="latent2rgb")
    assert len(images) == 700
    assert picture.n_frames == 234  # every third
    assert seconds(picture) == pytest.approx(700 / 4, abs=0.1)
    for height, width, small in ((200, 100, (400, 200)), (10, 1030, (5, 512))):
        images, _, picture = shown(torch.randn(1, 16, 1, height, width), decoder="latent2rgb")
        assert images.shape == (1, *small, 3)
        assert picture.size == small[::-1]
    # The milliseconds of a WebP do not fit into 32 bits if a clip takes many days.
    _, fps, picture = shown(torch.randn(1, 16, 5400, 1, 1), decoder="latent2rgb", fps=0.01)
    assert fps == 0.0025
    assert seconds(picture) == pytest.approx(2**31 / 1000, rel=1e-3)


def test_progress_covers_all_frames_and_an_interrupt_ends_it(tiny, progress, monkeypatch):
    import comfy.model_management as management

    from fast_video_vae.nodes.host import progress as host

    tiny("taew2_1.safetensors")
    shown(latent())
    assert progress[-1] == (9, 9)
    stop, calls = management.InterruptProcessingException, []

    def interrupted():
        calls.append(1)
        if len(calls) == 2:
            raise stop

    monkeypatch.setattr(host, "throw_exception_if_processing_interrupted", interrupted)
    with pytest.raises(stop):
        shown(latent(frames=4))


def test_memory_that_runs_out_is_freed_and_the_decode_repeated(tiny, monkeypatch, caplog):
    from fast_video_vae.vae.preview import TinyDecoder

    state, decode, tries = tiny("lighttaew2_1.safetensors"), TinyDecoder.decode_stream, []

    def failing(self, *given):
        tries.append(given)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("planted")
        return decode(self, *given)

    monkeypatch.setattr(TinyDecoder, "decode_stream", failing)
    images, *_ = shown(latent())
    assert (images - stock(state, latent())).abs().max() <= 1e-5
    assert "memory ran out in a preview; trying again, with all models unloaded" in caplog.text


def test_the_node_shows_an_animation_in_a_running_comfyui(server):
    workflow = Workflow()
    options = {"decoder": "auto", "fps": 16.0}
    node = workflow.add("FastVAE_PreviewLatent", samples=workflow.latent(64, 9), **options)
    result = server.run(workflow)[node[0]]
    (file,) = server.files(result)
    assert result["animated"] == [True]
    assert file.parent.name == "temp"
    assert file.read_bytes()[8:12] == b"WEBP"
