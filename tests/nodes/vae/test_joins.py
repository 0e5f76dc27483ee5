"""Windows of a long video: the corrected encode, ranges of a decode, and joined latents."""

import logging

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import (
    assert_same,
    clip,
    fast_vae,
    latents,
    ours,
    relative_error,
    small_latents,
    stopped_at,
)
from fast_video_vae.vae import round_trip

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.fixture(scope="module")
def demo(comfyui):
    """The bundled VAE, whose round trip is close to faithful."""
    return ours("Load", vae_name="bundled demo").args[0]


@pytest.fixture(scope="module")
def photo(comfyui):
    return ours("DemoClip").args[0][:5, 100:148, 100:148]


def encoded(vae, pixels, corrections, **options):
    result = ours("Encode", vae=vae, pixels=pixels, corrections=corrections, **options)
    return result.args[0]["samples"]


def decoded(vae, latent, **options):
    return ours("Decode", vae=vae, samples={"samples": latent}, **options).args[0]


def joined(first, second=None, **inputs):
    given = {"samples": {"samples": first}}
    given |= {} if second is None else {"next": {"samples": second}}
    return ours("JoinLatents", **(given | {"window": 0, "hand_over": 1} | inputs)).args


def test_a_correction_is_a_step_between_images(demo, photo):
    for pixels, options in ((photo, {}), (photo[:2], {"batch": "images"})):
        goal = encoded(demo, pixels, 0, **options)
        expected = 2 * goal - encoded(demo, decoded(demo, goal), 0, **options)
        assert relative_error(encoded(demo, pixels, 1, **options), expected) <= 1e-5
    videos = torch.stack([photo, photo.flip(0)])
    alone = [encoded(demo, each, 2) for each in videos]
    assert relative_error(encoded(demo, videos, 2), torch.cat(alone)) <= 1e-5


def test_a_step_of_any_family_is_one_between_images(seedvr2, picture_vae, monkeypatch):
    """Scaled latents, alpha, pictures; random weights need trust in a step."""
    monkeypatch.setattr(round_trip, "_TRUSTED", torch.inf)
    for vae, pixels in ((seedvr2.fast, clip(5, 16, 16)), (picture_vae, clip(2, 32, 32))):
        goal = encoded(vae, pixels, 0)
        expected = 2 * goal - encoded(vae, decoded(vae, goal), 0)
        assert relative_error(encoded(vae, pixels, 1), expected) <= 1e-5


def test_progress_and_stop_cover_all_passes(demo, fast, photo, progress):
    encoded(demo, photo, 2, chunk=1)
    assert progress == [(done, 6) for done in range(1, 7)]
    progress.clear()
    encoded(fast, clip(5), 8)  # of random weights: it ends early
    assert progress[-1] == (18, 18)
    with stopped_at(demo.first_stage_model.decoder.get_submodule("middle.0")):
        encoded(demo, photo, 1)


def test_another_vae_ignores_corrections_and_a_half_one_refuses_them(
    stock, tmp_path, caplog, photo
):
    with caplog.at_level(logging.INFO):
        encoded(stock, photo, 2)
    assert "unused: corrections" in caplog.text
    upscaling = fast_vae(random_state_dict(8, out_channels=12), tmp_path)
    with refused("^corrections is 2; expected 0: the decoder of this VAE makes frames 2 times"):
        encoded(upscaling, photo, 2)
    with refused("^corrections: got 9; expected a whole number from 0 to 8"):
        encoded(stock, photo, 9)


def test_a_range_of_a_decode_is_that_of_the_whole(family):
    latent = latents(5, 2, 2)
    whole = decoded(family.fast, latent)
    for text, wanted in (("3-9", slice(3, 10)), ("12-", slice(12, None)), ("5", slice(5, 6))):
        assert relative_error(decoded(family.fast, latent, frames=text), whole[wanted]) <= 1e-5
    assert relative_error(decoded(family.stock, latent, frames="3-9"), whole[3:10]) <= 1e-5


def test_a_range_does_not_compute_the_rest(fast):
    calls, decoder = [], fast.first_stage_model.decoder
    handle = next(iter(decoder.layers())).register_forward_pre_hook(lambda *_: calls.append(1))
    decoded(fast, small_latents(9), frames="0-4", chunk=1)
    handle.remove()
    assert len(calls) == 2


