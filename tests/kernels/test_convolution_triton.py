"""The convolutions in Triton's interpreter, or on a GPU: results, memory, tiles and refusals."""

import importlib
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.kernels import (
    BackendError,
    ConvWeight,
    Fused,
    conv3d,
    dispatch,
    use_backend,
)
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.triton_ops import convolution_tiles, runtime
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import PLAYED, random, video
from fast_video_vae.tests.kernels.convolutions import CALLS, KERNELS, build, example, taps_of

ALL = ("bias", "residual", "residual_bias")
NORM = (*ALL, "gamma")
CUBE, FLAT, ONE = (3, 3, 3), (1, 3, 3), (1, 1, 1)
PLAIN = {"stride": ONE, "padding": (0, 0)}

# What tiles with descriptors run, which read whole blocks of channels at a stride of 1: channels,
# taps, strides, padding, frames of tail and x, size, and terms.
PATCHES = {
    "a residual block": ((32, 32), CUBE, ONE, (1, 1), (2, 2), (5, 7), NORM),
    "a border": ((32, 64), CUBE, ONE, (0, 0), (2, 3), (6, 5), ALL),
    "without a tail": ((64, 32), CUBE, ONE, (1, 1), (0, 5), (3, 5), NORM),
    "one new frame": ((96, 96), CUBE, ONE, (1, 1), (2, 1), (3, 5), NORM),
    "more patches than one": ((32, 96), FLAT, ONE, (1, 1), (0, 1), (17, 19), NORM),
    "a wide row": ((32, 32), (1, 1, 3), ONE, (0, 1), (0, 2), (2, 131), ALL),
    "channels in three parts": ((192, 192), FLAT, ONE, (1, 1), (0, 1), (3, 5), NORM),
    "up in time": ((96, 192), (3, 1, 1), ONE, (0, 0), (1, 3), (3, 7), ("bias",)),
    "to a picture": ((96, 3), FLAT, ONE, (1, 0), (0, 1), (5, 3), ("bias",)),
    "wider than a tile": ((64, 256), ONE, ONE, (0, 0), (0, 1), (5, 3), ALL),
    "folded phases": ((32, 64), (2, 2), (1, 1), (1, 1), (0, 2), (5, 4), ()),
}

# Chips with rows and with patches; on a GPU only its own.
CHIPS = [(9, 0), (12, 0)] if "triton" in PLAYED else [torch.cuda.get_device_capability()]


pytestmark = pytest.mark.usefixtures("on_triton")


@pytest.fixture
def described(monkeypatch):
    """Return a function that puts the tiles of a chip with descriptors first, or skips."""
    if not convolution_tiles._has_descriptors():
        pytest.skip("needs Triton 3.4 or later")
    monkeypatch.setattr(convolution_tiles, "_BEFORE", 0)
    monkeypatch.setattr(convolution_tiles, "tiles_of", convolution_tiles.tiles_of.__wrapped__)

    def use(chip):
        if not convolution_tiles.tiles_of(chip, torch.float16, 96, 96)[0].columns:
            pytest.skip("needs a GPU with descriptors")
        if runtime.interpreted():
            monkeypatch.setattr(convolution_tiles, "chip_of", lambda _: chip)

    return use


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


def activations(*shape, dtype):
    """Return what a norm and SiLU make of normal numbers."""
    return F.silu(video(*shape)).to(dtype)


def run(case, target="new memory"):
    """Run a case in a batch of two with frames of NaN between them; compare it with the formula."""
    call = build(
        *case, torch.bfloat16, batch=2, target=target,
        pick=lambda choices: 1 if 0 in choices else 64,
    )  # fmt: skip
    with use_backend("triton"):
        call.check(call.run())


