"""Diffusion models by ComfyUI's loaders with random or quantised weights; runs of a sampler."""

import importlib
import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

KIND = "wan21-t2v"

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


def random_network(path, settings, seed=0, **options):
    """A network of a class in comfy.ldm, whose weights keep activations at about one."""
    file, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(f"comfy.ldm.{file}"), name)
    network = cls(**settings, device="cpu", **options)
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in network.state_dict().items():
        if "motion_encoder" in key:
            tensor.zero_()  # 30 M numbers, for the pixels of a face that no test shows
        elif tensor.is_floating_point():
            numbers = torch.randn(tensor.shape, generator=generator)
            if key.endswith("modulation"):
                numbers = 0.3 * numbers
            elif tensor.ndim > 1:
                numbers = numbers / tensor[0].numel() ** 0.5
            else:
                numbers = 0.1 * numbers + (1 if key.endswith("weight") else 0)
            tensor.copy_(numbers)
    return network


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