def test_a_range_of_pictures_and_of_several_videos(picture_vae, fast):
    pictures = latents(1, 2, 2, batch=4, channels=64)[:, :, 0]
    whole = decoded(picture_vae, pictures)
    assert relative_error(decoded(picture_vae, pictures, frames="1-2"), whole[1:3]) <= 1e-5
    with refused("^samples: got 2 videos; expected one, as from Latent From Batch"):
        decoded(fast, latents(2, batch=2), frames="1-2")
    with refused("^frames is '4-9'; the video has the frames 0-4"):
        decoded(fast, latents(2), frames="4-9")


@pytest.mark.parametrize(("overlap", "counts"), [(0, (1, 2)), (2, (3, 5))])
def test_a_joined_decode_has_each_frame_once_and_no_seam(family, overlap, counts):
    """The parts by ranges are the decode of the windows' latents, joined by hand."""
    first, second = (latents(count, 2, 2, seed=count) for count in counts)
    second[:, :, :overlap] = first[:, :, counts[0] - overlap :]
    given = first.clone(), second.clone()
    (alone, _, start), (whole, _, new) = joined(first), joined(first, second, overlap=overlap)
    assert_same([first, second, alone["samples"]], [*given, given[0]])
    expected = torch.cat([first, second[:, :, overlap:]], dim=2)
    assert torch.equal(whole["samples"], expected)
    frames = decoded(family.fast, expected)
    parts = [decoded(family.fast, whole["samples"], frames=text) for text in (start, new)]
    assert len(frames) == 4 * (sum(counts) - overlap) - 3
    assert relative_error(torch.cat(parts), frames) <= 1e-5


def test_the_window_has_the_last_frames_a_mask_and_the_other_keys(comfyui):
    video, mask = latents(5, batch=2), torch.ones(2, 6, 9)
    given = {"samples": video, "noise_mask": mask, "batch_index": [3, 4]}
    whole, window, text = ours("JoinLatents", samples=given, hand_over=3, window=4).args
    assert_same(whole, {"samples": video, "batch_index": [3, 4]})
    assert torch.equal(window["samples"][:, :, :3], video[:, :, 2:])
    assert not window["samples"][:, :, 3:].any()
    assert window["noise_mask"].mean((0, 1, 3, 4)).tolist() == [0, 0, 0, 1]
    assert window["batch_index"] == [3, 4]
    assert text == "0-16"
    _, bare, _ = ours("JoinLatents", samples=given, hand_over=3, window=0).args
    assert_same(bare, {"samples": video[:, :, 2:], "batch_index": [3, 4]})


def test_the_video_of_a_latent_with_audio_is_joined(comfyui):
    from comfy.nested_tensor import NestedTensor

    first, second = (small_latents(3, seed=seed) for seed in (1, 2))
    both = [NestedTensor((each, torch.zeros(1, 8, 4, 4))) for each in (first, second)]
    found = joined(*both, overlap=1)[0]["samples"]
    assert torch.equal(found, torch.cat([first, second[:, :, 1:]], dim=2))


def test_an_error_names_the_input_and_the_values(comfyui):
    for first, second, inputs, reason in (
        (latents(1)[:, :, 0], None, {}, r"samples: got a float32 tensor \[1, 16, 6, 9\]; expected"),
        (latents(3), latents(3, channels=48), {}, r"next: got .* \[1, 48, 3, 6, 9\]; expected"),
        (latents(3), latents(3, height=5), {}, r"next: got .* \[1, 16, 3, 5, 9\]; expected"),
        (latents(3), latents(3, batch=2), {}, r"next: got .* \[2, 16, 3, 6, 9\]; expected"),
        (latents(2), latents(5), {"overlap": 3}, "overlap: got 3; samples has 2 latent frames"),
        (latents(5), latents(2), {"overlap": 2}, "overlap: got 2; .* next 2 latent frames, of"),
        (latents(1), None, {"hand_over": 2}, "hand_over: got 2; the video has 1 latent frame$"),
        (latents(3), None, {"window": 1}, "window: got 1; expected more than the 1 of hand_over"),
    ):
        with refused(f"^{reason}"):
            joined(first, second, **inputs)
