"""The convolutions in Triton's interpreter, or on a GPU: results, memory and refusals."""

import importlib
import itertools
import math

import numpy as np
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
from fast_video_vae.tests.kernels.cases import missing, place, random, video
from fast_video_vae.tests.kernels.convolutions import (
    CALLS,
    KERNELS,
    Example,
    Placed,
    example,
    taps_of,
)
from fast_video_vae.tests.products import each_value_once

ALL = ("bias", "residual", "residual_bias")
NORM = (*ALL, "gamma")

# Channels, taps, strides, padding, frames of tail and x, size, and terms.
CASES = {
    "the first of a decoder": (16, 32, (3, 3, 3), (1, 1, 1), (1, 1), (2, 1), (5, 7), ("bias",)),
    "a residual block": (32, 32, (3, 3, 3), (1, 1, 1), (1, 1), (2, 2), (6, 5), ALL),
    "frames with a border": (24, 24, (3, 3, 3), (1, 1, 1), (0, 0), (2, 3), (6, 7), NORM),
    "without a tail": (20, 33, (3, 3, 3), (1, 1, 1), (1, 1), (0, 5), (3, 5), NORM),
    "a tail of one frame": (8, 17, (3, 3, 3), (1, 1, 1), (1, 0), (1, 4), (5, 4), ALL),
    "from a picture": (3, 16, (3, 3, 3), (1, 1, 1), (1, 1), (2, 1), (7, 9), ()),
    "from a patch": (12, 40, (3, 3, 3), (1, 1, 1), (1, 1), (2, 2), (4, 5), NORM),
    "to a picture": (24, 3, (3, 3, 3), (1, 1, 1), (1, 1), (2, 1), (5, 7), ("bias",)),
    "to a patch": (16, 12, (3, 3, 3), (1, 1, 1), (1, 1), (2, 1), (5, 3), NORM),
    "down in all": (16, 24, (3, 3, 3), (2, 2, 2), (1, 1), (2, 5), (7, 8), ALL),
    "down in time": (32, 32, (3, 1, 1), (2, 1, 1), (0, 0), (1, 4), (5, 3), ("bias",)),
    "up in time": (16, 32, (3, 1, 1), (1, 1, 1), (0, 0), (2, 3), (4, 5), ("bias",)),
    "taps of a frame": (16, 16, (1, 3, 3), (1, 1, 1), (1, 1), (0, 3), (5, 7), NORM),
    "a shortcut": (24, 48, (1, 1, 1), (1, 1, 1), (0, 0), (0, 3), (5, 7), ALL),
    "folded phases": (16, 64, (2, 2), (1, 1), (1, 1), (0, 3), (5, 4), ()),
    "down in a picture": (16, 16, (3, 3), (2, 2), (0, 0), (0, 2), (9, 7), ("bias",)),
    "one picture": (16, 96, (3, 3), (1, 1), (1, 1), (0, 1), (5, 7), NORM),
    "a projection": (32, 96, (1, 1), (1, 1), (0, 0), (0, 2), (5, 7), ("bias",)),
}  # fmt: skip

# Where memory begins, batches of two with frames between them, and where the result goes.
PLACES = {"aligned": (64, 1, 0), "batches and slices": (64, 2, 1), "misaligned": (1, 1, 1)}


@pytest.fixture(autouse=True)
def here():
    """Create tensors on a GPU, or on the CPU for Triton's interpreter."""
    reason = missing("triton")
    if reason:
        pytest.skip(reason)
    with place("triton"):
        yield


def signal_to_noise(y, expected):
    """Return the power of `expected` against that of the error of `y`, in dB."""
    error = (y.double() - expected.double()).square().sum()
    return 10 * math.log10(expected.double().square().sum() / error)


def activations(*shape, dtype):
    """Return what a norm and SiLU make of normal numbers."""
    x = F.silu(video(*shape))
    return x.to(dtype)