@pytest.mark.parametrize("number", range(len(PATCHES)), ids=list(PATCHES))
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_patches_equal_the_formula_between_nan(number, turn, described, launched):
    """What a patch has outside a frame is 0, not the NaN of the frames around it."""
    described(CHIPS[(number + turn) % len(CHIPS)])
    run(list(PATCHES.values())[number])
    assert launched == ["convolve_patches"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_of_all_kinds_equal_the_formula(kernel):
    """Drawn calls with one to five frames, any terms, padding, alignment and target."""
    drawn = (example(kernel, *call, seed) for seed in range(2) for call in CALLS)
    narrow = (call for call in drawn if call.weight.dtype == torch.bfloat16)
    for call in itertools.islice(narrow, 4):
        with use_backend("triton"):
            call.check(call.run())


@pytest.mark.parametrize("target", ["a slice of frames", "the residual"])
@pytest.mark.parametrize("name", ["a residual block", "folded phases"])
def test_patches_write_only_the_result(name, target, described, launched):
    for chip in CHIPS:
        described(chip)
        run(PATCHES[name], target)
    assert launched == ["convolve_patches"] * len(CHIPS)


def check_tile(variant, tile, inputs, outputs, kind, size):
    """Compare a tile with the formula."""
    x, weight = activations(1, inputs, 2, *size, dtype=kind), taps_of(outputs, inputs, 2, 1, 2)
    weight, tail = weight.to(kind), activations(1, inputs, 1, *size, dtype=kind)
    with use_backend("triton"):
        call = x, ConvWeight.of(weight)
        y = dispatch.ask(f"triton:{variant}", "conv3d", *call, tail=tail, **PLAIN)
    value, error = formulas.conv3d(x, weight, tail=tail)
    if tile.half:
        # Sums of up to 64 products are rounded to float16; a GPU rounds after each few of them.
        count = 1 if runtime.interpreted() else tile.depth
        magnitude, _ = formulas.conv3d(x.abs(), weight.abs(), tail=tail.abs())
        error = error + count * 2.0**-11 * magnitude
    formulas.check(y, value, error, str(tile))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outputs", [3, 64, 96, 160, 192, 256, 384])
def test_every_tile_equals_the_formula_at_its_edges(outputs, kind):
    """One pixel less than a tile, a whole one, and one more; products of an odd number."""
    chip = convolution_tiles.chip_of(torch.get_default_device())
    for variant, tile in enumerate(convolution_tiles.tiles_of(chip, kind, outputs)):
        check_tile(variant, tile, 15, outputs, kind, (1, tile.pixels + variant % 3))


@pytest.mark.parametrize("outputs", [17, 96, 128, 192, 256])
def test_every_patch_equals_the_formula_at_its_edges(outputs, described, launched):
    """A row and a column more than a patch, and less."""
    count = 0
    for chip, kind in zip(CHIPS, (torch.float16, torch.bfloat16), strict=False):
        described(chip)
        tiles = convolution_tiles.tiles_of(chip, kind, outputs, 32)
        for variant, tile in enumerate(tile for tile in tiles if tile.columns):
            rows, extra = tile.pixels // tile.columns, 1 - 2 * (variant % 2)
            size = max(1, rows + extra), tile.columns + extra
            check_tile(variant, tile, 32, outputs, kind, size)
            count += 1
    assert launched == ["convolve_patches"] * count


@pytest.mark.parametrize("outputs", [96, 192])
def test_norm_and_float16_sums_reach_60_db(outputs):
    x, weight = activations(1, 96, 1, 3, 5, dtype=torch.float16), taps_of(outputs, 96, 1, 3, 3)
    gamma = random(outputs, seed=3).abs()
    with use_backend("triton"):
        y = conv3d(x, weight.half(), padding=(1, 1), gamma=gamma)
    value, _ = formulas.conv3d(x, weight.half(), padding=(1, 1), gamma=gamma)
    error = (y.double() - value).square().sum()
    assert 10 * math.log10(value.square().sum() / error) >= 60


def test_float16_sums_end_after_an_iteration_of_the_kernel():
    """Partial sums of 63,488 are within float16; two of them are not, and four cancel."""
    x = torch.full((1, 1, 4, 4, 64), 32.0, dtype=torch.float16).movedim(-1, 1)
    weight = torch.full((96, 64, 1, 2, 2), 31.0, dtype=torch.float16)
    weight[..., 1, :] *= -1
    with use_backend("triton"):
        assert not conv3d(x, weight).any()


def refused(match, *args, **options):
    with use_backend("triton"), pytest.raises(BackendError, match=match):
        conv3d(*args, **options)


def test_calls_that_the_kernel_cannot_run_are_refused():
    x, weight = video(1, 16, 2, 4, 4).half(), taps_of(16, 16, 1, 1, 1, dtype=torch.float16)
    wide = taps_of(256, 16, 1, 1, 1, dtype=torch.float16)
    refused("its convolutions are for 16 bits, x is float32", x.float(), weight.float())
    refused("there is no kernel for float64", x.double(), weight.double())
    refused("x is not channels-last", x.contiguous(), weight)
    refused("out overlaps the memory of x", x, weight, out=x)
    large = taps_of(16, 16, 1, 6, 6, dtype=torch.float16)
    refused("more than 31 taps", x, large, padding=(2, 2))
    with use_backend("triton"):
        with pytest.raises(Refusal, match="there is no tile 9"):
            dispatch.ask("triton:9", "conv3d", x, ConvWeight.of(weight), **PLAIN)
        convolution = importlib.import_module(f"{runtime.__package__}.convolution")
        with pytest.raises(Refusal, match="192 at most, not 256"):
            convolution.conv3d(x, ConvWeight.of(wide), gamma=torch.ones(256))
    if runtime.interpreted():
        with pytest.raises(Refusal, match="the tensors are on cpu; triton needs an NVIDIA"):
            dispatch.ask("triton", "conv3d", x, ConvWeight.of(weight), **PLAIN)


def test_offsets_beyond_32_bits_are_refused():
    convolution = importlib.import_module(f"{runtime.__package__}.convolution")
    weight = ConvWeight.of(torch.empty(16, 64, 1, 3, 3, dtype=torch.float16, device="meta"))
    for height, width in ((2, 20_000_000), (70_000, 70_000)):
        shape = (1, 1, height, width, 64)
        x = torch.empty(shape, dtype=torch.float16, device="meta").movedim(-1, 1)
        with pytest.raises(Refusal, match="too far apart for 32-bit offsets"):
            convolution.conv3d(x, weight, padding=(1, 1))


def test_descriptors_count_more_than_32_bits_of_values(described, monkeypatch):
    described(CHIPS[0])
    convolution = importlib.import_module(f"{runtime.__package__}.convolution")
    calls = []
    monkeypatch.setattr(convolution, "launch", lambda *args, **_: calls.append(args))
    weight = ConvWeight.of(torch.empty(32, 32, 1, 3, 3, dtype=torch.float16, device="meta"))
    for shape in ((2, 40, 9000, 9000, 32), (1, 1, 9000, 90_000, 32)):
        x = torch.empty(shape, dtype=torch.float16, device="meta").movedim(-1, 1)
        convolution.conv3d(x, weight, padding=(1, 1))
        kernel, grid, out, described_x, *_ = calls.pop()
        assert kernel.__name__ == "convolve_patches"
        assert described_x.shape == list(shape)
        assert described_x.strides == [math.prod(shape[at + 1 :]) for at in range(5)]
        assert described_x.base is x
        assert out.shape == x.shape
        assert max(grid) < 2**31


def test_a_call_reports_its_tiles_and_what_they_fuse():
    """Wide results get their norm from another pass."""
    ops = importlib.import_module(f"{runtime.__package__}.ops")
    x = video(1, 16, 2, 4, 4).half()
    for outputs, norm in ((96, True), (192, True), (256, False)):
        call = x, ConvWeight.of(taps_of(outputs, 16, 3, 3, 3).half()), ONE, (1, 1)
        assert ops.fuses(*call, norm=True) == Fused(tail=True, sums=True, norm=norm, bias=True)
        assert not ops.fuses(*call, norm=False).norm
    x = activations(1, 16, 1, 3, 4, dtype=torch.bfloat16)
    weight, gamma = taps_of(256, 16, 1, 1, 1, dtype=torch.bfloat16), random(256, seed=3)
    with use_backend("triton"):
        y = conv3d(x, weight, gamma=gamma)
    formulas.check(y, *formulas.conv3d(x, weight, gamma=gamma))


def test_a_tile_without_memory_leaves_the_others(monkeypatch):
    """A chip with less shared memory than expected refuses a tile, and the next variant runs."""
    errors = pytest.importorskip("triton.runtime.errors", reason="needs triton")
    convolution = importlib.import_module(f"{runtime.__package__}.convolution")
    working, weight = convolution.convolve, ConvWeight.of(taps_of(96, 8, 1, 1, 1).bfloat16())
    monkeypatch.setattr(convolution_tiles, "chip_of", lambda _: (9, 0))
    first = convolution_tiles.tiles_of((9, 0), torch.bfloat16, 96)[0].pixels

    class Small:
        __name__ = "convolve"

        def __getitem__(self, grid):
            def start(*args, **constants):
                if constants["M"] == first:
                    raise errors.OutOfResources(131072, 65536, "shared memory")
                working[grid](*args, **constants)

            return start

    monkeypatch.setattr(convolution, "convolve", Small())
    monkeypatch.setattr(runtime, "_broken", {})
    x = video(1, 8, 1, 3, 4).bfloat16()
    with use_backend("triton"):
        for _ in range(2):
            with pytest.raises(Refusal, match="out of resource"):
                dispatch.ask("triton:0", "conv3d", x, weight, **PLAIN)
        y = dispatch.ask("triton:1", "conv3d", x, weight, **PLAIN)
    formulas.check(y, *formulas.conv3d(x, weight.plain()))


def test_memory_without_a_descriptor_gets_another_tile(described, launched):
    """Misaligned or repeated frames, an odd distance between frames, and a misaligned weight."""
    described(CHIPS[0])
    whole, weight = (each.bfloat16() for each in (video(1, 32, 3, 3, 5), taps_of(32, 32, 3, 1, 1)))
    misaligned = torch.empty(whole.numel() + 1, dtype=whole.dtype)[1:]
    misaligned = misaligned.view(1, 3, 3, 5, 32).movedim(-1, 1).copy_(whole)
    repeated = whole[:, :, :1].expand(-1, -1, 3, -1, -1)
    other = torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:]
    other = other.view(32, 3, 1, 1, 32).movedim(-1, 1).copy_(weight)
    steps = 3 * 488, 1, 488, 160, 32  # a frame has 480 numbers
    odd = torch.empty(3 * 488, dtype=whole.dtype).as_strided(whole.shape, steps).copy_(whole)
    for x, taps in ((misaligned, weight), (repeated, weight), (odd, weight), (whole, other)):
        with use_backend("triton"):
            with pytest.raises(Refusal, match="descriptors need memory at multiples of 16 bytes"):
                dispatch.ask("triton:0", "conv3d", x, ConvWeight.of(taps), **PLAIN)
            y = conv3d(x, taps, gamma=torch.ones(32))
        formulas.check(y, *formulas.conv3d(x, taps, gamma=torch.ones(32)))
    tail = misaligned[:, :, :2]
    with use_backend("triton"):
        y = conv3d(whole, weight, tail=tail)
    formulas.check(y, *formulas.conv3d(whole, weight, tail=tail))
    assert launched == ["convolve"] * 5


