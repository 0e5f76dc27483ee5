"""LoRA files as other programs wrote them: quantised, of several adapters, of unsupported kinds."""

import pytest
import torch

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.file import LoraFile
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests.lora.models import PREFIX, random_pairs, spelled, wan

WAN = wan(blocks=1)
TARGETS = Targets(WAN)
STEM = f"{PREFIX}blocks.0.self_attn.q"
DOWN, UP = f"{STEM}.lora_A.weight", f"{STEM}.lora_B.weight"
FP8, WIDE_FP8 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(matrix, dtype, scale):
    """Return a matrix in `dtype` and its values in float32."""
    codes = (matrix / scale.reshape(-1, *[1] * (matrix.ndim - 1))).clamp(-100, 100)
    codes = (codes if dtype.is_floating_point else codes.round()).to(dtype)
    return codes, codes.float() * scale.reshape(-1, *[1] * (matrix.ndim - 1))


def read(file):
    """Return the adapters of a file by the keys of their parameters."""
    return {entry.target.key: file.read(entry) for entry in file.entries}


# Endings of the matrix and of its scale.
SCALED = [
    ("lora_A.weight", "lora_A.weight_scale"),
    ("lora_A.weight", "lora_A.weight.scale"),
    ("lora_A.weight", "lora_A.scale"),
    ("lora_A.weight", "lora_A.weight.weight_scale"),
    ("lora_A.weight", "lora_A.weight_scale_inv"),
    ("lora_down.weight", "lora_down.scale_weight"),
    ("lora_A.my-style.v2.weight", "lora_A.my-style.v2.weight_scale"),
    ("lora_A", "lora_A.weight_scale"),
]


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(FP8, ()), (WIDE_FP8, (1,)), (FP8, (4,)), (FP8, (4, 1)), (torch.int8, (1, 1))],
)
@pytest.mark.parametrize(("matrix", "scale"), SCALED)
def test_a_scaled_matrix_is_that_of_the_numbers_it_stands_for(write, matrix, scale, dtype, rows):
    factors = numbers(*rows, seed=1).abs() / 30
    codes, values = quantised(numbers(4, 16), dtype, factors)
    other = {
        f"{STEM}.{matrix}".replace("lora_A", "lora_B").replace("down", "up"): numbers(16, 4),
        f"{STEM}.alpha": torch.tensor([[2]]),
    }
    given = write({**other, f"{STEM}.{matrix}": codes, f"{STEM}.{scale}": factors}, "given")
    plain = write({**other, f"{STEM}.{matrix}": values}, "plain")
    for target_dtype in (torch.float32, torch.bfloat16):
        banks = [load_bank([path], TARGETS, target_dtype) for path in (given, plain)]
        assert torch.equal(banks[0].flat, banks[1].flat)
        assert torch.equal(banks[0].scales, banks[1].scales)
    (adapter,) = read(LoraFile(given, TARGETS)).values()
    expected = 2 / 4 * next(iter(other.values())).double() @ values.double()
    assert torch.allclose(adapter.apply(torch.zeros(16, 16), 1).double(), expected, atol=1e-5)
    assert LoraFile(given, TARGETS).report.lines() == ["given: 3 keys applied"]


