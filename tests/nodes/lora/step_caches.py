"""Quantised models whose layers are skipped in some calls, and counts of what a run computes."""

import contextlib
import json
from collections import Counter

import pytest
import torch

from fast_video_vae.tests.nodes.lora.lora_errors import quantised_layers
from fast_video_vae.tests.nodes.vae.pairs import v3_node

STEPS = 5
# The caches skip each step that they may: the third and the fourth. Which ones they skip at their
# default of 0.2 depends on the latent, and so on the LoRA.
REUSE, END = 1000.0, 0.7


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
            scale = value.abs().max() / 448
            result[key] = (value / scale).to(torch.float8_e4m3fn)
        result[f"{layer}.weight_scale"] = scale
        description = list(json.dumps(form).encode())
        result[f"{layer}.comfy_quant"] = torch.tensor(description, dtype=torch.uint8)
    return result


@contextlib.contextmanager
def products(model):
    """Yield the number of quantised products with each weight, in the block.

    ComfyUI multiplies with a quantised tensor, or calls comfy-kitchen with its int8 values. An fp8
    weight is dequantised for such a product unless the input is fp8, too.
    """
    import comfy_kitchen.tensor

    count = Counter()
    owners = {
        module.weight._qdata.untyped_storage().data_ptr(): name
        for name, module in quantised_layers(model).items()
    }

    def owner(tensors):
        """Return the layer of the weight in a quantised product of these tensors."""
        data = [getattr(each, "_qdata", each) for each in tensors if isinstance(each, torch.Tensor)]
        data = [each for each in data if each.dtype in (torch.int8, torch.float8_e4m3fn)]
        names = [owners.get(each.untyped_storage().data_ptr()) for each in data]
        if len(data) == 2 or any(each.dtype == torch.int8 for each in data):
            return next(filter(None, names), None)
        return None

    kind, int8_linear = comfy_kitchen.tensor.QuantizedTensor, comfy_kitchen.int8_linear
    dispatch = kind.__torch_dispatch__

    def operation(cls, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("linear", "mm", "addmm"):
            count[owner(args)] += 1
        return dispatch(function, types, args, kwargs)

    def linear(*args, **kwargs):
        count[owner(args)] += 1
        return int8_linear(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__torch_dispatch__", classmethod(operation))
        patch.setattr(comfy_kitchen, "int8_linear", linear)
        yield count
    del count[None]


@contextlib.contextmanager
def calls(model):
    """Yield a list of the calls of the network in the block, each as the blocks that it called."""
    network, seen = model.model.diffusion_model, []
    handles = [network.register_forward_pre_hook(lambda *_: seen.append([]))]
    for number, block in enumerate(network.blocks):
        note = lambda *_, number=number: seen[-1].append(number)  # noqa: E731
        handles.append(block.register_forward_pre_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def easy_cache(model):
    """Skip the network in two steps, within its forward; the latent is changed in place."""
    return _cached(model, "EasyCacheNode")


def lazy_cache(model):
    """Skip two steps, outside the calls of the model."""
    return _cached(model, "LazyCacheNode")


def _cached(model, name):
    return v3_node(
        "nodes_easycache", name, model=model, reuse_threshold=REUSE, start_percent=0.0,
        end_percent=END, verbose=False,
    )[0]  # fmt: skip


def skip_layer(model):
    """Call the network once more in each step, without its last block."""
    return v3_node(
        "nodes_slg", "SkipLayerGuidanceDiT", model=model, scale=1.0, start_percent=0.0,
        end_percent=1.0, double_layers="1", single_layers="",
    )[0]  # fmt: skip


def nothing(model):
    """Skip nothing."""
    return model
