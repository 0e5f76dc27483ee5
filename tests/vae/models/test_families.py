"""Each family compared with another implementation, for any chunks and precision."""

import functools

import pytest
import torch

from fast_video_vae.kernels.convolution import onednn
from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import (
    Convolutions,
    joined,
    random_frames,
    random_latent,
    relative_error,
    stock,
)
from fast_video_vae.tests.vae.models.seedvr2_oracle import Oracle
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.planning import candidates

SIZE = 3, 2  # of a latent


class Family:
    """A small VAE of one family and its peer."""

    def __init__(self, state, peer):
        self.state, self.new_peer = state, peer
        self.vae = load_vae(state, dtype=torch.float32)
        self.truth = functools.cache(self._truth)

    def latent(self, latents, batch=1):
        return random_latent(batch, self.vae.config.latent_channels, latents, *SIZE, seed=latents)

    def frames(self, latents, batch=1):
        size = (self.vae.config.spatial_compression * length for length in SIZE)
        return random_frames(batch, 3, 4 * latents - 3, *size, seed=latents)

    def _truth(self, latents, batch):
        """Latents of the frames, and frames of the latent; diffusers clamps these."""
        peer = self.new_peer(self.state, torch.float64)
        latent, frames = self.latent(latents, batch), self.frames(latents, batch)
        return peer.encode(frames.double()), peer.decode(latent.double()).clamp(-1, 1)

    def check(self, run_encode, run_decode, latents, batch=1, tolerance=1e-5):
        """Compare an encode and a decode with the peer's."""
        encoded, decoded = self.truth(latents, batch)
        assert relative_error(run_encode(self.frames(latents, batch)), encoded) <= tolerance
        frames = run_decode(self.latent(latents, batch)).clamp(-1, 1)
        assert relative_error(frames, decoded) <= tolerance


def oracle(state, dtype):
    return Oracle({name: value.to(dtype) for name, value in state.items()})


