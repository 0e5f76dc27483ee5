"""Convolutions: every candidate of the CPU against the formula in float64, and the contract."""

import importlib
from itertools import product

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, ConvWeight, use_backend
from fast_video_vae.kernels.constraints import overlaps
from fast_video_vae.kernels.convolution import aten, cudnn, sliced
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import LAYOUTS, random, video
from fast_video_vae.tests.kernels.convolutions import (
    CALLS,
    CANDIDATES,
    KERNELS,
    example,
    kept,
    refuses,
    taps_of,
    using,
)

memory = importlib.import_module("fast_video_vae.kernels.reference.memory")

each_candidate = pytest.mark.parametrize("candidate", CANDIDATES)
PADDED = {"padding": (1, 1)}


def close(actual, weight, **call):
    formulas.check(actual, *formulas.conv3d(weight=weight, **call))


@each_candidate
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_candidate_equals_the_formula_and_writes_nothing_else(candidate, kernel):
    for terms, target in CALLS:
        call = example(kernel, terms, target, 0)
        if refuses(candidate, KERNELS[kernel][0]):
            reason = f"no backend runs this conv3d \\({candidate}: it is for taps in time\\)$"
            with using(candidate), pytest.raises(BackendError, match=reason):
                call.run()
            continue
        with using(candidate):
            result = call.run()
        call.check(result)


@each_candidate
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_are_read_and_written_correctly(candidate, layout):
    change, weight = LAYOUTS[layout], taps_of(12, 16, 3, 3, 3)
    videos = {
        "x": video(2, 16, 3, 5, 8),
        "tail": video(2, 16, 2, 5, 8, seed=2),
        "residual": video(2, 12, 3, 5, 8, seed=3),
    }
    for taps, given in product((weight, kept(weight)), (True, False)):
        call = {name: change(x) for name, x in videos.items() if given or name != "residual"}
        out = change(torch.full_like(videos["residual"], torch.nan))
        with using(candidate):
            assert kernels.conv3d(weight=taps, out=out, **call, **PADDED) is out
        close(out, weight, **call, **PADDED)


@each_candidate
@pytest.mark.parametrize("term", ["x", "residual", "tail"])
@pytest.mark.parametrize("shift", [1, -1])
def test_a_result_over_an_input_is_correct_or_refused(candidate, term, shift, monkeypatch):
    """A chain of convolutions in one ring of frames can do so by mistake.

    The reference reads and writes block by block.
    """
    monkeypatch.setattr(memory, "_BLOCK_ELEMENTS", 100)
    weight = taps_of(8, 8, 3, 3, 3)
    for taps in (weight, kept(weight)):
        ring = video(1, 8, 8, 5, 6)
        call = {"x": video(1, 8, 5, 5, 6, seed=1), "residual": video(1, 8, 3, 5, 6, seed=3)}
        if term == "tail":
            call |= {"x": call["x"][:, :, :3], "tail": video(1, 8, 2, 5, 6, seed=2)}
        call[term] = ring[:, :, 2 : 2 + call[term].shape[2]]
        before = {name: x.clone() for name, x in call.items()}
        out = ring[:, :, 2 + shift : 5 + shift]
        refusal = None
        with using(candidate):
            try:
                kernels.conv3d(weight=taps, out=out, **call, **PADDED)
            except BackendError as error:
                refusal = str(error)
        if refusal is None:
            close(out, weight, **before, **PADDED)
        else:
            assert "out overlaps the memory of" in refusal
            assert candidate != "any"


def test_memory_that_two_storages_share_is_an_overlap():
    numbers = random(5, 6, 8).numpy()
    one, two = (torch.from_numpy(numbers[i : i + 4]) for i in range(2))
    assert overlaps(one, two)
    assert overlaps(torch.nn.Parameter(one, requires_grad=False), two)
    assert not overlaps(one[:1], two)
    assert not overlaps(one, one.view_as(one), same=True)
    assert overlaps(one, one.view(-1), same=True)
    assert not overlaps(torch.empty(3, device="meta"), torch.empty(3, device="meta"))


@each_candidate
def test_a_kept_weight_serves_all_sizes_and_strides(candidate):
    """The library's layout of the weight depends on the first call."""
    dtype, derived = torch.bfloat16, []
    weight = taps_of(16, 12, 3, 3, 3, dtype=dtype)
    one = kept(weight, derived)
    sizes = [(1, 3, 4, 4), (2, 5, 9, 12), (1, 3, 4, 4)]
    for (batch, *size), stride, padding in product(
        sizes, [(1, 1, 1), (2, 2, 2)], [(1, 1), (0, 0), (1, 0)]
    ):
        call = {"x": video(batch, 12, *size, dtype=dtype), "stride": stride, "padding": padding}
        with using(candidate):
            actual = kernels.conv3d(weight=one, **call)
        close(actual, weight, **call)
    assert len(derived) <= 2  # once for each layout


