"""Fuse SwiGLU MLPs: every class against its own forward, and models that others patch too."""

import inspect
import logging
import pkgutil
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fast_video_vae.tests.nodes.diffusion import quantised, random_network
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

CPU = torch.device("cpu")
LUMINA, YAK = "comfy.ldm.lumina.model.FeedForward", "comfy.ldm.flux.layers.YakMLP"
LLAMA = "comfy.text_encoders.llama.MLP"
SETTINGS = SimpleNamespace(hidden_size=8, intermediate_size=16, mlp_activation="silu")

LUMINA_SIZES = {
    "dim": 48, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 1,
    "multiple_of": 16, "qk_norm": True, "cap_feat_dim": 24, "axes_dims": (8, 8, 8),
    "axes_lens": (32, 32, 32),
}  # fmt: skip


class Model(nn.Module):
    """The common part of ComfyUI's models: the network under this name."""

    def __init__(self, network):
        super().__init__()
        self.diffusion_model = network.eval().requires_grad_(False)


def model_of(network):
    """A MODEL of any network."""
    from comfy.model_patcher import ModelPatcher

    return ModelPatcher(Model(network), load_device=CPU, offload_device=CPU)


def block_of(path=YAK, dtype=torch.float32, operations=None):
    """An MLP of a class of ComfyUI with random positive weights."""
    import comfy.ops

    operations = operations or comfy.ops.disable_weight_init
    given = {"operations": operations, "ops": operations, "device": CPU, "dtype": dtype}
    given |= {"operation_settings": given, "config": SETTINGS, "activation": nn.SiLU()}
    cls = pkgutil.resolve_name(path)
    known = inspect.signature(cls).parameters
    sizes = {key for key in known if known[key].default is inspect.Parameter.empty} - given.keys()
    keywords = {key: given[key] for key in given.keys() & known}
    block = cls(*(8, 16, 8, None)[: len(sizes)], **keywords).to(dtype)
    for tensor in block.state_dict().values():
        tensor.uniform_(0, 1 / tensor.shape[-1])
    return block


@pytest.fixture
def kernel(comfyui):
    """A spy on the kernel's calls."""
    from fast_video_vae import kernels

    with patch.object(kernels, "silu_mul_by_kernel", wraps=kernels.silu_mul_by_kernel) as spy:
        yield spy


def fused(model):
    from fast_video_vae.nodes.mlp.nodes import FuseMLP

    return FuseMLP.execute(model=model).args[0]


def loaded(model, budget_bytes=0):
    """Load a MODEL with its patches for a block; a budget limits the loaded bytes of weights."""
    model.patch_model(CPU, lowvram_model_memory=budget_bytes)
    stack = ExitStack()
    stack.callback(model.unpatch_model, CPU)
    return stack


def outputs(block, *args, **named):
    """Return the outputs of a module, fused and original."""
    expected = block(*args, **named)
    with loaded(fused(model_of(nn.Sequential(block)))):
        return block(*args, **named), expected


