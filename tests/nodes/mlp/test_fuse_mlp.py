"""Fuse SwiGLU MLPs: every class of the table against its own forward, and whole models.

With LoRAs, offloading and quantised weights, and after the patches are removed.
"""

import importlib
import inspect
import logging
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from fast_video_vae.tests.nodes.dits import MLPS, model_of, output, patcher
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

CPU = torch.device("cpu")
LLAMA = {"hidden_size": 8, "intermediate_size": 16, "mlp_activation": "silu"}

# The arguments of every class in the table.
ROWS = {
    "comfy.image_encoders.dino2.SwiGLUFFN": (8,),
    "comfy.ldm.ace.ace_step15.MLP": (8, 16),
    "comfy.ldm.audio.dit.GLU": (8, 16, nn.SiLU()),
    "comfy.ldm.aura.mmdit.MLP": (8,),
    "comfy.ldm.flux.layers.SiLUActivation": (),
    "comfy.ldm.flux.layers.YakMLP": (8, 16),
    "comfy.ldm.genmo.joint_model.layers.FeedForward": (8, 16, 8, None),
    "comfy.ldm.hidream.model.FeedForwardSwiGLU": (8, 16, 8),
    "comfy.ldm.krea2.model.SwiGLU": (8, 4),
    "comfy.ldm.lens.model.GateMLP": (8, 16),
    "comfy.ldm.lumina.model.FeedForward": (8, 16, 8, None),
    "comfy.ldm.minimax_music.dit.GLU": (8, 16),
    "comfy.ldm.modules.diffusionmodules.mmdit.SwiGLUFeedForward": (8, 16, 8),
    "comfy.ldm.omnigen.omnigen2.LuminaFeedForward": (8, 16, 8),
    "comfy.ldm.seedvr.model.SwiGLUMLP": (8, 4, 8),
    "comfy.text_encoders.llama.MLP": (SimpleNamespace(**LLAMA),),
}
LUMINA, YAK = "comfy.ldm.lumina.model.FeedForward", "comfy.ldm.flux.layers.YakMLP"


def class_of(path):
    file, _, name = path.rpartition(".")
    return getattr(importlib.import_module(file), name)


def block_of(path=YAK, *arguments, dtype=torch.float32):
    """An MLP of a class of ComfyUI with random positive weights."""
    import comfy.ops

    cls, operations = class_of(path), comfy.ops.disable_weight_init
    given = {"operations": operations, "ops": operations, "device": CPU, "dtype": dtype}
    given["operation_settings"] = dict(given)
    taken = given.keys() & inspect.signature(cls).parameters
    block = cls(*(arguments or ROWS[path]), **{key: given[key] for key in taken}).to(dtype)
    for tensor in block.state_dict().values():
        tensor.uniform_(0, 1 / tensor.shape[-1])
    return block


@pytest.fixture
def kernel(monkeypatch):
    """A spy on the kernel's calls."""
    from fast_video_vae.nodes.mlp import fuse

    spy = Mock(wraps=fuse.silu_mul_by_kernel)
    monkeypatch.setattr(fuse, "silu_mul_by_kernel", spy)
    return spy


def fused(model):
    """Return the node's output for a MODEL."""
    from fast_video_vae.nodes.mlp.nodes import FuseMLP

    with torch.inference_mode():
        return FuseMLP.execute(model=model).args[0]


@contextmanager
def loaded(model, budget_bytes=0):
    """Load a MODEL with its patches; a budget limits the loaded bytes of weights."""
    model.patch_model(CPU, lowvram_model_memory=budget_bytes)
    try:
        yield model
    finally:
        model.unpatch_model(CPU)


def outputs(block, *args, **named):
    """Return the outputs of a module, fused and original."""
    model, expected = model_of(nn.Sequential(block)), block(*args, **named)
    with loaded(fused(model)):
        return block(*args, **named), expected


