"""The convolutions in Triton's interpreter, or on a GPU: results, memory, tiles and refusals."""

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.kernels import BackendError, ConvWeight, conv3d, use_backend
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.modules import ask
from fast_video_vae.kernels.triton_ops import convolution_tiles, runtime, tiles
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import arguments, video
from fast_video_vae.tests.kernels.convolutions import CALLS, KERNELS, example, taps_of

HALF = torch.float16

pytestmark = pytest.mark.usefixtures("on_triton")


def activations(*shape, dtype):
    return F.silu(video(*shape)).to(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_of_all_kinds_equal_the_formula(kernel):
    """Drawn calls with one to five frames, any terms, padding, alignment and target."""
    drawn = (example(kernel, *call, seed) for seed in range(2) for call in CALLS)
    narrow = [call for call in drawn if call.weight.dtype == torch.bfloat16]
    for call in sorted(narrow, key=lambda call: call.weight.numel())[1:4:2]:
        with use_backend("triton"):
            call.check(call.run())


def check_tile(variant, tile, inputs, outputs, kind, size):
    x, weight = activations(1, inputs, 2, *size, dtype=kind), taps_of(outputs, inputs, 2, 1, 2)
    weight, tail = weight.to(kind), activations(1, inputs, 1, *size, dtype=kind)
    with use_backend("triton"):
        call = {"x": x, "weight": ConvWeight.of(weight), "tail": tail, "tile": variant}
        y = ask("triton", "conv3d", *arguments("conv3d", **call))
    value, error = formulas.conv3d(x, weight, tail=tail)
    if tile.half:
        # Sums of up to 64 products are rounded to float16; a GPU rounds after each few of them.
        count = 1 if runtime.interpreted() else tile.depth
        magnitude, _ = formulas.conv3d(x.abs(), weight.abs(), tail=tail.abs())
        error = error + count * 2.0**-11 * magnitude
    formulas.check(y, value, error, str(tile))


# Of sm_89 tiles sum in float16, and of sm_90 one has a block of channels with a mask.
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("chip", "outputs"), [((8, 9), 3), ((8, 9), 96), ((8, 9), 192), ((9, 0), 96)]
)
def test_every_tile_equals_the_formula_at_its_edges(chip, outputs, kind, monkeypatch):
    """One pixel less than a tile, a whole one, and one more; products of an odd number."""
    if runtime.interpreted():
        convolution = importlib.import_module(f"{runtime.__package__}.convolution")
        monkeypatch.setattr(convolution, "chip_of", lambda _: chip)
    else:
        chip = tiles.chip_of(torch.get_default_device())
    for variant, tile in enumerate(convolution_tiles.tiles_of(chip, kind, outputs)):
        check_tile(variant, tile, 15, outputs, kind, (1, tile.pixels + variant % 3))


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
    refused("its convolutions are for 16 bits, x is float32", x.float(), weight.float())
    refused("there is no kernel for float64", x.double(), weight.double())
    refused("x is not channels-last", x.contiguous(), weight)
    refused("out overlaps the memory of x", x, weight, out=x)
    large = taps_of(16, 16, 1, 6, 6, dtype=torch.float16)
    refused("more than 31 taps", x, large, padding=(2, 2))
    wide = taps_of(256, 16, 1, 1, 1, dtype=torch.float16)
    refused("up to 192 output channels, not 256", x, wide)
    call = {"x": x, "weight": ConvWeight.of(weight)}
    with use_backend("triton"), pytest.raises(Refusal, match="there is no tile 9"):
        ask("triton", "conv3d", *arguments("conv3d", **call, tile=9))
    if runtime.interpreted():
        with pytest.raises(Refusal, match="the tensors are on cpu; triton needs an NVIDIA"):
            ask("triton", "conv3d", *arguments("conv3d", **call))


def test_offsets_beyond_32_bits_are_refused():
    convolution = importlib.import_module(f"{runtime.__package__}.convolution")
    weight = ConvWeight.of(torch.empty(16, 64, 1, 3, 3, dtype=torch.float16, device="meta"))
    for height, width in ((2, 20_000_000), (70_000, 70_000)):
        shape = (1, 1, height, width, 64)
        x = torch.empty(shape, dtype=torch.float16, device="meta").movedim(-1, 1)
        with pytest.raises(Refusal, match="too far apart for 32-bit offsets"):
            convolution.conv3d(*arguments("conv3d", x=x, weight=weight, padding=(1, 1)))


@pytest.mark.parametrize("chip", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_chip_has_tiles_for_up_to_192_channels(chip):
    tiles_of = convolution_tiles.tiles_of
    for outputs, dtype in itertools.product((3, 32, 96, 128, 160, 192), (HALF, torch.bfloat16)):
        found = tiles_of(chip, dtype, outputs)
        assert found
        assert all(tile.width >= outputs for tile in found)
        halves = dtype == HALF and chip in ((8, 9), (12, 0))
        assert {tile.half for tile in found} == {halves}
    assert not tiles_of(chip, torch.float32, 96)
    assert not tiles_of(chip, HALF, 256)
    for other in ((7, 5), (99, 0), "gfx942", tiles.chip_of(torch.device("xpu"))):
        assert not tiles_of(other, HALF, 96)
