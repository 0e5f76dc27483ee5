"""LoRA files as programs write them, broken or malicious: scales, reports and one-line errors.

`vae/checkpoint_io/test_hostile_files.py` has the files that are the same for every reader.
"""

import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.file import LoraFile
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests import builders
from fast_video_vae.tests.lora.models import PREFIX, modules, ones, spelled, wan

T2V = wan(i2v=False)
TARGETS = Targets(T2V)
Q = f"{PREFIX}blocks.0.self_attn.q"
DOWN, UP = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
FP8 = torch.float8_e4m3fn
DIFFUSERS, PEFT = "lora_adapter_metadata", "adapter_config"


@pytest.fixture
def write(tmp_path):
    def written(tensors, metadata=None):
        save_file(tensors, tmp_path / "some.safetensors", metadata)
        return tmp_path / "some.safetensors"

    return written


def pair(up=(16, 4), down=(4, 16), dtype=torch.float32, **more):
    """Return a pair, and more parts of its module."""
    tensors = {DOWN: torch.ones(down, dtype=dtype), UP: torch.ones(up, dtype=dtype)}
    return tensors | {f"{Q}.{part}": torch.as_tensor(tensor) for part, tensor in more.items()}


@pytest.mark.parametrize(
    ("alpha", "metadata", "scale"),
    [
        (None, {}, 1),
        (2, {"lora_alpha": "8"}, 2 / 4),  # the alpha of the pair takes precedence
        (None, {"lora_alpha": "8"}, 8 / 4),
        (2, {PEFT: '{"use_rslora": true}'}, 2 / math.sqrt(4)),
        (None, {DIFFUSERS: '{"unet.use_rslora": true, "unet.lora_alpha": 8}'}, 8 / math.sqrt(4)),
        # Invalid metadata is ignored.
        (2, {DIFFUSERS: "no JSON", PEFT: "[1, 2]", "format": "pt"}, 2 / 4),
        (2, {DIFFUSERS: "[" * 100_000}, 2 / 4),
        (None, {"lora_alpha": "None", PEFT: '{"lora_alpha": [1]}'}, 1),
        (2, {"peft_config": '{"lora_alpha": 1' + "0" * 400 + "}"}, 2 / 4),
    ],
)
def test_alpha_and_metadata_set_the_scale_of_a_pair(write, alpha, metadata, scale):
    alphas = {} if alpha is None else {"alpha": [[alpha]]}
    bank = load_bank([write(pair(**alphas), metadata)], TARGETS)
    assert bank.scales[:4].tolist() == pytest.approx([scale] * 4)


# Keys of scales, of the matrices that they belong to, and forms of quantised matrices.
SCALES = {
    "lora_A.weight_scale": "lora_A.weight", "lora_A.weight.scale": "lora_A.weight",
    "lora_A.weight_scale_inv": "lora_A.weight", "lora_down.scale_weight": "lora_down.weight",
    "lora_A.v2.weight_scale": "lora_A.v2", "diff.weight_scale": "diff",
}  # fmt: skip
FORMS = [(FP8, ()), (torch.float8_e5m2, (1,)), (FP8, (16,)), (FP8, (16, 1)), (torch.int8, (1, 1))]


@pytest.mark.parametrize(("scale", "form"), [*zip(SCALES, [*FORMS, FORMS[0]], strict=True)])
def test_a_scaled_matrix_is_that_of_the_numbers_it_stands_for(write, scale, form):
    (dtype, shape), key = form, f"{Q}.{SCALES[scale]}"
    factors, codes = torch.rand(shape) + 0.01, torch.randint(-100, 100, (16, 16)).to(dtype)
    tensors = {key.replace("lora_A", "lora_B").replace("down", "up"): torch.ones(16, 16)}
    file = LoraFile(write(tensors | {key: codes, f"{Q}.{scale}": factors}), TARGETS)
    found = file.read(file.entries[0]).tensors[0]
    assert torch.equal(found, codes.float() * factors.reshape(-1, 1))
    assert len(file.report.lines()) == 1


SOME = {
    f"{PREFIX}blocks.0.self_attn.{name}.lora_{part}.{adapter}.weight": torch.ones(shape)
    for name, adapter in {"q": "high", "k": "high", "v": "low"}.items()
    for part, shape in (("B", (16, 4)), ("A", (4, 16)))
}
IMAGE = ones(wan(), ["blocks.1.cross_attn.k_img", "blocks.1.cross_attn.v_img"])
OTHER = ones(T2V, [f"blocks.0.self_attn.{name}" for name in "qkv"], rank=8)
UNFIT = {f"blocks.0.cross_attn.{name}": (17 + n, 16, 16) for n, name in enumerate("koqv")}
UNFIT["patch_embedding"] = 16, 48, "6x1x2x2"  # of a control LoRA

