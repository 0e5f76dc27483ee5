"""The ops on any memory: strides, offsets, aliases, empty tensors and very large ones."""

from itertools import product

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import use_backend
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import (
    LAYOUTS,
    OPS,
    PLAYED,
    Poisoned,
    each_dtype,
    has,
    inputs,
    random,
    video,
)


def remade(value, layout):
    if isinstance(value, torch.Tensor) and value.ndim == 5:
        return LAYOUTS[layout](value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def expected_of(op, dtype):
    """Return the results of the reference on channels-last memory; `test_ops.py` checks those."""
    args, keywords = inputs(op, dtype)
    with use_backend("reference"):
        return getattr(kernels, op)(*args, **keywords), keywords.get("tail")


def check_close(actual, expected):
    if actual is not None:
        close = {"rtol": 2 * torch.finfo(expected.dtype).eps, "atol": 2e-6}
        torch.testing.assert_close(actual, expected, **close)


@pytest.mark.parametrize("op", sorted(set(OPS) - {"attention", "silu_mul"}))
@each_dtype
def test_any_strides_are_read_and_written_correctly_or_refused(ask, op, dtype):
    """A backend that refuses has not written."""
    expected, next_tail = expected_of(op, dtype)
    images, writes = op == "frames_to_images", op not in ("average_down", "group_norm_statistics")
    like = expected.movedim(-1, 0)[None] if images else expected
    ran = set()  # with the layout at both ends; then one of them shows nothing more
    for layout, ends in product(LAYOUTS, ("both", "inputs", "out") if writes else ("inputs",)):
        if layout in ran:
            continue
        args, keywords = inputs(op, dtype)
        if ends != "out":
            args = [remade(value, layout) for value in args]
            keywords = {name: remade(value, layout) for name, value in keywords.items()}
        if ends != "inputs":
            out = LAYOUTS[layout](torch.full_like(like, torch.nan))
            keywords["out"] = out[0].movedim(0, -1) if images else out
        actual = ask(getattr(kernels, op), *args, **keywords)
        check_close(actual, expected)
        if actual is None:
            assert ends == "inputs" or out.isnan().all()
            continue
        assert actual is keywords.get("out", actual)
        ran |= {layout} if ends == "both" else set()
        if next_tail is not None:
            check_close(keywords["tail"], next_tail)


ROWS = {
    "swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other row": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "wider rows": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "sparse": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "columns": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("op", ["silu_mul", "attention"])
@each_dtype
def test_any_rows_are_correct_or_refused(ask, op, dtype):
    expected, _ = expected_of(op, dtype)
    for layout in ROWS.values():
        args, keywords = inputs(op, dtype)
        args = [layout(x) if x.ndim == 3 else x for x in args]
        check_close(ask(getattr(kernels, op), *args, **keywords), expected)
        if op != "attention":
            out = layout(torch.full_like(expected, torch.nan))
            actual = ask(getattr(kernels, op), *args, out=out, **keywords)
            if actual is None:
                assert out.isnan().all()
            else:
                check_close(out, expected)


@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.uint8, torch.uint16])
def test_images_are_written_anywhere_or_refused(ask, to):
    """At any address, as planes, into a wider image, every other pixel or image."""
    x = LAYOUTS["misaligned"](video(1, 3, 4, 6, 10))
    expected, _ = formulas.frames_to_images(x, dtype=to)
    for shape, offset, view in [
        ((4, 6, 10, 3), 1, lambda memory: memory),
        ((4, 3, 6, 10), 64, lambda memory: memory.permute(0, 2, 3, 1)),
        ((4, 6, 20, 3), 64, lambda memory: memory[:, :, 7:17]),
        ((4, 6, 10, 4), 64, lambda memory: memory[..., :3]),
        ((9, 6, 10, 3), 64, lambda memory: memory[1::2]),
    ]:
        buffer = Poisoned(*shape, dtype=to, offset=offset)
        actual = ask(kernels.frames_to_images, x, out=view(buffer.memory))
        assert actual is None or torch.equal(buffer.take(actual), expected), shape


@pytest.mark.parametrize("channels", [3, 16, 33])
@each_dtype
def test_results_may_overwrite_their_inputs(backend, dtype, channels):
    gamma, bias = random(2, channels, seed=1)
    x, other = (video(2, channels, 3, 5, 7, dtype=dtype, seed=seed) for seed in (2, 3))
    rows, gate = (y.movedim(1, -1) for y in (x, other))
    sums = formulas.bias_residual(x, bias, other, gamma)
    gates = formulas.silu_mul(rows, gate)
    for op, args, place, expected in (
        (kernels.rms_norm_silu, (x, gamma), 0, formulas.rms_norm_silu(x, gamma)),
        (kernels.silu_mul, (rows, gate), 0, gates),
        (kernels.silu_mul, (rows, gate), 1, gates),
        (kernels.bias_residual, (x, bias, other, gamma), 0, sums),
        (kernels.bias_residual, (x, bias, other, gamma), 2, sums),
    ):
        if not has(backend, op.__name__):
            continue
        args = [y.clone() for y in args]
        before = [y.clone() for y in args]
        assert op(*args, out=args[place]) is args[place]
        formulas.check(args[place], *expected, f"{op.__name__} into argument {place}")
        for n, (now, then) in enumerate(zip(args, before, strict=True)):
            assert n == place or torch.equal(now, then)


