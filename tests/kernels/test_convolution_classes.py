"""Which convolutions are tried: classes of similar sizes, those that count, and few candidates."""

import math
from collections import Counter
from unittest import mock

import pytest
import torch

from fast_video_vae.kernels import TrialBudget, trials
from fast_video_vae.kernels.convolution import budget, choice
from fast_video_vae.kernels.convolution.shape_class import LEAST_PRODUCTS, class_of
from fast_video_vae.kernels.convolution.weight import ConvWeight
from fast_video_vae.tests.kernels.candidates import PADDED, PLAIN, call, new_team, order, tried
from fast_video_vae.tests.kernels.cases import random

# Seconds of a tile in a trial on H200, nearly all for its compilation.
TILE_S = 0.7


@pytest.fixture
def team(monkeypatch, tmp_path):
    return new_team(monkeypatch, tmp_path)


def meta_class(outputs, inputs, size, *, frames=4, norm=False):
    """The class of a convolution of 3 x 3 x 3 taps on `meta`."""
    x = torch.empty(1, inputs, frames, *size, device="meta", dtype=torch.bfloat16)
    taps = (outputs, inputs, 3, 3, 3)
    weight = ConvWeight(taps, x.dtype, x.device, lambda: torch.empty(taps, device="meta"))
    gamma = torch.empty(outputs, device="meta") if norm else None
    rest = {"tail": x[:, :, :2], "out": None, "gamma": gamma}
    return class_of("conv3d", x, weight, PADDED | rest)


@pytest.mark.parametrize("level", [1, 2, 4, 8])
def test_usual_sizes_of_videos_are_one_class(level):
    sizes = (480, 832), (720, 1280), (1280, 720), (512, 512), (704, 1280)
    classes = {meta_class(96, 96, (height // level, width // level)) for height, width in sizes}
    assert len(classes) == 1
    larger = meta_class(96, 96, (1080 // level, 1920 // level))
    assert larger.area == classes.pop().area + 1


def test_a_norm_decides_where_a_tile_can_apply_it():
    for channels, differs in ((96, True), (192, True), (384, False)):
        with_norm = meta_class(channels, channels, (90, 160), norm=True)
        assert (with_norm != meta_class(channels, channels, (90, 160))) is differs


def test_a_wide_call_with_a_norm_is_checked_with_a_residual(team):
    """It is of the class of calls with one."""

    def ask(name, op, *args, **kwargs):
        y = team.ask(name, op, *args, **kwargs)
        return y + 1 if name == "triton:1" and kwargs.get("residual") is not None else y

    args, kwargs = call(channels=200, size=(3, 3), gamma=random(200))
    with trials():
        assert choice.order(ask, "conv3d", args, kwargs) == ("triton:0", *PLAIN)


def test_small_calls_run_the_plain_op(team, monkeypatch):
    monkeypatch.setattr(choice, "LEAST_PRODUCTS", 2 * 4**2 * 16 * 16 * 27 + 1)
    assert tried(team) == PLAIN
    assert not team.asked
    assert tried(team, channels=24) == ("triton:1", *PLAIN)


def test_the_first_and_the_last_layer_of_a_video_are_small():
    for outputs, inputs, size in ((384, 16, (90, 160)), (3, 96, (720, 1280))):
        assert meta_class(outputs, inputs, size).products() < LEAST_PRODUCTS
    for channels, size in ((384, (60, 104)), (96, (480, 832)), (96, (256, 256))):
        assert meta_class(channels, channels, size).products() > LEAST_PRODUCTS


@pytest.mark.parametrize("picture", [True, False])
def test_the_first_frame_of_a_video_runs_the_plain_op(team, picture):
    x = random(1, 16, 20, 21).bfloat16().contiguous(memory_format=torch.channels_last)
    weight = ConvWeight.of(random(16, 16, 3, 3).bfloat16())
    kwargs = {"stride": (1, 1), "padding": (1, 1), "out": None, "gamma": None}
    with trials(TrialBudget(picture=picture)):
        found = choice.order(team.ask, "conv2d", (x, weight), kwargs)
    assert found == (("triton:1", *PLAIN) if picture else PLAIN)
    assert bool(team.asked) is picture
    # What a picture has found serves in a video.
    with trials():
        assert choice.order(team.ask, "conv2d", (x, weight), kwargs) == found


def test_a_picture_has_less_time():
    assert TrialBudget().left_s == budget.BUDGET_S
    assert TrialBudget(picture=True).left_s == budget.PICTURE_S
    assert TrialBudget(0.1, picture=True).left_s == 0.1


def test_two_tiles_are_tried(team):
    team.variants = 6
    assert tried(team) == ("triton:1", *PLAIN)
    assert set(team.asked) == {"aten", "kitchen", "triton:0", "triton:1", "sliced"}


@pytest.mark.parametrize(("first", "asked"), [(5.39, True), (5.41, False)])
def test_a_slow_first_tile_means_that_the_second_is_not_tried(team, first, asked):
    team.times["triton:0"] = first
    tried(team)
    assert ("triton:1" in team.asked) is asked
    team.restart()
    team.asked.clear()
    assert order(team)[0] == ("triton:1" if asked else "kitchen")
    tried(team)
    assert not team.asked  # the trial is complete


@pytest.mark.parametrize("kind", ["nvidia", "amd", "intel", "apple"])
def test_slices_are_tried_where_the_library_can_be_poor(team, monkeypatch, kind):
    monkeypatch.setattr(choice, "device_kind", lambda _: kind)
    monkeypatch.setattr(choice, "convolution_order", lambda *_: PLAIN)
    tried(team)
    assert ("sliced" in team.asked) is (kind != "nvidia")


@pytest.fixture(scope="module")
def first_decode():
    """The products by shape class of a decode of 720 x 1280 x 81 by Wan 2.1, and what is tried."""
    pytest.importorskip("triton", reason="the launches need triton")
    from fast_video_vae.tests.kernels import first_run

    classes, plain = Counter(), first_run._order

    def recorded(op, args, kwargs):
        if op in ("conv2d", "conv3d"):
            x, weight = args[:2]
            frames = x.shape[2] if op == "conv3d" else x.shape[0]
            pixels = frames * math.prod(x.shape[-2:])
            classes[class_of(op, x, weight, kwargs)] += math.prod(weight.shape) * pixels
        return plain(op, args, kwargs)

    with mock.patch.object(first_run, "_order", recorded):
        first_run.Process().run(first_run.meta_vae("wan2.1"), first_run.Run(81, 720, 1280))
    return classes, {key for key in classes if choice._counts(key, TrialBudget())}


def test_a_first_decode_has_few_trials(first_decode):
    """10 classes of 26, with 20 tiles: about 14 s, or 7 videos of 2 s."""
    classes, tried_classes = first_decode
    assert len(classes) <= 26
    assert len(tried_classes) <= 10
    seconds = len(tried_classes) * choice._TILES * TILE_S
    assert math.ceil(seconds / budget.BUDGET_S) <= 7


def test_a_first_decode_tries_nearly_all_products(first_decode):
    classes, tried_classes = first_decode
    counts = {True: 0.0, False: 0.0}
    for key, products in classes.items():
        counts[key in tried_classes] += products
    assert counts[False] < 0.01 * counts[True]


def test_a_first_decode_compiles_few_tiles(first_decode):
    """Levels of equal channels run the same kernels: 9 for 10 classes, so 18 tiles."""
    kernels = {(key.op, key.taps, key.stride, key.norm) for key in first_decode[1]}
    assert len(kernels) * choice._TILES <= 18
