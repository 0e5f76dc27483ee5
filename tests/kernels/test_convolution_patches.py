"""The convolution's tiles with descriptors, in Triton's interpreter or on a GPU that has them."""

import importlib
import math
from dataclasses import replace

import pytest
import torch

from fast_video_vae.kernels import ConvWeight, conv3d, dispatch, use_backend
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.triton_ops import convolution_tiles, runtime
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import PLAYED, missing, place, random, video
from fast_video_vae.tests.kernels.convolutions import Example, Placed, taps_of
from fast_video_vae.tests.products import each_value_once

SUMS = ("bias", "residual_bias")
NORM = (*SUMS, "gamma")
PLAIN = {"stride": (1, 1, 1), "padding": (0, 0)}

# Input and output channels, taps, padding, frames of tail and x, size, batch, and terms.
CASES = {
    "a residual block": (32, 32, (3, 3, 3), (1, 1), (2, 2), (5, 7), 1, NORM),
    "frames with a border": (32, 64, (3, 3, 3), (0, 0), (2, 3), (6, 5), 1, SUMS),
    "without a tail": (64, 32, (3, 3, 3), (1, 1), (0, 5), (3, 5), 2, NORM),
    "a tail of one frame": (64, 64, (3, 3, 3), (1, 0), (1, 4), (5, 3), 2, ()),
    "one new frame": (96, 96, (3, 3, 3), (1, 1), (2, 1), (3, 5), 2, NORM),
    "more patches than one": (32, 96, (1, 3, 3), (1, 1), (0, 1), (17, 19), 1, NORM),
    "a wide row": (32, 32, (1, 1, 3), (0, 1), (0, 2), (2, 131), 1, SUMS),
    "channels in three parts": (192, 192, (1, 3, 3), (1, 1), (0, 1), (3, 5), 1, NORM),
    "up in time": (96, 192, (3, 1, 1), (0, 0), (2, 3), (3, 7), 1, ("bias",)),
    "a shortcut": (192, 96, (1, 1, 1), (0, 0), (0, 3), (5, 3), 2, ("bias",)),
    "to a picture": (96, 3, (3, 3, 3), (1, 1), (2, 1), (5, 3), 1, ("bias",)),
    "wider than a tile": (64, 256, (1, 3, 3), (1, 1), (0, 1), (5, 3), 1, SUMS),
    "frames": (64, 96, (3, 3), (1, 1), (0, 3), (5, 7), 1, NORM),
    "folded phases": (32, 64, (2, 2), (1, 1), (0, 2), (5, 4), 1, ()),
}  # fmt: skip

# Chips with rows and with patches; on a GPU only its own.
CHIPS = [(9, 0), (12, 0)] if "triton" in PLAYED else [torch.cuda.get_device_capability()]


@pytest.fixture(params=CHIPS, ids="sm_{0[0]}{0[1]}".format)
def chip(request, monkeypatch):
    """Use the tiles of a chip, those with descriptors first, and skip if it has none of these."""
    reason = missing("triton")
    if reason:
        pytest.skip(reason)
    if not convolution_tiles._has_descriptors():
        pytest.skip("needs Triton 3.4 or later")
    monkeypatch.setattr(convolution_tiles, "_BEFORE", 0)
    monkeypatch.setattr(convolution_tiles, "tiles_of", convolution_tiles.tiles_of.__wrapped__)
    if not convolution_tiles.tiles_of(request.param, torch.float16, 96, 96)[0].columns:
        pytest.skip("needs a GPU with descriptors")
    if runtime.interpreted():
        monkeypatch.setattr(convolution_tiles, "chip_of", lambda _: request.param)
    with place("triton"):
        yield request.param


