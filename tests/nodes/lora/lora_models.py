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
    more: dict = field(default_factory=dict)  # of conditionings, in addition to the text
    latent: tuple[int, int] = (16, 3)  # channels and frames
    text: int = 4096  # size of an embedding of a token


def _noise(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _wan(model_type, network="model.WanModel", base="WAN21", more=None, latent=(16, 3), **settings):
    known = {"dim": 128, "ffn_dim": 256, "num_heads": 1, "num_layers": 2, "in_dim": 16}
    known |= {"model_type": model_type, **settings}
    return Kind(f"wan.{network}", known, base, more or {}, latent)


_IMAGE = {"clip_vision_output": SimpleNamespace(penultimate_hidden_states=_noise(1, 257, 1280))}
_VIDEO = {"concat_latent_image": _noise(1, 16, 3, 8, 8)}
_MASK = {"concat_mask": torch.ones(1, 1, 3, 8, 8)}

KINDS = {
    "wan21-t2v": _wan("t2v"),
    "wan21-i2v": _wan("i2v", more=_IMAGE | _VIDEO | _MASK, in_dim=36),
    "wan22-14b-i2v": _wan("t2v", more=_VIDEO, in_dim=36),
    "wan22-5b": _wan("t2v", base="WAN22", latent=(48, 3), in_dim=48, out_dim=48),
    "vace": _wan(
        "vace", "model.VaceWanModel", "WAN21_Vace", {"vace_frames": [_noise(1, 32, 3, 8, 8)]},
        vace_in_dim=96, vace_layers=2,
    ),
    "animate": _wan(
        "animate", "model_animate.AnimateWanModel", "WAN22_Animate",
        _IMAGE | {"pose_video_latent": _noise(1, 16, 2, 8, 8)},
        in_dim=36, ffn_dim=128, num_layers=5,  # there is a face adapter for every five blocks
    ),
    "qwen-image": Kind(
        "qwen_image.model.QwenImageTransformer2DModel",
        {"num_layers": 1, "num_attention_heads": 1, "joint_attention_dim": 64},
        "QwenImage", latent=(16, 1), text=64,
    ),
}  # fmt: skip


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


def dequantised(file, kind=KIND):
    """The model as if its file had the values of the quantised weights in float32."""
    values = {
        f"{name}.weight".removeprefix("diffusion_model."): module.weight.dequantize().clone()
        for name, module in quantised_layers(load_model(kind, file)).items()
    }
    assert values
    return load_model(kind, random_weights(kind) | values)


def inputs(kind):
    """Noise, and conditionings with the text and without."""
    known = KINDS[kind]
    channels, frames = known.latent
    texts = (_noise(1, 8, known.text, seed=seed) for seed in (2, 3))
    both = ([[each, dict(known.more)]] for each in texts)
    return _noise(1, channels, frames, 8, 8, seed=1), *both


@torch.inference_mode()
def sample(model, kind=KIND, *, steps=2):
    """A run of ComfyUI's sampler; the latent."""
    import comfy.sample

    noise, positive, negative = inputs(kind)
    return comfy.sample.sample(
        model, noise, steps, 4.0, "euler", "simple", positive, negative,
        torch.zeros_like(noise), seed=1, disable_pbar=True,
    )  # fmt: skip


def lora_for(state, *, rank=4, seed=3, parts=COMMON, amount=0.4):
    """A LoRA of all linear layers, convolutions, biases and norms of a state dict.

    A delta of a weight is about `amount` of it.
    """
    generator, lora = torch.Generator().manual_seed(seed), {}
    differences = {
        "weight": ("norms", "diff"),
        "bias": ("biases", "diff_b"),
        "modulation": ("modulations", "modulation.diff"),
    }

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    for key, value in state.items():
        name, _, leaf = f"diffusion_model.{key}".rpartition(".")
        if "motion_encoder" in key or not value.is_floating_point():
            continue
        if leaf == "weight" and value.ndim > 1:
            if "pairs" in parts:
                down = noise(rank, *value.shape[1:])
                up = noise(len(value), rank, *[1] * (value.ndim - 2))
                lora[f"{name}.lora_down.weight"] = down / down[0].numel() ** 0.5
                lora[f"{name}.lora_up.weight"] = up * (2 * amount / rank**0.5)
                lora[f"{name}.alpha"] = torch.tensor(rank / 2)
        elif leaf in differences and differences[leaf][0] in parts:
            lora[f"{name}.{differences[leaf][1]}"] = 0.3 * noise(*value.shape)
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
    """Return the tensors of a model by name, as bits, and the functions on them; to be equal."""
    found = {}
    for name, value in [*model.model.named_parameters(), *model.model.named_buffers()]:
        data = getattr(value, "_qdata", value).detach().contiguous()
        bits = hashlib.sha1(data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        module, _, leaf = name.rpartition(".")
        functions = getattr(model.model.get_submodule(module), f"{leaf}_function", ())
        found[name] = id(value), bits, len(functions)
    return found


def bits(model):
    """The bits without the identity: ComfyUI may give a model other tensors with the same bits."""
    return {name: found for name, (_, found, _) in weights(model).items()}
