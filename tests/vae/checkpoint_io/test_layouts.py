"""Files in the wild: the VAE is found wherever it is and read exactly, or refused in one line."""

import itertools
import json
import logging

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import diffusers_name, random_state_dict, refused
from fast_video_vae.tests.tiny import random_tiny
from fast_video_vae.tests.vae.families import STATES, latent_for, random_frames, random_latent
from fast_video_vae.tests.wan22 import diffusers_wan22_name
from fast_video_vae.vae import LayoutError, load_vae, read_checkpoint
from fast_video_vae.vae.preview import load_tiny_decoder

WHOLE = {family: make() for family, make in STATES.items()}
SMALL = WHOLE["wan2.1"]
OTHER = random_state_dict(8, seed=1)
ANCHOR, WEIGHT = "decoder.middle.0.residual.0.gamma", "decoder.conv1.weight"
LOSS = {"loss.logvar": torch.zeros(()), "loss.discriminator.main.0.weight": torch.ones(4, 3, 4, 4)}
UNET = {
    "model.diffusion_model.blocks.0.ffn.0.weight": torch.ones(8, 8, dtype=torch.int8),
    "model.diffusion_model.head.modulation": torch.full((1, 2, 8), float("nan")),
    "text_encoders.t5.encoder.block.0.weight": torch.ones(8, dtype=torch.uint8),
    "cond_stage_model.encoder.conv_in.weight": torch.zeros(0, 3),
}
OPTIMIZER = {"state": {n: {"step": torch.tensor(1.0), "avg": torch.ones(2)} for n in range(300)}}
TRAINED = {
    "global_step": 3, "ema_decay": 0.999, "optimizer": OPTIMIZER, "rng": [torch.ones(2), "x"],
    "model_ema.decodermiddle0residual0gamma": torch.ones(3), "proj_head.weight": torch.ones(2, 2),
}  # fmt: skip


def saved(content, path, suffix):
    """Save `content`: safetensors, or PyTorch's formats from 1.6 on and before."""
    path = path / f"vae{suffix}"
    if suffix == ".safetensors":
        save_file({key: value.contiguous().clone() for key, value in content.items()}, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=suffix != ".ckpt")
    return path


def put(prefix, state):
    return {prefix + key: value for key, value in state.items()}


def nested(names, state):
    for name in reversed(names.split("/")):
        state = {name: state}
    return state


def diffusers(state, family="wan2.1"):
    rename = diffusers_name if family == "wan2.1" else diffusers_wan22_name
    return {rename(key): value for key, value in state.items()}


def flat(state, time="none"):
    """The last tap of each convolution in 4 dimensions; `time_conv` as it is, too, or not."""
    kept = {k: v for k, v in state.items() if time != "none" or ".time_conv." not in k}
    as_it_is = "weightless" if time == "cut" else ".time_conv."
    return {k: v[:, :, -1] if v.ndim == 5 and as_it_is not in k else v for k, v in kept.items()}


def quantised(state, scale, name="weight_scale", dtype=torch.float8_e4m3fn):
    """Weights in float8 with scales of a shape, and what they mean."""
    low, expected = dict(state), dict(state)
    for number, (key, value) in enumerate(state.items()):
        if not key.endswith(".weight") or number % 2:
            continue
        given = torch.rand(scale(value)) + 0.5
        low[key] = value.to(dtype)
        low[key.removesuffix("weight") + name] = given
        if number % 4:
            low[key.removesuffix("weight") + "input_scale"] = torch.ones(())
            low[key.removesuffix("weight") + "comfy_quant"] = torch.ones(9, dtype=torch.uint8)
        expected[key] = low[key].float() * given.view(-1, *[1] * (value.ndim - 1))
    return low | {"scaled_fp8": torch.zeros(0)}, expected


