"""A corrected encode: hand-overs without drift, its steps, its cost, and what it keeps."""

import math
import weakref

import pytest
import torch

from fast_video_vae.tests.builders import decoder_of, random_state_dict, refused
from fast_video_vae.tests.vae.families import STATES, VIDEO, random_frames
from fast_video_vae.vae import StreamOptions, encode_corrected, load_vae, media
from fast_video_vae.vae.demo import CLIP_PATH, VAE_PATH


@pytest.fixture(scope="module")
def bundled():
    return load_vae(VAE_PATH, dtype=torch.float32)


@pytest.fixture(scope="module")
def photo():
    """Five frames of the middle of the bundled clip, in [-1, 1]."""
    frames = torch.stack(list(media.read_video(CLIP_PATH).frames(dtype=torch.uint8))[:5])
    return frames[:, 96:144, 96:144].movedim(-1, 0)[None].float() / 127.5 - 1


def again(vae, latent):
    """What the next window encodes, by hand."""
    return vae.encode(vae.decode(latent).clamp(-1, 1))


def error(vae, latent, frames):
    return (vae.encode(frames) - again(vae, latent)).flatten(1).norm(dim=1)


def levels(frames):
    """Mean, saturation and contrast in levels of 8 bits."""
    frames = (frames + 1) * 127.5
    return frames.mean(), (frames.amax(1) - frames.amin(1)).mean(), frames.std()


def psnr(frames, source):
    return -10 * math.log10(((frames - source) / 2).square().mean())


def test_ten_hand_overs_lose_a_third_of_what_plain_ones_lose(bundled, photo):
    lost, drift = {}, {}
    for corrections in (0, 3):
        frames, seen = photo, []
        for _ in range(10):
            frames = bundled.decode(encode_corrected(bundled, frames, corrections)).clamp(-1, 1)
            seen.append(frames)
        first, last = seen[0], seen[-1]
        lost[corrections] = psnr(first, photo) - psnr(last, photo)
        pairs = zip(levels(first), levels(last), strict=True)
        drift[corrections] = [abs(float(after - before)) for before, after in pairs]
    assert lost[3] <= lost[0] / 3
    *colors, contrast = drift[3]
    assert all(new <= max(0.5, old / 3) for new, old in zip(colors, drift[0], strict=False))
    assert contrast <= 1


def test_corrections_are_an_accelerated_iteration(bundled, photo):
    goal = latent = bundled.encode(photo)
    assert torch.equal(encode_corrected(bundled, photo, 0), goal)
    errors, seen = [error(bundled, latent, photo)], []
    for corrections in (1, 2, 3):
        seen.append((latent, goal - again(bundled, latent)))
        latent = sum(seen[-1])
        if len(seen) > 1:  # the mix of both steps whose error would be least
            (one, left), (other, rest) = seen[-2:]
            change = (rest - left).flatten()
            share = torch.linalg.lstsq(change[:, None], rest.flatten()[:, None]).solution.item()
            latent = (1 - share) * (other + rest) + share * (one + left)
        found = encode_corrected(bundled, photo, corrections)
        assert (found - latent).abs().max() <= 1e-4 * latent.abs().max()
        errors.append(error(bundled, found, photo))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("family", "dtype"), [("wan2.2", torch.float32), ("seedvr2", torch.bfloat16)]
)
def test_the_error_of_no_family_grows(family, dtype):
    """The round trip of random weights is far from faithful, and of most gets worse by a step."""
    vae = load_vae(STATES[family](), dtype=dtype)
    step, frames = vae.config.spatial_compression, 5 if family in VIDEO else 1
    clip = random_frames(2, vae.config.image_channels, frames, step, 2 * step)
    plain = vae.encode(clip)
    for corrections in (1, 3):
        found = encode_corrected(vae, clip, corrections)
        assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
        worse = error(vae, found, clip) / error(vae, plain, clip)
        assert worse.max() <= (1 + 1e-5 if dtype == torch.float32 else 1.02)


def test_a_diverging_video_of_a_batch_keeps_its_plain_latent(bundled, photo):
    state = dict(bundled.state_dict())
    for name in ("decoder.head.2.weight", "decoder.head.2.bias"):
        state[name] = 2.6 * state[name]  # contrast grows, so that a step goes too far
    vae = load_vae(state, dtype=torch.float32)
    batch = torch.cat([photo / 8, photo])
    plain, found = vae.encode(batch), encode_corrected(vae, batch, 4)
    assert (error(vae, found, batch) <= error(vae, plain, batch)).all()
    alone = [encode_corrected(vae, each, 4) for each in batch.split(1)]
    assert (found - torch.cat(alone)).abs().max() <= 1e-5 * plain.abs().max()


def test_the_frames_are_never_all_in_memory(bundled, monkeypatch):
    alive, most = [], []
    decode = bundled.decode_stream

    def watched(*args):
        for piece in decode(*args):
            alive.append((weakref.ref(piece), piece.shape[2]))
            most.append(sum(count for piece, count in alive if piece() is not None))
            yield piece

    monkeypatch.setattr(bundled, "decode_stream", watched)
    encode_corrected(bundled, random_frames(1, 3, 33, 8, 8), 1, StreamOptions(1))
    assert len(most) > 8
    assert max(most) <= 12


def test_a_correction_costs_a_decode_and_an_encode_with_the_options(bundled, photo):
    calls, hooks = {"encoder": 0, "decoder": 0}, []
    for name in calls:

        def count(*_, name=name):
            calls[name] += 1

        layer = next(iter(bundled.get_submodule(name).layers()))
        hooks.append(layer.register_forward_pre_hook(count))
    latents, expected = [], encode_corrected(bundled, photo, 1)

    def counted(pieces):
        for piece in pieces:
            latents.append(piece.shape[2])
            yield piece

    calls |= dict.fromkeys(calls, 0)
    given = {"to_range": lambda x: 2 * x - 1, "counted": counted}
    found = encode_corrected(bundled, (photo + 1) / 2, 1, StreamOptions(1), **given)
    for hook in hooks:
        hook.remove()
    assert calls == {"encoder": 2 * 2, "decoder": 2}
    assert latents == [1] * 4
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    options = StreamOptions(dtype=torch.bfloat16)
    assert encode_corrected(bundled, photo, 0, options).dtype == torch.bfloat16


def test_a_vae_without_a_round_trip_is_refused():
    frames, state = random_frames(1, 3, 5, 8, 8), STATES["wan2.1"]()
    with refused("^the checkpoint has no encoder"):
        encode_corrected(load_vae(decoder_of(state)), frames, 1)
    with refused("^corrections is 1; expected 0: .* 2 times as high and wide"):
        encode_corrected(load_vae(random_state_dict(8, out_channels=12)), frames, 1)
