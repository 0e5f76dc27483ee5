"""Every op, with every backend, against its formula in float64: one table of cases.

The counts of channels and pixels lie around multiples of vector lengths. Results are written into
memory of NaN inside a longer buffer, and any write outside of it is an error.
"""

import importlib
import math
from itertools import product

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import use_backend
from fast_video_vae.kernels.backends import ORDER
from fast_video_vae.kernels.support import EXACT
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import (
    DTYPES,
    OPS,
    PLAYED,
    SERVED,
    Poisoned,
    each_dtype,
    random,
    serving,
    some,
    video,
    window,
)

WIDTHS = (3, 33, 96, 520)
GROUPS = {3: 1, 33: 11, 96: 32, 520: 8}

# B, T, H, W: 1, 15, 16, 17, 63, 64 and 65 pixels.
SIZES = (
    (1, 1, 1, 1), (1, 2, 3, 5), (2, 1, 4, 4), (1, 3, 1, 17), (2, 2, 7, 9), (1, 5, 8, 8),
    (1, 1, 5, 13),
)  # fmt: skip

# Channels before and after, frames and rows of a block.
AVERAGES = {
    3: [(4, 4, 1, 2), (4, 8, 2, 2), (4, 4, 2, 2), (8, 4, 2, 2), (3, 4, 1, 2)],
    33: [(4, 8, 1, 2), (4, 16, 1, 2), (4, 32, 2, 2), (33, 33, 2, 2)],
    96: [(6, 4, 2, 2), (4, 4, 1, 1), (4, 2, 1, 1), (12, 2, 3, 2)],
    520: [(160, 320, 2, 2), (320, 640, 1, 2)],  # the layers of Wan 2.2
}

# Channels of the source and of the result, and repetitions in time.
SOURCES = {
    3: [(8, 8, 2), (8, 4, 1), (8, 2, 1), (6, 3, 2)],
    33: [(4, 8, 1), (16, 2, 2), (8, 1, 2), (33, 33, 2)],
    96: [(12, 9, 1), (64, 32, 2), (64, 16, 1)],
    520: [(96, 24, 2)],
}

SHUFFLES = [
    *product([(1, 2, 2), (2, 2, 2)], ("cthw", "ctwh", "hwtc", "wcht")),
    ((3, 1, 2), "ctwh"), ((2, 1, 1), "hwtc"), ((1, 1, 1), "cthw"),
]  # fmt: skip

# Dtypes of images.
FORMATS = [torch.float32, torch.uint8, torch.uint16]
IMAGES = [(1, "cthw"), (2, "cthw"), (2, "ctwh"), (3, "hwtc")]

YES_NO = (True, False)

memory = importlib.import_module("fast_video_vae.kernels.reference.memory")


def clip(channels, size, dtype, seed=0):
    batch, *pixels = size
    return video(batch, channels, *pixels, dtype=dtype, seed=seed)


def group_norm(c, dtype, size, silu, given):
    """Return a call; given statistics are not dense."""
    options = {"silu": silu, "eps": 1e-3}
    if given:
        options["statistics"] = random(GROUPS[c], 2, size[1], size[0], seed=2).permute(3, 2, 1, 0)
    return (clip(c, size, dtype), *random(2, c, seed=1), GROUPS[c]), options


def terms(c, dtype, size, given):
    numbers = random(2, c, seed=1)
    each = (numbers[0], clip(c, size, dtype, 1), numbers[1])
    each = [term if there else None for term, there in zip(each, given, strict=True)]
    return (clip(c, size, dtype), *each), {}


def phases(_, dtype, case, frames, biased):
    """Return a merge; of one frame the source has one, which comes last or first."""
    before, after, times = case
    source = video(2, before, max(frames, 1), 3, 5, dtype=dtype, seed=1)
    grid = video(2, 4 * after, frames * times or 1, 4, 6, dtype=dtype)
    return (grid, source, times), {"bias": random(after, seed=3) if biased else None}


