"""LoRA files for diffusion models; models with them by our nodes and by ComfyUI's; their bits."""

import functools
import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.diffusion import KIND, random_weights
from fast_video_vae.tests.nodes.vae.pairs import node, relative_error  # noqa: F401

# Relative error of float32 rounding: at most 2e-6 was measured in three steps.
ROUNDING = 1e-5
# Least change of a LoRA in the tests, which distinguishes a run with it from one without.
EFFECT = 1e-2

# Kinds of tensors that ComfyUI's loaders apply too, and all kinds.
COMMON = ("pairs", "biases", "norms")
ALL = (*COMMON, "modulations")

MODES = ("auto", "stream", "bypass", "merged")
UNMERGED = MODES[:3]


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
