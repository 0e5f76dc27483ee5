"""Restored weights, loads by ComfyUI, and LoRAs together with other patches."""

import contextlib
import functools
import gc
import itertools

import pytest
import torch

from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import apply, core, fast, stack
from fast_video_vae.tests.nodes.vae.pairs import relative_error
from fast_video_vae.tests.products import each_value_once

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

# In the middle of a call: block 0 is over, block 1 is not.
MIDDLE = "diffusion_model.blocks.1.cross_attn.o"
lora = functools.partial(loras.lora, parts=loras.ALL)


@pytest.fixture
def model():
    """A separate model for each test, which can change it."""
    return diffusion.load_model(KIND)


def aborted(module, patched, error, when):
    """Run until an error before a module, in its forward, or in a hook of another's after it."""

    def fail(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as hooks:
        if when == "within":
            patch.setitem(module.__dict__, "forward", fail)
        else:
            kind = "forward_pre_hook" if when == "before" else "forward_hook"
            hooks.enter_context(getattr(module, f"register_{kind}")(fail))
        with pytest.raises(error):
            sample(patched)


def held(model):
    """The hooks on a model, and the number and bytes of all tensors of the process."""
    gc.collect()
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.model.modules()
    )
    plain = torch.Tensor, torch.nn.Parameter  # those of traces have no sizes
    tensors = [each for each in gc.get_objects() if type(each) in plain]
    return hooks, len(tensors), sum(each.nbytes for each in tensors)


def test_completed_and_aborted_runs_leave_the_model_as_it_was(model):
    """Every weight to the bit; and of many prompts with other LoRAs no hooks and no memory."""
    import comfy.model_management

    errors = ZeroDivisionError, comfy.model_management.InterruptProcessingException
    ways = itertools.product(loras.UNMERGED, errors, ["before", "within", "after"])
    without, before, sizes = sample(model), loras.weights(model), []
    module = model.model.get_submodule(MIDDLE)
    for number, (mode, error, when) in enumerate(ways):
        patched = fast(model, lora(number % 2), 0.1 * number + 0.5, mode)
        expected = sample(patched)
        assert loras.weights(model) == before
        aborted(module, patched, error, when)
        assert loras.weights(model) == before
        assert torch.equal(sample(model), without)
        assert torch.equal(sample(patched), expected)
        del patched
        sizes.append(held(model))
    assert sizes[5] == sizes[11] == sizes[17]


@pytest.fixture
def loads(model, monkeypatch):
    """The calls of ComfyUI that load the model's weights."""
    from comfy.model_patcher import ModelPatcher

    counted, load = [], ModelPatcher.load

    def counting(self, *args, **keywords):
        if self.model is model.model:
            counted.append(args)
        return load(self, *args, **keywords)

    sample(model)
    monkeypatch.setattr(ModelPatcher, "load", counting)
    return counted


@pytest.mark.parametrize("mode", loras.UNMERGED)
def test_another_lora_does_not_reload_the_model(model, loads, mode):
    one = fast(model, lora(0), 0.8, mode)
    more, (none, report) = fast(one, lora(1), -0.5, mode), apply(model, stack(lora(), 0), mode)
    models = [one, fast(model, lora(0), 3.0, mode), fast(model, lora(1), 0.8, mode), more, none]
    results = [*map(sample, models)]
    assert all(map(torch.equal, results, map(sample, models)))
    assert min(map(relative_error, results, results[1:])) > loras.EFFECT
    assert results[-1].equal(sample(model))  # strength 0 is the model itself
    assert "keys applied" not in report
    assert not loads
    sample(core(model, lora(), 0.8))  # core's loader loads it again
    assert loads


def test_a_merged_stack_is_loaded_once(model, loads):
    def merged(strength=0.8, seed=0, blocks=""):
        return apply(model, stack(lora(seed), strength, blocks), "merged")[0]

    first, again = merged(), merged()
    assert first.patches_uuid == again.patches_uuid
    others = merged(0.7), merged(seed=1), merged(blocks="0"), fast(merged(), lora(1), 1, "merged")
    assert len({str(each.patches_uuid) for each in (model, first, *others)}) == 6
    assert torch.equal(sample(first), sample(again))
    assert len(loads) == 1


@each_value_once(mode=loras.UNMERGED, first=["theirs", "ours"], what=["hooks", "forward"])
def test_patches_of_other_nodes_apply_to_layers_with_a_lora(model, mode, first, what):
    """Hooks that double what it is given and halve what it gives; or a forward that adds to it."""
    module, patched = model.model.get_submodule(MIDDLE), fast(model, loras.lora(0), 0.8, mode)
    if first == "ours":
        sample(patched)  # our hooks are there from now on
    if what == "hooks":
        module.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        module.register_forward_hook(lambda _, args, y: 0.25 * y)
    else:
        forward = module.forward
        module.forward = theirs = lambda x: forward(x) + x.flip(-1)
    result, expected = sample(patched), sample(core(model, loras.lora(0), 0.8))
    assert what == "hooks" or module.forward is theirs
    assert relative_error(result, expected) < loras.ROUNDING
    without = sample(core(diffusion.load_model(KIND), loras.lora(0), 0.8))
    assert relative_error(expected, without) > loras.EFFECT