# What the examples of an op vary, by its channels, and its call with one of them.
TABLE = {
    "rms_norm_silu": (
        lambda c: product(SIZES, YES_NO, YES_NO),
        lambda c, dtype, size, silu, biased: (
            (clip(c, size, dtype), random(c, seed=1)),
            {"silu": silu, "bias": random(c, seed=2) if biased else None},
        ),
    ),
    "group_norm_silu": (lambda c: product(SIZES, YES_NO, YES_NO), group_norm),
    "group_norm_statistics": (
        lambda c: product(SIZES, (1e-6, 0.1)),
        lambda c, dtype, size, eps: ((clip(c, size, dtype), GROUPS[c], eps), {}),
    ),
    "silu_mul": (
        lambda c: [((1,),), ((15,),), ((3, 17),), ((2, 3, 11),)],
        lambda c, dtype, shape: (random(*shape, 2 * c, dtype=dtype).mul_(4).chunk(2, -1), {}),
    ),
    "bias_residual": (lambda c: product(SIZES[1:5], product((0, 1), repeat=3)), terms),
    "attention": (
        lambda c: product([(1, 50), (3, 17), (2, 1), (1, 129)], YES_NO),
        # Thirds of one tensor, as a projection makes them, or three tensors.
        lambda c, dtype, rows, joined: (
            random(*rows, 3 * c, dtype=dtype).chunk(3, -1)
            if joined
            else random(3, *rows, c, dtype=dtype).unbind(),
            {},
        ),
    ),
    "average_down": (
        lambda c: product(AVERAGES[c], (1, 2, 3, 4, 5), (1, 2)),
        lambda c, dtype, case, frames, batch: (
            (video(batch, case[0], frames, 4, 6, dtype=dtype), case[1]),
            {"times": case[2], "size": case[3]},
        ),
    ),
    "interleave_time": (
        lambda c: product(SIZES[1:5], (1, 2, 3)),
        lambda c, dtype, size, count: ((clip(count * min(c, 64), size, dtype), count), {}),
    ),
    "merge_phases": (
        lambda c: [
            *((None, size, biased) for size in SIZES[1:5] for biased in YES_NO),
            *product(SOURCES[c], (0, 1, 3), YES_NO),
        ],
        lambda c, dtype, case, size, biased: (
            phases(c, dtype, case, size, biased)
            if case
            else (
                (video(2, 4 * min(c, 64), size[1], size[2] + 1, size[3] + 1, dtype=dtype),),
                {"bias": random(min(c, 64), seed=3) if biased else None},
            )
        ),
    ),
    "pixel_shuffle_3d": (
        lambda c: product(SHUFFLES, ((1, 1, 3, 5), (2, 3, 3, 5))),
        lambda c, dtype, shuffle, size: (
            (clip(min(c, 40) * math.prod(shuffle[0]), size, dtype), *shuffle),
            {},
        ),
    ),
    "frames_to_images": (  # a third of the numbers is out of range
        lambda c: product(SIZES if c < 96 else SIZES[1:3], IMAGES, FORMATS),
        lambda c, dtype, size, image, form: (
            (clip(min(c, 16) * image[0] ** 2, size, dtype),),
            {"patch": image[0], "order": image[1], "dtype": form},
        ),
    ),
}

WITHOUT_OUT = ("attention", "average_down", "group_norm_statistics")


def room(op, value, dtype, offset):
    """Return a buffer of NaN, and its part for the result."""
    if op in ("silu_mul", "frames_to_images"):
        buffer = Poisoned(*value.shape, dtype=value.dtype if op != "silu_mul" else dtype)
        return buffer, buffer.memory
    return window(*value.shape, dtype=dtype, offset=offset)


def is_dense(y):
    return (y.movedim(1, -1) if y.ndim == 5 else y).is_contiguous()


