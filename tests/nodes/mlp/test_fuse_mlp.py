"""Fuse SwiGLU MLPs: which classes are recognised, and small models of ComfyUI's, fused or not.

With LoRAs, offloading and quantised weights, and after the patches are removed.
"""

import importlib
import logging
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import missing
from fast_video_vae.tests.nodes.dits import MLPS, model_of, output, patcher
from fast_video_vae.tests.nodes.mlp.mlps import (
    GATED,
    MLP,
    UNLIKE,
    GateAlone,
    Halves,
    Nest,
    Saturated,
    SecondHalf,
    TwoSteps,
)
from fast_video_vae.tests.nodes.server import Workflow
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


# Models whose MLPs are modules with their own linear layers.
every_whole_mlp = pytest.mark.parametrize("name", ["hidream", "lumina2", "seedvr2"])


@pytest.fixture
def calls(monkeypatch):
    """The input shape of each kernel call, and whether the call got an `out`."""
    from fast_video_vae.nodes.mlp import fuse

    seen, kernel = [], fuse.silu_mul_by_kernel

    def counted(x, gate, out=None):
        seen.append((x.shape, out is not None))
        return kernel(x, gate, out)

    monkeypatch.setattr(fuse, "silu_mul_by_kernel", counted)
    return seen


def fused(model):
    """Return the node's output for a MODEL."""
    from fast_video_vae.nodes.mlp.nodes import FuseMLP

    with torch.inference_mode():
        return FuseMLP.execute(model=model).args[0]


@contextmanager
def loaded(model, budget_bytes=0):
    """Load a MODEL with its patches; a budget limits the loaded bytes of weights."""
    cpu = torch.device("cpu")
    model.patch_model(cpu, lowvram_model_memory=budget_bytes)
    try:
        yield model
    finally:
        model.unpatch_model(cpu)


def linears(model):
    """Yield the names of the linear layers of a fused MODEL's MLPs."""
    for key in model.object_patches:
        name = key.removesuffix(".__class__")
        for child, _ in model.model.get_submodule(name).named_children():
            yield f"{name}.{child}"


@pytest.mark.parametrize("name", MLPS)
def test_fused_mlps_give_the_same_output(name, calls, caplog):
    model = patcher(name)
    expected = output(name, model)
    with caplog.at_level(logging.INFO):
        fast = fused(model)
    ((cls, count),) = MLPS[name].items()
    assert f"fused the SwiGLU MLPs of Model: {count} {cls}" in caplog.messages[-1]
    assert not model.object_patches
    assert torch.equal(output(name, fast), expected)  # not loaded yet
    assert not calls
    with loaded(fast):
        assert relative_error(output(name, fast), expected) <= 1e-5
    assert len(calls) == count
    assert torch.equal(output(name, model), expected)


def outputs(block, *args, **named):
    """Return the outputs of a module, fused and original."""
    model, expected = model_of(Nest(block)), block(*args, **named)
    with loaded(fused(model)):
        return block(*args, **named), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", GATED)
def test_every_spelling_is_recognised_and_rounds_once(cls, dtype, calls):
    torch.manual_seed(0)
    block, seen, x = cls().to(dtype), {}, torch.randn(2, 5, 8, dtype=dtype)
    for name, child in block.named_children():
        child.register_forward_hook(lambda _, args, y, name=name: seen.update({name: (*args, y)}))
    result, expected = outputs(block, x)
    assert len(calls) == 1
    if cls is GateAlone:
        value, gate = x.chunk(2, -1)
        product = result
    elif cls in (Halves, SecondHalf):
        gate, value = seen["w1"][1].chunk(2, -1)
        gate, value = (value, gate) if cls is SecondHalf else (gate, value)
        product = seen["w2"][0]
    else:
        gate, value, product = seen["gate"][1], seen["up"][1], seen["down"][0]
    if not missing("native"):
        formulas.check(product, *formulas.silu_mul(gate, value))
    # Stock also rounds SiLU and the product, half an eps each; this bounds both.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("cls", GATED)