FAMILIES = {
    "wan2.1": (lambda: random_state_dict(8), lambda s, dtype: diffusers_vae(s, dtype=dtype)),
    "wan2.2": (lambda: random_wan22(8, 16), lambda s, dtype: diffusers_vae(s, dtype=dtype)),
    "seedvr2": (lambda: random_seedvr2((32, 32, 64, 64)), oracle),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    state, peer = FAMILIES[request.param]
    return Family(state(), peer)


@pytest.fixture(params=["oneDNN", "plain"])
def weights_layout(request, family, monkeypatch):
    """Both weight layouts; caches of the other layout are cleared first."""
    family.vae.drop_derived()
    if request.param == "plain":
        monkeypatch.setattr(onednn, "serves", lambda *_: False)  # as on a GPU
    yield
    family.vae.drop_derived()


def slow(*rows):
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


@pytest.mark.usefixtures("weights_layout")
@pytest.mark.parametrize(
    ("latents", "batch"), [(1, 2), (2, 1), (4, 2), *slow((1, 1), (1, 3), (2, 3), (3, 1), (5, 1))]
)
def test_results_equal_the_peer(family, latents, batch):
    family.check(family.vae.encode, family.vae.decode, latents, batch)


@pytest.mark.parametrize(
    ("state", "shape", "qwen_image"),
    [
        (lambda: random_state_dict(96), (1, 3, 5, 16, 24), False),  # the published width
        *slow(*((lambda: random_state_dict(96), (3, 3, n, 16, 24), False) for n in (1, 17))),
        (lambda: random_state_dict(8), (1, 3, 13, 16, 24), True),
        (random_qwen21, (1, 4, 1, 48, 32), False),
        (random_qwen21, (3, 4, 1, 48, 32), False),
    ],
)
def test_results_equal_diffusers(state, shape, qwen_image):
    weights = state()
    vae = load_vae(weights, dtype=torch.float32)
    peer = diffusers_vae(weights, qwen_image=qwen_image)
    video = random_frames(*shape)
    expected = peer.encode(video)
    assert relative_error(vae.encode(video), expected) <= 1e-5
    # diffusers clamps what it decodes
    actual = vae.decode(expected)
    assert relative_error(actual.clamp(-1, 1), peer.decode(expected).clamp(-1, 1)) <= 1e-5


def test_a_2x_decoder_shuffles_its_channels_into_pixels():
    state = random_state_dict(8, out_channels=12)
    vae = load_vae(state, dtype=torch.float32)
    latent = random_latent(2, 16, 3, 3, 2)
    twelve = diffusers_vae(state).decode(latent)
    expected = torch.nn.functional.pixel_shuffle(twelve.movedim(2, 1), 2).movedim(1, 2)
    actual = vae.decode(latent)
    assert actual.shape == (2, 3, 9, 48, 32)
    assert relative_error(actual.clamp(-1, 1), expected) <= 1e-5
    assert vae.encode(random_frames(1, 3, 5, 16, 16)).shape == (1, 16, 2, 2, 2)


def test_decode_does_not_clamp():
    state = random_state_dict(8)
    brighter = state | {"decoder.head.2.bias": state["decoder.head.2.bias"] + 3}
    assert load_vae(brighter).decode(random_latent(1, 16, 1, 2, 2)).max() > 2


COMFYUI = {
    "wan2.1": lambda: random_state_dict(8),
    "LightVAE": lambda: random_state_dict(24),
    "Qwen-Image-Layered": lambda: random_state_dict(8, image_channels=4, out_channels=4),
    "wan2.2": lambda: random_wan22(8, 16),
}


@pytest.mark.comfyui
@pytest.mark.parametrize("name", COMFYUI)
def test_results_equal_comfyui(name):
    state = COMFYUI[name]()
    peer, vae = stock(state), load_vae(state, dtype=torch.float32)
    for frames in (1, 5, 17):
        video = random_frames(1, vae.config.image_channels, frames, 32, 48)
        expected = peer.encode(video)
        assert relative_error(vae.encode(video), expected) <= 1e-5
        # neither result is clamped
        assert relative_error(vae.decode(expected), peer.decode(expected)) <= 1e-5


@pytest.mark.usefixtures("weights_layout")
@pytest.mark.parametrize("chunk", [1, 2, 3, -1, *slow((4,), (5,), (7,), (100,), (None,))])
def test_any_chunk_gives_the_same_result(family, chunk):
    encode, decode = (functools.partial(f, chunk=chunk) for f in _both(family.vae))
    family.check(encode, decode, 6)


@pytest.mark.parametrize("piece", [1, 3, *slow((2,), (5,), (17,))])
def test_pieces_of_any_length_give_the_same_result(family, piece):
    def in_pieces(stream):
        return lambda x: joined(stream(iter(x.split(piece, 2))))

    family.check(in_pieces(family.vae.encode_stream), in_pieces(family.vae.decode_stream), 6)


@pytest.mark.usefixtures("plans_anew")
def test_parts_of_a_chunk_give_the_same_result(family, monkeypatch):
    monkeypatch.setattr(candidates, "_CPU_PART_BYTES", 1 << 12)
    family.check(family.vae.encode, family.vae.decode, 4)


@pytest.mark.parametrize("limit_bytes", [1, *slow((20_000,), (100_000,))])
def test_any_memory_limit_gives_the_same_result(family, limit_bytes, monkeypatch):
    monkeypatch.setattr(family.vae, "limit_bytes", limit_bytes)
    encode, decode = (functools.partial(f, chunk=-1) for f in _both(family.vae))
    family.check(encode, decode, 4, batch=2)


def test_a_longer_video_starts_with_the_same_result(family):
    for run, x, end in (
        (family.vae.encode, family.frames(4), 5),
        (family.vae.decode, family.latent(4), 2),
    ):
        short = run(x[:, :, :end])
        assert relative_error(run(x)[:, :, : short.shape[2]], short) <= 1e-5


@pytest.mark.usefixtures("weights_layout")
def test_a_single_frame_runs_in_2d_and_equals_the_first_of_a_video(family):
    for run, x in ((family.vae.encode, family.frames(3)), (family.vae.decode, family.latent(3))):
        expected = run(x)[:, :, :1]
        with Convolutions() as convolutions:
            assert torch.equal(run(x[:, :, :1]), expected)
        assert set(convolutions.dimensions) == {4}


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 3)])
@pytest.mark.parametrize(("latents", "batch"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_all_activations_are_channels_last(family, latents, batch, size):
    seen = []

    def note(module, args, output):
        tensors = (x for x in (*args, output) if isinstance(x, torch.Tensor) and x.ndim == 5)
        seen.extend((type(module).__name__, x.shape, x.stride()) for x in tensors)

    hooks = [module.register_forward_hook(note) for module in family.vae.modules()]
    step = family.vae.config.spatial_compression
    frames = random_frames(batch, 3, 4 * latents - 3, *(step * length for length in size))
    result = family.vae.decode(family.vae.encode(frames))
    for hook in hooks:
        hook.remove()
    assert len(seen) > 50
    for name, shape, stride in (*seen, ("result", result.shape, result.stride())):
        _, channels, _, height, width = shape
        dense = (0, 1, height * width * channels, width * channels, channels)
        # A single frame has the strides of the layout too; for a single pixel they are ambiguous.
        known = range(1, 5) if height * width > 1 else [1]
        assert all(stride[dim] == dense[dim] for dim in known), (name, shape, stride)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow((torch.float16,))])
def test_low_precision_errs_at_most_twice_as_much_as_the_peer(family, dtype):
    vae, peer = load_vae(family.state, dtype=dtype), family.new_peer(family.state, dtype)
    latent, frames = family.latent(3), family.frames(3)
    for run, other, x, expected in zip(
        _both(vae), (peer.encode, peer.decode), (frames, latent), family.truth(3, 1), strict=True
    ):
        ours, theirs = run(x), other(x.to(dtype)).double()
        if run == vae.decode:
            ours, theirs = ours.clamp(-1, 1), theirs.clamp(-1, 1)
        error = (ours.double() - expected).norm()
        assert error <= 2 * (theirs - expected).norm()


def _both(vae):
    return vae.encode, vae.decode