EMPTY = [(0, 8, 2, 4, 4), (1, 8, 0, 4, 4), (2, 8, 2, 0, 4), (1, 8, 2, 4, 0), (0, 8, 0, 0, 0)]


@pytest.mark.parametrize("shape", EMPTY)
@each_dtype
def test_empty_inputs_have_empty_results(ask, dtype, shape):
    batch, _, frames, *_ = shape
    x, ones = video(*shape, dtype=dtype), torch.ones(8)
    rows, no_rows = x.movedim(1, -1), video(2, 8, 3, 1, 5, dtype=dtype)
    calls = [
        ("rms_norm_silu", (x, ones), {}),
        ("group_norm_silu", (x, ones, ones, 2), {}),
        ("group_norm_silu", (x, ones, ones, 2), {"statistics": torch.ones(batch, frames, 2, 2)}),
        ("silu_mul", (rows, rows), {}),
        ("attention", (ones.expand(0, 5, 8),) * 3, {}),
        ("attention", (ones.expand(2, 0, 8),) * 3, {}),
        ("bias_residual", (x, ones, x, ones), {}),
        ("interleave_time", (x, 2), {}),
        ("pixel_shuffle_3d", (x, (2, 2, 2)), {}),
        ("average_down", (x, 4), {"times": 2, "size": 2}),
        ("frames_to_images", (x,), {"patch": 2}),
        ("frames_to_images", (x,), {"dtype": torch.uint16}),
        *[("merge_phases", (grid,), {}) for grid in (x, no_rows) if min(grid.shape[3:])],
    ]
    for op, args, keywords in calls:
        actual = ask(getattr(kernels, op), *args, **keywords)
        assert actual is None or not actual.numel(), op
    statistics = ask(kernels.group_norm_statistics, x, 2)
    if statistics is not None:
        assert statistics.shape == (batch, frames, 2, 2)
        assert statistics.isnan().all()


@each_dtype
def test_zero_new_frames_keep_the_tail(ask, dtype):
    x, ones = video(1, 8, 0, 2, 2, dtype=dtype), torch.ones(8)
    tail = video(1, 8, 2, 2, 2, dtype=dtype)
    before = tail.clone()
    for op, args in ((kernels.rms_norm_silu, (ones,)), (kernels.group_norm_silu, (ones, ones, 2))):
        result = ask(op, x, *args, tail=tail)
        assert result is None or torch.equal(result, before)
        assert torch.equal(tail, before)


def far(x, frames=0):
    """Copy `x` to frames that are more than 2^32 numbers apart, after `frames` others.

    The memory between them is not touched, so it is not allocated.
    """
    batch, channels, count, height, width = x.shape
    apart = (1 << 32) + 2 * channels * height * width
    memory = torch.empty((frames + count - 1) * apart + x[0, :, 0].numel(), dtype=x.dtype)
    shape = batch, channels, frames + count, height, width
    strides = 0, 1, apart, width * channels, channels
    view = memory.as_strided(shape, strides)
    view[:, :, frames:].copy_(x)
    return view


@pytest.mark.skipif("cuda" not in PLAYED, reason="the memory of a GPU is allocated at once")
@pytest.mark.parametrize("backend", ["native", "cuda"], indirect=True)
def test_frames_may_be_more_than_2_32_numbers_apart(backend):
    x = video(1, 16, 2, 4, 6, dtype=torch.bfloat16)
    source = video(1, 4, 1, 3, 5, dtype=torch.bfloat16, seed=1)
    numbers = random(2, 16, seed=1)
    calls = [
        ("rms_norm_silu", (numbers[0],), {"tail": 1}),
        ("group_norm_silu", (*numbers, 2), {"tail": 1}),
        ("bias_residual", (numbers[0],), {}),
        ("average_down", (), {"channels": 16, "times": 1, "size": 2}),
        ("frames_to_images", (), {"patch": 2}),
        ("frames_to_images", (), {"patch": 2, "dtype": torch.uint16}),
        ("interleave_time", (2,), {}),
        ("merge_phases", (source, 2), {}),
        ("pixel_shuffle_3d", ((2, 2, 2),), {}),
    ]
    for op, args, keywords in calls:
        run, copies = getattr(kernels, op), dict(keywords)
        if "tail" in keywords:
            keywords["tail"] = video(1, 16, 1, 4, 6, dtype=torch.bfloat16, seed=2)
            copies["tail"] = far(keywords["tail"])
        expected = run(x, *args, **keywords)
        if op in ("rms_norm_silu", "group_norm_silu", "bias_residual"):
            copies["out"] = far(expected[:, :, -1:], frames=expected.shape[2] - 1)
        assert torch.equal(run(far(x), *args, **copies), expected), op
        assert "tail" not in keywords or torch.equal(copies["tail"], keywords["tail"])
