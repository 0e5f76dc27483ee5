"""Clips with static frames: less work, and when frames are static.

`test_any_way.py` shows that the latents are the same.
"""

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.played_devices import Waits
from fast_video_vae.tests.vae.families import (
    STATES,
    Convolutions,
    close,
    random_frames,
)
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.models import static_frames
from fast_video_vae.vae.models.static_frames import Changes


def clip(*moving, size=16):
    """Return frames: `n` changing ones for a number, the last one `n` times for `("static", n)`."""
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


@pytest.mark.parametrize("family", ["wan2.1", "wan2.2", "seedvr2"])
def test_static_frames_cost_less_and_do_not_change_latents(family):
    vae = load_vae(STATES[family](), dtype=torch.float32)
    skipping, whole = check(vae, clip(3, ("static", 62)), 2)
    assert skipping.count < 0.75 * whole.count


def test_grey_frames_reduce_the_products_to_a_quarter():
    """As WanImageToVideo encodes."""
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    skipping, whole = check(vae, clip(1, "grey", ("static", 79), size=32), None)
    assert skipping.products < whole.products / 4


def check(vae, video, chunk):
    """Compare the latents with and without skipping static frames; return the work of both."""
    vae.encode(video[:, :, :9], chunk)  # derives the weights
    work, results = [], []
    for vae.skips_static in (True, False):
        with Convolutions() as seen:
            results.append(vae.encode(video, chunk))
        work.append(seen)
    close(*results)
    return work


def test_changes_compare_every_value_and_keep_no_view():
    frame = torch.zeros(1, 2, 1, 100, 100)  # of which every second value is compared first
    changes = Changes()
    assert changes.repeats(frame) == 1
    assert changes.repeats(frame.expand(-1, -1, 3, -1, -1)) == 4
    for place in ((0, 1, 0, 99, 99), (0, 0, 0, 0, 0), (0, 1, 0, 41, 7), (0, 0, 0, 0, 1)):
        other = frame.clone()
        other[place] = 1
        assert changes.repeats(other) == 1
        assert changes.repeats(frame) == 1
        assert changes.repeats(torch.cat([frame, other, frame, frame], 2)) == 2
    assert changes.repeats(torch.zeros(1, 2, 1, 100, 101)) == 1
    other = frame.clone()
    changes.repeats(other)
    other.fill_(1)  # `changes` keeps a copy of it
    assert changes.repeats(other) == 1


def test_a_whole_video_has_the_repeats_of_its_chunks_with_one_wait(monkeypatch):
    monkeypatch.setattr(static_frames, "_PIECE", 20 * 3 * 16 * 16)
    video = torch.cat([clip(2, ("static", 5), 1, "grey", ("static", 9), 2)] * 2)
    video[1, 2, 4, 15, 15] = 7
    chunks = [video[:, :, :1], *video[:, :, 1:].split(4, 2)]
    one_by_one, whole = Changes(), Changes(video)
    expected = [one_by_one.repeats(chunk) for chunk in chunks]
    with Waits() as seen:
        assert [whole.repeats(chunk) for chunk in chunks] == expected
    assert seen.count == 1
    # Frames after the video are compared as before.
    assert whole.repeats(video[:, :, :1]) == 1