@each_candidate
def test_a_weight_that_is_not_kept_is_derived_in_each_call(candidate):
    x, weight, derived = video(1, 8, 3, 4, 4), taps_of(4, 8, 3, 3, 3), []

    def derive():
        derived.append(weight)
        return weight.contiguous(memory_format=torch.channels_last_3d)

    once = ConvWeight(weight.shape, weight.dtype, weight.device, derive, keeps=False)
    for count in (1, 2):
        with using(candidate):
            close(kernels.conv3d(x, once, **PADDED), weight, x=x, **PADDED)
        assert not once.layouts
        assert len(derived) == count


@each_candidate
def test_a_weight_serves_with_and_without_inference_mode(candidate):
    x, weight = video(1, 16, 3, 4, 4), taps_of(12, 16, 3, 3, 3)
    for first in (True, False):
        one = kept(weight)
        for mode in (first, not first, first):
            with torch.inference_mode(mode), using(candidate):
                close(kernels.conv3d(x, one, **PADDED), weight, x=x, **PADDED)
                close(kernels.conv3d(x, weight, **PADDED), weight, x=x, **PADDED)


@each_candidate
def test_no_videos_and_a_tail_without_frames(candidate):
    x, weight = video(1, 6, 3, 5, 7), taps_of(4, 6, 3, 3, 3)
    with using(candidate):
        for taps in (weight, kept(weight)):
            assert kernels.conv3d(x[:0], taps, torch.ones(4)).shape == (0, 4, 1, 3, 5)
        close(kernels.conv3d(x, weight, tail=x[:, :, :0]), weight, x=x)
        everything = kernels.conv3d(x[:, :, :0], weight, tail=x)
    close(everything, weight, x=x)


@pytest.mark.parametrize("joined_bytes", [1, 20_000])
@pytest.mark.parametrize("kernel", ["3x3x3", "3x1x1 by 2"])
def test_slices_of_any_size_are_the_convolution(kernel, joined_bytes, monkeypatch):
    """Groups of frames share one product as long as their joined memory is small."""
    monkeypatch.setattr(sliced, "_JOINED_BYTES", joined_bytes)
    for terms, target in CALLS:
        call = example(kernel, terms, target, 0)
        with use_backend("sliced"):
            call.check(call.run())


def test_channels_are_filled_up_for_tensor_cores(monkeypatch):
    """On a GPU, in 16 bits, to multiples of 8."""
    seen, call = [], cudnn.convolve

    def noted(x, taps, *rest):
        seen.append((x.shape[1], len(taps)))
        return call(x, taps, *rest)

    monkeypatch.setattr(aten, "device_kind", lambda _: "nvidia")
    monkeypatch.setattr(cudnn, "convolve", noted)
    for (inputs, outputs), taps in product([(3, 16), (16, 3), (16, 8)], [(3, 3, 3), (3, 3)]):
        x, bias = video(1, inputs, 3, 4, 5, dtype=torch.bfloat16), random(outputs)
        weight = taps_of(outputs, inputs, *taps, dtype=torch.bfloat16)
        with use_backend("aten"):
            close(kernels.conv3d(x, weight, bias, **PADDED), weight, x=x, bias=bias, **PADDED)
    assert seen == [(8, 16), (8, 16), (16, 8), (16, 8), (16, 8), (16, 8)]


def test_slices_replace_a_convolution_that_the_library_lacks(monkeypatch):
    """On a GPU, where the library is not asked again."""
    tried = []

    def lacks(*_):
        tried.append(1)
        raise RuntimeError("not implemented")

    monkeypatch.setattr(aten, "device_kind", lambda _: "nvidia")
    monkeypatch.setattr(aten, "_missing", set())
    monkeypatch.setattr(torch.nn.functional, "conv3d", lacks)
    x, tail, weight = video(1, 8, 2, 4, 5), video(1, 8, 2, 4, 5, seed=1), taps_of(8, 8, 3, 3, 3)
    with use_backend("aten"):
        found = [kernels.conv3d(x, weight, tail=tail, **PADDED) for _ in range(2)]
    monkeypatch.undo()
    for each in found:
        close(each, weight, x=x, tail=tail, **PADDED)
    assert len(tried) == 1


def test_a_backend_without_convolutions_leaves_the_choice_open():
    """And a candidate that has only convolutions leaves it open for the other ops."""
    x, weight = video(1, 6, 3, 5, 7), taps_of(4, 6, 3, 3, 3)
    for name in ("native", "cuda"):
        with use_backend(name):
            close(kernels.conv3d(x, weight), weight, x=x)
    for name in ("aten", "sliced"):
        with use_backend(name):
            assert kernels.silu_mul(x.movedim(1, -1), x.movedim(1, -1)).shape == (1, 3, 5, 7, 6)
