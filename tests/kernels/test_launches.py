"""The launches of the GPU backends, and their bytes, counted on tensors of the `meta` device."""

import pytest
import torch

pytest.importorskip("triton", reason="the launches need triton")

from fast_video_vae import kernels
from fast_video_vae.kernels.cuda_ops import attention
from fast_video_vae.kernels.reference.attention import in_blocks
from fast_video_vae.tests.benchmarks import count_bytes
from fast_video_vae.tests.kernels import launches
from fast_video_vae.tests.kernels.structures import argument

LIMIT_BYTES = 16 << 30

STEPS = [
    (family, direction)
    for family in ("wan2.1", "wan2.2", "seedvr2")
    for direction in ("decode", "encode")
]

mixed_products = pytest.mark.skipif(
    "out_dtype" not in (torch.bmm.__doc__ or ""),
    reason="products of 16-bit tensors in float32 need PyTorch 2.8",
)

# Launches per latent of a steady decode of Wan 2.1, those of the convolutions included.
MOST = 79

# The partial sums of a group norm are a tenth of a percent of its bytes, and their number differs.
APART = 1e-3

# Bytes per score: written in float32, read and rounded, read. PyTorch's softmax reads and writes
# float32 twice.
SCORES = {"cuda": 4 + 6 + 2, "reference": 4 + 14 + 2}


def step(family, direction, backend, *, attends=False):
    config = count_bytes.configs()[family]
    return count_bytes.steady_step(
        config, direction, 720, 1280, LIMIT_BYTES, backend=backend, attends=attends
    )


def video(channels, frames):
    memory = torch.empty(1, frames, 36, 64, channels, dtype=torch.bfloat16, device="meta")
    return memory.movedim(-1, 1)


@pytest.mark.parametrize(
    ("family", "direction"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case == ("seedvr2", "decode") else ())
        for case in STEPS
    ],
)
def test_cuda_launches_and_moves_no_more_than_triton(family, direction):
    counters = {name: step(family, direction, name)[0] for name in ("triton", "cuda")}
    triton, cuda = counters.values()
    assert cuda.launches <= triton.launches
    assert cuda.passes <= triton.passes * (1 + APART)
    assert cuda.by_op.keys() == triton.by_op.keys()
    for op in cuda.by_op:
        if op != "combination of group norm":
            assert cuda.by_op[op] == pytest.approx(triton.by_op[op], rel=0.01), op


@mixed_products
def test_a_step_stays_within_its_launches_with_attention_in_blocks():
    counter, latents = step("wan2.1", "decode", "cuda", attends=True)
    assert counter.launches / latents <= MOST


@pytest.mark.parametrize(
    ("family", "direction"),
    [
        pytest.param(*case, marks=() if case == ("wan2.2", "encode") else pytest.mark.slow)
        for case in STEPS
    ],
)
def test_the_reference_moves_six_times_as_much(family, direction):
    cuda, plain = (step(family, direction, name)[0].passes for name in ("cuda", "reference"))
    assert plain >= 5.8 * cuda


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize(
    ("frames", "tail", "units"),
    [
        (4, 0, 8),  # x and the result
        (4, 2, 14),  # x, the old tail, which is moved to the result, and the new one
        (2, 2, 10),
        (1, 2, 8),  # a frame of the tail becomes the other
    ],
)
def test_a_norm_moves_the_frames_of_its_window(backend, frames, tail, units):
    x, gamma = video(96, frames), torch.empty(96, dtype=torch.bfloat16, device="meta")
    given = {"tail": video(96, tail)} if tail else {}
    with torch.no_grad(), count_bytes.counted(backend=backend) as counter:
        kernels.rms_norm_silu(x, gamma, **given)
    assert counter.launches == 1
    assert counter.total == units * video(96, 1).nbytes + gamma.nbytes


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize(("frames", "tail", "read", "written"), [(4, 0, 4, 4), (4, 2, 4, 10)])
def test_a_norm_moves_one_byte_per_code(backend, frames, tail, read, written):
    """`read` frames of 16-bit numbers, and `written` of codes, those of the old tail included."""
    x, gamma = video(96, frames), torch.empty(96, dtype=torch.bfloat16, device="meta")
    given = {"tail": video(96, tail).to(torch.int8)} if tail else {}
    given["codes"] = torch.empty(96, device="meta")
    given["saturated"] = torch.empty(2, dtype=torch.int64, device="meta")
    with torch.no_grad(), count_bytes.counted(backend=backend) as counter:
        kernels.rms_norm_silu(x, gamma, **given)
    assert counter.launches == 1
    moved = read * video(96, 1).nbytes + written * video(96, 1).numel()
    assert counter.total == moved + gamma.nbytes + given["codes"].nbytes


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_group_norm_reads_twice_and_writes_once(backend):
    x, numbers = video(128, 4), torch.empty(128, device="meta")
    with torch.no_grad(), count_bytes.counted(backend=backend) as counter:
        kernels.group_norm_silu(x, numbers, numbers, 32)
    assert counter.launches == 3
    assert counter.total == pytest.approx(3 * x.nbytes, rel=0.1)  # few pixels per partial sum


@mixed_products
@pytest.mark.parametrize(
    ("kind", "each"),
    [
        ("cuda", 4),  # two products, the softmax, a copy of the result
        ("reference", 5),  # and the multiplication that rounds
    ],
)
def test_attention_in_blocks_reads_its_scores_once_for_the_softmax(kind, each):
    q = torch.empty(1, 16384, 384, dtype=torch.bfloat16, device="meta")
    weigh = {"weigh": attention.softmax} if kind == "cuda" else {}
    with torch.no_grad(), count_bytes.counted(backend="cuda") as counter:
        in_blocks(q, q, q, **weigh)
    blocks = 4  # of 4096 rows
    assert counter.launches == each * blocks
    scores = q.shape[1] ** 2
    assert counter.total == pytest.approx(SCORES[kind] * scores, rel=0.1)


def test_an_argument_with_another_size_than_its_structure_is_an_error():
    packed = []

    def launch(source, kernel, like, items, threads, arguments, **constants):
        packed.append((source, kernel, arguments))

    x = torch.empty(4, 96, dtype=torch.bfloat16, device="meta")
    with launches.recorded("cuda", launch):
        kernels.ask("cuda", "silu_mul", x, x)
    source, kernel, memory = packed[0]
    op = argument(source, kernel, memory)
    assert (op.x_row, op.packs, op.row.by) == (96, 48, 12)
    with pytest.raises(ValueError, match="gate_rows gets 80 bytes; expected 72"):
        argument(source, kernel, memory + bytes(8))