def test_without_a_kernel_the_result_is_bit_identical(cls, monkeypatch):
    """A GPU without Triton must not be slower for the node."""
    from fast_video_vae.nodes.mlp import fuse

    monkeypatch.setattr(fuse, "silu_mul_by_kernel", lambda *_, **__: None)
    with torch.inference_mode():
        result, expected = outputs(cls(), torch.randn(2, 5, 8))
    assert torch.equal(result, expected)


def test_float16_saturates_where_the_module_does_and_nowhere_else(calls):
    for cls in (Saturated, MLP):
        block = cls(bias=False).half()
        for linear in block.children():
            nn.init.eye_(linear.weight)
        result, expected = outputs(block, torch.full((1, 8), 300, dtype=torch.float16))
        torch.testing.assert_close(result, expected, equal_nan=True)
        assert expected.isfinite().all() == (cls is Saturated)
    assert len(calls) == 2


def test_a_model_without_gated_mlps_passes_with_a_log_line(caplog):
    from comfy.model_patcher import ModelPatcher

    cpu = torch.device("cpu")
    for model in (model_of(Nest(UNLIKE[0]())), ModelPatcher(nn.Linear(2, 2), cpu, cpu)):
        with caplog.at_level(logging.INFO):
            assert fused(model) is model
        name = type(model.model).__name__
        assert f"{name} has no SwiGLU MLPs to fuse; the model is unchanged" in caplog.messages[-1]


def test_fusing_is_idempotent_and_works_with_a_loaded_clone():
    model = patcher("lumina2")
    first = fused(model)
    assert fused(first) is first
    with loaded(first):
        second = fused(model)
    assert second is not first
    assert second.object_patches == first.object_patches


def test_unloading_restores_the_network_after_another_node_patches_forward():
    block, x = MLP(), torch.randn(3, 8)
    model, expected, before = model_of(Nest(block)), block(x), dict(vars(block))
    keys, fast = list(model.model.state_dict()), fused(model)
    with loaded(fast):
        assert list(model.model.state_dict()) == keys
        assert type(block) is not MLP
    assert type(block) is MLP
    assert vars(block) == before
    fast.add_object_patch("diffusion_model.block.forward", lambda x: x)
    with loaded(fast):
        assert block(x) is x
    # ComfyUI leaves on the module the forward that it read while the fused class was set.
    torch.testing.assert_close(block(x), expected)
    assert type(block) is MLP
    assert fused(model) is model


def adapters(model, rank=2):
    """Yield a LoRA for every linear layer of the MLPs."""
    from comfy.weight_adapter import LoRAAdapter

    generator = torch.Generator().manual_seed(2)
    for name in linears(model):
        height, width = model.model.state_dict()[f"{name}.weight"].shape
        up = torch.randn(height, rank, generator=generator)
        down = torch.randn(rank, width, generator=generator) / width**0.5
        yield f"{name}.weight", LoRAAdapter(set(), (up, down, float(rank), None, None, None))


@pytest.mark.parametrize("budget_bytes", [0, 1], ids=["loaded", "offloaded"])
@every_whole_mlp
def test_a_lora_on_the_mlps_works_in_every_order(name, budget_bytes, calls):
    model = patcher(name)
    fast = fused(model)
    lora, stock = dict(adapters(fast)), output(name, model)
    with_lora, before = model.clone(), fast.clone()
    assert set(with_lora.add_patches(lora, 0.5)) == set(lora)
    before.add_patches(lora, 0.5)
    after = fused(with_lora)
    with loaded(with_lora):
        expected = output(name, model)
    assert relative_error(expected, stock) > 0.01
    assert not calls
    for patched in (before, after):
        with loaded(patched, budget_bytes):
            assert patched.model.model_lowvram == bool(budget_bytes)
            assert relative_error(output(name, model), expected) <= 1e-5
    assert calls
    assert torch.equal(output(name, model), stock)


