"""Nodes for a server: a text encoder, and what ComfyUI has unloaded of large models.

ComfyUI is asked for more memory than any GPU has, so that it unloads whatever it may.
"""

import json

import comfy.model_management
import comfy.model_patcher
import torch

EVENTS = []
OF_INTEREST = ("Encoder", "WAN21")


class Encoder(torch.nn.Linear):
    """Replaces a text encoder."""


@torch.inference_mode()
def encode(seed):
    if not ENCODERS:
        device = comfy.model_management.get_torch_device()
        made = comfy.model_patcher.CoreModelPatcher
        ENCODERS.append(made(Encoder(4096, 4096), device, torch.device("cpu")))
    comfy.model_management.load_models_gpu(ENCODERS)
    weight = ENCODERS[0].model.weight
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(1, 8, 4096, generator=generator).to(weight)
    return [[(tokens @ weight).cpu(), {}]]


def unloads(samples):
    events = json.dumps(EVENTS)
    EVENTS.clear()
    return events


def recorded(kind, method):
    real = getattr(kind, method)

    def record(patcher, *args, **kwargs):
        name = type(patcher.model).__name__
        nothing = method == "detach" and not (*args, *kwargs.values(), True)[0]
        if name in OF_INTEREST and not nothing:
            EVENTS.append((method, name))
        return real(patcher, *args, **kwargs)

    setattr(kind, method, record)


ENCODERS = []
for patcher in (comfy.model_patcher.ModelPatcher, comfy.model_patcher.ModelPatcherDynamic):
    for method in ("detach", "partially_unload"):
        if method in vars(patcher):
            recorded(patcher, method)
comfy.model_management.EXTRA_RESERVED_VRAM = 10**13


def _node(function, returns, **required):
    return type(
        function.__name__,
        (),
        {
            "CATEGORY": "tests",
            "FUNCTION": "run",
            "RETURN_TYPES": (returns,),
            "INPUT_TYPES": classmethod(lambda cls: {"required": required}),
            "run": lambda self, **given: (function(**given),),
        },
    )


NODE_CLASS_MAPPINGS = {
    "Test_Encode": _node(encode, "CONDITIONING", seed=("INT", {})),
    "Test_Unloads": _node(unloads, "STRING", samples=("LATENT",)),
}