def layouts():
    """Name, content and format of files; the weights that they mean, and how many others."""
    kinds = [
        *((family, lambda state, _: state) for family in WHOLE),
        *((family, diffusers) for family in WHOLE if family != "seedvr2"),
    ]
    kind, suffix = itertools.cycle(kinds), itertools.cycle([".safetensors", ".pth", ".ckpt"])
    for prefix, extra in itertools.product(PREFIXES, ({}, UNET, LOSS)):
        family, rename = next(kind)
        content = extra | put(prefix, rename(WHOLE[family], family))
        name = f"{family} {prefix} {len(extra)}"
        yield name, content, next(suffix), WHOLE[family], len(extra)
    for names, (extra, count) in itertools.product(DICTS, ((TRAINED, 605), (UNET, 4))):
        family, rename = next(kind)
        content = extra | nested(names, LOSS | put("module.", rename(WHOLE[family], family)))
        name = f"{family} in {names} {count}"
        yield name, content, (".pth", ".ckpt")[len(names) % 2], WHOLE[family], count + len(LOSS)
    compiled = {key.replace("coder.", "coder._orig_mod."): value for key, value in SMALL.items()}
    yield "each part compiled", compiled, ".safetensors", SMALL, 0
    parts = {"encoder": {}, "decoder": {}, "conv1": {}, "conv2": {}}
    for key, value in SMALL.items():
        parts[key.partition(".")[0]][key.partition(".")[2]] = value
    yield "a dict per part", parts, ".pth", SMALL, 0
    yield "the same twice", {"ema": SMALL, "model": SMALL}, ".pth", SMALL, 0
    copies = {"ema": put("module.", SMALL), "state_dict": {k: v.clone() for k, v in SMALL.items()}}
    yield "equal twice", copies, ".pth", SMALL, len(SMALL)
    yield "equal in one", put("ema.", SMALL) | SMALL, ".safetensors", SMALL, len(SMALL)
    for (what, shape), name in itertools.product(SCALES.items(), ("weight_scale", "scale_weight")):
        dtype = torch.float8_e5m2 if what == "each" else torch.float8_e4m3fn
        family, rename = next(kind)
        low, expected = quantised(WHOLE[family], shape, name, dtype)
        bases = {base: f"{base}.weight" for base, _, _ in (key.rpartition(".") for key in low)}
        bases = dict(zip(bases, rename(dict.fromkeys(bases.values()), family), strict=True))
        renamed = {}
        for key, value in low.items():
            base, _, end = key.rpartition(".")
            renamed[f"{bases[base].removesuffix('.weight')}.{end}" if base else key] = value
        yield f"{family} {what} {name}", put("vae.", renamed), ".safetensors", expected, 1


PREFIXES = (
    "vae.model.", "_orig_mod.", "module.model.", "module._orig_mod.vae.model.", "vae.", "a.b-c.",
    "first_stage_model.", "first_stage_model._orig_mod.", "pipe.vae.module.",
)  # fmt: skip
DICTS = (
    "state_dict", "ema", "generator", "gen_model", "module", "params_ema", "model", "vae", "vae.a",
    "model_state_dict", "generator/state_dict", "checkpoint/ema/model", "a/b/c/d/e",
)  # fmt: skip
SCALES = {
    "one": lambda value: (), "one number": lambda value: (1,), "each": lambda value: (len(value),),
    "each kept": lambda value: (len(value), *[1] * (value.ndim - 1)),
}  # fmt: skip
FOUND = list(layouts())


@pytest.mark.parametrize("layout", FOUND, ids=[each[0] for each in FOUND])
def test_a_layout_is_read_exactly_and_the_rest_is_one_line(tmp_path, caplog, layout):
    _, content, suffix, expected, count = layout
    with caplog.at_level(logging.INFO):
        weights = read_checkpoint(saved(content, tmp_path, suffix)).weights
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], value) for key, value in expected.items())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(count)
    assert all(f": left out {count} not of the VAE (" in each for each in lines), lines


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_found_vae_decodes_as_the_plain_file(tmp_path, number):
    _, content, suffix, expected, _ = FOUND[number]
    vae = load_vae(saved(content, tmp_path, suffix), dtype=torch.float32)
    plain = load_vae(expected, dtype=torch.float32)
    latent = latent_for(vae, 2, 32, 32)
    assert torch.equal(vae.decode(latent), plain.decode(latent))


def changed(**changes):
    """The VAE under a prefix, with other entries; None: without it."""
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return {k: v for k, v in put("vae.", {**SMALL, **given}).items() if v is not None}


