"""Properties of the SeedVR2 layout; see test_families.py for the rest."""

import functools

import pytest
import torch

from fast_video_vae.kernels.convolution import onednn
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import (
    Convolutions,
    random_frames,
    random_latent,
    relative_error,
)
from fast_video_vae.tests.vae.models.seedvr2_oracle import Oracle, PlainUpsample
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.layers import row_bands
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.models import seedvr2
from fast_video_vae.vae.planning import candidates

WIDTHS = (32, 32, 64, 64)


@pytest.fixture(scope="module")
def state():
    return random_seedvr2(WIDTHS)


@pytest.fixture(scope="module")
def vae(state):
    return load_vae(state, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(state):
    """The upsampling in its two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seedvr2, "SeedVR2Upsample", PlainUpsample)
        return load_vae(state, dtype=torch.float32)


@pytest.fixture(scope="module")
def truth(state):
    """Return the float64 result for a clip, by direction and shape."""
    oracle = Oracle({name: value.double() for name, value in state.items()})

    @functools.cache
    def of(direction, *shape):
        make = random_latent if direction == "decode" else random_frames
        return getattr(oracle, direction)(make(*shape).double())

    return of


@pytest.fixture(params=["oneDNN", "plain"])
def weights_layout(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(onednn, "serves", lambda *_: False)  # as on a GPU


def test_latents_are_scaled_and_have_no_statistics(vae):
    assert vae.config.latent_scale == 0.9152
    latent = random_latent(1, 16, 1, 2, 2)
    assert torch.equal(vae.normalize(latent), latent)
    assert torch.equal(vae.denormalize(latent), latent)


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (4, 1), (6, 5)])
def test_the_folded_upsampling_is_exact_at_borders(vae, plain, truth, size):
    """The bias of its first convolution has no effect on zero padding. One pixel is all border."""
    shape = (1, 16, 3, *size)
    for each in (vae, plain):
        assert relative_error(each.decode(random_latent(*shape)), truth("decode", *shape)) <= 1e-5


@pytest.mark.parametrize("name", ["upscale_conv.weight", "upscale_conv.bias", "conv.weight"])
@pytest.mark.parametrize("behind", [False, True])
def test_changed_parameters_update_the_folded_weights(state, name, behind):
    """`behind`: changed through `.data`, which autograd does not record."""
    vae, latent = load_vae(state, dtype=torch.float32), random_latent(1, 16, 3, 2, 2)
    vae.decode(latent)
    parameter = vae.get_parameter(f"decoder.up_blocks.1.upsamplers.0.{name}")
    with torch.no_grad():
        target = parameter.data if behind else parameter
        target.mul_(-2)
    changed = load_vae(vae.state_dict(), dtype=torch.float32)
    assert torch.equal(vae.decode(latent), changed.decode(latent))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_the_folded_upsampling_is_as_accurate_in_half_precision(state, truth, dtype):
    shape = (1, 16, 3, 2, 2)
    expected = truth("decode", *shape)
    errors = []
    for form in (seedvr2.SeedVR2Upsample, PlainUpsample):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(seedvr2, "SeedVR2Upsample", form)
            frames = load_vae(state, dtype=dtype).decode(random_latent(*shape)).double()
        errors.append(((frames - expected).norm() / expected.norm()).item())
    assert errors[0] <= 1.1 * errors[1]
    assert errors[1] <= 16 * torch.finfo(dtype).eps


# --- bands of rows


@pytest.fixture
def banded(state, monkeypatch):
    """A VAE that computes in bands, and the list of their rows."""
    made = []
    vae = load_vae(state, dtype=torch.float32)
    vae.limit_bytes = 1
    monkeypatch.setattr(candidates, "_SMALLEST_PART_BYTES", 1)
    of_window = CausalConv3d.of_window

    def counted(self, window, cache, pads, *args, **options):
        if pads == (0, 1):
            made.append(window.shape[3] - 2)
        return of_window(self, window, cache, pads, *args, **options)

    monkeypatch.setattr(CausalConv3d, "of_window", counted)
    return vae, made


@pytest.mark.usefixtures("weights_layout")
@pytest.mark.parametrize(
    ("latents", "chunk", "rows"),  # a single frame, and steps of both kinds
    [
        (1, None, 1),
        (6, 2, 2),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [(1, None, 3), (4, None, 1), (4, None, 3), (6, 1, 2), (6, 3, 2)]
        ),
    ],
)
def test_bands_give_the_same_result(banded, truth, latents, chunk, rows, monkeypatch):
    vae, made = banded
    of = row_bands.rows_of
    monkeypatch.setattr(
        row_bands, "rows_of", lambda *args: min(rows, args[1].shape[3], of(*args) * 9)
    )
    for name, x in (
        ("decode", random_latent(2, 16, latents, 5, 3)),
        ("encode", random_frames(2, 3, 4 * latents - 3, 24, 40)),
    ):
        assert relative_error(getattr(vae, name)(x, chunk), truth(name, *x.shape)) <= 1e-5
        assert max(made) == rows
        made.clear()


def test_enough_memory_needs_no_bands(banded):
    vae, made = banded
    vae.limit_bytes = 1 << 30
    vae.decode(random_latent(1, 16, 3, 4, 4))
    assert not made


@pytest.mark.usefixtures("plans_anew")
def test_a_convolution_reads_one_band_at_a_time(state, monkeypatch):
    """A convolution reads the size of a band, not of three frames."""

    vae = load_vae(state, dtype=torch.float32)
    latent = random_latent(1, 16, 2, 8, 8)
    vae.decode(latent)
    read = []
    monkeypatch.setattr(candidates, "_SMALLEST_PART_BYTES", 1)
    for limit in (1 << 30, 1):
        vae.limit_bytes = limit
        with Convolutions() as convolutions:
            vae.decode(latent)
        read.append(convolutions.largest)
    assert read[1] * 4 < read[0]


@pytest.mark.parametrize("height", [1, 2, 7, 8, 9])
def test_the_bytes_of_a_band_determine_its_rows(height):
    conv = seedvr2.causal(32, 32)
    x = torch.empty(1, 32, 1, height, 10)
    cache = TemporalCache()
    assert row_bands.rows_of(conv, x, cache) == height  # bands are not requested
    row = 32 * 10 * 4
    for first, frames in ((True, 1), (False, 3)):
        with torch.no_grad():
            cache.first = first
            cache.band_bytes = frames * row * 4
            assert row_bands.rows_of(conv, x, cache) >= min(height, 2)
            cache.band_bytes = 1
            assert row_bands.rows_of(conv, x, cache) == 1
            cache.band_bytes = frames * row * height // 4 + frames * row
            assert row_bands.rows_of(conv, x, cache) == height