@pytest.fixture
def launched(monkeypatch):
    """Return the names of the kernels that run."""
    convolution, names = importlib.import_module(f"{runtime.__package__}.convolution"), []
    launch = convolution.launch

    def recorded(kernel, *args, **options):
        names.append(kernel.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(convolution, "launch", recorded)
    return names


def call_of(case, dtype, *, target="new memory"):
    """Return the call of a case; NaN surrounds the videos, and frames of it are between them."""
    inputs, outputs, taps, padding, (known, frames), size, batch, terms = case
    rank = len(taps) + 2

    def placed(channels, frames, size, seed):
        # The first of two choices: a frame of NaN before and after, and aligned memory.
        shape = (batch, channels, frames, *size)
        return Placed(shape, rank, dtype, lambda choices: 1 if 0 in choices else 64, seed)

    times, high, wide = (1, *taps)[-3:]
    after = known + frames - times + 1
    result = size[0] + 2 * padding[0] - high + 1, size[1] + 2 * padding[1] - wide + 1
    videos = {"x": placed(inputs, frames, size, 2)}
    if known:
        videos["tail"] = placed(inputs, known, size, 3)
    if target == "the residual" or "residual_bias" in terms:
        videos["residual"] = placed(outputs, after, result, 4)
    numbers = dict(zip(NORM, random(3, outputs, seed=5), strict=True))
    options = {"padding": padding, **{name: numbers[name] for name in terms}}
    weight = taps_of(outputs, inputs, *taps, dtype=dtype)
    out = placed(outputs, after, result, None) if target == "other memory" else None
    in_place = target == "the residual"
    return Example(f"conv{rank - 2}d", videos, weight, options, True, out, in_place)


@each_value_once(name=CASES, chip=CHIPS, indirect=["chip"])
def test_patches_equal_the_formula_between_nan(name, chip, launched):
    """What a patch has outside a frame is 0, not the NaN of the frames around it."""
    call = call_of(CASES[name], torch.bfloat16)
    with use_backend("triton"):
        call.check(call.run())
    assert launched == ["convolve_patches"]


@pytest.mark.parametrize("target", ["other memory", "the residual"])
@pytest.mark.parametrize("name", ["a residual block", "without a tail", "folded phases"])
def test_patches_write_only_the_result(name, target, chip, launched):
    call = call_of(CASES[name], torch.bfloat16, target=target)
    with use_backend("triton"):
        call.check(call.run())
    assert launched == ["convolve_patches"]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outputs", [17, 64, 96, 128, 160, 192, 256])
def test_every_patch_equals_the_formula_at_its_edges(outputs, kind, chip, launched):
    """A row and a column more than a patch, and less."""
    shape = chip, kind, outputs, 32
    patches = [tile for tile in convolution_tiles.tiles_of(*shape) if tile.columns]
    for variant, tile in enumerate(patches):
        rows, extra = tile.pixels // tile.columns, 1 - 2 * (variant % 2)
        size = max(1, rows + extra), tile.columns + extra
        x, weight = video(1, 32, 2, *size, dtype=kind), taps_of(outputs, 32, 2, 1, 2, dtype=kind)
        tail = video(1, 32, 1, *size, dtype=kind, seed=1)
        with use_backend("triton"):
            call = x, ConvWeight.of(weight)
            y = dispatch.ask(f"triton:{variant}", "conv3d", *call, **PLAIN, tail=tail)
        value, error = formulas.conv3d(x, weight, tail=tail)
        if tile.half:
            # Sums of 32 products are rounded to float16; a GPU rounds after each few of them.
            count = 1 if runtime.interpreted() else tile.depth
            magnitude, _ = formulas.conv3d(x.abs(), weight.abs(), tail=tail.abs())
            error = error + count * 2.0**-11 * magnitude
        formulas.check(y, value, error, str(tile))
    assert launched == ["convolve_patches"] * len(patches)


def strided(x, frame):
    """Return a copy of `x` `[B, C, T, H, W]` with another distance between its frames."""
    batch, channels, frames, _, width = x.shape
    memory = torch.empty(batch * frames * frame, dtype=x.dtype)
    steps = frames * frame, 1, frame, width * channels, channels
    return memory.as_strided(x.shape, steps).copy_(x)


def test_memory_without_a_descriptor_gets_another_tile(chip, launched):
    whole, weight = (each.bfloat16() for each in (video(1, 32, 3, 3, 5), taps_of(32, 32, 3, 1, 1)))
    misaligned = torch.empty(whole.numel() + 1, dtype=whole.dtype)[1:]
    misaligned = misaligned.view(1, 3, 3, 5, 32).movedim(-1, 1).copy_(whole)
    repeated = whole[:, :, :1].expand(-1, -1, 3, -1, -1)
    other = torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:]
    other = other.view(32, 3, 1, 1, 32).movedim(-1, 1).copy_(weight)
    odd = strided(whole, whole[0, :, 0].numel() + 8)
    calls = (misaligned, weight), (repeated, weight), (odd, weight), (whole, other)
    for x, taps in calls:
        with use_backend("triton"):
            with pytest.raises(Refusal, match="descriptors need memory at multiples of 16 bytes"):
                dispatch.ask("triton:0", "conv3d", x, ConvWeight.of(taps), **PLAIN)
            y = conv3d(x, taps, gamma=torch.ones(32))
        formulas.check(y, *formulas.conv3d(x, taps, gamma=torch.ones(32)))
    with use_backend("triton"):
        tail = misaligned[:, :, :2]
        y = conv3d(whole, weight, tail=tail)
    formulas.check(y, *formulas.conv3d(whole, weight, tail=tail))
    assert launched == ["convolve"] * 5