WIDE = torch.zeros(32, 16, 3, 3, 3)
REFUSED = {
    "EMA and plain": ({"state_dict": SMALL, "ema": OTHER}, "at state_dict and ema; expected one"),
    "EMA inside": (SMALL | put("ema.", OTHER), "at its root and ema; expected one"),
    "two VAEs": (put("first_stage_model.", SMALL) | put("vae.", OTHER), "first_stage_model and vae"),
    "a part of it twice": (
        {"vae": SMALL, "dec": {k: v for k, v in SMALL.items() if k[:3] == "dec"}},
        "at vae and dec; expected one",
    ),
    "another dtype": (
        {"a": SMALL, "b": {k: v.double() for k, v in SMALL.items()}}, "at a and b; expected one"
    ),
    "ten of them": ({f"a{n}": {ANCHOR: torch.ones(n + 1)} for n in range(10)}, "holds 10 networks"),
    "one name twice": ({"vae": {"a": WIDE}, "vae.a": WIDE} | SMALL, "two of its entries .* vae.a"),
    "both compiled and not": (
        SMALL | {"decoder._orig_mod.conv1.weight": WIDE}, "both mean decoder.conv1.weight"
    ),
    "a missing key": (changed(decoder__conv1__bias=None), "1 missing .decoder.conv1.bias"),
    "a renamed key": (
        changed(decoder__conv1__bias=None, decoder__conv_1__bias=WIDE), "1 missing .*1 unexpected"
    ),
    "another block": (changed(decoder__upsamples__15__residual__2__weight=WIDE), "1 unexpected"),
    "another shape": (changed(decoder__conv1__weight=WIDE[1:]), "conv1.weight.* of another shape|exp"),
    "whole numbers": (changed(decoder__conv1__weight=WIDE.to(torch.int8)), "not floating point"),
    "a count in it": (changed(decoder__conv1__steps=3), "decoder.conv1.steps is a int; expected"),
    "no tensors": ({"state_dict": {"a": 1}, "epoch": 3}, "expected names and tensors"),
    "another network": ({"state_dict": UNET, "epoch": 3}, "not a Wan, Qwen-Image or SeedVR2 VAE"),
    "a large optimizer": (
        {"vae": SMALL, "optimizer": [list(range(10_000)) for _ in range(40)]}, "300000 instructions"
    ),
    **{
        f"a scale of {what}": (
            changed(decoder__conv1__weight=weight, decoder__conv1__weight_scale=scale, **more),
            words,
        )
        for what, weight, scale, more, words in (
            ("inputs", WIDE.to(torch.float8_e4m3fn), torch.ones(16), {}, "scales .16.* 1 or 32"),
            ("blocks", WIDE.to(torch.float8_e4m3fn), torch.ones(32, 2), {}, "scales .32, 2."),
            ("bfloat16", WIDE.bfloat16(), torch.ones(()), {}, "is torch.bfloat16 with scales"),
            ("int8", WIDE.to(torch.int8), torch.ones(()), {}, "is torch.int8 with scales"),
            ("8 bits", WIDE.to(torch.float8_e5m2), WIDE[:, 0, 0, 0, 0].char(), {}, "torch.int8; exp"),
            ("two kinds", WIDE.to(torch.float8_e5m2), torch.ones(()),
             {"decoder__conv1__scale_weight": torch.ones(())}, "1 unexpected"),
            ("nothing", None, torch.ones(()), {}, "has no decoder.conv1.weight"),
            ("infinity", WIDE.to(torch.float8_e5m2), torch.tensor(float("nan")), {}, "hold NaN"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("suffix", [".pth", ".ckpt"])
def test_what_is_not_clear_is_refused_in_one_line(tmp_path, name, suffix):
    content, words = REFUSED[name]
    if suffix == ".ckpt" and any("float8" in str(v.dtype) for v in content.values() if hasattr(v, "dtype")):
        suffix = ".safetensors"
    with refused(words, f"vae{suffix}") as caught:
        load_vae(saved(content, tmp_path, suffix))
    assert caught is None


def test_another_network_is_left_to_comfyui():
    for content in (UNET, {"state_dict": put("decoder.", UNET), "epoch": 3}):
        with pytest.raises(LayoutError, match="not a Wan"):
            read_checkpoint(content)


@pytest.mark.parametrize("dtype", ["U8", "F4", "F8_E8M0"])
def test_other_models_are_not_read(tmp_path, dtype):
    """A file with a hole of 256 GB and tensors of unknown kinds around the VAE."""
    size, plain = 1 << 38, saved(put("vae.", SMALL), tmp_path, ".safetensors").read_bytes()
    start = 8 + int.from_bytes(plain[:8], "little")
    header = json.loads(plain[8:start])
    for entry in header.values():
        entry["data_offsets"] = [size + offset for offset in entry["data_offsets"]]
    end = max(entry["data_offsets"][1] for entry in header.values())
    header["a.weight"] = {"dtype": dtype, "shape": [size], "data_offsets": [0, size]}
    header["z.none"] = {"dtype": dtype, "shape": [0], "data_offsets": [end, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "whole.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(size, 1)
        file.write(plain[start:])
    weights = read_checkpoint(tmp_path / "whole.safetensors").weights
    assert all(torch.equal(weights[key], value) for key, value in SMALL.items())


@pytest.mark.parametrize("time", ["none", "cut", "whole"])
@pytest.mark.parametrize("family", ["wan2.1", "wan2.2"])
def test_weights_of_single_frames_give_the_frame_of_a_video_vae(tmp_path, family, time):
    whole = load_vae(WHOLE[family], dtype=torch.float32)
    for rename in (lambda state, _: state, diffusers):
        content = put("vae.", rename(flat(WHOLE[family], time), family))
        vae = load_vae(saved(content, tmp_path, ".safetensors"), dtype=torch.float32)
        assert vae.config.family == family
        latent = latent_for(vae, 1, 48, 32, batch=2)
        assert torch.equal(vae.decode(latent), whole.decode(latent))
        frames = random_frames(2, 3, 1, 48, 32)
        assert torch.equal(vae.encode(frames), whole.encode(frames))
    again = load_vae(vae.state_dict(), dtype=torch.float32)
    assert torch.equal(again.decode(latent), whole.decode(latent))
    video, latents = random_frames(1, 3, 5, 48, 32), latent.repeat(1, 1, 2, 1, 1)
    for call in (
        lambda: vae.encode(video), lambda: list(vae.encode_stream(iter(video.split(1, 2)))),
        lambda: vae.decode(latents), lambda: list(vae.decode_stream(iter(latents.split(1, 2)))),
    ):  # fmt: skip
        with refused("expected 1: the weights of this VAE are 2D"):
            call()


def test_pruned_weights_of_single_frames_have_their_own_widths():
    state = {k: v[..., :24, :, :, :, :] if v.ndim == 5 else v for k, v in flat(SMALL).items()}
    assert load_vae(state).config.taps == 1


def test_a_tiny_decoder_is_found_too(tmp_path):
    state, latent = random_tiny(16), random_latent(1, 16, 2, 3, 4)
    plain = load_tiny_decoder(saved(state, tmp_path, ".pth"), dtype=torch.float32, normalizes=False)
    path = saved({"ema": put("vae.", state), "model": TRAINED}, tmp_path, ".pth")
    found = load_tiny_decoder(path, dtype=torch.float32, normalizes=False)
    assert torch.equal(found.decode(latent), plain.decode(latent))


def test_the_command_reads_them_and_names_what_it_leaves_out(tmp_path, run):
    path = saved({"generator": {"state_dict": SMALL}, **TRAINED}, tmp_path, ".ckpt")
    code, lines, notes = run("info", path)
    assert code == 0
    assert "family        wan2.1" in lines
    assert len([each for each in notes if "left out 605 not of the VAE (global_step" in each]) == 1
    path = saved(flat(SMALL), tmp_path, ".safetensors")
    code, lines, _ = run("info", path)
    assert (code, "compression   8 in space, 1 in time" in lines) == (0, True)
    latents = {"latent": random_latent(1, 16, 2, 4, 4)}
    save_file(latents, tmp_path / "video.safetensors")
    code, _, notes = run("decode", tmp_path / "video.safetensors", "-o", tmp_path / "v.mp4", "--vae", path)
    assert code == 1 and "got 2 frames; expected 1: the weights of this VAE are 2D" in notes[-1], notes
    assert not (tmp_path / "v.mp4").exists()