def test_offloaded_weights_that_are_cast_per_call_work(calls):
    import comfy.ops

    # bf16 weights that a float32 model casts in every call.
    name, cpu = "hidream", torch.device("cpu")
    model = patcher(name, torch.bfloat16, comfy.ops.manual_cast)
    expected, fast = output(name, model), fused(model)
    for extra_bytes in (1, model.model_size() // 2, 1 << 30):
        fast.partially_load(cpu, extra_bytes)
        assert relative_error(output(name, model), expected) <= 1e-5
    assert calls
    fast.partially_unload(cpu, fast.model_size())
    assert relative_error(output(name, model), expected) <= 1e-5
    fast.detach()
    assert torch.equal(output(name, model), expected)


# nvfp4 and mxfp8 do not run on a CPU: it cannot swizzle their scales.
@pytest.mark.parametrize(
    "algorithm",
    ["float8_e4m3fn", "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8"],
)
def test_every_layout_of_quantised_weights_works(algorithm, calls):
    import comfy.ops
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    torch.manual_seed(0)
    layout = QUANT_ALGOS[algorithm]["comfy_tensor_layout"]
    operations, mlp = comfy.ops.mixed_precision_ops(), MLP(256, 512, bias=False).bfloat16()
    x = torch.randn(1, 9, 256, dtype=torch.bfloat16)
    truth = mlp(x).float()
    for name, linear in mlp.named_children():
        height, width = linear.weight.shape
        layer = operations.Linear(width, height, bias=False, dtype=torch.bfloat16)
        weight = QuantizedTensor.from_float(linear.weight.detach(), layout)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.quant_format, layer.layout_type = algorithm, layout
        setattr(mlp, name, layer)
    model = model_of(Nest(mlp))
    with torch.no_grad():
        expected = mlp(x).float()
        with loaded(fused(model)):
            result = mlp(x).float()
    assert len(calls) == 1
    # The product is rounded before it is quantised, which costs less than the quantisation.
    assert (result - expected).square().mean() < (expected - truth).square().mean() / 4


def test_gradients_flow(calls):
    model, x = model_of(Nest(MLP())), torch.randn(2, 5, 8, requires_grad=True)
    model.model.requires_grad_(True)
    leaves = [x, *model.model.parameters()]

    def gradients():
        return torch.autograd.grad(model.model.diffusion_model(x).square().sum(), leaves)

    expected = gradients()
    with loaded(fused(model)):
        torch.testing.assert_close(gradients(), expected, rtol=1e-5, atol=1e-6)
    assert calls == [((2, 5, 16), False)]


def test_it_overwrites_a_projection_unless_it_is_used_elsewhere(calls):
    block, kept, x = MLP(), [], torch.randn(3, 8)
    with loaded(fused(model_of(Nest(block)))):
        block(x)
        block.gate.register_forward_hook(lambda module, args, y: kept.append(y))
        block(x)
    assert [in_place for _, in_place in calls] == [True, False]
    assert torch.equal(kept[0], F.linear(x, block.gate.weight, block.gate.bias))


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 3, 4, 8)])
def test_inputs_of_every_rank_and_by_name_work(shape):
    for cls in (MLP, Halves):
        torch.testing.assert_close(*outputs(cls(), torch.randn(shape)))
    torch.testing.assert_close(*outputs(TwoSteps(), hidden_states=torch.randn(shape)))


def test_layers_that_return_another_dtype_work(calls):
    block = MLP()
    block.gate.register_forward_hook(lambda module, args, y: y.double())
    block.down.register_forward_pre_hook(lambda module, args: args[0].float())
    assert torch.equal(*outputs(block, torch.randn(3, 8)))
    assert not calls


