"""Files in the wild: the VAE is found wherever it is and read exactly, or refused in one line."""

import json
import logging
import re
import sys
from itertools import cycle

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import diffusers_name, random_state_dict, refused
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import STATES, latent_for, random_frames
from fast_video_vae.tests.wan22 import diffusers_wan22_name
from fast_video_vae.vae import LayoutError, load_vae, read_checkpoint

WHOLE = {family: make() for family, make in STATES.items()}
SMALL, OTHER, ONE = WHOLE["wan2.1"], random_state_dict(8, seed=1), torch.ones(())
LOSS = {"loss.logvar": torch.zeros(()), "loss.discriminator.main.0.weight": torch.ones(4, 3, 4, 4)}
UNET = {
    "model.diffusion_model.blocks.0.ffn.0.weight": torch.ones(8, 8, dtype=torch.int8),
    "model.diffusion_model.head.modulation": torch.full((1, 2, 8), float("nan")),
    "text_encoders.t5.encoder.block.0.weight": torch.ones(8, dtype=torch.uint8),
    "cond_stage_model.encoder.conv_in.weight": torch.zeros(0, 3),
}
TABLE = {"vocoder.conv1.weight": torch.ones(3)}
MOMENTS = {n: {"step": torch.tensor(1.0), "avg": torch.ones(2)} for n in range(300)}
TRAINED = {
    "global_step": 3, "ema_decay": 0.9, "optimizer": {"state": MOMENTS}, "rng": [torch.ones(2)],
    "model_ema.decodermiddle0residual0gamma": torch.ones(3), "proj_head.weight": torch.ones(2, 2),
}  # fmt: skip
PREFIXES = (
    *("vae.model.", "_orig_mod.", "module._orig_mod.vae.model.", "vae.", "a.b-c."),
    *("first_stage_model._orig_mod.", "pipe.vae.module."),
)
DICTS = "state_dict", "generator", "module", "vae.a", "generator/state_dict", "a/b/c/d/e"
SCALES = {
    "one": lambda value: (), "one number": lambda value: (1,), "each": lambda value: (len(value),),
    "each kept": lambda value: (len(value), *[1] * (value.ndim - 1)),
}  # fmt: skip


def saved(content, folder, suffix):
    """Save safetensors, or in PyTorch's formats from 1.6 on (`.pth`) and before (`.ckpt`)."""
    path = folder / f"vae{suffix}"
    if suffix == ".safetensors":
        save_file({key: value.contiguous().clone() for key, value in content.items()}, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=suffix != ".ckpt")
    return path


def put(prefix, state):
    return {prefix + key: value for key, value in state.items()}


def diffusers(state, family):
    name = diffusers_name if family == "wan2.1" else diffusers_wan22_name

    def renamed(key):
        base, _, end = key.rpartition(".")
        return name(f"{base}.weight").removesuffix("weight") + end if "_" in end else name(key)

    return {renamed(key) if "." in key else key: value for key, value in state.items()}


def flat(state, time="none"):
    """The last tap of each convolution in 4 dimensions; without `time_conv`, cut or whole."""
    kept = {k: v for k, v in state.items() if time != "none" or ".time_conv." not in k}
    whole = ".time_conv." if time == "whole" else "nothing"
    return {k: v[:, :, -1] if v.ndim == 5 and whole not in k else v for k, v in kept.items()}


def quantised(state, scale, name, dtype):
    """Some weights in float8 with scales of a shape, and what they mean."""
    low, expected = state | {"scaled_fp8": torch.zeros(0)}, dict(state)
    for key in [key for key in state if key.endswith(".weight")][::2]:
        base, weight = key.removesuffix("weight"), state[key].to(dtype)
        low[key], low[base + name] = weight, torch.rand(scale(weight)) + 0.5
        low[f"{base}input_scale"], low[f"{base}comfy_quant"] = torch.ones(()), torch.ones(9).byte()
        expected[key] = weight.float() * low[base + name].view(-1, *[1] * (weight.ndim - 1))
    return low, expected


