"""The sizes, offsets and barriers of the convolution for Hopper, in a model of its source."""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.kernels.cuda_ops.hopper_tile import tile_of
from fast_video_vae.tests.kernels.hopper_model import MOST_SHARED, convolve, faults

CHANNELS = (96, 128, 160, 192, 256, 320, 384, 512, 640, 1024)

each_scheme = pytest.mark.parametrize("copies", [True, False])


def agrees(call, size, known=0, padding=None, *, copies, anchored=False, **wrong):
    """Whether the model equals the formula in each bit: sums of whole numbers are exact.

    `call` has the kernel and the channels, `size` the frames, rows and columns, `wrong` constants.
    """
    kernel, inputs, outputs = call
    tile = tile_of(*call, copies=copies, norm=False)
    tile = tile._replace(constants={**tile.constants, **wrong})
    padding = padding or tuple(int(taps > 1) for taps in kernel[1:])
    shapes = (2, *size, inputs), (2, known, *size[1:], inputs), (outputs, inputs, *kernel)
    numbers = np.random.default_rng(0)
    x, tail, weight = (numbers.integers(-9, 10, shape, dtype=np.int8) for shape in shapes)
    result = convolve(tile, x, tail, weight, padding, anchored=anchored)
    ends = np.r_[: tile.width, outputs - tile.width : outputs]
    window = torch.from_numpy(np.concatenate([tail, x], axis=1)).double().movedim(-1, 1)
    sums = F.conv3d(window, torch.from_numpy(weight[ends]).double(), padding=(0, *padding))
    return np.array_equal(result[..., ends], sums.movedim(1, -1).numpy())


@each_scheme
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 3), (1, 2, 2), (3, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 1, 33), (9, 17, 1), (2, 32, 16), (4, 15, 18)])
def test_any_size_and_tail_equals_the_formula(kernel, size, copies):
    for inputs, known in product((32, 64), range(3)):
        if size[0] + known >= kernel[0]:
            assert agrees((kernel, inputs, 96), size, known, copies=copies)


@each_scheme
@pytest.mark.parametrize("inputs", CHANNELS)
@pytest.mark.parametrize("outputs", CHANNELS)
def test_all_channels_equal_the_formula(inputs, outputs, copies):
    assert agrees(((1, 2, 2), inputs, outputs), (1, 1, 1), copies=copies)


@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 2, 2), (3, 1, 1)])
@pytest.mark.parametrize("inputs", [96, 128])
def test_one_box_for_all_columns_of_taps_needs_a_permutation_by_address(kernel, inputs):
    """Only a GPU shows whether it has one; a box per column is right in either way."""
    for copies, anchored in product((True, False), (True, False)):
        right = agrees((kernel, inputs, 96), (3, 9, 9), copies=copies, anchored=anchored)
        assert right == (copies or not anchored or kernel[2] == 1)


def by(*changes):
    return lambda value: [value + change for change in changes]


def wrong_offsets(text):
    values = text.split(",")
    for i, value in enumerate(values):
        for other in (int(value) - 1, int(value) + 1, values[i - 1]):
            yield ",".join(map(str, [*values[:i], other, *values[i + 1 :]]))


def wrong_descriptors(text):
    value = int(text[:-3], 0)
    changed = value + (1 << 32), value - (1 << 32), value ^ 3 << 62, value | 1 << 49
    return [f"{each:#x}ull" for each in changed]


# Changes of a constant that do harm. These do none: a frame more has no weights, half a slab loads
# twice, fewer stages are fewer from two on, and more memory is unused.
PLANTS = {
    "WIDTH": by(-32, 32), "SLAB": lambda slab: [2 * slab], "FRAMES": by(-1),
    "FRAME_TAPS": by(-1, 1), "SHIFTS": by(-1, 1), "BOX_TAPS": lambda taps: [taps // 2, 2 * taps],
    "TAP_STEP": by(-1, 1), "GROUP": by(-1, 1), "OFFSETS": wrong_offsets,
    "X_DESCRIPTOR": wrong_descriptors, "X_STAGES": lambda stages: [1, stages + 1],
    "X_BYTES": by(-1024, 16, 1024), "X_EXPECTED": by(-16, 16), "X_BLOCK": by(-1, 1),
    "X_SIDE": by(-1, 1), "W_DESCRIPTOR": wrong_descriptors,
    "W_STAGES": lambda stages: [1, stages + 1], "W_BYTES": by(-1024, 16, 1024),
    "W_EXPECTED": by(-16, 16), "W_TAP": by(-1024, 16, 1024), "K_STEP": by(-1, 1),
    "EXCHANGE": by(-1024, 1024), "BARRIERS": by(-8, 8), "VECTORS": by(-8, 8),
    "SHARED": lambda size: [size - 8, MOST_SHARED + 8],
}  # fmt: skip


# Boxes of weights with two and with three taps, in slabs of 64 and of 32.
@pytest.mark.parametrize(
    ("kernel", "inputs", "copies"), [((2, 2, 2), 128, True), ((2, 3, 3), 96, False)]
)
@pytest.mark.parametrize("name", PLANTS)
def test_a_wrong_constant_is_found(name, kernel, inputs, copies):
    call, size = (kernel, inputs, 256), (2, 15 + kernel[1], 15 + kernel[2])
    constants = tile_of(*call, copies=copies, norm=False).constants
    assert agrees(call, size, padding=(0, 0), copies=copies)
    for wrong in PLANTS[name](constants[name]):
        with suppress(AssertionError, ValueError, IndexError):  # found, or found before the end
            assert agrees(call, size, padding=(0, 0), copies=copies, **{name: wrong})
            pytest.fail(f"{name} may be {wrong}")


@pytest.mark.parametrize("stages", [(2, 2), (2, 3), (3, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize(("boxes", "steps"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_no_interleaving_is_a_race_or_a_deadlock(stages, boxes, steps):
    assert not faults(stages, boxes, steps)


@pytest.mark.parametrize(
    ("stages", "broken", "fault"),
    [
        ((1, 3), "", "deadlock"),
        ((3, 1), "", "deadlock"),
        ((3, 3), "early", "race"),
        ((3, 3), ("full", 1), "race"),  # of one stage of pixels
        ((3, 3), ("full", 4), "race"),  # of one stage of weights
        ((2, 5), ("empty", 1), "race"),
        ((3, 3), ("empty", 4), "race"),
        ((3, 3), "parity", "deadlock"),
        ((3, 3), "count", "race"),
        ((3, 3), "end", "deadlock"),
    ],
)
def test_a_broken_rule_of_the_barriers_is_found(stages, broken, fault):
    assert fault in faults(stages, 2, 2, broken=broken)