def test_torch_compile_runs_the_module_s_own_code(calls):
    model, x = model_of(Nest(MLP())), torch.randn(3, 8)
    expected = model.model.diffusion_model(x)
    compiled = torch.compile(model.model.diffusion_model, backend="eager", fullgraph=True)
    with loaded(fused(model)):
        assert torch.equal(compiled(x), expected)
    assert not calls


def test_a_saved_fused_model_has_the_original_weights(server):
    weights = patcher("flux2").model.diffusion_model.state_dict()
    save_file(weights, server.models("diffusion_models") / "flux2.safetensors")
    workflow = Workflow()
    model = workflow.add("UNETLoader", unet_name="flux2.safetensors", weight_dtype="default")
    for _ in range(2):
        model = workflow.add("FastVAE_FuseMLP", model=model)
    workflow.add("ModelSave", model=model, filename_prefix="fused")
    server.run(workflow)
    saved = load_file(next(server.output.glob("fused*.safetensors")))
    assert "fused the SwiGLU MLPs of Flux2: 3 SiLUActivation" in server.log()
    assert saved.keys() == {f"model.diffusion_model.{key}" for key in weights}
    for key, weight in weights.items():
        assert torch.equal(saved[f"model.diffusion_model.{key}"].float(), weight.float())


def recognised(module):
    from fast_video_vae.nodes.mlp.swiglu import recognise

    return recognise(module, type(module))


def wiring(*arguments):
    from fast_video_vae.nodes.mlp.swiglu import Wiring

    return Wiring(*arguments)


@pytest.mark.parametrize("cls", UNLIKE)
def test_a_similar_class_is_not_recognised(cls):
    assert recognised(cls()) is None
    assert recognised(cls().eval()) is None


def layers():
    import comfy.ops

    return {"device": "meta", "operations": comfy.ops.disable_weight_init}


# File of comfy.ldm, class, arguments and wiring; those of whole models are tested above.
CORE = [
    ("ace.ace_step15", "MLP", (8, 16), (("gate_proj", "up_proj"), 0, "down_proj")),
    ("audio.dit", "GLU", (8, 16, nn.SiLU()), (("proj",), 1, None)),
    ("aura.mmdit", "MLP", (8,), (("c_fc1", "c_fc2"), 0, "c_proj")),
    ("flux.layers", "YakMLP", (8, 16), (("gate_proj", "up_proj"), 0, "down_proj")),
    ("genmo.joint_model.layers", "FeedForward", (8, 16, 8, None), (("w1",), 0, "w2")),
    ("krea2.model", "SwiGLU", (8, 4), (("gate", "up"), 0, "down")),
    ("lens.model", "GateMLP", (8, 16), (("w1", "w3"), 0, "w2")),
    ("minimax_music.dit", "GLU", (8, 16), (("proj",), 1, None)),
    ("omnigen.omnigen2", "LuminaFeedForward", (8, 16), (("linear_1", "linear_3"), 0, "linear_2")),
]  # fmt: skip


@pytest.mark.parametrize(("file", "name", "arguments", "expected"), CORE)
def test_the_classes_of_comfyui_are_recognised(file, name, arguments, expected):
    """The weights are on the meta device, so that they cannot be read."""
    cls = getattr(importlib.import_module(f"comfy.ldm.{file}"), name)
    assert recognised(cls(*arguments, dtype=None, **layers())) == wiring(*expected)


def test_the_mlp_of_lumina_saturates_in_float16():
    from comfy.ldm.lumina.model import FeedForward

    lumina = FeedForward(8, 16, 8, None, layers())
    assert recognised(lumina) == wiring(("w1", "w3"), 0, "w2", frozenset({torch.float16}))


def test_an_mlp_that_comfyui_fuses_is_not_recognised(caplog):
    from comfy.ldm.minimax.model import MLP

    with caplog.at_level(logging.DEBUG):
        assert recognised(MLP(8, 16, **layers())) is None
    assert "not a gated MLP" in caplog.messages[-1]
