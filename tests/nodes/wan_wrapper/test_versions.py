"""The calls of the WANVAE nodes of two versions: of March 2025, and of 2026.

The functions here call the VAE with the arguments of these nodes and process its result in the same
way. The expected result is computed in that way from ComfyUI's network. The VAE of March 2025
clamps all frames to [-1, 1]; that of 2026 only those of a tiled decode.
"""

import pytest
import torch

from fast_video_vae.tests.nodes.vae.pairs import relative_error
from fast_video_vae.tests.nodes.wan_wrapper.wrapped import CPU, family_of, video, wrapped

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

# Widgets of the nodes: sizes in pixels, of 2026 also divided by 8.
MARCH_2025 = {"tile_size": (272, 272), "tile_stride": (144, 128)}
SMALLEST = {"tile_size": (40 // 8, 40 // 8), "tile_stride": (32 // 8, 32 // 8)}

tiled_or_not = pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])


@pytest.fixture(scope="module")
def family(comfyui, tmp_path_factory):
    return family_of("wan2.1", tmp_path_factory.mktemp("vae"))


@pytest.fixture
def vae(family):
    return wrapped(family.fast)


@pytest.fixture
def latent(family):
    """Latents with frames beyond [-1, 1]."""
    generator = torch.Generator().manual_seed(0)
    latent = 1.5 * torch.randn(1, family.channels, 5, 4, 6, generator=generator)
    assert family.oracle.decode(latent).abs().max() > 1.1
    return latent


def by_min_and_max(frames):
    return (frames - frames.min()) / (frames.max() - frames.min())


def image_of(frames):
    return frames.permute(1, 2, 3, 0)


def decode_2025(vae, latent, tiled):
    """WanVideo Decode of March 2025."""
    vae.to(CPU)
    latent = latent.to(device=CPU, dtype=vae.dtype)
    frames = vae.decode(latent, device=CPU, tiled=tiled, **MARCH_2025)[0]
    vae.to(CPU)
    vae.model.clear_cache()
    return image_of(by_min_and_max(frames).clamp(0, 1)).cpu().float()


def scaled_2026(frames, normalization):
    if normalization == "minmax":
        return by_min_and_max(frames)
    return frames if normalization == "none" else (frames.clamp(-1, 1) + 1) / 2


def decode_2026(vae, latent, tiled, normalization="default", looped=False):
    """WanVideo Decode of 2026, whose last frames of a loop are always scaled by their range."""
    vae.to(CPU)
    latent = latent.clone().to(device=CPU, dtype=vae.dtype)
    options = {"device": CPU, "end_": False, "tiled": tiled, **SMALLEST}
    frames = scaled_2026(vae.decode(latent, **options)[0].cpu().float(), normalization)
    if looped:
        seam = torch.cat([latent[:, :, -3:], latent[:, :, :2]], dim=2)
        seam = by_min_and_max(vae.decode(seam, **options)[0].cpu().float())
        frames = torch.cat([seam[:, 9:], frames[:, 5:]], dim=1)
    vae.to(CPU)
    return image_of(frames.clamp_(0, 1))


class Stock:
    """The frames of the wrapper's own VAE, from ComfyUI's network."""

    dtype = torch.float32

    def __init__(self, oracle, clamps):
        self._oracle, self._clamps, self.model = oracle, clamps, self

    def to(self, *_):
        return self

    def clear_cache(self):
        pass

    def decode(self, latent, device, tiled, **_):
        frames = self._oracle.decode(latent)
        return list(frames.clamp(-1, 1) if tiled or self._clamps else frames)


@tiled_or_not
def test_the_decode_of_2025_gives_its_image(family, vae, latent, tiled):
    """It scales the frames by their range, so frames beyond [-1, 1] would lose contrast."""
    image = decode_2025(vae, latent, tiled)
    assert relative_error(image, decode_2025(Stock(family.oracle, True), latent, tiled)) <= 1e-5
    (frames,) = family.oracle.decode(latent)
    assert relative_error(image, image_of((frames.clamp(-1, 1) + 1) / 2)) <= 1e-5


@tiled_or_not
@pytest.mark.parametrize(
    ("normalization", "looped"),
    [("default", False), ("minmax", False), ("none", False), ("default", True)],
)
def test_the_decode_of_2026_gives_its_image(family, vae, latent, tiled, normalization, looped):
    image = decode_2026(vae, latent, tiled, normalization, looped)
    expected = decode_2026(Stock(family.oracle, False), latent, tiled, normalization, looped)
    assert relative_error(image, expected) <= 1e-5


@tiled_or_not
def test_a_window_of_the_samplers_of_2026_gets_the_frames_of_its_vae(family, latent, tiled):
    """They decode window after window, and encode the last frames again."""
    vae = wrapped(family.fast)
    frames = vae.decode(latent.to(CPU, vae.dtype), device=CPU, tiled=tiled, pbar=False)[0].cpu()
    (expected,) = Stock(family.oracle, False).decode(latent, CPU, tiled)
    assert relative_error(frames, expected) <= 1e-5
    again = vae.encode(frames[None, :, -1:].to(CPU, vae.dtype), device=CPU, pbar=False)[0]
    assert relative_error(again[None], family.oracle.encode(expected[None, :, -1:])) <= 1e-4


@tiled_or_not
def test_the_encodes_of_both_versions_give_the_same(family, vae, tiled):
    pixels, step = video(5, 96, 128), vae.upsampling_factor
    expected = family.oracle.encode(pixels)
    small = {"tile_size": (64 // step, 64 // step), "tile_stride": (32 // step, 32 // step)}
    for latents in (
        vae.encode(pixels, device=CPU, tiled=tiled, **MARCH_2025),
        vae.encode(pixels, device=CPU, tiled=tiled, **small),
        vae.encode(pixels, device=CPU, tiled=tiled, pbar=False),
        vae.encode([pixels[0]], CPU, tiled=tiled),
    ):
        assert latents.dtype == torch.float32
        assert relative_error(latents, expected) <= 1e-5
        latents *= 0.5  # nodes with a latent strength write into them
    assert relative_error(vae.encode([pixels[0]], CPU)[0][None], expected) <= 1e-5


def test_the_images_of_a_latent_batch_are_encoded_one_by_one(family, vae):
    pixels = video(3)
    images = pixels[0].permute(1, 2, 3, 0)
    parts = [image[None, None].permute(0, 4, 1, 2, 3) for image in images]
    latents = torch.stack([vae.encode(part, device=CPU, tiled=False)[0] for part in parts])
    expected = torch.cat([family.oracle.encode(pixels[:, :, at : at + 1]) for at in range(3)])
    assert relative_error(latents, expected) <= 1e-5