@pytest.mark.parametrize(
    ("parts", "scaled"),
    [
        (("lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight"), "lora_B"),
        (("lokr_w1", "lokr_w2"), "lokr_w2"),
        (("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), "hada_w2_a"),
        (("diff",), "diff"),
    ],
)
def test_the_parts_of_every_kind_can_be_scaled(write, parts, scaled):
    """They need more memory than in the file."""
    shapes = {
        "lora_A.weight": (4, 16), "lora_magnitude_vector.weight": (16,), "lokr_w1": (4, 4),
        "lokr_w2": (4, 4), "hada_w1_b": (4, 16), "hada_w2_b": (4, 16), "diff": (16, 16),
    }  # fmt: skip
    tensors = {f"{STEM}.{part}": numbers(*shapes.get(part, (16, 4))) for part in parts}
    (key,) = [key for key in tensors if key.startswith(f"{STEM}.{scaled}")]
    codes, values = quantised(tensors[key], FP8, torch.tensor(0.01))
    scale = {f"{STEM}.{scaled}.weight_scale": torch.tensor(0.01)}
    paths = write(tensors | {key: codes} | scale, "given"), write(tensors | {key: values}, "plain")
    results = []
    for path in paths:
        bank = load_bank([path], TARGETS)
        (layer,) = bank.layers.values()
        (adapter,) = layer.adapters(bank.others)
        results.append(adapter.apply(numbers(16, 16, seed=3), 0.7))
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", [(16,), (3,), (1, 4), (2, 2), (4, 16), (0,)])
def test_a_scale_of_another_shape_is_refused(write, shape):
    codes, _ = quantised(numbers(4, 16), FP8, torch.tensor(0.1))
    path = write({DOWN: codes, UP: numbers(16, 4), f"{STEM}.lora_A.weight_scale": numbers(*shape)})
    with pytest.raises(ValueError, match="one number or one per row") as caught:
        load_bank([path], TARGETS)
    assert str(caught.value).startswith("some.safetensors: ")
    assert len(str(caught.value)) <= 160


def test_adapters_of_different_layers_are_applied_together(write):
    tensors = {
        f"blocks.0.self_attn.{layer}.lora_{part}.{name}.weight": numbers(*shape)
        for layer, name in (("q", "high"), ("v", "low"))
        for part, shape in (("A", (4, 16)), ("B", (16, 4)))
    }
    file = LoraFile(write(tensors), TARGETS)
    assert len(read(file)) == 2
    assert file.report.used == 4


def test_one_of_the_adapters_of_a_file_is_applied(write):
    """Its pair with the magnitudes, or in other layers the pairs, of another would be wrong."""
    one = {
        "lora_A.my-style.v2.weight": numbers(4, 16),
        "lora_B.my-style.v2.weight": numbers(16, 4),
    }
    other = {
        "lora_A.other.weight": numbers(8, 16),
        "lora_B.other.weight": numbers(16, 8),
        "lora_magnitude_vector.other": numbers(16),
    }
    tensors = {f"{STEM}.{part}": tensor for part, tensor in (one | other).items()}
    others = {key: value for key, value in tensors.items() if "other" in key}
    tensors |= {key.replace(".q.", ".v."): value.clone() for key, value in others.items()}
    file = LoraFile(write(tensors), TARGETS)
    (adapter,) = read(file).values()
    assert torch.equal(adapter.up, one["lora_B.my-style.v2.weight"])
    assert adapter.dora_scale is None
    assert file.report.lines()[1:] == [
        "  6 keys are ignored: earlier keys or adapters have their weights"
    ]


# Names of kinds and endings of keys, the shared ones of a file with its prefix.
KINDS = {
    "VeRA": ("vera_lambda_b", "vera_lambda_d", "vera_lambda_b.my-style", "base_model.vera_A"),
    "IA3": ("ia3_l", "on_input", "on_input weight"),
    "AdaLoRA": ("lora_E", "lora_A lora_B lora_E", "lora_A.default lora_B.default lora_E.default"),
    "FourierFT": ("fourierft_spectrum", "fourierft_spectrum.default"),
    "VB-LoRA": ("vblora_logits_A", "vblora_logits_B_topk_indices", "base_model.vblora_vector_bank"),
    "HRA": ("hra_u",),
    "LoRA-XS": ("lora_A.weight lora_B.weight default_lora_latent_mapping.weight",),
    "PEFT's OFT": ("oft_R.weight",),
    "PEFT's BOFT": ("boft_R boft_s",),
    "Stand-In": ("q_loras.down.weight", "lora_unet_blocks_0_self_attn_q_loras.lora_up.weight"),
    "SVDQuant": ("qweight wscales",),
}


@pytest.mark.parametrize(
    ("kind", "endings"), [(kind, each) for kind, endings in KINDS.items() for each in endings]
)
def test_an_unsupported_kind_is_named(write, kind, endings):
    keys = [
        each if each.startswith(("base_model", "lora_unet")) else f"{STEM}.{each}"
        for each in endings.split(" ")
    ]
    odd = {key: torch.ones(16, 16) for key in keys}
    other = spelled(random_pairs(WAN, ["blocks.0.self_attn.k"]))
    file = LoraFile(write(odd | other), TARGETS)
    assert file.report.lines() == [
        "some.safetensors: 2 keys applied",
        f"  {len(keys)} keys of an unsupported kind ({kind})",
    ]
    with pytest.raises(ValueError, match="unsupported kind") as caught:
        LoraFile(write(odd), TARGETS)
    expected = "LoRA, LoHa, LoKr, GLoRA, OFT, BOFT or differences"
    assert str(caught.value) == (
        f"some.safetensors is an unsupported kind ({kind}); expected {expected}"
    )
