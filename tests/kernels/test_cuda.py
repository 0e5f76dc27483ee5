"""The CUDA C++ kernels: memory, long rows, large offsets, several items per block, refusals."""

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import use_backend
from fast_video_vae.kernels.cuda_ops import attention, runtime
from fast_video_vae.kernels.reference.attention import LIFT
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import OPS, each_dtype, has, inputs, random, video

MINE = [op for op in OPS if has("cuda", op)]
NARROW = (torch.bfloat16, torch.float16)
EMULATED = not torch.cuda.is_available()


pytestmark = pytest.mark.usefixtures("on_cuda")


@each_dtype
@pytest.mark.parametrize("op", MINE)
def test_calls_repeat_bit_for_bit_in_memory_of_nan(op, dtype, monkeypatch):
    """Blocks of a large video do several items each, an odd number of them in the last ones."""
    results = []
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN, the temporary one too
    try:
        for most in (runtime._MOST_BLOCKS, runtime._MOST_BLOCKS, 3, 1):
            monkeypatch.setattr(runtime, "_MOST_BLOCKS", most)
            args, keywords = inputs(op, dtype)
            with use_backend("cuda"):
                results.append((getattr(kernels, op)(*args, **keywords), keywords.get("tail")))
    finally:
        torch.use_deterministic_algorithms(False)
    first, first_tail = results[0]
    assert not first.isnan().any()
    for result, tail in results[1:]:
        assert torch.equal(result, first)
        assert tail is first_tail is None or torch.equal(tail, first_tail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outlier", "rest", "deviation"), [(1000.3, 0.1, 0.0), (0.0, 1.7, 0.0), (30.7, 0.1, 1.0)]
)
def test_outliers_do_not_reduce_the_precision_of_a_variance(dtype, outlier, rest, deviation):
    """The first pixel of a frame, of a chunk and of a thread: each of them may be the outlier."""
    x = video(1, 256, 1, 16, 64).mul_(deviation).add_(rest)
    for pixel in (0, 7, 300):
        x[..., pixel // 64, pixel % 64] = outlier
        with use_backend("cuda"):
            formulas.holds("group_norm_statistics", x.to(dtype), 32, 1e-6)


@pytest.mark.parametrize("dtype", NARROW)
# Without packs, with a pack, as long as the registers of a block, one pack and one number longer.
@pytest.mark.parametrize("columns", [1, 264, 8192, 8200, 9001])
def test_the_softmax_of_a_row_equals_the_formula(columns, dtype):
    scores = 4 * random(1, 3, columns)
    scores[0, 1] *= 20  # most weights are 0
    scores[0, 2] -= 1e4
    expected = scores.double().softmax(-1) * LIFT
    actual = attention.softmax(scores.clone(), dtype).double()
    roundings = torch.finfo(dtype).eps * expected + 2**-24  # the smallest float16 is 2^-24
    assert ((actual - expected).abs() <= roundings + 1e-4 * expected).all()


@pytest.mark.parametrize("columns", [24, 9000])
def test_the_softmax_keeps_infinities_and_nan(columns):
    scores = torch.zeros(1, 4, columns)
    scores[0, 0, 5] = float("nan")
    scores[0, 1, :-1] = -float("inf")
    scores[0, 2] = -float("inf")
    scores[0, 3, 2] = float("inf")
    actual = attention.softmax(scores, torch.bfloat16)
    assert actual[0, [0, 2]].isnan().all()  # no weight of such a row is defined
    assert actual[0, 3, 2].isnan()
    assert actual[0, 1].tolist() == [0] * (columns - 1) + [LIFT]


@pytest.mark.skipif(not EMULATED, reason="the products of the emulator are those of the CPU")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("length", [33, 128])
def test_attention_in_blocks_with_this_softmax_equals_the_formula(dtype, length):
    q, k, v = random(2, length, 3 * 384, dtype=dtype).chunk(3, -1)
    with use_backend("cuda"):
        result = kernels.attention(q, k, v)
    formulas.check(result, *formulas.attention(q, k, v))


def test_a_failed_launch_is_an_error_of_one_line(monkeypatch):
    rows, module = torch.ones(4, 16), type("Broken", (), {})()
    module.launch = lambda *_: (_ for _ in ()).throw(RuntimeError("the driver returned 719"))
    with use_backend("cuda"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "loaded", lambda *_: module)
            message = "^the kernel gate_rows did not start: the driver returned 719$"
            with pytest.raises(RuntimeError, match=message):
                kernels.silu_mul(rows, rows)
        formulas.holds("silu_mul", rows, rows)