# Tensors next to `SOME`, by the lines about them.
REPORT = {
    "8 keys for k_img/v_img: not in this model":
        spelled(IMAGE) | spelled(IMAGE, "lora_unet_{mixed}"),
    "4 keys for cross_attn_k_img/cross_attn_v_img: not in this model":
        spelled(IMAGE, "lora_unet_{flat}"),
    "5 keys for norm_k_img/other/temporal/text_embedding/...: not in this model": [
        f"{name}.diff" for name in (
            "blocks.0.norm_k_img", "blocks.0.other", "text_embedding.9", "temporal.0", "txt_out",
        )],
    "5 keys for a text encoder: not applied to a model": [
        "lora_te_text_model.alpha", "te1.a.alpha", "clip_l.a.alpha", "text_encoders.umt5.a.alpha",
        "text_encoder_2.a.weight"],
    f"4 keys of an unknown form: A\\nB, {'A' * 51}...{'A' * 26}, A\\u202e, ...":
        ["A\nB", "A" * 999, "A\u202e", "dwpose.0.weight"],
    **{f"2 keys do not fit: a pair for {out}x{inner} and a parameter of 16x{own}":
       spelled({name: (torch.ones(out, 4), torch.ones(4, inner))})
       for name, (out, inner, own) in UNFIT.items()},
    "3 more keys do not fit":  # after five lines
        [f"{PREFIX}blocks.0.self_attn.o.lokr_{part}" for part in ("w1", "w2_a", "w2_b")],
    # Mixing the parts of two adapters or dialects would be wrong.
    "14 keys are ignored: earlier keys or adapters have their weights":
        spelled(OTHER | ones(T2V, ["head.head"]), ending=".lora_{B}.other.weight")
        | spelled({f"blocks.0.attn1.to_{name[-1]}": OTHER[name] for name in OTHER},
                  "transformer.{name}"),
    "3 keys of an unsupported kind (AdaLoRA)":
        [f"{PREFIX}blocks.1.ffn.0.lora_{part}.default" for part in "ABE"],
    "2 keys of an unsupported kind (Stand-In)": [
        f"{PREFIX}blocks.1.ffn.2.q_loras.down.weight",
        "lora_unet_blocks_0_self_attn_q_loras.lora_up.weight"],
}  # fmt: skip


def test_a_report_has_a_line_for_each_reason(write):
    tensors = dict(SOME)
    for each in REPORT.values():
        tensors |= each if isinstance(each, dict) else {key: torch.ones(4, 4) for key in each}
    bank = load_bank([write(tensors)], TARGETS)
    first, *lines = bank.reports[0].lines()
    assert first == "some.safetensors: 6 keys applied"
    assert sorted(lines) == sorted(f"  {line}" for line in REPORT)
    rows = [layer.rows for layer in bank.layers.values() if layer.rows]
    assert rows == [{0: (0, 4)}] * 3


def refuse(path, match):
    with builders.refused(match, path.name):
        load_bank([path], TARGETS)


LARGER = wan(d=32, f=48, i2v=False)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({}, "it has no keys"),
        ({"a\n\u202e" + "b" * 900: torch.ones(1)}, r"^(?=.{,160}$).*it has a\\n\\u202eb"),
        ({f"{Q}.hra_u": torch.ones(2)}, r"is an unsupported kind \(HRA\); expected LoRA"),
        (spelled(ones(LARGER, modules(LARGER))), r"for another model: a pair for \d+x\d+ and a "),
        # The error has five keys of each side.
        ({f"transformer_blocks.{n}.attn.to_q.lora_A.weight": torch.ones(4, 4) for n in range(6)},
         r"nothing in some.safetensors is for this model: it has (transformer_\S+[,;] ){5}"
         r"the model has diffusion_model.patch_embedding, (diffusion_model.\S+, ){3}\S+$"),
        ({f"{Q}.diff": torch.tensor(1.0)}, "a difference of a scalar for a parameter of 16x16"),
        ({key.replace("self_attn.q", "norm3"): part for key, part in pair().items()},
         "a pair for 16x16 and a parameter of 16$"),
        (pair(lora_magnitude_vector=torch.ones(3)), "magnitudes of 3 for a parameter of 16x16"),
        (pair((16, 4), (5, 16)), "up has rank 4, down has rank 5; expected the same rank"),
        *((pair(up, down), "some") for up, down in (
            ((), (2, 16)), ((16,), (16,)), ((16, 0), (0, 16)), ((0, 2), (2, 16)),
        )),
        ({DOWN: torch.ones(2, 16)}, "expected all of them"),
        (pair(dtype=torch.int64), "expected floating point"),
        *((pair() | {UP: torch.full((16, 4), math.nan).to(dtype)},
           "self_attn.q.* up holds nan; expected finite numbers") for dtype in (torch.half, FP8)),
        (pair(alpha=math.nan), "alpha is nan"),
        (pair(alpha=torch.ones(2)), r"alpha is \[2\]; expected one finite number"),
        *((pair() | {f"{UP}_scale": torch.ones(shape)}, "one number or one per row")
          for shape in ((4,), (16, 4), (0,))),
    ],
)  # fmt: skip
def test_an_unusable_file_is_refused(write, tensors, match):
    # Metadata do not make up for half a pair.
    refuse(write(tensors, {"lora_alpha": "8"}), match)


@pytest.mark.skipif(os.name == "nt", reason="the system has no named pipes")
def test_what_is_no_file_is_refused_at_once(tmp_path):
    path = tmp_path / "some.safetensors"
    refuse(path, "cannot be read: No such file")
    os.mkfifo(path)
    refuse(path, "is a device; expected a .safetensors file")


def test_a_header_length_like_a_pickle_is_read_as_safetensors(write):
    data = (path := write(pair())).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for size in (0x280, 0x580):  # as of protocols 2 and 5
        path.write_bytes(size.to_bytes(8, "little") + data[8:header].ljust(size) + data[header:])
        assert len(load_bank([path], TARGETS).layers) == 1


def test_a_file_that_changes_between_its_header_and_a_pair_is_refused(write):
    for change in (lambda path: os.utime(path, ns=(1, 1)), Path.unlink):
        file = LoraFile(path := write(SOME), TARGETS)
        file.read(file.entries[0])
        change(path)
        with builders.refused("(was replaced|cannot be read)", "some.safetensors"):
            file.read(file.entries[1])
