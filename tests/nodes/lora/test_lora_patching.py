"""Restored weights, loads by ComfyUI, and LoRAs together with other patches."""

import functools
import gc

import pytest
import torch

from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import UNMERGED, apply, core, fast, sample, stack
from fast_video_vae.tests.nodes.vae.pairs import relative_error
from fast_video_vae.tests.products import each_value_once

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

# In the middle of a call: block 0 is over, block 1 is not.
MIDDLE = "diffusion_model.blocks.1.cross_attn.o"
lora = functools.partial(loras.lora, parts=loras.ALL)


@pytest.fixture
def model():
    """A separate model for each test, which can change it."""
    return loras.load_model(loras.KIND)


class _FailureError(Exception):
    pass


def aborted(model, patched, error, when):
    """Run until an error before a module, in its forward, or in a hook of another's after it."""

    def fail(*_, **__):
        raise error

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


@each_value_once(mode=UNMERGED, how=["error", "interrupt"], when=["before", "within", "after"])
def test_completed_and_aborted_runs_leave_every_weight_unchanged(model, mode, how, when):
    import comfy.model_management

    interrupt = comfy.model_management.InterruptProcessingException
    without, before = sample(model), loras.weights(model)
    patched = fast(model, lora(), 0.8, mode)
    expected = sample(patched)
    assert loras.weights(model) == before
    aborted(model, patched, interrupt if how == "interrupt" else _FailureError, when)
    assert loras.weights(model) == before
    assert loras.nothing_left(model)
    assert torch.equal(sample(model), without)
    assert torch.equal(sample(patched), expected)


def test_many_prompts_leave_no_hooks_and_no_memory(model):
    """Completed and aborted ones, with other LoRAs and strengths each."""

    def state():
        gc.collect()
        hooks = [
            len(hooks)
            for each in model.model.modules()
            for hooks in (each._forward_hooks, each._forward_pre_hooks)
        ]
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        return sum(hooks), len(tensors), sum(each.nbytes for each in tensors)

    found = []
    for number in range(12):
        patched = fast(model, lora(number % 2), 0.1 * number + 0.1, UNMERGED[number % 3])
        aborted(model, patched, _FailureError, "within")
        sample(patched)
        del patched
        found.append(state())
    assert found[11] == found[5]


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
    assert relative_error(results[0], results[1]) > loras.EFFECT
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


@each_value_once(mode=loras.MODES, order=["before", "after"], loader=["weights", "bypass"])
def test_loras_of_both_packs_add_up(model, mode, order, loader):
    """Its bypass loader adds to the output of linear layers, and patches their biases."""
    from comfy_extras.nodes_lora_debug import LoraLoaderBypassModelOnly

    def theirs(patcher):
        if loader == "weights":
            return core(patcher, loras.lora(1), 0.6)
        bypass = LoraLoaderBypassModelOnly()
        return bypass.load_lora_model_only(patcher, loras.lora(1), 0.6)[0]

    expected = sample(core(core(model, loras.lora(0), 0.8), loras.lora(1), 0.6))
    if order == "before":
        patched = fast(theirs(model), loras.lora(0), 0.8, mode)
    else:
        patched = theirs(fast(model, loras.lora(0), 0.8, mode))
    assert relative_error(sample(patched), expected) < loras.ROUNDING


@each_value_once(mode=UNMERGED, first=["theirs", "ours"], what=["hooks", "forward"])
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
    without = sample(core(loras.load_model(loras.KIND), loras.lora(0), 0.8))
    assert relative_error(expected, without) > loras.EFFECT