def test_calls_that_descriptors_cannot_load_have_other_tiles(described, monkeypatch):
    described(CHIPS[0])

    def columns(channels, stride=ONE):
        x, weight = video(1, channels, 2, 4, 4).half(), taps_of(96, channels, 1, 1, 1).half()
        tiles = convolution_tiles.tiles_for(x, ConvWeight.of(weight), stride)
        return [tile.columns for tile in tiles]

    assert columns(32)[0]
    assert not any(columns(48))
    assert not any(columns(32, (1, 2, 2)))
    monkeypatch.setattr(convolution_tiles, "_has_descriptors", lambda: False)
    assert not any(columns(32))


@pytest.mark.parametrize("chip", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), "gfx1201"])
def test_each_shape_class_has_few_tiles_that_fit(chip):
    """Of those with descriptors, one is among the first two."""
    tiles_of, count = convolution_tiles.tiles_of, {(9, 0): 2, (10, 0): 2, (12, 0): 1}.get(chip, 0)
    if not convolution_tiles._has_descriptors():
        count = 0
    for outputs in (3, 32, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536):
        for dtype, inputs in itertools.product((torch.float16, torch.bfloat16), (None, 64, 96)):
            tiles = tiles_of(chip, dtype, outputs, *([inputs] if inputs else []))
            assert 1 <= len(tiles) == len(set(tiles)) <= 6
            for tile in tiles:
                assert tile.width >= outputs or outputs > convolution_tiles.WIDEST
                assert not tile.half or (dtype == torch.float16 and tile.depth <= 64)
            patches = [tile for tile in tiles if tile.columns]
            assert len(patches) == (count if inputs else 0)
            assert not patches or sum(tile in patches for tile in tiles[:2]) == 1
            assert all(inputs % tile.depth == 0 for tile in patches)
            assert all(tile.pixels % tile.columns == 0 for tile in patches)
    assert not tiles_of(chip, torch.float32, 96)


def test_tiles_are_those_of_the_chip_and_of_its_inputs():
    tiles_of = convolution_tiles.tiles_of
    assert not tiles_of((7, 5), torch.float16, 96)
    assert not tiles_of((99, 0), torch.float16, 96)
    for outputs in (64, 96):  # two small programs per multiprocessor come first
        first, second, *_ = tiles_of((9, 0), torch.bfloat16, outputs)
        assert (first.pixels, first.warps, second.pixels, second.warps) == (128, 4, 256, 8)
    if convolution_tiles._has_descriptors():
        whole, halved = (tiles_of((9, 0), torch.float16, 96, inputs)[1] for inputs in (64, 96))
        assert replace(whole, depth=32, stages=whole.stages + 1) == halved