@pytest.mark.parametrize(
    ("backend", "op", "dtype"),
    [
        (name, op, dtype)
        for op, name, dtype in product(OPS, ORDER, (*DTYPES, torch.float64))
        if (name, op, dtype) in SERVED and (op, dtype) != ("group_norm_silu", torch.float64)
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("channels", WIDTHS)
def test_an_op_equals_its_formula(backend, op, dtype, channels, monkeypatch):
    """In new memory and in `out`, aligned or not; ops without rounding equal the reference.

    The blocks of the reference have less than a row, several rows, or a frame.
    """
    examples, make = TABLE[op]
    for number, example in enumerate(some(backend, examples(channels), 4)):
        monkeypatch.setattr(memory, "_BLOCK_ELEMENTS", (10**6, 1, 100, 1000)[number % 4])
        args, options = make(channels, dtype, *example)
        tensors = [x for x in args if torch.is_tensor(x)]
        before = [x.clone() for x in tensors]
        value, error = getattr(formulas, op)(*args, **options)
        if dtype == torch.float64 and error is not None:
            error = 2 * error  # that of the formula too
        where = f"{op} {example}"
        if number % 2 or backend not in PLAYED or op in WITHOUT_OUT:
            y = getattr(kernels, op)(*args, **options)
            formulas.check(y, value, error, where)
            assert is_dense(y), where
            place = y.untyped_storage().data_ptr()
            assert all(place != x.untyped_storage().data_ptr() for x in tensors), where
        if op not in WITHOUT_OUT and not (number % 2 and backend in PLAYED):
            buffer, out = room(op, value, dtype, (64, 1, 3, 63)[number // 2 % 4])
            given = {name: each for name, each in options.items() if name != "dtype"}
            if op == "frames_to_images" and number % 4:
                out = out.unflatten(0, (args[0].shape[0], -1))
            assert getattr(kernels, op)(*args, out=out, **given) is out
            y = buffer.take(out).view(value.shape)
            formulas.check(y, value, error, where)
        assert all(map(torch.equal, tensors, before)), where
        if op in EXACT and backend != "reference":
            with use_backend("reference"):
                assert torch.equal(y, getattr(kernels, op)(*args, **options)), where


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0.0, 1.0), (1e4, 1.0), (1e4, 0.05), (-300.0, 1e-3)]
)
def test_group_norm_of_a_large_frame_far_from_zero(backend, mean, deviation):
    """A variance computed from the mean of the squares would have an error of `u mean^2`."""
    size = (40, 52) if backend in PLAYED else (160, 208)
    x = video(1, 16, 1, *size).mul_(deviation).add_(mean)
    both = [formulas.holds("group_norm_statistics", x, 2, 1e-12) for _ in range(2)]
    assert torch.equal(*both)
    formulas.holds("group_norm_silu", x, *random(2, 16, seed=1), 2)
    if backend == "reference" and mean == 1e4:  # the mean is rounded once
        value, _ = formulas.group_norm_statistics(x, 2, 1e-12)
        assert torch.equal(both[0][0, 0, 0], value[0, 0, 0].float())
        # A third of the numbers is one unit above: the mean has an error like the deviation.
        x = torch.full_like(x, mean).index_fill_(4, torch.arange(0, size[1], 3), mean + 2**-10)
        value, _ = formulas.group_norm_statistics(x, 2, 1e-12)
        torch.testing.assert_close(kernels.group_norm_statistics(x, 2, 1e-12).double(), value)


@pytest.mark.parametrize("given", [*DTYPES, torch.float64, torch.float8_e4m3fn])
@each_dtype
def test_scales_and_biases_have_any_dtype_and_shape(ask, dtype, given):
    """Checkpoints store them as `[C, 1, 1, 1]`; here they are also strided views."""
    x, grid = video(1, 24, 2, 3, 5, dtype=dtype), video(1, 96, 1, 3, 4, dtype=dtype)
    few = random(2, 48, seed=1).to(given)[:, ::2]
    a, b = few[0].view(24, 1, 1, 1), few[1].view(1, 24)
    for op, args, keywords in (
        ("rms_norm_silu", (x, a), {}),
        ("rms_norm_silu", (x, a), {"bias": b}),
        ("group_norm_silu", (x, a, b, 4), {}),
        ("bias_residual", (x, a, x, b), {}),
        ("merge_phases", (grid,), {"bias": b}),
    ):
        actual = ask(getattr(kernels, op), *args, **keywords)
        plain = [y.double().flatten() if y is a or y is b else y for y in args]
        wide = {name: value.double().flatten() for name, value in keywords.items()}
        if actual is not None:
            formulas.check(actual, *getattr(formulas, op)(*plain, **wide), op)


@pytest.mark.parametrize("backend", ["native", "reference"], indirect=True)
@each_dtype
def test_results_are_correct_with_several_threads(backend, dtype):
    """The parts have different sizes, and the last one is short."""
    shape = (1, 48, 3, 37, 83)
    x, residual = video(*shape, dtype=dtype), video(*shape, dtype=dtype, seed=1)
    weight, bias = random(2, 48, seed=2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        formulas.holds("rms_norm_silu", x, weight)
        formulas.holds("group_norm_silu", x, weight, bias, 12)
        formulas.holds("bias_residual", x, bias, residual, weight)
        formulas.holds("group_norm_statistics", x, 12)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_moved_numbers_of_another_dtype_are_correct_or_refused(ask, to):
    """Of a video in any order of its axes in memory."""
    x = video(2, 12, 2, 3, 5, dtype=torch.bfloat16)
    expected = formulas.pixel_shuffle_3d(x, (1, 2, 2), "ctwh")[0].to(to)
    for axes in [(0, 1, 2, 3, 4), (0, 2, 3, 4, 1), (2, 4, 0, 3, 1)]:
        back = [axes.index(dim) for dim in range(5)]
        buffer = Poisoned(*(expected.shape[dim] for dim in axes), dtype=to)
        out = buffer.memory.permute(back)
        actual = ask(kernels.pixel_shuffle_3d, x, (1, 2, 2), "ctwh", out=out)
        assert actual is None or torch.equal(buffer.take(actual), expected)


def around(steps):
    """Return float32 numbers around `steps`, float64 values of images, and special numbers."""
    nearest = (2 * steps - 1).float()
    x = [nearest]
    for towards in (-2.0, 2.0):
        moved = nearest
        for _ in range(3):
            moved = moved.nextafter(torch.tensor(towards))
            x.append(moved)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -0.0])
    return torch.cat([*x, special]).view(1, 1, 1, 1, -1)


@pytest.mark.parametrize("backend", serving("frames_to_images"), indirect=True)
@each_dtype
@pytest.mark.parametrize("to", FORMATS)
def test_images_are_exact_for_all_numbers(backend, dtype, to):
    """Test all numbers of a 16-bit dtype, and float32 numbers around each of the steps."""
    white = {torch.float32: 1, torch.uint8: 255}.get(to, 65535)
    if dtype == torch.float32:
        first = 0.5 if to == torch.uint16 else 0.0  # rounded in the middle, or dropped
        x = around((torch.arange(-1, white + 2, dtype=torch.float64) + first) / white)
    else:
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(1, 1, 1, 1, -1)
    actual = kernels.frames_to_images(x, dtype=to)
    expected, _ = formulas.frames_to_images(x, dtype=to)
    if to == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", serving("frames_to_images"), indirect=True)
def test_frames_of_more_numbers_than_a_block_become_images(backend):
    x = video(1, 3, 5, *((40, 56) if backend in PLAYED else (240, 416)))
    formulas.holds("frames_to_images", x, dtype=torch.uint8)
