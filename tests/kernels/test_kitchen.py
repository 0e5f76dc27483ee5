"""The candidate "kitchen" against float64, with stand-ins for the package that check its contract.

The stand-ins compute in float64 and round once. They fail for every call that the package would
pass to the library's convolution: other dtypes, channels, strides or addresses.
"""

import importlib
import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, ConvWeight, errors, use_backend
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import Poisoned, random, video

kitchen = importlib.import_module("fast_video_vae.kernels.convolution.kitchen")

HALF = torch.float16


class StandIn:
    """A `comfy_kitchen` whose `fp16_conv3d` keeps the arguments of its calls."""

    def __init__(self, pads):
        self.calls = []

        def fp16_conv3d(x, weight, bias=None, residual=None, stride=1, out=None):
            self.run(x, weight, bias, residual, stride, (0, 0, 0), out)
            return out

        def padding_conv3d(x, weight, bias=None, residual=None, stride=1, padding=0, out=None):
            self.run(x, weight, bias, residual, stride, padding or (0, 0, 0), out)
            return out

        self.module = types.ModuleType("comfy_kitchen")
        self.module.fp16_conv3d = padding_conv3d if pads else fp16_conv3d

    def run(self, x, weight, bias, residual, stride, padding, out):
        self.calls.append({"x": x, "weight": weight, "bias": bias, "out": out})
        outputs, inputs = weight.shape[:2]
        given = [each for each in (x, weight, bias, residual, out) if each is not None]
        assert all(each.dtype == HALF and each.data_ptr() % 16 == 0 for each in given)
        assert outputs % 8 == inputs % 8 == 0
        assert x.stride(1) == 1
        assert all(
            stride == (inputs if axis == 4 else stride // 8 * 8)
            for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
            if size > 1 and axis != 1
        )
        for dense in (weight, out, *(() if residual is None else (residual,))):
            assert dense.is_contiguous(memory_format=torch.channels_last_3d)
        assert bias is None or (bias.shape == (outputs,) and bias.is_contiguous())
        assert max(_span(x), _span(out)) < kitchen._LIMIT
        y = F.conv3d(x.double(), weight.double(), None, stride, padding)
        y = y if bias is None else y + bias.double().view(-1, 1, 1, 1)
        assert out.shape == y.shape
        out.copy_(y if residual is None else y + residual.double())


def _span(x):
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


@pytest.fixture
def fresh(monkeypatch):
    """Reset the state of a process: the package was not imported, and no warning is logged."""
    monkeypatch.setattr(errors, "_logged", set())
    kitchen.installed.cache_clear()
    yield
    kitchen.installed.cache_clear()


@pytest.fixture(params=[False, True], ids=["valid", "padding"])
def package(request, monkeypatch, fresh):
    """Install a stand-in, without and with a parameter `padding`, and select the candidate."""
    stand_in = StandIn(request.param)
    stand_in.pads = request.param
    monkeypatch.setitem(sys.modules, "comfy_kitchen", stand_in.module)
    with use_backend("kitchen"):
        yield stand_in


def taps(outputs, inputs, *size):
    return random(outputs, inputs, *size, dtype=HALF, seed=5).div_(inputs**0.5)


def expected(x, weight, bias, stride, padding, tail=None, residual=None, residual_bias=None):
    """Return the convolution in float64, and the error of a bias that is rounded to float16."""
    x = x.double() if tail is None else torch.cat([tail, x], dim=2).double()
    convolve, ones = (F.conv3d, (1, 1, 1)) if x.ndim == 5 else (F.conv2d, (1, 1))
    pads = (0, *padding) if x.ndim == 5 else padding
    y = convolve(x, weight.double(), None, stride, pads)
    error = torch.zeros_like(y)
    for vector in (bias, residual_bias):
        if vector is not None:
            y = y + vector.double().view(-1, *ones)
            error = error + (2.0**-11 + 2.0**-22) * vector.double().abs().view(-1, *ones)
    return y if residual is None else y + residual.double(), error


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(16, 24), (3, 16), (16, 3), (12, 12)],  # aligned; a picture in, out; not multiples of 8
)
@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    [
        ((3, 3, 3), (1, 1, 1), (1, 1)),
        ((3, 3, 3), (1, 1, 1), (0, 0)),
        ((1, 1, 1), (1, 1, 1), (0, 0)),
        ((3, 1, 1), (2, 1, 1), (0, 0)),  # Wan's time_conv
        ((3, 3, 3), (2, 2, 2), (0, 1)),
    ],
)
def test_videos_equal_the_formula(package, inputs, outputs, size, stride, padding):
    weight, bias, other = taps(outputs, inputs, *size), random(outputs), random(outputs, seed=1)
    for batch, known, terms in ((1, 0, 0), (1, 2, 2), (2, 2, 1), (2, 0, 2)):
        x = video(batch, inputs, 3, 5, 7, dtype=HALF)
        tail = video(batch, inputs, known, 5, 7, dtype=HALF, seed=2) if known else None
        plain = kernels.conv3d(x, weight, stride=stride, padding=padding, tail=tail)
        formulas.check(plain, *expected(x, weight, None, stride, padding, tail))
        assert plain.movedim(1, -1).is_contiguous()
        residual = video(*plain.shape, dtype=HALF, seed=3) if terms else None
        added = {"residual": residual, "residual_bias": other if terms > 1 else None}
        buffer = Poisoned(batch, plain.shape[2] + 2, *plain.shape[3:], outputs, dtype=HALF)
        out = buffer.memory.movedim(-1, 1)[:, :, 1:-1]
        options = {"stride": stride, "padding": padding, "tail": tail}
        assert kernels.conv3d(x, weight, bias, **options, **added, out=out) is out
        values = expected(x, weight, bias, **options, **added)
        formulas.check(buffer.take(out), *values, f"{tuple(x.shape)}")


