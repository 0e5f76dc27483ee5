"""The dtypes that a CPU convolves fast, by its instructions."""

import pytest
import torch

from fast_video_vae.kernels.devices import instructions
from fast_video_vae.kernels.devices.instructions import multiplies_bfloat16, slow_on_cpu

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def cpu(monkeypatch):
    """Return a function that plays a CPU with features, and what oneDNN says of both dtypes."""

    def play(features, *, bf16=True, fp16=True):
        monkeypatch.setattr(instructions, "cpu_features", lambda: frozenset(features))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        for name, answer in (("bf16", bf16), ("fp16", fp16)):
            query = None if answer is None else lambda answer=answer: answer
            monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", query)

    return play


@pytest.mark.parametrize(
    ("features", "answers", "bfloat16", "slow"),
    [
        ({"sse2", "avx2"}, {"bf16": False, "fp16": False}, False, (True, True)),
        ({"sse2", "avx512_f"}, {"fp16": False}, False, (False, True)),
        ({"sse2", "avx512_bf16"}, {"fp16": False}, True, (False, True)),
        ({"sse2", "avx512_bf16", "avx512_fp16"}, {}, True, (False, False)),
        ({"sse2", "amx_tile", "amx_bf16"}, {}, True, (False, True)),
        ({"asimd", "bf16"}, {}, False, (False, False)),  # ARM
        ({"sse2", "avx512_bf16"}, {"bf16": None, "fp16": None}, False, (True, True)),  # older
    ],
)
def test_the_instructions_decide(cpu, features, answers, bfloat16, slow):
    cpu(features, **answers)
    assert multiplies_bfloat16() == bfloat16
    assert (slow_on_cpu(BF16), slow_on_cpu(FP16)) == slow


def test_without_onednn_both_are_slow(cpu, monkeypatch):
    cpu({"sse2", "avx512_bf16", "avx512_fp16"})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert slow_on_cpu(BF16)
    assert slow_on_cpu(FP16)
    assert not multiplies_bfloat16()
