"""Restored weights, loads by ComfyUI, and LoRAs together with other patches."""

import functools

import pytest
import torch

from fast_video_vae.tests.nodes.lora import lora_models
from fast_video_vae.tests.nodes.lora.lora_models import (
    ALL,
    COMMON,
    EFFECT,
    MODES,
    ROUNDING,
    UNMERGED,
    apply,
    core,
    fast,
    load_model,
    nothing_left,
    relative_error,
    sample,
    stack,
    weights,
)
from fast_video_vae.tests.products import each_value_once

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

KIND = "wan21-t2v"
# In the middle of a call: block 0 is over, block 1 is not.
MIDDLE = "diffusion_model.blocks.1.cross_attn.o"


lora = functools.partial(lora_models.lora, parts=ALL)


@pytest.fixture
def model():
    """A separate model for each test, which can change it."""
    return load_model(KIND)


class _FailureError(Exception):
    pass


@each_value_once(mode=UNMERGED, how=["error", "interrupt"], when=["before", "within", "after"])
def test_completed_and_aborted_runs_leave_every_weight_unchanged(model, mode, how, when):
    """Before a module, in its forward, or in a hook of another's after it."""
    import comfy.model_management

    interrupt = comfy.model_management.InterruptProcessingException
    error = interrupt if how == "interrupt" else _FailureError

    def fail(*_, **__):
        raise error

    without, before = sample(model), weights(model)
    patched = fast(model, lora(), 0.8, mode)
    expected = sample(patched)
    assert weights(model) == before
    module = model.model.get_submodule(MIDDLE)
    if when == "within":
        module.forward, undo = fail, functools.partial(delattr, module, "forward")
    elif when == "before":
        undo = module.register_forward_pre_hook(fail).remove
    else:
        undo = module.register_forward_hook(fail).remove
    with pytest.raises(error):
        sample(patched)
    undo()
    assert weights(model) == before
    assert nothing_left(model)
    assert torch.equal(sample(model), without)
    assert torch.equal(sample(patched), expected)


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


@pytest.mark.parametrize("mode", UNMERGED)
def test_another_lora_does_not_reload_the_model(model, loads, mode):
    one = fast(model, lora(0), 0.8, mode)
    stronger, other = fast(model, lora(0), 3.0, mode), fast(model, lora(1), 0.8, mode)
    more = apply(one, stack(lora(1), -0.5), mode)[0]
    results = [sample(each) for each in (one, stronger, other, more, model)]
    again = [sample(each) for each in (one, stronger, other, more, model)]
    assert not loads
    assert all(map(torch.equal, results, again))
    assert relative_error(results[0], results[1]) > EFFECT
    sample(core(model, lora(), 0.8))  # core's loader loads it again
    assert loads


def test_a_merged_stack_is_loaded_once(model, loads):
    def merged(strength=0.8, seed=0, blocks=""):
        return apply(model, stack(lora(seed), strength, blocks), "merged")[0]

    first, again = merged(), merged()
    assert first.patches_uuid == again.patches_uuid != model.patches_uuid
    others = merged(0.7), merged(seed=1), merged(blocks="0"), fast(merged(), lora(1), 1, "merged")
    assert len({str(each.patches_uuid) for each in (first, *others)}) == 5
    result = sample(first)
    assert torch.equal(sample(again), result)
    assert len(loads) == 1


@each_value_once(mode=MODES, order=["before", "after"], loader=["weights", "bypass"])
def test_loras_of_both_packs_add_up(model, mode, order, loader):
    """Its bypass loader adds to the output of linear layers, and patches their biases."""
    from comfy_extras.nodes_lora_debug import LoraLoaderBypassModelOnly

    def theirs(patcher):
        if loader == "weights":
            return core(patcher, lora(1), 0.6)
        return LoraLoaderBypassModelOnly().load_lora_model_only(patcher, lora(1), 0.6)[0]

    expected = sample(core(core(model, lora(0, parts=COMMON), 0.8), lora(1), 0.6))
    if order == "before":
        patched = fast(theirs(model), lora(0, parts=COMMON), 0.8, mode)
    else:
        patched = theirs(fast(model, lora(0, parts=COMMON), 0.8, mode))
    assert relative_error(sample(patched), expected) < ROUNDING


@each_value_once(mode=UNMERGED, first=["theirs", "ours"], what=["hooks", "forward"])
def test_patches_of_other_nodes_apply_to_layers_with_a_lora(model, mode, first, what):
    """Hooks that double what it is given and halve what it gives; or a forward that adds to it."""
    module, calls = model.model.get_submodule(MIDDLE), []
    patched = fast(model, lora(0, parts=COMMON), 0.8, mode)
    without = sample(patched)  # our hooks are there from now on
    if first == "theirs":
        patched = fast(model := load_model(KIND), lora(0, parts=COMMON), 0.8, mode)
        module = model.model.get_submodule(MIDDLE)
    if what == "hooks":
        module.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        module.register_forward_hook(lambda _, args, y: calls.append(1) or 0.25 * y)
    else:
        forward = module.forward
        module.forward = theirs = lambda x: calls.append(1) or forward(x) + x.flip(-1)
    result = sample(patched)
    assert len(calls) == 2
    assert what == "hooks" or module.forward is theirs
    expected = sample(core(model, lora(0, parts=COMMON), 0.8))
    assert len(calls) == 4
    assert relative_error(expected, without) > EFFECT
    assert relative_error(result, expected) < ROUNDING