@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "stride"),
    [(16, 24, 3, 1), (3, 16, 3, 1), (16, 3, 3, 1), (16, 16, 1, 1), (12, 24, 3, 2)],
)
def test_frames_equal_the_formula(package, inputs, outputs, size, stride):
    weight, bias = taps(outputs, inputs, size, size), random(outputs)
    x = video(3, inputs, 1, 5, 7, dtype=HALF).squeeze(2)
    options = {"stride": (stride, stride), "padding": (size // 2, size // 2)}
    y = kernels.conv2d(x, weight, bias, **options)
    formulas.check(y, *expected(x, weight, bias, **options))
    assert y.movedim(1, -1).is_contiguous()
    residual = y.clone()
    out = residual if outputs % 8 == 0 else torch.empty_like(y)
    values = expected(x, weight, bias, **options, residual=residual)
    assert kernels.conv2d(x, weight, bias, **options, residual=residual, out=out) is out
    formulas.check(out, *values)


def test_a_norm_follows_in_another_pass(package):
    x, weight = video(1, 16, 3, 4, 5, dtype=HALF), taps(16, 16, 3, 3, 3)
    gamma, bias = random(2, 16, seed=1)
    y = kernels.conv3d(x, weight, bias)
    actual = kernels.conv3d(x, weight, bias, gamma=gamma)
    formulas.check(actual, *formulas.rms_norm_silu(y, gamma))


def test_nothing_is_copied_for_frames_with_a_border(package):
    """The window, the weight and the result are those of the caller."""
    weight = ConvWeight((24, 16, 3, 3, 3), HALF, torch.device("cpu"), lambda: aligned_taps)
    aligned_taps = taps(24, 16, 3, 3, 3).contiguous(memory_format=torch.channels_last_3d)
    longer = video(1, 16, 7, 6, 8, dtype=HALF)
    x, out = longer[:, :, 1:6], video(1, 24, 5, 4, 6, dtype=HALF)[:, :, 1:4]
    bias = random(24, dtype=HALF)
    kernels.conv3d(x, weight, bias, residual=out, out=out)
    (call,) = package.calls
    for name, mine in (("x", x), ("weight", aligned_taps), ("bias", bias), ("out", out)):
        assert call[name].data_ptr() == mine.data_ptr(), name
    assert call["x"].stride() == x.stride()


def test_the_inner_pixels_of_a_border_are_read_where_they_are(package):
    bordered = video(2, 16, 3, 6, 8, dtype=HALF)
    x, weight = bordered[..., 1:-1, 1:-1], taps(8, 16, 1, 1, 1)
    formulas.check(kernels.conv3d(x, weight), *expected(x, weight, None, (1, 1, 1), (0, 0)))
    (call,) = package.calls
    assert call["x"].data_ptr() == x.data_ptr()


def test_a_border_is_asked_for_only_without_padding(package):
    x, weight = video(1, 16, 3, 4, 5, dtype=HALF), taps(16, 16, 3, 3, 3)
    for padding, border in (((1, 1), not package.pads), ((0, 0), False)):
        fused = kernels.conv_fuses(x, weight, stride=(1, 1, 1), padding=padding)
        assert fused == kernels.Fused(sums=True, bias=True, border=border)


@pytest.mark.parametrize(("limit", "calls"), [(16 * 6 * 8 * 5, 4), (16 * 6 * 8 * 3, 10)])
def test_large_videos_run_in_calls_whose_bytes_31_bits_count(package, monkeypatch, limit, calls):
    """Two videos of 7 frames have 5 results each; 5 frames hold 3 windows, and 3 hold one."""
    monkeypatch.setattr(kitchen, "_LIMIT", limit + 1)
    x, weight = video(2, 16, 7, 6, 8, dtype=HALF), taps(8, 16, 3, 3, 3)
    residual = video(2, 8, 5, 4, 6, dtype=HALF, seed=1)
    y = kernels.conv3d(x, weight, residual=residual)
    values = expected(x, weight, None, (1, 1, 1), (0, 0), residual=residual)
    formulas.check(y, *values)
    assert len(package.calls) == calls


def test_frames_that_31_bits_do_not_count_are_refused(package, monkeypatch):
    monkeypatch.setattr(kitchen, "_LIMIT", 16 * 6 * 8 * 3)
    with pytest.raises(BackendError, match="more bytes than 31 bits count"):
        kernels.conv3d(video(1, 16, 3, 6, 8, dtype=HALF), taps(8, 16, 3, 3, 3))
    assert not package.calls


@pytest.mark.parametrize("offset", [64, 63, 60])
def test_misaligned_memory_is_refused(package, offset):
    """Offsets are in values of 2 bytes; 64 is aligned."""
    buffer = Poisoned(1, 3, 4, 5, 16, dtype=HALF, offset=offset)
    x = buffer.memory.movedim(-1, 1)
    x.copy_(video(1, 16, 3, 4, 5, dtype=HALF))
    weight, good = taps(16, 16, 3, 1, 1), video(1, 16, 1, 4, 5, dtype=HALF)
    if offset == 64:
        formulas.check(kernels.conv3d(x, weight), *expected(x, weight, None, (1, 1, 1), (0, 0)))
        return
    with pytest.raises(BackendError, match="x is not aligned to 16 bytes"):
        kernels.conv3d(x, weight)
    for name in ("residual", "out"):
        with pytest.raises(BackendError, match=f"{name} is not aligned to 16 bytes"):
            kernels.conv3d(x.clone(), weight, **{name: x[:, :, :1]})
    assert not package.calls
    assert kernels.conv3d(x.clone(), weight, random(17, dtype=HALF)[1:], out=good) is good


def test_other_layouts_are_refused_unless_they_are_copied_anyway(package):
    planar = random(1, 16, 3, 4, 5, dtype=HALF)
    with pytest.raises(BackendError, match="x is not channels-last"):
        kernels.conv3d(planar, taps(16, 16, 1, 1, 1))
    few, weight = random(1, 3, 3, 4, 5, dtype=HALF), taps(16, 3, 1, 1, 1)
    formulas.check(kernels.conv3d(few, weight), *expected(few, weight, None, (1, 1, 1), (0, 0)))
    odd = video(1, 16, 3, 4, 5, dtype=HALF).as_strided(
        (1, 16, 3, 4, 4), (964, 1, 321, 80, 16)
    )  # frames that are 321 values apart
    with pytest.raises(BackendError, match="the rows of x are not aligned to 16 bytes"):
        kernels.conv3d(odd[:, :, :2], taps(16, 16, 1, 1, 1))


@pytest.mark.parametrize("layout", ["frames of longer videos", "planar", "wide", "in place"])
def test_a_residual_of_any_layout_is_added(package, layout):
    x, weight = video(2, 16, 3, 4, 5, dtype=HALF), taps(8, 16, 1, 1, 1)
    residual = {
        "frames of longer videos": video(2, 8, 7, 4, 5, dtype=HALF, seed=1)[:, :, 2:5],
        "planar": random(2, 8, 3, 4, 5, dtype=HALF),
        "wide": video(2, 16, 3, 4, 5, dtype=HALF, seed=1)[:, :8],
        "in place": video(2, 8, 7, 4, 5, dtype=HALF, seed=1)[:, :, 2:5],
    }[layout]
    before = residual.clone()
    y = kernels.conv3d(x, weight, residual=residual, out=residual if layout == "in place" else None)
    formulas.check(y, *expected(x, weight, None, (1, 1, 1), (0, 0), residual=before))
    assert (y is residual) or torch.equal(residual, before)


def test_a_call_that_fails_is_a_refusal_with_one_line(package, monkeypatch, caplog):
    def fails(*_, **__):
        raise RuntimeError("CUDA error: invalid argument\nand more")

    x, weight = video(1, 8, 1, 4, 4, dtype=HALF), taps(8, 8, 1, 3, 3)
    monkeypatch.setattr(kitchen, "_op", lambda: kitchen._Op(fails, pads=False))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(BackendError, match=r"failed .*invalid argument"):
                kernels.conv3d(x, weight)
    (line,) = caplog.messages
    assert "and more" not in line
    monkeypatch.setattr(kitchen, "_op", lambda: kitchen._Op(out_of_memory, pads=False))
    with pytest.raises(torch.OutOfMemoryError):
        kernels.conv3d(x, weight)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_other_dtypes_are_refused(package, dtype):
    x, weight = video(1, 8, 1, 2, 2, dtype=dtype), taps(8, 8, 1, 1, 1).to(dtype)
    with pytest.raises(BackendError, match="kitchen: there is no kernel for"):
        kernels.conv3d(x, weight)


def test_gradients_and_overlaps_are_refused(package):
    x, weight = video(1, 8, 3, 2, 2, dtype=HALF), taps(8, 8, 1, 1, 1)
    with pytest.raises(BackendError, match="requires gradients"):
        kernels.conv3d(x, weight.clone().requires_grad_())
    with pytest.raises(BackendError, match="out overlaps the memory of x"):
        kernels.conv3d(x[:, :, 1:], weight, out=x[:, :, :2])
    y = video(1, 8, 3, 2, 2, dtype=HALF, seed=1)
    with pytest.raises(BackendError, match="out overlaps the memory of residual"):
        kernels.conv3d(x[:, :, 1:], weight, residual=y[:, :, 1:], out=y[:, :, :2])
    assert not package.calls


def test_a_cpu_is_refused_unless_the_candidate_is_forced(package):
    with use_backend("reference"), pytest.raises(errors.Refusal, match="kitchen needs a GPU"):
        kitchen.conv3d(video(1, 8, 1, 2, 2, dtype=HALF), ConvWeight.of(taps(8, 8, 1, 1, 1)))


def _without():
    return types.ModuleType("comfy_kitchen")


def _other():
    module = types.ModuleType("comfy_kitchen")
    module.fp16_conv3d = lambda x, weight, bias, stride: x
    return module


@pytest.mark.parametrize(
    ("make", "reason", "lines"),
    [
        (lambda: None, "comfy_kitchen is not installed", 0),
        (_without, "comfy_kitchen has no fp16_conv3d", 1),
        (_other, "comfy_kitchen has an fp16_conv3d with other parameters", 1),
    ],
)
def test_a_missing_op_is_refused_and_logged_once(monkeypatch, caplog, fresh, make, reason, lines):
    monkeypatch.setitem(sys.modules, "comfy_kitchen", make())
    if make() is None:  # what the finders raise
        real = importlib.import_module

        def lacking(name, package=None):
            if name == "comfy_kitchen":
                raise ModuleNotFoundError("No module named 'comfy_kitchen'", name=name)
            return real(name, package)

        monkeypatch.setattr(importlib, "import_module", lacking)
    x, weight = video(1, 8, 1, 4, 4, dtype=HALF), taps(8, 8, 1, 3, 3)
    with caplog.at_level(logging.WARNING), use_backend("kitchen"):
        assert kernels.conv_fuses(x, weight, stride=(1, 1, 1), padding=(1, 1)).border
        for _ in range(2):
            with pytest.raises(BackendError, match=reason):
                kernels.conv3d(x, weight, padding=(1, 1))
    assert len(caplog.messages) == lines
    assert all("pip install --upgrade comfy-kitchen" in line for line in caplog.messages)


def test_a_package_that_fails_is_a_reason(monkeypatch, caplog, fresh):
    real = importlib.import_module

    def failing(name, package=None):
        if name == "comfy_kitchen":
            raise OSError("libcudart.so: cannot open\nand more")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", failing)
    x, weight = video(1, 8, 1, 4, 4, dtype=HALF), taps(8, 8, 1, 3, 3)
    with (
        caplog.at_level(logging.WARNING),
        use_backend("kitchen"),
        pytest.raises(BackendError, match=r"cannot be imported \(OSError: libcudart\.so: cannot o"),
    ):
        kernels.conv3d(x, weight)
    (line,) = caplog.messages
    assert "and more" not in line