@pytest.mark.parametrize("number", range(16))
def test_every_class_computes_what_its_own_code_does(number, kernel):
    """A class that a release of ComfyUI has rewired fails here."""
    from fast_video_vae.nodes.mlp.nodes import WIRINGS

    assert len(WIRINGS) == 16
    path = list(WIRINGS)[number]
    dtype = (torch.float16, torch.float32)[number % 2]  # LUMINA's is the first
    block, x = block_of(path, dtype), torch.randn(2, 4, 8).to(dtype)
    x[0, 2], x[0, 3, 0] = 1500, torch.nan  # products above the largest float16, and not a number
    result, expected = outputs(block, x)
    assert kernel.call_count == 1
    assert expected.isfinite().all() == (dtype == torch.float16 and path == LUMINA)
    # Stock also rounds SiLU and the product, half an eps each; this bounds both.
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=bound, atol=bound, equal_nan=True)
    kernel.configure_mock(side_effect=lambda *_: None)  # a device without one
    with torch.inference_mode():
        result, expected = outputs(block, x=x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


# A class or a module, and an attribute that another pack or another release has changed.
CHANGED = [
    ("class", LUMINA, "_forward_silu_gating", lambda self, x, y: x),
    ("module", LUMINA, "_forward_silu_gating", torch.mul),
    ("module", YAK, "act_fn", nn.GELU()),
    ("module", YAK, "up_proj", nn.Linear(8, 32)),  # another size
    ("module", YAK, "scale", nn.Parameter(torch.ones(()))),
    ("module", LLAMA, "activation", nn.functional.gelu),
    ("module", YAK, "__class__", None),  # a subclass of the same name
]


@pytest.mark.parametrize(("what", "path", "name", "value"), CHANGED)
def test_a_changed_mlp_is_unchanged_with_a_log_line(what, path, name, value, monkeypatch, caplog):
    block = block_of(path)
    cls = type(block)
    value = value or type(cls.__name__, (cls,), {"__module__": cls.__module__})
    monkeypatch.setattr(block if what == "module" else cls, name, value, raising=False)
    model = model_of(nn.Sequential(block))
    with caplog.at_level(logging.INFO):
        assert fused(model) is model
    assert "Model has no SwiGLU MLPs to fuse; the model is unchanged" in caplog.messages[-1]
    del model.model.diffusion_model
    model.model.diffusion_model = lambda x: x  # another pack's inference engine
    assert fused(model) is model


@pytest.mark.parametrize("budget_bytes", [0, 1])  # of loaded weights, 0: all
def test_a_model_gives_the_same_with_patches_in_every_order(budget_bytes, kernel, caplog):
    import comfy.ops

    def output():
        generator = torch.Generator().manual_seed(1)
        noise = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        with torch.inference_mode():
            inputs = noise(1, 4, 8, 6), torch.tensor([0.6]), noise(1, 5, 24), 5
            return model.model.diffusion_model(*inputs)

    options = {"dtype": torch.float32, "operations": comfy.ops.manual_cast}
    model = model_of(random_network("lumina.model.NextDiT", LUMINA_SIZES, **options))
    stock, patched = output(), model.clone()
    weights = [(key, each) for key, each in model.model.state_dict().items() if each.ndim == 2]
    lora = {key: ("diff", (torch.randn_like(each) / 50,)) for key, each in weights}
    with caplog.at_level(logging.INFO):
        fast = fused(model)
    assert "fused the SwiGLU MLPs of Model: 3 FeedForward" in caplog.messages[-1]
    assert not model.object_patches
    assert fused(fast) is fast
    for each in (patched, fast):
        assert set(each.add_patches(lora)) == set(lora)
    with loaded(patched, budget_bytes):
        expected = output()
    assert relative_error(expected, stock) > 0.01
    for each in (fast, fused(patched)):
        with loaded(each, budget_bytes):
            assert each.model.model_lowvram == bool(budget_bytes)
            assert relative_error(output(), expected) <= 1e-5
    assert kernel.call_count == 2 * 3
    assert torch.equal(output(), stock)


def test_quantised_weights_stay_quantised(kernel):
    import comfy.ops

    state = block_of(YAK, torch.bfloat16).state_dict()
    block = block_of(YAK, torch.bfloat16, comfy.ops.mixed_precision_ops())
    block.load_state_dict(quantised(state, {"format": "int8_tensorwise"}, bool))
    with torch.no_grad():
        result, expected = outputs(block, torch.randn(9, 8, dtype=torch.bfloat16))
    assert kernel.call_count == 1
    # One step of 8-bit activations, to which the rounded product may go.
    assert relative_error(result, expected) <= 1 / 127


def test_it_overwrites_a_projection_only_where_nothing_else_needs_it(kernel):
    block, kept, x = block_of(), [], torch.randn(3, 8, requires_grad=True)
    model = fused(model_of(nn.Sequential(block)))
    leaves = [x, *block.requires_grad_().parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), leaves)
    with loaded(model):
        result = torch.autograd.grad(block(x).square().sum(), leaves)
        with torch.no_grad():
            block(x)
            block.gate_proj.register_forward_hook(lambda module, args, y: kept.append(y))
            block(x)
            assert torch.equal(kept[0], block.gate_proj(x))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    assert [call.args[2] is None for call in kernel.call_args_list] == [True, False, True]