def layouts():
    """Name, content and format of files; the weights that they mean, and how many others."""
    kinds = [(family, lambda state, _: state) for family in WHOLE]
    kind = cycle([*kinds, *((family, diffusers) for family in WHOLE if family != "seedvr2")])
    suffix = cycle([".safetensors", ".pth", ".ckpt"])
    for prefix, extra in zip(PREFIXES, cycle([{}, UNET, LOSS]), strict=False):
        extra = extra if prefix.count(".") > 1 else extra | TABLE
        family, respell = next(kind)
        content, count = extra | put(prefix, respell(WHOLE[family], family)), len(extra)
        yield f"{family} {prefix} {count}", content, next(suffix), WHOLE[family], count
    for names, (extra, count) in zip(DICTS, cycle([(TRAINED, 605), (UNET, 4)]), strict=False):
        family, respell = next(kind)
        content = LOSS | put("module.", respell(WHOLE[family], family))
        for name in reversed(names.split("/")):
            content = {name: content}
        form = (".pth", ".ckpt")[len(names) % 2]
        yield f"{family} in {names} {count}", extra | content, form, WHOLE[family], count + 2
    names = cycle(["weight_scale", "scale_weight"])
    for (what, shape), name in zip(SCALES.items(), names, strict=False):
        family, respell = next(kind)
        dtype = torch.float8_e5m2 if what == "each" else torch.float8_e4m3fn
        low, expected = quantised(WHOLE[family], shape, name, dtype)
        content = put("vae.", respell(low, family))
        yield f"{family} {what} {name}", content, ".safetensors", expected, 1
    parts = {key.replace("coder.", "coder._orig_mod."): value for key, value in SMALL.items()}
    yield "each part compiled", parts, ".safetensors", SMALL, 0
    # AutoencoderKLHunyuanVideo15 has most of the names of Wan in diffusers.
    other = {"hy.decoder.mid_block.resnets.0.norm1.gamma": ONE}
    yield "another VAE", SMALL | other, ".safetensors", SMALL, 1
    for key in ("weight_scale", "input_scale"):  # of 1
        yield f"with {key}", SMALL | {f"decoder.conv1.{key}": ONE}, ".pth", SMALL, 0
    images = WHOLE["qwen-image-2.1"]
    flattened = {k: v.squeeze(2) if v.ndim == 5 else v for k, v in images.items()}
    yield "2D in diffusers", diffusers(flattened, "qwen-image-2.1"), ".safetensors", images, 0
    parts = {name: {} for name in ("encoder", "decoder", "conv1", "conv2")}
    for key, value in SMALL.items():
        parts[key.partition(".")[0]][key.partition(".")[2]] = value
    yield "a dict per part", parts, ".pth", SMALL, 0
    copies = {"ema": put("module.", SMALL), "state_dict": {k: v.clone() for k, v in SMALL.items()}}
    yield "equal twice", copies, ".pth", SMALL, len(SMALL)
    yield "equal in one", put("ema.", SMALL) | SMALL, ".safetensors", SMALL, len(SMALL)


FOUND = list(layouts())


@pytest.mark.parametrize("layout", FOUND, ids=[each[0] for each in FOUND])
def test_a_layout_is_read_exactly_and_the_rest_is_one_line(tmp_path, caplog, layout):
    _, content, suffix, expected, count = layout
    path = saved(content, tmp_path, suffix)
    with caplog.at_level(logging.INFO):
        weights = read_checkpoint(path).weights
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], value) for key, value in expected.items())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(count)
    assert all(f": left out {count} not of the VAE (" in each for each in lines), lines


def changed(value, key="weight", **more):
    """The VAE under a prefix with another entry of its first convolution, and `more` of them."""
    entries = {f"decoder.conv1.{name}": each for name, each in {key: value, **more}.items()}
    return put("vae.model.", {k: v for k, v in (SMALL | entries).items() if v is not None})


