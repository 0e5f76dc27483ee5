"""Is a kernel right: the rule next to planted errors, and the check of all ops of a backend."""

import functools

import pytest
import torch

from fast_video_vae.kernels import ConvWeight, code_steps, use_backend
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.modules import ask
from fast_video_vae.kernels.ready import sample_inputs, selfcheck, variants
from fast_video_vae.kernels.ready.selfcheck import are_codes_right, is_right
from fast_video_vae.tests.kernels.cases import DTYPES, arguments

CPU = torch.device("cpu")
NARROW = (torch.bfloat16, torch.float16)


def rows(seed, dtype, count=1024, channels=96):
    """Return numbers in float64, and their roundings to `dtype`: what a plain op returns."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(count, channels, dtype=torch.float64, generator=generator)
    return exact, exact.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "plant",
    [
        lambda y: y[256:384].mul_(1.01),  # one block of queries
        lambda y: y[1023].zero_(),
        lambda y: y[5, 7:9].copy_(y[5, 9:11]),
        lambda y: y[0, :1].fill_(torch.nan),
    ],
)
def test_a_planted_error_is_found(plant, dtype):
    exact, plain = rows(0, dtype)
    result = plain.clone()
    assert is_right(result, plain, exact)
    plant(result)
    assert not is_right(result, plain, exact)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1.025), (torch.float32, 2.0)])
def test_an_error_may_be_little_more_than_that_of_the_plain_op(dtype, most):
    exact, _ = rows(0, dtype)
    error = torch.randn(exact.shape, dtype=torch.float64) * 50 * torch.finfo(dtype).eps
    plain = (exact + error).to(dtype)
    assert is_right((exact - error).to(dtype), plain, exact)
    assert is_right((exact + 0.98 * most * error).to(dtype), plain, exact)
    assert not is_right((exact + 1.02 * most * error).to(dtype), plain, exact)


def test_a_copy_is_exact_or_wrong():
    exact, plain = rows(0, torch.bfloat16)
    exact, result = plain.double(), plain.clone()
    assert is_right(result, plain, exact)
    result[17, 3] *= 1 + torch.finfo(torch.bfloat16).eps
    assert not is_right(result, plain, exact)


@pytest.mark.parametrize(("lowest", "highest"), [(-128, 127), (0, 255), (0, 65535)])
def test_one_wrong_code_is_found(lowest, highest):
    exact = torch.rand(4096, dtype=torch.float64) * (highest - lowest + 40) + lowest - 20
    codes = exact.round().clamp(lowest, highest)
    assert are_codes_right(codes, exact, lowest, highest)
    far = (exact - exact.round()).abs() < 0.25
    at = int((far & (exact > lowest + 2) & (exact < highest - 2)).nonzero()[0])
    codes[at] += 1
    assert not are_codes_right(codes, exact, lowest, highest)


@pytest.mark.parametrize("shift", [None, torch.tensor([0.0, 0.3, -2.0, 1.0])])
def test_the_steps_of_codes_hold_four_deviations(shift):
    gamma = torch.tensor([1.0, -0.5, 0.1, 2.0])
    values = gamma[:, None] * torch.linspace(-4, 4, 8001)
    values = torch.nn.functional.silu(values if shift is None else values + shift[:, None])
    expected = torch.maximum(-values.amin(1) / 17, values.amax(1) / 238)
    torch.testing.assert_close(code_steps(gamma, shift), expected, rtol=1e-4, atol=1e-9)


@pytest.fixture
def changed(monkeypatch):
    """Return a function that changes the results of `triton`, which runs in its interpreter."""
    pytest.importorskip("triton", reason="the check runs Triton's kernels")
    if torch.cuda.is_available():
        pytest.skip("on a GPU the background thread checks them")
    monkeypatch.setattr(sample_inputs, "_LARGE", (5, 24))
    change = []

    def asked(name, op, *args):
        if name == "cuda":
            raise Refusal("it needs a GPU")
        with use_backend("triton"):
            y = ask(name, op, *args)
        return change[0](op, y) if change else y

    monkeypatch.setattr(selfcheck, "ask", asked)
    return change.append


NAMES = ("triton", "cuda")


def sample(op, dtype, **more):
    """Return the sample of an op with all optional tensors."""
    given = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) else value
        for name, value in sample_inputs._USUAL[op].items()
    }
    size = (1, 1, 144) if op == "attention" else (2, 5, 5)
    return functools.partial(sample_inputs.call, op, size, dtype, CPU, {**given, **more})


def convolution(dtype, taps, **options):
    """Return the sample of a convolution with the weight `taps`, all terms and a tail."""
    x, vector = torch.zeros(1, taps[1], 2, 4, 4, dtype=dtype), torch.zeros(taps[0])
    weight = ConvWeight.of(torch.zeros(taps, dtype=dtype))
    given = {"x": x, "weight": weight, "bias": vector, "residual_bias": vector} | options
    args = arguments("conv3d", **given, padding=(1, 1))
    return variants.samples_of("conv3d", args, variants.key_of("conv3d", args, CPU))


@pytest.mark.parametrize("op", sample_inputs.OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_of_every_op_are_right(op, dtype, changed):
    found = selfcheck.checked(NAMES, op, sample(op, dtype))
    assert found == (() if op == "attention" else ("triton",))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("taps", "norm"), [((96, 32, 3, 3, 3), True), ((48, 32, 3, 3), False)])
def test_the_kernels_of_convolutions_are_right(taps, norm, dtype, changed):
    more = {"gamma": torch.zeros(taps[0])} if norm else {}
    given = convolution(dtype, taps, **more)
    assert selfcheck.checked(["triton"], "conv3d", given) == ("triton",)


def test_a_wrong_code_of_a_norm_is_found(changed):
    codes = torch.zeros(96), torch.zeros(2, dtype=torch.int64)
    more = {"border": 1, "codes": codes[0], "saturated": codes[1]}
    more["out"] = torch.zeros(1, 96, 1, 1, 1, dtype=torch.int8)
    given = sample("rms_norm_silu", torch.bfloat16, **more)
    assert selfcheck.checked(NAMES, "rms_norm_silu", given) == ("triton",)
    at = [(-1, 4)]

    def wrong(_, y):
        code = y[(0, 5, *at[0], 4)]
        code += 1 if code < 100 else -1
        return y

    changed(wrong)
    for at[0] in ((-1, 4), (-1, 0), (0, 4)):  # a code, one of the border, and one of the tail
        assert not selfcheck.checked(NAMES, "rms_norm_silu", given)


@pytest.mark.parametrize("op", ["conv3d", "frames_to_images", "bias_residual"])
def test_one_wrong_row_of_an_op_is_found(op, changed):
    given = convolution(torch.float16, (96, 32, 3, 3, 3)) if op == "conv3d" else None
    given = given or sample(op, torch.bfloat16)

    def wrong(_, y):
        flat = y.movedim(1, -1) if y.ndim == 5 else y
        flat[0, -1].copy_(flat[0, 0])
        return y

    changed(wrong)
    assert not selfcheck.checked(["triton"], op, given)


def test_a_lack_of_memory_does_not_show_that_a_kernel_is_wrong(changed):
    def fails(*_):
        raise torch.OutOfMemoryError

    changed(fails)
    with pytest.raises(torch.OutOfMemoryError):
        selfcheck.checked(NAMES, "silu_mul", sample("silu_mul", torch.bfloat16))
