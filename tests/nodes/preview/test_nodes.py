"""Preview Video Latent (Fast): frames of ComfyUI's network, colors, pictures, and errors."""

import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.server import Workflow
from fast_video_vae.tests.tiny import random_tiny, stock_frames
from fast_video_vae.tests.vae.planning.live_bytes import LiveBytes

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference", "approx", "temp")]

CPU = torch.device("cpu")


@pytest.fixture
def temp(comfyui, tmp_path, monkeypatch):
    """An empty folder for temporary files."""
    import folder_paths

    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))


@pytest.fixture
def tiny(approx):
    """Put a random tiny decoder of a name into models/vae_approx; its state dict."""

    def saved(name, channels=16, changed=None):
        state = random_tiny(channels, seed=len(name))
        content = {"encoder.0.weight": torch.zeros(64, 3, 3, 3)} | state | (changed or {})
        save = torch.save if name.endswith("pth") else save_file
        save({key: each for key, each in content.items() if each is not None}, approx / name)
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


def latent(channels=16, frames=3, batch=1, side=6):
    generator = torch.Generator().manual_seed(channels)
    return torch.randn(batch, channels, frames, side, side + 1, generator=generator)


def wan(channels):
    import comfy.latent_formats

    return {16: comfy.latent_formats.Wan21, 48: comfy.latent_formats.Wan22}[channels]()


def stock(state, samples, name="light"):
    """The IMAGE of ComfyUI's network for latents as a file of this name expects them."""
    given = samples if name.startswith("light") else wan(samples.shape[1]).process_in(samples)
    return stock_frames(state, given).movedim(1, -1).flatten(0, 1).clamp(0, 1)


@pytest.mark.parametrize(
    ("name", "channels", "frames", "batch"),
    [
        ("lighttaew2_1.safetensors", 16, 5, 1),
        ("LightTAEw2_1_fp16.pth", 16, 2, 2),
        ("taew2_1.pth", 16, 3, 1),
        ("taew2_2.safetensors", 48, 2, 2),
        ("lighttaew2_2.safetensors", 48, 1, 1),
    ],
)
def test_auto_takes_the_tiny_decoder_of_the_channels(tiny, name, channels, frames, batch):
    tiny({16: "lighttaew2_2.pth", 48: "lighttaew2_1.pth"}[channels], 64 - channels)
    state = tiny(name, channels)
    samples = latent(channels, frames, batch)
    images, fps, picture = shown(samples)
    assert (images.dtype, fps) == (torch.float32, 16.0)
    assert (images - stock(state, samples, name.lower())).abs().max() <= 1e-5
    assert picture.n_frames == len(images) == batch * (4 * frames - 3)
    if len(images) > 1:
        assert seconds(picture) == pytest.approx(len(images) / 16, abs=0.002)


def test_the_light_decoder_is_preferred_and_wider_ones_are_not_listed(tiny):
    from fast_video_vae.nodes.preview.nodes import PreviewLatent

    names = ["lighttaew2_1.pth", "taehv.pth", "taew2_1.safetensors", "taew2_2_super.pth"]
    light, *_ = [tiny(name) for name in names]
    options = PreviewLatent.define_schema().inputs[1].options
    assert options == ["auto", "latent2rgb", *names[::2]]
    images, *_ = shown(latent())
    assert (images - stock(light, latent())).abs().max() <= 1e-5
    tiny(names[0], changed={"decoder.22.bias": torch.ones(3)})  # read again
    assert not torch.equal(shown(latent())[0], images)