WIDE = torch.zeros(32, 16, 3, 3, 3)
FLOAT8 = WIDE.to(torch.float8_e5m2)
INFINITE = torch.full_like(WIDE, float("inf")).to(torch.float8_e5m2)
ZEROS = {key: torch.zeros_like(SMALL[key]) for key in ("conv1.weight", "conv2.weight")}
FAULTY = {
    **{k: v for k, v in SMALL.items() if not re.search(r"upsamples\.[0156]\.residual\.6\.bias", k)},
    "decoder.loss.weight": ONE,
    "decoder.middle.1.proj.weight": ONE,
}
HALF = {key: value for key, value in SMALL.items() if key.startswith("decoder.")}
FLAT = flat(SMALL)
CUT = next(key for key in FLAT if key.endswith("resample.1.weight"))
REFUSED = [
    ({"state_dict": SMALL, "ema": OTHER}, "different networks, at state_dict and ema; expected"),
    (SMALL | put("ema.", OTHER), "at its root and ema; expected one"),
    ({"vae": SMALL, "dec": HALF}, "at vae and dec; expected one"),
    ({f"a{n}": HALF | {"n": ONE} for n in range(10)}, "holds 10 networks"),
    (SMALL | {"vae": {"a": ONE}, "vae.a": ONE}, "two of its entries are named vae.a"),
    (SMALL | {"decoder._orig_mod.conv1.weight": WIDE}, "both mean decoder.conv1.weight"),
    ([1, 2], "holds a list; expected a state dict"),
    ({1: ONE}, "expected names and tensors"),
    (changed(None, "bias"), "1 missing .decoder.conv1.bias"),
    (SMALL | {"decoder.middle.1.proj.weight": WIDE[..., 0]}, "32, 16, 3, 3., expected .32, 32, 1"),
    (FAULTY, "4 missing .decoder.upsamples.0.residual.6.bias and 3 more., 1 unexpected, 1 of ano"),
    (changed(WIDE[:, :0]), "decoder.conv1.weight is .32, 0, .* which holds nothing"),
    (changed((WIDE + 1).bfloat16() * float("nan")), "NaN or infinity: .*decoder.conv1.weight"),
    (changed(INFINITE), "NaN or infinity: .*decoder.conv1.weight"),
    (SMALL | ZEROS, r"conv2.weight .post_quant_conv. is all zeros: .* one flat color"),
    ({k: v for k, v in WHOLE["wan2.2"].items() if ".upsamples.2." not in k}, "has 3 stages; exp"),
    (random_seedvr2((48, 64, 64, 64)), "48 channels; expected a multiple of 32"),
    (changed(WIDE.char()), "not floating point"),
    (changed(3, "steps"), "decoder.conv1.steps is a int; expected plain tensors"),
    (SMALL | {"all": [list(range(10_000)) for _ in range(40)]}, "300000 instructions"),
    (changed(FLOAT8, weight_scale=torch.ones(16)), "scales .16. .* expected float8 with 1 or 32"),
    (changed(FLOAT8, scale_weight=ONE.char()), "in torch.int8; expected float8"),
    (changed(FLOAT8, weight_scale=ONE, scale_weight=ONE), "1 unexpected"),
    (changed(FLOAT8, scale_weight=ONE / 0), "hold NaN or infinity"),
    (changed(WIDE.bfloat16(), weight_scale=2 * ONE), "is torch.bfloat16 with scales"),
    ({k.replace("encoder.", "enc."): v for k, v in SMALL.items()}, "enc.* is of an encoder; exp"),
    (FLAT | {CUT: FLAT[CUT][..., 0]}, "1 of another shape"),
    (changed(None, weight_scale=ONE), "has no decoder.conv1.weight"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_not_clear_is_refused_in_one_line(tmp_path, number):
    content, words = REFUSED[number]
    with refused(words, "vae.pth"):
        load_vae(saved(content, tmp_path, ".pth"))


@pytest.mark.skipif(sys.platform != "linux", reason="the file system has no holes")
def test_other_models_are_not_read(tmp_path):
    """A file with a hole of 256 GB in front of the VAE, and tensors of unknown kinds."""
    size, plain = 1 << 38, saved(put("vae.", SMALL), tmp_path, ".safetensors").read_bytes()
    start = 8 + int.from_bytes(plain[:8], "little")
    header = json.loads(plain[8:start])
    for entry in header.values():
        entry["data_offsets"] = [size + offset for offset in entry["data_offsets"]]
    header["a.weight"] = {"dtype": "F4", "shape": [2 * size], "data_offsets": [0, size]}
    header["a.empty"] = {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    with (tmp_path / "whole.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(size, 1)
        file.write(plain[start:])
    weights = read_checkpoint(tmp_path / "whole.safetensors").weights
    (tmp_path / "whole.safetensors").unlink()
    assert all(torch.equal(weights[key], value) for key, value in SMALL.items())
    with pytest.raises(LayoutError, match="not a Wan"):  # so that ComfyUI can load it
        read_checkpoint({"state_dict": put("decoder.", UNET), "epoch": 3})


@pytest.mark.parametrize(
    ("family", "time"), [("wan2.1", "none"), ("wan2.2", "cut"), ("wan2.1", "whole")]
)
def test_weights_of_single_frames_give_the_frame_of_a_video_vae(tmp_path, family, time):
    whole, content = load_vae(WHOLE[family], dtype=torch.float32), flat(WHOLE[family], time)
    latent, frames = latent_for(whole, 1, 32, 16, batch=2), random_frames(2, 3, 1, 32, 16)
    path = saved(put("vae.", diffusers(content, family)), tmp_path, ".safetensors")
    vae = load_vae(path, dtype=torch.float32)
    assert vae.config.family == family
    for each in (vae, load_vae(vae.state_dict(), dtype=torch.float32)):
        assert torch.equal(each.decode(latent), whole.decode(latent))
        assert torch.equal(each.encode(frames), whole.encode(frames))
    video, latents = random_frames(1, 3, 5, 32, 16), latent.repeat(1, 1, 2, 1, 1)
    with refused("frames; expected 1: the weights of this VAE are of single frames"):
        vae.encode(video)
    with refused("frames; expected 1: the weights of this VAE are of single frames"):
        list(vae.decode_stream(iter(latents.split(1, 2))))
