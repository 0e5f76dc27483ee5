"""The convolution of int8 codes: exact sums, terms, memory and refusals.

The oracle is PyTorch's convolution in float64, which holds every sum of the tests exactly.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.kernels import BackendError, int8_conv3d, use_backend
from fast_video_vae.kernels.codes import zero_of
from fast_video_vae.kernels.convolution import onednn
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.triton_ops import runtime
from fast_video_vae.tests.kernels import convolutions, formulas
from fast_video_vae.tests.kernels.cases import missing, place, random, video

# Batch, input channels, frames with the tail in front, rows and columns with the border; output
# channels and taps.
CASES = {
    "a residual block": ((1, 96, 3, 4, 5), 96, (3, 3, 3)),
    "no block divides the channels": ((2, 20, 4, 5, 6), 33, (3, 3, 3)),
    "from a picture": ((1, 3, 6, 5, 7), 24, (3, 3, 3)),
    "to a picture": ((1, 33, 3, 5, 4), 3, (3, 3, 3)),
    "one frame": ((2, 64, 1, 5, 3), 16, (1, 3, 3)),
    "taps in time": ((1, 32, 5, 3, 7), 64, (3, 1, 1)),
    "a product of one step": ((1, 16, 2, 1, 3), 17, (1, 1, 1)),
    "more pixels than a tile": ((1, 16, 1, 18, 21), 40, (1, 3, 3)),
    "even taps": ((1, 24, 3, 4, 5), 20, (2, 2, 2)),
}
# A processor without VNNI sums by the reference.
ONEDNN = onednn.missing(torch.device("cpu"))
KINDS = [("reference", torch.int8), ("reference", torch.uint8), ("triton", torch.int8)]
each_kind = pytest.mark.parametrize(("candidate", "kind"), KINDS, indirect=["candidate"])
each_candidate = pytest.mark.parametrize("candidate", ["reference", "triton"], indirect=True)


@pytest.fixture
def candidate(request):
    reason = missing(request.param)
    if reason:
        pytest.skip(reason)
    with use_backend(request.param), place(request.param):
        yield request.param


def codes_of(*shape, kind=torch.int8, seed=0):
    """Return every value of `kind`, `[B, C, T, H, W]` in channels-last memory."""
    batch, channels, *pixels = shape
    info, generator = torch.iinfo(kind), torch.Generator().manual_seed(seed)
    size = (batch, *pixels, channels)
    values = torch.randint(info.min, info.max + 1, size, generator=generator, device="cpu")
    return values.to(torch.get_default_device(), kind).movedim(-1, 1)


def taps_of(outputs, inputs, *taps, seed=1):
    return codes_of(outputs, inputs, *taps, seed=seed).clamp(min=-127).contiguous()


def sums_of(x, weight):
    return F.conv3d(x.cpu().double() - zero_of(x.dtype), weight.cpu().double()).to(x.device)


def check_sums(x, weight):
    """Check that the sums are those of float64, in int32 and in float32 with a scale of 1."""
    expected = sums_of(x, weight)
    result = int8_conv3d(x, weight, None, dtype=torch.int32)
    assert result.movedim(1, -1).is_contiguous()
    assert torch.equal(result, expected.to(torch.int32))
    scaled = int8_conv3d(x, weight, torch.ones(weight.shape[0]))
    assert torch.equal(scaled, expected.float())


@each_kind
@pytest.mark.parametrize("name", CASES)
def test_sums_equal_those_of_float64(name, candidate, kind):
    shape, outputs, taps = CASES[name]
    check_sums(codes_of(*shape, kind=kind), taps_of(outputs, shape[1], *taps))


@each_kind
def test_the_largest_sums_are_exact(candidate, kind):
    """All products of a sum have the same sign: at 384 channels it needs 29 bits."""
    info, weight = torch.iinfo(kind), torch.full((16, 384, 3, 3, 3), -127, dtype=torch.int8)
    weight[8:] = 127
    for code in (info.min, info.max):
        x = codes_of(1, 384, 3, 3, 3, kind=kind).fill_(code)
        result = int8_conv3d(x, weight, None, dtype=torch.int32)
        assert torch.equal(result, sums_of(x, weight).to(torch.int32))


def terms_of(outputs, shape, dtype):
    """Return a scale that keeps the sums near 1, and all terms."""
    scale = random(outputs, seed=2).abs() * 1e-5
    bias, residual_bias = random(2, outputs, seed=3)
    residual = video(*shape, dtype=dtype, seed=4)
    return scale, {"bias": bias, "residual": residual, "residual_bias": residual_bias}


def formula(x, weight, scale, bias=None, residual=None, residual_bias=None):
    """Return the result in float64, and the error of its steps in float32."""

    def wide(values):
        return values.double().view(1, -1, 1, 1, 1)

    value = sums_of(x, weight) * wide(scale)
    steps = 2 * value.abs()  # of the sum, if it has more than 24 bits, and of the product
    for term in (bias, residual, residual_bias):
        if term is not None:
            value = value + (term.double() if term.ndim == 5 else wide(term))
            steps = steps + value.abs()
    return value, steps * formulas.unit(torch.float32) * 1.01


@each_candidate
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_terms_are_added_in_float32_and_rounded_once(dtype, candidate):
    x, weight = codes_of(2, 24, 3, 4, 5), taps_of(33, 24, 3, 3, 3)
    scale, terms = terms_of(33, (2, 33, 1, 2, 3), dtype)
    for names in ((), ("bias",), ("residual",), ("bias", "residual", "residual_bias")):
        chosen = {name: terms[name] for name in names}
        y = int8_conv3d(x, weight, scale, dtype=dtype, **chosen)
        formulas.check(y, *formula(x, weight, scale, **chosen), f"{names}")
    shaped = scale.double().view(1, -1, 1, 1, 1), terms["bias"].half().view(-1, 1)
    y = int8_conv3d(x, weight, *shaped)
    formulas.check(y, *formula(x, weight, scale, terms["bias"].half()))


@each_candidate
@pytest.mark.parametrize(("offset", "spare"), [(0, 1), (1, 1)])
def test_memory_around_the_videos_is_neither_read_nor_written(offset, spare, candidate):
    """Slices of frames in batches of two; the result is other memory or the residual."""
    shape, result = (2, 32, 3, 5, 6), (2, 33, 1, 3, 4)

    def pick(choices):
        return spare if 0 in choices else 64 - 63 * offset

    def placed(values):
        placed = convolutions.Placed(values.shape, values.dtype, pick, None)
        placed.view.copy_(values)
        return placed

    weight = taps_of(33, 32, 3, 3, 3)
    scale, terms = terms_of(33, result, torch.bfloat16)
    x, residual = placed(codes_of(*shape)), placed(terms["residual"])
    other = placed(torch.zeros(result, dtype=torch.bfloat16))
    expected = formula(x.view, weight, scale, **terms)
    for target in (other, residual):
        call = {**terms, "residual": residual.view, "out": target.view, "dtype": torch.bfloat16}
        assert int8_conv3d(x.view, weight, scale, **call) is target.view
        formulas.check(target.take(), *expected)


@pytest.mark.skipif(bool(ONEDNN), reason=ONEDNN)
def test_onednn_sums_exactly_and_adds_the_residual_after_a_rounding():
    x, weight = codes_of(2, 24, 3, 4, 5, kind=torch.uint8), taps_of(33, 24, 3, 3, 3)
    scale, terms = terms_of(33, (2, 33, 1, 2, 3), torch.bfloat16)
    out, residual = torch.zeros_like(terms["residual"]), terms.pop("residual")
    with use_backend("aten"):
        assert torch.equal(int8_conv3d(x, weight, torch.ones(33)), sums_of(x, weight).float())
        plain = int8_conv3d(x, weight, scale, **terms, dtype=torch.bfloat16)
        call = {**terms, "residual": residual, "dtype": torch.bfloat16, "out": out}
        assert int8_conv3d(x, weight, scale, **call) is out
    formulas.check(plain, *formula(x, weight, scale, **terms))
    assert torch.equal(out, plain + residual)


@pytest.mark.parametrize("candidate", ["triton"], indirect=True)
def test_calls_that_the_kernel_cannot_run_are_refused(candidate):
    x, weight = codes_of(1, 16, 2, 4, 4), taps_of(16, 16, 1, 1, 1)
    with pytest.raises(BackendError, match="there is no kernel for uint8"):
        int8_conv3d(codes_of(1, 16, 2, 4, 4, kind=torch.uint8), weight, None, dtype=torch.int32)
    with pytest.raises(BackendError, match="x is not channels-last"):
        int8_conv3d(x.contiguous(), weight, None, dtype=torch.int32)
    memory = torch.zeros(16 * (2 * 16 + 1))
    first, second = (memory[at : at + 512].view(1, 2, 4, 4, 16).movedim(-1, 1) for at in (0, 16))
    with pytest.raises(BackendError, match="out overlaps the memory of residual"):
        int8_conv3d(x, weight, torch.ones(16), residual=first, out=second)
    long = taps_of(16, 2048, 1, 9, 9)
    with pytest.raises(BackendError, match="saturate sums of more than 131071 products"):
        int8_conv3d(codes_of(1, 2048, 1, 9, 9), long, None, dtype=torch.int32)


def test_other_chips_have_no_tiles():
    pytest.importorskip("triton", reason="needs triton")
    int8 = importlib.import_module(f"{runtime.__package__}.int8_convolution")
    for chip in ((7, 5), (10, 3), "gfx942"):
        with pytest.raises(Refusal, match="no tiles for the chip"):
            int8.tile_of(chip, 96, 96, 27 * 96)
