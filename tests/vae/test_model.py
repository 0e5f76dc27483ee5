"""What goes in and comes out: shapes, dtypes, bad input, statistics, and the global switches."""

import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.streaming import precision
from fast_video_vae.vae.validation import check_finite


@pytest.fixture(scope="module")
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


def frames(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


BAD_LATENTS = {
    "other channels": (torch.zeros(1, 12, 1, 2, 2), ["12 channels", "16"]),
    "four dimensions": (torch.zeros(1, 16, 2, 2), ["4 dimensions", "5"]),
    "zero frames": (torch.zeros(1, 16, 0, 2, 2), ["empty", "[1, 16, 0, 2, 2]"]),
    "zero batch": (torch.zeros(0, 16, 1, 2, 2), ["empty"]),
    "NaN": (torch.full((1, 16, 1, 2, 2), math.nan), ["NaN", "64 values"]),
    "inf": (torch.full((1, 16, 1, 2, 2), math.inf), ["infinite"]),
    "integers": (torch.zeros(1, 16, 1, 2, 2, dtype=torch.int64), ["int64", "float"]),
    "a list": ([[0.0]], ["expected"]),
}
BAD_FRAMES = {
    "height not a multiple of 8": (torch.zeros(1, 3, 1, 12, 16), ["12 x 16", "multiples of 8"]),
    "width not a multiple of 8": (torch.zeros(1, 3, 1, 16, 9), ["16 x 9"]),
    "other channels": (torch.zeros(1, 4, 1, 8, 8), ["4 channels", "3"]),
    "four dimensions": (torch.zeros(3, 1, 8, 8), ["4 dimensions"]),
    "zero frames": (torch.zeros(1, 3, 0, 8, 8), ["empty"]),
    "int32": (torch.zeros(1, 3, 1, 8, 8, dtype=torch.int32), ["int32", "uint8"]),
    "bool": (torch.zeros(1, 3, 1, 8, 8, dtype=torch.bool), ["bool"]),
    "NaN": (torch.full((1, 3, 1, 8, 8), math.nan), ["NaN"]),
}


@pytest.mark.parametrize("case", BAD_LATENTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_latents_are_one_line_before_any_work(vae, case, streamed):
    latent, words = BAD_LATENTS[case]
    with pytest.raises((ValueError, TypeError)) as error:
        vae.decode(latent)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
    if streamed and isinstance(latent, torch.Tensor):
        with pytest.raises(ValueError, match=words[0].replace("[", r"\[")):
            next(vae.decode_stream(iter([latent])))


@pytest.mark.parametrize("case", BAD_FRAMES)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_frames_are_one_line_before_any_work(vae, case, streamed):
    video, words = BAD_FRAMES[case]
    with pytest.raises(ValueError, match=words[0]) as error:
        next(vae.encode_stream(iter([video]))) if streamed else vae.encode(video)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_tensor_is_checked_when_the_stream_is_asked_for(vae):
    with pytest.raises(ValueError, match="12 channels"):
        vae.decode_stream(torch.zeros(1, 12, 1, 2, 2))  # not only at its first frame


@pytest.mark.parametrize("chunk", [0, -2, 1.5, "all", True])
def test_a_bad_chunk_is_named(vae, chunk):
    with pytest.raises(ValueError, match="chunk is"):
        vae.decode(torch.zeros(1, 16, 1, 2, 2), chunk=chunk)
    with pytest.raises(ValueError, match="chunk is"):
        vae.encode(torch.zeros(1, 3, 1, 8, 8), chunk=chunk)


def test_a_piece_of_another_size_is_named(vae):
    pieces = [torch.zeros(1, 3, 1, 8, 8), torch.zeros(1, 3, 4, 16, 8)]
    with pytest.raises(ValueError, match=r"\[1, 3, 4, 16, 8\]"):
        list(vae.encode_stream(pieces))


def test_no_pieces_at_all_are_an_error(vae):
    with pytest.raises(ValueError, match="no frames came"):
        next(vae.encode_stream([]))
    with pytest.raises(ValueError, match="no latents came"):
        next(vae.decode_stream([]))


@pytest.mark.parametrize(("count", "kept"), [(2, 1), (4, 1), (6, 5), (8, 5), (16, 13)])
@pytest.mark.parametrize("chunk", [None, 1, 2, -1])
def test_a_tail_is_dropped_with_one_warning(vae, count, kept, chunk):
    video = frames(1, 3, count, 8, 16)
    expected = vae.encode(video[:, :, :kept])
    with pytest.warns(UserWarning, match=f"the last {count - kept} frame") as caught:
        latent = vae.encode(video, chunk=chunk)
    assert len(caught) == 1
    torch.testing.assert_close(latent, expected, rtol=1e-5, atol=1e-5)
    with pytest.warns(UserWarning, match=f"the last {count - kept} frame") as caught:
        latents = list(vae.encode_stream(video.split(3, dim=2), StreamOptions(chunk)))
    assert len(caught) == 1
    torch.testing.assert_close(torch.cat(latents, 2), expected, rtol=1e-5, atol=1e-5)


def test_a_whole_video_gives_no_warning(vae):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vae.encode(frames(1, 3, 9, 8, 8))


def test_uint8_is_0_to_255(vae):
    raw = torch.randint(0, 256, (1, 3, 5, 8, 16), dtype=torch.uint8)
    expected = vae.encode(raw.double() / 127.5 - 1)
    torch.testing.assert_close(vae.encode(raw), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_inputs_of_any_float_dtype_are_cast(vae, dtype):
    latent, video = torch.randn(1, 16, 2, 1, 1).to(dtype), frames(1, 3, 5, 8, 8).to(dtype)
    assert vae.decode(latent).dtype == vae.encode(video).dtype == torch.float32
    assert torch.equal(vae.decode(latent), vae.decode(latent.float()))
    assert torch.equal(vae.encode(video), vae.encode(video.float()))


@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last_3d, "every other frame"]
)
def test_inputs_of_any_layout_are_alike(vae, layout):
    latent = torch.randn(2, 16, 6, 2, 3)[:, :, ::2]
    if layout != "every other frame":
        latent = latent.contiguous(memory_format=layout)
    torch.testing.assert_close(vae.decode(latent), vae.decode(latent.clone()))


def test_results_are_five_dimensional(vae):
    assert vae.decode(torch.zeros(2, 16, 1, 1, 1)).shape == (2, 3, 1, 8, 8)
    assert vae.encode(torch.zeros(2, 3, 1, 8, 8)).shape == (2, 16, 1, 1, 1)


def test_normalize_uses_the_statistics_of_wan(vae):
    latent = torch.zeros(1, 16, 1, 1, 1)
    normal = vae.normalize(latent)
    assert normal[0, 0, 0, 0, 0].item() == pytest.approx(0.7571 / 2.8184)
    assert normal[0, 15, 0, 0, 0].item() == pytest.approx(0.2921 / 1.9160)
    latent = torch.randn(2, 16, 3, 2, 2)
    torch.testing.assert_close(vae.denormalize(vae.normalize(latent)), latent)


def test_float32_switches_are_set_during_the_work_and_restored_after(monkeypatch):
    seen = []

    class Switch:
        fp32_precision = "tf32"

    owner = Switch()
    monkeypatch.setattr(
        precision, "_switches", lambda _: [(owner, "fp32_precision", "ieee", ("ieee",))]
    )
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    vae.decoder.conv1.register_forward_hook(lambda *_: seen.append(owner.fp32_precision))
    for _ in vae.decode_stream(torch.zeros(1, 16, 3, 1, 1), StreamOptions(chunk=1)):
        assert owner.fp32_precision == "tf32"  # between two pieces it is the caller's
    assert set(seen) == {"ieee"}
    vae.allow_tf32 = True
    seen.clear()
    vae.decode(torch.zeros(1, 16, 1, 1, 1))
    assert set(seen) == {"tf32"}


def test_an_error_restores_the_float32_switches(monkeypatch):
    class Switch:
        fp32_precision = "tf32"

    owner = Switch()
    monkeypatch.setattr(
        precision, "_switches", lambda _: [(owner, "fp32_precision", "ieee", ("ieee",))]
    )

    def fail():
        with (
            precision.full_float32(torch.device("cpu")),
            precision.full_float32(torch.device("cpu")),
        ):
            assert owner.fp32_precision == "ieee"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert owner.fp32_precision == "tf32"


_ATTENTION = """
import resource, runpy, sys
runpy.run_path(sys.argv[1])
import torch
from fast_video_vae.kernels import attention
q = torch.randn(1, 40000, 16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention(q, q, q)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_attention_never_holds_the_scores_of_all_pairs():
    pytest.importorskip("resource", reason="peak memory is read from getrusage, on POSIX")
    conftest = str(Path(__file__).parents[1] / "conftest.py")
    result = subprocess.run(
        [sys.executable, "-c", _ATTENTION, conftest], capture_output=True, text=True, check=True
    )
    scores_kib = 40000 * 40000 * 4 // 1024
    assert int(result.stdout) < scores_kib // 50


def test_the_memory_estimate_grows_with_the_frame_and_not_below_its_caches(vae):
    small, large = vae.plan(480, 832).peak_bytes, vae.plan(1088, 1920).peak_bytes
    assert 0 < small < large
    assert vae.plan(480, 832, encode=True).peak_bytes > 0
    vae.limit_bytes = 1
    try:
        assert vae.plan(480, 832).peak_bytes <= small
    finally:
        vae.limit_bytes = None


def test_the_memory_estimate_of_a_small_frame_is_small(vae):
    assert vae.plan(64, 64).peak_bytes < 100 << 20  # of which 64 MiB whatever the size


def test_the_memory_estimate_of_one_frame_holds_no_tails(vae):
    assert vae.plan(480, 832, lone=True).peak_bytes < vae.plan(480, 832).peak_bytes / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_finite_numbers_whose_sum_is_not_are_taken(dtype):
    largest = torch.full((1, 16, 3, 4, 4), torch.finfo(dtype).max, dtype=dtype)
    check_finite(largest, "latent")
    largest[0, 3, 1, 2, 2] = math.inf
    largest[0, 4, 1, 2, 2] = -math.inf
    with pytest.raises(ValueError, match="2 values that are NaN or infinite"):
        check_finite(largest, "latent")