def test_half_precision_is_near_float32_and_memory_does_not_grow(tiny, monkeypatch):
    from fast_video_vae.nodes.preview import tiny_decoder

    state, samples = tiny("lighttaew2_1.pth"), latent(frames=12, side=4)
    expected, peaks = stock_frames(state, samples[:, :, :3]), []
    patcher = tiny_decoder.tiny_model("lighttaew2_1.pth", 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        monkeypatch.setattr(tiny_decoder, "dtype_on", lambda device, dtype=dtype: dtype)
        decoder = tiny_decoder.tiny_decoder_on(CPU, patcher)
        frames = torch.stack([*decoder.frames(samples[:, :, :3], CPU)], 2)
        assert frames.dtype == dtype
        # 24 convolutions, each rounded twice; the sums of float32 have another order.
        error = (frames.float() - expected).abs().max() / expected.abs().max()
        assert error <= max(48 * torch.finfo(dtype).eps / 2, 1e-5)
    decoder = patcher.model
    for count in (4, 12):
        counter = LiveBytes()
        for tensor in (samples, *decoder.state_dict().values()):
            counter.ignore(tensor)
        with counter:
            for frame in decoder.frames(samples[:, :, :count], CPU):
                del frame
        peaks.append(counter.peak)
    assert peaks[1] <= 1.02 * peaks[0]
    assert peaks[1] <= decoder.peak_bytes(samples.shape) <= 1.5 * peaks[1]


@pytest.mark.parametrize(("channels", "scale"), [(16, 8), (48, 16)])
def test_colors_are_those_of_comfyuis_factors(channels, scale):
    """One picture per latent frame, of the latent as the model sees it."""
    samples, kind = latent(channels), wan(channels)
    images, fps, picture = shown(samples, fps=24.0)
    assert images.shape == (3, 6 * scale, 7 * scale, 3)
    assert (fps, picture.n_frames, seconds(picture)) == (6.0, 3, pytest.approx(0.5, abs=0.002))
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
    images, fps, _ = shown(samples, decoder=decoder)
    assert (images.shape, fps) == ((2, 48, 48, 3), 16.0)
    assert ("colors of this preview are those of Wan" in caplog.text) == (decoder[0] != "t")
    video, *_ = shown(samples.unsqueeze(2), decoder=decoder)
    assert torch.equal(video, images) == (decoder != "auto")


def test_latents_of_other_models_work_if_their_colors_are_certain():
    assert shown(torch.randn(1, 12, 2, 4, 4))[0].shape == (2, 32, 32, 3)  # Mochi
    with refused("samples: got 4 channels; .* formats with different colors", "SD15", "SDXL"):
        shown(torch.randn(1, 4, 8, 8))
    with refused("samples: got 5 channels; .* but none has them"):
        shown(torch.randn(1, 5, 1, 8, 8))
    with refused("samples: got 3 dimensions; expected those of a video or of images"):
        shown(torch.randn(1, 16, 8))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"decoder.22.bias": None}, "is not a tiny decoder: .* decoder.22.bias is missing"),
        ({"decoder.9.conv.0.bias": None}, "decoder.9.conv.0.bias is missing; a tiny decoder needs"),
        (
            {"decoder.8.weight": torch.zeros(64, 256, 3, 3)},
            r"decoder.8.weight is \[64, 256, 3, 3\]",
        ),
        ({"decoder.1.weight": torch.zeros(256, 32, 3, 3)}, "is for 32 latent channels; expected"),
        ({"decoder.22.bias": torch.full((3,), torch.nan)}, "decoder.22.bias holds NaN or infinity"),
        ({"function": random_tiny}, "its pickle is damaged, or holds more than tensors"),
        (None, ""),
    ],
)
def test_a_file_that_does_not_fit_is_named_in_one_line(tiny, approx, changed, words):
    tiny("taew2_1.pth", changed=changed)
    if changed is None:
        (approx / "taew2_1.pth").write_bytes(b"no")
    with refused(f"^decoder: .*taew2_1.pth.*{words}"):
        shown(latent())
    tiny("taew2_1.pth", 48)  # whatever its name says
    with refused("decoder: taew2_1.pth is for latents of 48 channels; expected one for 16"):
        shown(latent())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("decoder", ["latent2rgb", "lighttaew2_1.pth"])
def test_latents_of_any_float_dtype_are_shown(tiny, dtype, decoder):
    tiny("lighttaew2_1.pth")
    narrow = latent().to(dtype)
    images, *_ = shown(narrow, decoder=decoder)
    assert torch.equal(images, shown(narrow.float(), decoder=decoder)[0])


def test_a_long_or_large_clip_is_shown_in_a_small_file():
    images, _, picture = shown(torch.randn(1, 16, 700, 2, 3), decoder="latent2rgb")
    assert (len(images), picture.n_frames) == (700, 234)  # every third
    assert seconds(picture) == pytest.approx(700 / 4, rel=0.01)
    for height, width, small in ((200, 100, (400, 200)), (10, 1030, (5, 512))):
        images, _, picture = shown(torch.randn(1, 16, 1, height, width), decoder="latent2rgb")
        assert images.shape == (1, *small, 3)
        assert picture.size == small[::-1]
    # The milliseconds of a WebP do not fit into 32 bits if a clip takes many days.
    _, fps, picture = shown(torch.randn(1, 16, 5400, 1, 1), decoder="latent2rgb", fps=0.01)
    assert fps == 0.0025
    assert seconds(picture) == pytest.approx(2**31 / 1000, rel=0.02)


def test_progress_covers_all_frames_and_an_interrupt_ends_it(tiny, progress, monkeypatch):
    import comfy.model_management as management
    import comfy.utils

    tiny("taew2_1.pth")
    shown(latent())
    assert progress == [(done, 9) for done in range(1, 10)]
    stop = lambda *given, **options: management.interrupt_current_processing()  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", stop)
    with pytest.raises(management.InterruptProcessingException):
        shown(latent())


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
    images, *_ = shown(latent())
    assert (images - stock(state, latent())).abs().max() <= 1e-5
    assert [each is used[0] for each in used] == [True, True, False]
    for way in ("with all models unloaded", "on the CPU"):
        assert f"memory ran out in a preview; trying again, {way}" in caplog.text


def test_the_node_shows_an_animation_in_a_running_comfyui(server):
    workflow = Workflow()
    options = {"decoder": "auto", "fps": 16.0}
    node = workflow.add("FastVAE_PreviewLatent", samples=workflow.latent(64, 9), **options)
    result = server.run(workflow)[node[0]]
    (file,) = server.files(result)
    assert result["animated"] == [True]
    assert file.parent.name == "temp"
    assert file.read_bytes()[8:12] == b"WEBP"
