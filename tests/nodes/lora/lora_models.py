"""Small diffusion models of ComfyUI's own classes, LoRA files for them, and runs of a sampler."""

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.lora.dits import random_network
from fast_video_vae.tests.nodes.vae.pairs import node, relative_error  # noqa: F401

# Relative error of float32 rounding: at most 2e-6 was measured in three steps.
ROUNDING = 1e-5
# Least change of a LoRA in the tests, which distinguishes a run with it from one without.
EFFECT = 1e-2

# Kinds of tensors that ComfyUI's loaders apply too, and all kinds.
COMMON = ("pairs", "biases", "norms")
ALL = (*COMMON, "modulations")

KIND = "wan21-t2v"
MODES = ("auto", "stream", "bypass", "merged")
UNMERGED = MODES[:3]

FP8 = {"format": "float8_e4m3fn"}  # of a quantised layer, as ComfyUI's files describe it


@dataclass(frozen=True)
class Kind:
    """A model of the tests."""

    network: str  # module and class in comfy.ldm
    settings: dict  # arguments of the network, equal to those that ComfyUI detects
    base: str  # class that ComfyUI must detect, in comfy.model_base
    latent: tuple[int, int] = (16, 3)  # channels and frames
    text: int = 4096  # size of an embedding of a token
    more: dict = field(default_factory=dict)  # of conditionings, in addition to the text


def _wan(**settings):
    return {"dim": 128, "ffn_dim": 256, "num_heads": 1, "num_layers": 2, "in_dim": 16} | settings