@pytest.mark.parametrize("name", MLPS)
def test_fused_mlps_give_the_same_output(name, kernel, caplog):
    model = patcher(name)
    expected = output(name, model)
    with caplog.at_level(logging.INFO):
        fast = fused(model)
    ((cls, count),) = MLPS[name].items()
    assert f"fused the SwiGLU MLPs of Model: {count} {cls}" in caplog.messages[-1]
    assert not model.object_patches
    assert fused(fast) is fast
    with loaded(fast):
        assert fused(model).object_patches == fast.object_patches
        assert relative_error(output(name, fast), expected) <= 1e-5
    assert kernel.call_count == count
    assert torch.equal(output(name, model), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ROWS)
def test_every_class_computes_what_its_own_code_does(path, dtype, kernel):
    """A class that a release of ComfyUI has rewired fails here."""
    from fast_video_vae.nodes.mlp.fuse import WIRINGS

    assert ROWS.keys() == WIRINGS.keys()
    block, x = block_of(path, dtype=dtype), torch.randn(2, 4, 8).to(dtype)
    x[0, 2], x[0, 3, 0] = 1500, torch.nan  # products above the largest float16, and not a number
    result, expected = outputs(block, x)
    assert kernel.call_count == 1
    saturates = dtype == torch.float16 and path == LUMINA
    assert expected.isfinite().all() == saturates
    assert expected[0, 2].isinf().any() == (dtype == torch.float16 and not saturates)
    # Stock also rounds SiLU and the product, half an eps each; this bounds both.
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=bound, atol=bound, equal_nan=True)
    kernel.configure_mock(side_effect=lambda *_: None)  # a device without one
    with torch.inference_mode():
        result, expected = outputs(block, x=x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


# A class or a module, and an attribute that another pack or another release has changed.
CHANGED = [
    ("class", YAK, "forward", lambda self, x: x),
    ("module", YAK, "forward", lambda x: x),
    ("class", LUMINA, "_forward_silu_gating", lambda self, x, y: x),
    ("module", LUMINA, "_forward_silu_gating", torch.mul),
    ("module", YAK, "__class__", nn.Module),
    ("module", YAK, "dropout", nn.Dropout()),
    ("module", YAK, "act_fn", nn.GELU()),
    ("module", YAK, "up_proj", nn.Linear(8, 32)),  # another size
    ("module", YAK, "up_proj", None),
    ("module", YAK, "scale", nn.Parameter(torch.ones(()))),
    ("module", "comfy.text_encoders.llama.MLP", "activation", nn.functional.gelu),
]


@pytest.mark.parametrize(("what", "path", "name", "value"), CHANGED)
def test_a_changed_mlp_is_unchanged_with_a_log_line(what, path, name, value, monkeypatch, caplog):
    block = block_of(path)
    if name == "__class__":  # a subclass of the same name
        names = {"__module__": type(block).__module__, "__qualname__": type(block).__qualname__}
        value = type(type(block).__name__, (type(block),), names)
    monkeypatch.setattr(block if what == "module" else type(block), name, value, raising=False)
    model = model_of(nn.Sequential(block))
    with caplog.at_level(logging.INFO):
        assert fused(model) is model
    assert "Model has no SwiGLU MLPs to fuse; the model is unchanged" in caplog.messages[-1]


def test_a_network_that_is_no_module_is_unchanged():
    from comfy.model_patcher import ModelPatcher

    engine = ModelPatcher(nn.Linear(2, 2), CPU, CPU)
    engine.model.diffusion_model = lambda x: x  # another pack's inference engine
    assert fused(engine) is engine


@pytest.mark.parametrize("budget_bytes", [0, 1], ids=["loaded", "offloaded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of the weights
def test_a_lora_works_in_every_order(dtype, budget_bytes, kernel):
    import comfy.ops
    from comfy.weight_adapter import LoRAAdapter

    name = "hidream"
    model = patcher(name, dtype, comfy.ops.manual_cast)
    stock, fast, with_lora, lora = output(name, model), fused(model), model.clone(), {}
    for key, weight in model.model.state_dict().items():
        if f"{key.rsplit('.', 2)[0]}.__class__" in fast.object_patches:
            pair = torch.randn(len(weight), 2), torch.randn(2, weight.shape[1]) / 9
            lora[key] = LoRAAdapter(set(), (*pair, 2.0, None, None, None))
    assert set(with_lora.add_patches(lora, 0.5)) == set(lora)
    with loaded(with_lora, budget_bytes):
        expected = output(name, model)
    assert relative_error(expected, stock) > 0.01
    assert not kernel.called
    fast.add_patches(lora, 0.5)
    for patched in (fast, fused(with_lora)):
        with loaded(patched, budget_bytes):
            assert patched.model.model_lowvram == bool(budget_bytes)
            assert relative_error(output(name, model), expected) <= 1e-5
    assert kernel.called
    assert torch.equal(output(name, model), stock)


# nvfp4 and mxfp8 do not run on a CPU: it cannot swizzle their scales.
@pytest.mark.parametrize(
    "algorithm", ["float8_e4m3fn", "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8"]
)
def test_every_layout_of_quantised_weights_works(algorithm, kernel):
    import comfy.ops
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    path, dtype = "comfy.ldm.ace.ace_step15.MLP", torch.bfloat16
    block, operations = block_of(path, 256, 512, dtype=dtype), comfy.ops.mixed_precision_ops()
    x, layout = torch.randn(1, 9, 256, dtype=dtype), QUANT_ALGOS[algorithm]["comfy_tensor_layout"]
    truth = block(x).float()
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(block, name).weight.detach()
        layer = operations.Linear(*weight.shape[::-1], bias=False, dtype=dtype)
        weight = QuantizedTensor.from_float(weight, layout)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.quant_format, layer.layout_type = algorithm, layout
        setattr(block, name, layer)
    with torch.no_grad():
        result, expected = (each.float() for each in outputs(block, x))
    assert kernel.call_count == 1
    # The product is rounded before it is quantised, which costs less than the quantisation.
    assert (result - expected).square().mean() < (expected - truth).square().mean() / 4


def test_unloading_restores_the_network_after_another_node_patches_forward():
    block, x = block_of(), torch.randn(3, 8)
    model, cls, before = model_of(nn.Sequential(block)), type(block), dict(vars(block))
    expected, keys, fast = block(x), list(model.model.state_dict()), fused(model)
    with loaded(fast):
        assert list(model.model.state_dict()) == keys
        assert type(block) is not cls
    assert (type(block), vars(block)) == (cls, before)
    fast.add_object_patch("diffusion_model.0.forward", lambda x: x)
    with loaded(fast):
        assert block(x) is x
    # ComfyUI leaves on the module the forward that it read while the fused class was set.
    torch.testing.assert_close(block(x), expected)
    assert fused(model) is model


def test_gradients_flow(kernel):
    x, block = torch.randn(2, 5, 8, requires_grad=True), block_of()
    model = model_of(nn.Sequential(block))
    leaves = [x, *block.requires_grad_(True).parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), leaves)
    with loaded(fused(model)):
        result = torch.autograd.grad(block(x).square().sum(), leaves)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    assert kernel.call_args.args[2] is None  # autograd needs the projections


def test_it_overwrites_a_projection_unless_it_is_used_elsewhere(kernel):
    block, kept, x = block_of(), [], torch.randn(3, 8)
    with loaded(fused(model_of(nn.Sequential(block)))):
        block(x)
        block.gate_proj.register_forward_hook(lambda module, args, y: kept.append(y))
        block(x)
    assert [call.args[2] is None for call in kernel.call_args_list] == [False, True]
    assert torch.equal(kept[0], block.gate_proj(x))


def test_layers_that_return_another_dtype_work(kernel):
    block = block_of()
    block.gate_proj.register_forward_hook(lambda module, args, y: y.double())
    block.down_proj.register_forward_pre_hook(lambda module, args: args[0].float())
    assert torch.equal(*outputs(block, torch.randn(3, 8)))
    assert not kernel.called


def test_torch_compile_runs_the_module_s_own_code(kernel):
    block, x = block_of(), torch.randn(3, 8)
    expected = block(x)
    with loaded(fused(model_of(nn.Sequential(block)))):
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
    assert not kernel.called