def call_of(case, dtype, *, where="aligned", in_place=False):
    """Return the call of a case, between NaN."""
    inputs, outputs, taps, stride, padding, (known, frames), size, terms = case
    offset, batch, spare = PLACES[where]
    flat = len(taps) == 2
    batch = 1 if flat else batch

    def pick(choices):
        return spare if 0 in choices else offset

    def placed(channels, frames, size, seed):
        shape = (batch, channels, frames, *size)
        return Placed(shape, 4 if flat else 5, dtype, pick, seed)

    weight = taps_of(outputs, inputs, *taps, dtype=dtype)
    videos = {"x": placed(inputs, frames, size, 2)}
    if known:
        videos["tail"] = placed(inputs, known, size, 3)
    lengths = (known + frames, *size)
    after = [
        (length + 2 * pad - count) // step + 1
        for length, pad, count, step in zip(
            lengths, (0, *padding), (1, *taps)[-3:], (1, *stride)[-3:], strict=True
        )
    ]
    if "residual" in terms or in_place:
        videos["residual"] = placed(outputs, after[0], after[1:], 4)
    numbers = dict(zip(("bias", "residual_bias", "gamma"), random(3, outputs, seed=5), strict=True))
    vectors = {name: values for name, values in numbers.items() if name in terms}
    out = None if in_place or where == "aligned" else placed(outputs, after[0], after[1:], None)
    options = {"stride": stride, "padding": padding, **vectors}
    op = "conv2d" if flat else "conv3d"
    return Example(op, videos, weight, options, True, out, in_place)


@pytest.mark.parametrize("name", CASES)
def test_a_convolution_equals_the_formula(name):
    call = call_of(CASES[name], torch.bfloat16)
    with use_backend("triton"):
        call.check(call.run())


@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_of_all_kinds_equal_the_formula(kernel):
    """Drawn calls with one to five frames, any terms, padding, alignment and target."""
    drawn = (example(kernel, *call, seed) for seed in range(2) for call in CALLS)
    narrow = (call for call in drawn if call.weight.dtype == torch.bfloat16)
    for call in itertools.islice(narrow, 3):
        with use_backend("triton"):
            call.check(call.run())


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["a residual block", "without a tail", "folded phases"])
def test_only_the_result_is_written_wherever_memory_is(name, where):
    """Everything around the inputs and the result is NaN."""
    for in_place in (False, True):
        call = call_of(CASES[name], torch.bfloat16, where=where, in_place=in_place)
        with use_backend("triton"):
            call.check(call.run())


@pytest.mark.parametrize("outputs", [96, 160, 192])
def test_the_norm_of_whole_pixels_equals_the_formula(outputs):
    case = (16, outputs, (1, 3, 3), (1, 1, 1), (1, 1), (0, 1), (5, 7), NORM)
    for in_place in (False, True):
        call = call_of(case, torch.bfloat16, in_place=in_place)
        with use_backend("triton"):
            call.check(call.run())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outputs", [3, 32, 64, 96, 128, 160, 192, 256, 384])
def test_every_tile_equals_the_formula_at_its_edges(outputs, kind):
    """One pixel less than a tile, a whole one, and one more; products of an odd number."""
    chip = convolution_tiles.chip_of(torch.get_default_device())
    tiles = convolution_tiles.tiles_of(chip, kind, outputs)
    for variant, tile in enumerate(tiles):
        columns = tile.pixels + variant % 3 - 1
        x = activations(1, 15, 2, 1, columns, dtype=kind)
        weight = taps_of(outputs, 15, 3, 1, 1, dtype=kind)
        tail = activations(1, 15, 1, 1, columns, dtype=kind)
        options = {"stride": (1, 1, 1), "padding": (0, 0), "tail": tail}
        with use_backend("triton"):
            y = dispatch.ask(f"triton:{variant}", "conv3d", x, ConvWeight.of(weight), **options)
        value, error = formulas.conv3d(x, weight, tail=tail)
        if tile.half:
            # Sums of 64 products are rounded to float16; a GPU rounds after each few of them.
            count = 1 if runtime.interpreted() else tile.depth
            magnitude, _ = formulas.conv3d(x.abs(), weight.abs(), tail=tail.abs())
            error = error + count * 2.0**-11 * magnitude
        formulas.check(y, value, error, str(tile))