def test_calls_that_descriptors_cannot_load_have_other_tiles(chip, monkeypatch):
    def columns(channels, stride=(1, 1, 1)):
        x, weight = video(1, channels, 2, 4, 4).half(), taps_of(96, channels, 1, 1, 1).half()
        tiles = convolution_tiles.tiles_for(x, ConvWeight.of(weight), stride)
        return [tile.columns for tile in tiles]

    assert columns(32)[0]
    assert not any(columns(48))
    assert not any(columns(32, (1, 2, 2)))
    monkeypatch.setattr(convolution_tiles, "_has_descriptors", lambda: False)
    assert not any(columns(32))


def test_descriptors_count_more_than_32_bits_of_values(chip, monkeypatch):
    convolution = importlib.import_module(f"{runtime.__package__}.convolution")
    calls = []
    monkeypatch.setattr(convolution, "launch", lambda *args, **_: calls.append(args))
    weight = ConvWeight.of(torch.empty(32, 32, 1, 3, 3, dtype=torch.float16, device="meta"))
    for shape in ((2, 40, 9000, 9000, 32), (1, 1, 9000, 90_000, 32)):
        x = torch.empty(shape, dtype=torch.float16, device="meta").movedim(-1, 1)
        convolution.conv3d(x, weight, padding=(1, 1))
        kernel, grid, out, described, *_ = calls.pop()
        assert kernel.__name__ == "convolve_patches"
        assert described.shape == list(shape)
        assert described.strides == [math.prod(shape[at + 1 :]) for at in range(5)]
        assert described.base is x
        assert out.shape == x.shape
        assert max(grid) < 2**31


def test_one_of_the_first_two_tiles_has_patches():
    for chip, count in {(9, 0): 2, (10, 0): 2, (10, 3): 2, (12, 0): 1}.items():
        for outputs in (3, 32, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024):
            for inputs in (32, 96, 64, 192, 384):
                for dtype in (torch.float16, torch.bfloat16):
                    tiles = convolution_tiles.tiles_of(chip, dtype, outputs, inputs)
                    patches = [tile for tile in tiles if tile.columns]
                    assert len(patches) == count
                    assert sum(tile in patches for tile in tiles[:2]) == 1
                    assert count < len(tiles) == len(set(tiles)) <= 6
                    for tile in patches:
                        assert inputs % tile.depth == 0
                        assert tile.pixels % tile.columns == 0
                        assert not tile.half or dtype == torch.float16
    for chip in ((8, 0), (8, 9), "gfx942"):
        tiles = convolution_tiles.tiles_of(chip, torch.float16, 96, 96)
        assert tiles == convolution_tiles.tiles_of(chip, torch.float16, 96)
    whole, halved = (
        convolution_tiles.tiles_of((9, 0), torch.float16, 96, inputs)[1] for inputs in (64, 96)
    )
    assert replace(whole, depth=32, stages=whole.stages + 1) == halved


@pytest.mark.parametrize("outputs", [64, 96])
def test_two_small_programs_per_multiprocessor_come_first(outputs):
    first, second, *_ = convolution_tiles.tiles_of((9, 0), torch.bfloat16, outputs)
    assert (first.pixels, first.warps) == (128, 4)
    assert (second.pixels, second.warps) == (256, 8)
