"""Convolutions in parts, and direct calls of cuDNN for versions where PyTorch avoids it."""

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.kernels.convolution import cudnn

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def forget():
    cudnn._is_left_out.cache_clear()
    yield
    cudnn._is_left_out.cache_clear()


@pytest.mark.parametrize(
    ("torch_version", "cudnn_version", "left_out"),
    [
        ("2.9.0+cu128", 91002, True),
        ("2.10.0", 91499, True),
        ("2.9.1+cu130", 91500, False),  # the first that PyTorch trusts
        ("2.8.0+cu128", 91002, False),
        ("2.11.0+cu130", 91300, False),
        ("2.9.0+rocm6.4", None, False),
    ],
)
def test_cudnn_is_called_directly_for_some_versions(
    torch_version, cudnn_version, left_out, monkeypatch
):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", "12.8" if cudnn_version else None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn_version)
    for dtype in (torch.float16, torch.bfloat16):
        assert cudnn._is_left_out(CUDA, dtype) == left_out
        assert not cudnn._is_left_out(torch.device("cpu"), dtype)
    assert not cudnn._is_left_out(CUDA, torch.float32)


@pytest.mark.parametrize("biased", [False, True])
def test_a_direct_call_gives_the_same_convolution(biased, monkeypatch):
    calls = []  # with their switches: benchmark, deterministic, TF32

    def stand_in(x, weight, padding, stride, dilation, groups, *switches):
        calls.append(switches)
        return F.conv3d(x, weight, None, stride, padding, dilation, groups)

    monkeypatch.setattr(torch, "cudnn_convolution", stand_in)
    monkeypatch.setattr(cudnn, "_is_left_out", lambda *_: True)
    x, weight, bias = convolution((1, 3, 4, 6, 5), (2, 3, 3, 3, 3))
    bias = bias if biased else None
    expected = F.conv3d(x, weight, bias, (2, 1, 1), (0, 1, 1))
    torch.testing.assert_close(cudnn.convolve(x, weight, bias, (2, 1, 1), (0, 1, 1)), expected)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        cudnn.convolve(x, weight, bias, (2, 1, 1), (0, 1, 1))
    assert calls == [(False, False, True), (True, True, True)]
    with torch.backends.cudnn.flags(enabled=False):
        cudnn.convolve(x, weight, bias, (2, 1, 1), (0, 1, 1))
    assert len(calls) == 2


def convolution(shape, weight_shape):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64).contiguous(
            memory_format=torch.channels_last if len(size) == 4 else torch.channels_last_3d
        )
        for size in (shape, weight_shape)
    )
    return x, weight, torch.randn(weight_shape[0], generator=generator, dtype=torch.float64)


CASES = {
    "causal": ((1, 4, 7, 6, 5), (6, 4, 3, 3, 3), (1, 1, 1), (0, 1, 1)),
    "every second frame": ((1, 4, 9, 3, 3), (4, 4, 3, 1, 1), (2, 1, 1), (0, 0, 0)),
    "frames": ((5, 4, 6, 5), (6, 4, 3, 3), (1, 1), (1, 1)),
    "every second row, a pad": ((1, 4, 13, 6), (6, 4, 4, 4), (2, 2), (1, 1)),
    "four columns at a time": ((1, 4, 3, 9, 8), (12, 4, 3, 3, 6), (1, 1, 4), (0, 1, 1)),
}


@pytest.mark.parametrize("limit", [1, 700])
@pytest.mark.parametrize("case", CASES)
def test_parts_give_the_whole_convolution(case, limit, monkeypatch):
    shape, weight_shape, stride, padding = CASES[case]
    x, weight, bias = convolution(shape, weight_shape)
    expected = (F.conv2d if x.ndim == 4 else F.conv3d)(x, weight, bias, stride, padding)
    assert torch.equal(cudnn.convolve(x, weight, bias, stride, padding), expected)

    sizes, name = [], f"conv{x.ndim - 2}d"
    call = getattr(F, name)

    def observed(x, *args):
        y = call(x, *args)
        sizes.append(max(x.numel(), y.numel()))
        return y

    monkeypatch.setattr(cudnn, "_LIMIT", limit)
    monkeypatch.setattr(F, name, observed)
    actual = cudnn.convolve(x, weight, bias, stride, padding)
    times = torch.zeros(expected[:, 0].shape)
    for region in cudnn.parts(shape, weight_shape, stride, padding):
        times[tuple(slice(*ends) for ends in region)] += 1
    assert (times == 1).all()
    # Another size can be summed in another order: 4 * 3 * 3 * 3 products at most.
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    assert len(sizes) > 1 or sizes[0] < limit
    if len(sizes) > 1:
        order = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        assert actual.is_contiguous(memory_format=order)
    if limit > 250:  # more than a single row reads
        assert max(sizes) < limit


def test_a_huge_frame_is_cut_into_rows_and_a_long_chunk_into_frames():
    """Without touching such memory: 8192 x 8192 pixels of 96 channels, and 16 frames of 2K."""
    kernel, steps, pads = (96, 96, 3, 3), (1, 1), (1, 1)
    regions = cudnn.parts((1, 96, 8192, 8192), kernel, steps, pads)
    assert [region[1] for region in regions] == [(i * 2048, i * 2048 + 2048) for i in range(4)]
    assert {(region[0], region[2]) for region in regions} == {((0, 1), (0, 8192))}

    kernel, steps, pads = (96, 96, 3, 3, 3), (1, 1, 1), (0, 1, 1)
    regions = cudnn.parts((1, 96, 18, 1088, 1920), kernel, steps, pads)
    assert [region[1] for region in regions] == [(0, 8), (8, 16)]
    assert all(region[2:] == ((0, 1088), (0, 1920)) for region in regions)

    # One element short of the limit, and at it.
    for height, count in ((2**15 - 1, 1), (2**15, 2)):
        assert len(cudnn.parts((1, 1, 2**16, height), (1, 1, 1, 1), steps[1:], (0, 0))) == count
