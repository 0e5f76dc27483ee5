"""Clips that stand still: the same latents, with less work."""

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    Convolutions,
    close,
    joined,
    random_frames,
)
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.frame_runs import Settling
from fast_video_vae.vae.planning import plan as plan_module
from fast_video_vae.vae.streaming.static_frames import Changes


@pytest.fixture(scope="module", params=STATES)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


def clip(*moving, size=16):
    """Frames: a number makes so many that change, `("still", n)` the last of them n times."""
    frames = [torch.zeros(1, 3, 1, size, size)]
    for part in moving:
        if part == "grey":
            frames += frames[:1]
        elif isinstance(part, tuple):
            frames += [frames[-1]] * part[1]
        else:
            frames += [
                random_frames(1, 3, 1, size, size, seed=len(frames) + at) for at in range(part)
            ]
    return torch.cat(frames[1:], 2)


def of(vae, video):
    """With as many channels as it takes."""
    return torch.cat([video, video[:, :1]], 1)[:, : vae.config.image_channels]


@pytest.mark.parametrize(
    ("parts", "chunk"),
    [
        ((3, ("still", 70)), 1),
        ((3, ("still", 70)), 2),
        ((1, "grey", ("still", 79)), 1),  # what WanImageToVideo encodes
        ((("still", 81),), 1),
    ],
)
def test_what_stands_still_is_the_same_and_costs_less(vae, parts, chunk):
    took, whole = check(vae, clip(*parts), chunk)
    assert took.count < 0.75 * whole.count


@pytest.mark.parametrize(
    ("parts", "chunk", "pieces"),
    [
        *(((5, ("still", 27), 2, ("still", 11)), 4, pieces) for pieces in (1, 7, 30)),
        ((2, ("still", 39), 8, ("still", 24), 4), 1, None),  # it moves again
        ((2, ("still", 39), 8, ("still", 24), 4), 3, None),
        ((1,), None, None),  # a picture, and copies of it
        ((("still", 5),), None, None),
        ((("still", 81),), -1, None),
        ((2, ("still", 51)), 2, 3),
    ],
)
def test_any_clip_in_any_pieces_is_the_same(vae, parts, chunk, pieces):
    check(vae, clip(*parts), chunk, pieces)


def encoded(vae, pieces, chunk, skips):
    vae.skips_static = skips
    try:
        return joined(vae.encode_stream(pieces, StreamOptions(chunk)))
    finally:
        vae.skips_static = True


def check(vae, video, chunk, pieces=None):
    """The same latents with what stands still left out and without; the work of both."""
    video = of(vae, video)
    encoded(vae, video[:, :, :9], chunk, False)  # forms are made
    work, results = [], []
    for skips in (True, False):
        source = video if pieces is None else iter(video.split(pieces, 2))
        with Convolutions() as seen:
            results.append(encoded(vae, source, chunk, skips))
        work.append(seen)
    close(*results)
    return work


@pytest.mark.parametrize("chunk", [1, 4, -1, None])
def test_a_picture_and_80_grey_frames_take_a_quarter_of_the_products(chunk):
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    took, whole = check(vae, clip(1, "grey", ("still", 79), size=32), chunk)
    assert took.products < whole.products / 4


@pytest.mark.parametrize("vae", VIDEO, indirect=True)
@pytest.mark.parametrize("chunk", [4, -1])
@pytest.mark.parametrize("moving", [2, 5, 8, 11, 16])
def test_a_change_anywhere_in_a_chunk_is_seen(vae, moving, chunk):
    check(vae, clip(moving, ("still", 41 - moving)), chunk)


@pytest.mark.parametrize("vae", VIDEO, indirect=True)
@pytest.mark.parametrize("repeats", [2, 4, 6, 7, 8, 12])
def test_what_is_alike_for_a_while_is_the_same(vae, repeats):
    """From frames shown twice to those that settle the first layers."""
    parts = [part for _ in range(4) for part in (1, ("still", repeats - 1))]
    check(vae, clip(*parts, 1), 3)


@pytest.mark.parametrize("vae", VIDEO, indirect=True)
@pytest.mark.parametrize("part", [1, 1 << 12, 1 << 15])
def test_layers_come_to_rest_in_parts_of_any_size(vae, part, monkeypatch):
    monkeypatch.setattr(plan_module, "_CPU_PART_BYTES", part)
    batch = torch.cat([clip(6, ("still", 47)), clip(4, 2, ("still", 47))], 0)
    check(vae, batch, 4)