@pytest.mark.parametrize("outputs", [96, 192])
def test_norm_and_float16_sums_reach_60_db(outputs):
    x, weight = activations(1, 96, 1, 3, 5, dtype=torch.float16), taps_of(outputs, 96, 1, 3, 3)
    gamma = random(outputs, seed=3).abs()
    with use_backend("triton"):
        y = conv3d(x, weight.half(), padding=(1, 1), gamma=gamma)
    value, _ = formulas.conv3d(x, weight.half(), padding=(1, 1), gamma=gamma)
    assert signal_to_noise(y, value) >= 60


@pytest.mark.parametrize("channels", [96, 384])
def test_float16_sums_of_64_products_reach_60_db(channels):
    """The interpreter rounds once per iteration, so the roundings of tensor cores are emulated.

    They add blocks of products exactly and round the sum: 4 products on the oldest chips, 8 since
    Ampere (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).
    """
    count = 27 * channels
    x = activations(1, count, 1, 4, 8, dtype=torch.float16).movedim(1, -1).flatten(0, 3)
    weight = (random(48, count, seed=1) / math.sqrt(count)).half()
    rows, columns = x.cpu().double().numpy(), weight.cpu().double().numpy().T
    total = np.zeros((len(rows), columns.shape[1]), np.float32)
    for start in range(0, count, 64):
        part = np.zeros(total.shape, np.float16)
        for at in range(start, min(start + 64, count), 4):
            part = (part + rows[:, at : at + 4] @ columns[at : at + 4]).astype(np.float16)
        total += part
    assert signal_to_noise(torch.from_numpy(total).half(), torch.from_numpy(rows @ columns)) >= 60


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
    options = {"stride": (1, 1, 1), "padding": (0, 0)}
    with use_backend("triton"):
        with pytest.raises(Refusal, match="there is no tile 9"):
            dispatch.ask("triton:9", "conv3d", x, ConvWeight.of(weight), **options)
        convolution = importlib.import_module(f"{runtime.__package__}.convolution")
        with pytest.raises(Refusal, match="192 at most, not 256"):
            convolution.conv3d(x, ConvWeight.of(wide), gamma=torch.ones(256))
    if runtime.interpreted():
        with pytest.raises(Refusal, match="the tensors are on cpu; triton needs an NVIDIA"):
            dispatch.ask("triton", "conv3d", x, ConvWeight.of(weight), **options)


def test_offsets_beyond_32_bits_are_refused():
    convolution = importlib.import_module(f"{runtime.__package__}.convolution")
    weight = ConvWeight.of(torch.empty(16, 64, 1, 3, 3, dtype=torch.float16, device="meta"))
    for height, width in ((2, 20_000_000), (70_000, 70_000)):
        shape = (1, 1, height, width, 64)
        x = torch.empty(shape, dtype=torch.float16, device="meta").movedim(-1, 1)
        with pytest.raises(Refusal, match="too far apart for 32-bit offsets"):
            convolution.conv3d(x, weight, padding=(1, 1))


def test_a_call_reports_its_tiles_and_what_they_fuse():
    ops = importlib.import_module(f"{runtime.__package__}.ops")
    x = video(1, 16, 2, 4, 4).half()
    for outputs, norm in ((96, True), (192, True), (256, False)):
        call = x, ConvWeight.of(taps_of(outputs, 16, 3, 3, 3).half()), (1, 1, 1), (1, 1)
        assert ops.fuses(*call, norm=True) == Fused(tail=True, sums=True, norm=norm, bias=True)
        assert not ops.fuses(*call, norm=False).norm