def _noise(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


_IMAGE = SimpleNamespace(penultimate_hidden_states=_noise(1, 257, 1280))

KINDS = {
    "wan21-t2v": Kind("wan.model.WanModel", _wan(model_type="t2v"), "WAN21"),
    "wan21-i2v": Kind(
        "wan.model.WanModel",
        _wan(model_type="i2v", in_dim=36),
        "WAN21",
        more={
            "clip_vision_output": _IMAGE,
            "concat_latent_image": _noise(1, 16, 3, 8, 8),
            "concat_mask": torch.ones(1, 1, 3, 8, 8),
        },
    ),
    "wan22-14b-i2v": Kind(
        "wan.model.WanModel",
        _wan(model_type="t2v", in_dim=36),
        "WAN21",
        more={"concat_latent_image": _noise(1, 16, 3, 8, 8)},
    ),
    "wan22-5b": Kind(
        "wan.model.WanModel",
        _wan(model_type="t2v", in_dim=48, out_dim=48),
        "WAN22",
        latent=(48, 3),
    ),
    "vace": Kind(
        "wan.model.VaceWanModel",
        _wan(model_type="vace", vace_in_dim=96, vace_layers=2),
        "WAN21_Vace",
        more={"vace_frames": [_noise(1, 32, 3, 8, 8)]},
    ),
    "animate": Kind(
        "wan.model_animate.AnimateWanModel",
        # There is a face adapter for every five blocks.
        _wan(model_type="animate", in_dim=36, ffn_dim=128, num_layers=5),
        "WAN22_Animate",
        more={"clip_vision_output": _IMAGE, "pose_video_latent": _noise(1, 16, 2, 8, 8)},
    ),
    "qwen-image": Kind(
        "qwen_image.model.QwenImageTransformer2DModel",
        {"num_layers": 1, "num_attention_heads": 1, "joint_attention_dim": 64},
        "QwenImage",
        latent=(16, 1),
        text=64,
    ),
}


def random_weights(kind, seed=0):
    """A state dict of a model whose activations stay at about one."""
    import comfy.ops

    known = KINDS[kind]
    options = {"operations": comfy.ops.disable_weight_init, "dtype": torch.float32}
    return random_network(known.network, known.settings, seed, **options).state_dict()


def load_model(kind, state=None, **options):
    """A MODEL, as ComfyUI's loader makes it of a file; what it says of the size is the file's."""
    import comfy.model_base
    import comfy.model_detection as detection
    import comfy.sd

    state = random_weights(kind) if state is None else dict(state)
    detect, known = detection.detect_unet_config, KINDS[kind]
    with pytest.MonkeyPatch.context() as patch:
        if kind == "qwen-image":  # its sizes are not detected
            sized = lambda *args, **more: detect(*args, **more) | known.settings  # noqa: E731
            patch.setattr(detection, "detect_unet_config", sized)
        model = comfy.sd.load_diffusion_model_state_dict(state, model_options=options)
    assert type(model.model) is getattr(comfy.model_base, known.base)
    return model


def quantised(state, form, wanted):
    """A file whose matrices with the names `wanted` are quantised, one scale for each.

    `form` is the description of each layer, as ComfyUI reads it; int8 has a scale for each output.
    """
    result = dict(state)
    for key, value in state.items():
        if not (key.endswith(".weight") and value.ndim == 2 and wanted(key)):
            continue
        layer = key.removesuffix(".weight")
        if form["format"] == "int8_tensorwise":
            scale = value.abs().amax(1, keepdim=True) / 127
            result[key] = (value / scale).round().to(torch.int8)
        else:
            scale = value.abs().max().float() / 448
            result[key] = (value / scale).to(torch.float8_e4m3fn)
        result[f"{layer}.weight_scale"] = scale
        description = list(json.dumps(form).encode())
        result[f"{layer}.comfy_quant"] = torch.tensor(description, dtype=torch.uint8)
    return result


def quantised_layers(model):
    return {
        name: module
        for name, module in model.model.named_modules()
        if type(getattr(module, "weight", None)).__name__ == "QuantizedTensor"
    }


def dequantised(file):
    """The model as if its file had the values of the quantised weights in float32."""
    values = {
        f"{name}.weight".removeprefix("diffusion_model."): module.weight.dequantize().clone()
        for name, module in quantised_layers(load_model(KIND, file)).items()
    }
    assert values
    return load_model(KIND, random_weights(KIND) | values)


def inputs(kind, seed=1):
    """Noise, and conditionings with the text and without."""
    known = KINDS[kind]
    channels, frames = known.latent
    texts = (
        [[_noise(1, 8, known.text, seed=seed + number), dict(known.more)]] for number in (1, 2)
    )
    return _noise(1, channels, frames, 8, 8, seed=seed), *texts


@torch.inference_mode()
def sample(model, kind=KIND, *, steps=2, cfg=4.0, seed=1):
    """A run of ComfyUI's sampler; the latent."""
    import comfy.sample

    noise, positive, negative = inputs(kind, seed)
    return comfy.sample.sample(
        model, noise, steps, cfg, "euler", "simple", positive, negative,
        torch.zeros_like(noise), seed=1, disable_pbar=True,
    )  # fmt: skip


def lora_for(state, *, rank=4, seed=3, parts=COMMON, amount=0.4):
    """A LoRA of all linear layers, convolutions, biases and norms of a state dict.

    A delta of a weight is about `amount` of it.
    """
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for key, value in state.items():
        if "motion_encoder" in key or not value.is_floating_point():
            continue
        name, _, leaf = f"diffusion_model.{key}".rpartition(".")
        if leaf == "weight" and value.ndim > 1 and "pairs" in parts:
            down = torch.randn((rank, *value.shape[1:]), generator=generator)
            ones = [1] * (value.ndim - 2)
            up = torch.randn((len(value), rank, *ones), generator=generator)
            lora[f"{name}.lora_down.weight"] = down / down[0].numel() ** 0.5
            lora[f"{name}.lora_up.weight"] = up * (2 * amount / rank**0.5)
            lora[f"{name}.alpha"] = torch.tensor(rank / 2)
        elif leaf == "weight" and value.ndim == 1 and "norms" in parts:
            lora[f"{name}.diff"] = 0.3 * torch.randn(value.shape, generator=generator)
        elif leaf == "bias" and "biases" in parts:
            lora[f"{name}.diff_b"] = 0.3 * torch.randn(value.shape, generator=generator)
        elif leaf == "modulation" and "modulations" in parts:
            lora[f"{name}.{leaf}.diff"] = 0.3 * torch.randn(value.shape, generator=generator)
    return lora


def save_lora(tensors, name="lora.safetensors"):
    """Put a file where ComfyUI's loaders and ours find it; its name."""
    import folder_paths

    folder = Path(folder_paths.get_folder_paths("loras")[0])
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    return name


@functools.cache
def lora(seed=0, kind=KIND, parts=COMMON):
    """The file of a LoRA of a kind of models; another seed has other weights."""
    name = f"{kind}-{seed}-{'-'.join(parts)}.safetensors"
    return save_lora(lora_for(random_weights(kind), seed=seed, parts=parts), name)


def stack(name, strength="1.0", blocks="", before=None):
    """Return the output of LoRA Stack (Fast)."""
    from fast_video_vae.nodes.lora.nodes import LoraStack

    given = {} if before is None else {"stack": before}
    inputs = {"lora_name": name, "strength": str(strength), "blocks": blocks, **given}
    assert LoraStack.validate_inputs(strength=str(strength), blocks=blocks) is True
    return _run(LoraStack, inputs)[0]


def apply(model, given, mode="auto", phase="auto"):
    """Return the outputs of Apply LoRA (Fast): a model and a report."""
    from fast_video_vae.nodes.lora.nodes import ApplyLora

    return _run(ApplyLora, {"model": model, "stack": given, "mode": mode, "phase": phase})


def fast(model, name, strength="1.0", mode="auto"):
    """A model with one LoRA, by our nodes."""
    return apply(model, stack(name, strength), mode)[0]


def core(model, name, strength=1.0):
    """A model with one LoRA, by ComfyUI's node."""
    return node("LoraLoaderModelOnly", model, name, strength)[0]


def _run(cls, inputs):
    return cls.PREPARE_CLASS_CLONE(None).EXECUTE_NORMALIZED(**inputs).args


def session_of(model):
    """Return the session of a model that has run."""
    from fast_video_vae.nodes.lora.apply import KEY

    (session,) = model.get_attachment(KEY).sessions.values()
    return session


def weights(model):
    """Return the tensors of a model by name, as bits; they must not change."""
    found = {}
    for name, value in [*model.model.named_parameters(), *model.model.named_buffers()]:
        data = getattr(value, "_qdata", value).detach().contiguous()
        bits = hashlib.sha1(data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        found[name] = id(value), bits
    return found


def bits(model):
    """The same without the identity: ComfyUI may give a model other tensors with the same bits."""
    return {name: found for name, (_, found) in weights(model).items()}


def nothing_left(model):
    """Whether no module has a function or a patch on its weights."""
    return not any(
        getattr(module, name, None)
        for module in model.model.modules()
        for name in ("weight_function", "bias_function")
    )