def test_a_piece_that_learns_is_a_change(vae):
    """What came before it is not what comes before the next."""
    frames = of(vae, clip(1, ("still", 8)))
    other = of(vae, clip(10))[:, :, 6:].requires_grad_()
    pieces = [frames, other, frames[:, :, 1:]]
    close(encoded(vae, iter(pieces), 1, True), encoded(vae, iter(pieces), 1, False))


def test_a_change_of_one_number_is_a_change(vae):
    video = clip(1, ("still", 44), size=32)
    video[0, 1, 30, 17, 5] += 1e-3
    check(vae, video, 1)


def test_long_enough_ends_cost_nothing(vae):
    def convolutions(latents):
        video = of(vae, clip(1, ("still", 4 * latents)))
        return check(vae, video, 1)[0].count

    assert convolutions(60) == convolutions(50) > 0


def test_frames_in_a_buffer_that_is_used_again_are_not_still(vae):
    """Who hands over pieces may write the next one into the same memory."""
    video = of(vae, clip(33))
    buffer = torch.empty_like(video[:, :, :4])

    def pieces():
        yield video[:, :, :1]
        for start in range(1, 33, 4):
            buffer.copy_(video[:, :, start : start + 4])
            yield buffer

    close(encoded(vae, pieces(), 1, True), encoded(vae, video, 1, False))


def test_eight_bits_and_batches_are_compared_too(vae):
    video = ((clip(2, ("still", 43)) + 1) * 127).to(torch.uint8)
    moving = ((clip(45) + 1) * 127).to(torch.uint8)
    both = torch.cat([video, moving], 0)
    for frames in (video, both):
        took, whole = check(vae, frames, 1)
        if vae.config.family != "qwen-image-2.1":
            assert (took.count < whole.count) == (frames is video)


def test_what_learns_is_computed(vae):
    video = of(vae, clip(1, ("still", 8))).requires_grad_()
    vae.encode(video).square().sum().backward()
    assert video.grad[:, :, -1].any()


def test_a_decode_computes_all():
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    latent = torch.zeros(1, 16, 30, 2, 2)
    with Convolutions() as seen:
        vae.decode(latent, 1)
    vae.skips_static = False
    with Convolutions() as whole:
        vae.decode(latent, 1)
    assert seen.count == whole.count


def test_changes_see_any_number_and_keep_no_view():
    frame = torch.zeros(1, 2, 1, 80, 90)
    changes = Changes()
    assert changes.repeats(frame) == 1
    assert changes.repeats(frame.expand(-1, -1, 3, -1, -1)) == 4
    for place in ((0, 1, 0, 79, 89), (0, 0, 0, 0, 0), (0, 1, 0, 41, 7)):
        other = frame.clone()
        other[place] = 1
        assert changes.repeats(other) == 1
        assert changes.repeats(frame) == 1
        assert changes.repeats(torch.cat([frame, other, frame, frame], 2)) == 2
    assert changes.repeats(torch.zeros(1, 2, 1, 80, 91)) == 1
    other = frame.clone()
    changes.repeats(other)
    other.fill_(1)  # what it was compared with is its own
    assert changes.repeats(other) == 1


@pytest.mark.parametrize(("taps", "stride"), [(1, 1), (3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("fresh", [-5, -2, -1, 0, 1, 2, 7, 10])
def test_results_come_to_rest_where_the_formula_says(fresh, taps, stride):
    """By a convolution in time alone, of numbers that grow up to the last fresh one."""
    frames, before = 12, 20
    numbers = torch.arange(1.0, before + frames + 1).clamp(max=before + fresh)
    numbers = numbers[(len(numbers) - taps) % stride :]  # the last result ends with the last frame
    weight = torch.tensor([0.25, 0.5, 1])[-taps:]
    results = F.conv1d(numbers[None, None], weight[None, None], stride=stride)[0, 0]
    behind = Settling(frames, fresh).behind(taps, stride)
    differing = int((results != results[-1]).sum())
    assert behind.frames == frames // stride
    assert behind.fresh == differing + 1 - (len(results) - behind.frames)