def test_wide_results_get_their_norm_from_another_pass():
    x = activations(1, 16, 1, 3, 4, dtype=torch.bfloat16)
    weight, gamma = taps_of(256, 16, 1, 1, 1, dtype=torch.bfloat16), random(256, seed=3)
    with use_backend("triton"):
        y = conv3d(x, weight, gamma=gamma)
    formulas.check(y, *formulas.conv3d(x, weight, gamma=gamma))


def test_a_tile_without_memory_leaves_the_others(monkeypatch):
    """A chip with less shared memory than expected refuses a tile, and the next variant runs."""
    errors = pytest.importorskip("triton.runtime.errors", reason="needs triton")
    convolution = importlib.import_module(f"{runtime.__package__}.convolution")
    working, weight = convolution.convolve, ConvWeight.of(taps_of(96, 8, 1, 1, 1).half())
    monkeypatch.setattr(convolution_tiles, "chip_of", lambda _: (9, 0))
    first = convolution_tiles.tiles_of((9, 0), torch.float16, 96)[0].pixels

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
    x, options = video(1, 8, 1, 3, 4).half(), {"stride": (1, 1, 1), "padding": (0, 0)}
    with use_backend("triton"):
        for _ in range(2):
            with pytest.raises(Refusal, match="out of resource"):
                dispatch.ask("triton:0", "conv3d", x, weight, **options)
        y = dispatch.ask("triton:1", "conv3d", x, weight, **options)
    assert signal_to_noise(y, formulas.conv3d(x, weight.plain())[0]) >= 60


@each_value_once(
    shape=[((32, 96), (2, 3), (1, 1), (5, 7)), ((64, 192), (2, 1), (1, 1), (3, 17)),
           ((96, 33), (2, 1), (0, 0), (5, 18)), ((32, 256), (0, 3), (1, 0), (3, 5))],
    chip=[(9, 0), (12, 0)],
    where=["aligned", "batches and slices"],
)  # fmt: skip
def test_patches_with_descriptors_equal_the_formula(shape, chip, where, monkeypatch):
    """What lies outside the frame is NaN, and must be read as zeros."""
    if not runtime.interpreted():
        pytest.skip("chooses the tiles of another chip")
    pytest.importorskip("triton.tools.tensor_descriptor", reason="before Triton 3.4 none exist")
    convolution = importlib.import_module(f"{runtime.__package__}.convolution")
    for module in (convolution_tiles, convolution):
        monkeypatch.setattr(module, "chip_of", lambda _: chip)
    monkeypatch.setattr(convolution_tiles, "_BEFORE", 0)  # so that they are first
    monkeypatch.setattr(convolution_tiles, "tiles_of", convolution_tiles.tiles_of.__wrapped__)
    channels, frames, padding, size = shape
    terms = NORM if channels[1] <= convolution_tiles.WIDEST else ALL
    case = (*channels, (3, 3, 3), (1, 1, 1), padding, frames, size, terms)
    launched, launch = [], convolution.launch
    monkeypatch.setattr(
        convolution, "launch", lambda *a, **k: launched.append(a[0]) or launch(*a, **k)
    )
    for in_place in (False, True):
        call = call_of(case, torch.bfloat16, where=where, in_place=in_place)
        with use_backend("triton"):
            call.check(call.run())
    assert launched == [convolution.convolve_patches] * 2


@pytest.mark.parametrize("chip", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), "gfx1201"])
def test_each_shape_class_has_few_tiles_that_fit(chip):
    for outputs in (3, 12, 32, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536):
        for dtype in (torch.float16, torch.bfloat16):
            tiles = convolution_tiles.tiles_of(chip, dtype, outputs)
            assert 1 <= len(tiles) == len(set(tiles)) <= 6
            for tile in tiles:
                assert tile.width >= outputs or outputs > convolution_tiles.WIDEST
                assert not tile.half or (dtype == torch.float16 and tile.depth <= 64)
    assert not convolution_tiles.tiles_of(chip, torch.float32, 96)


def test_unknown_chips_have_no_tiles():
    assert not convolution_tiles.tiles_of((7, 5), torch.float16, 96)
    assert not convolution_tiles.tiles_of((99, 0), torch.float16, 96)
