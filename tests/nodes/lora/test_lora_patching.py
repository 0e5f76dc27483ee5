"""Restored weights, loads by ComfyUI, and LoRAs with other patches and on compiled models."""

import contextlib
import dataclasses
import gc

import pytest
import torch

from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import apply, core, fast, lora, stack
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

# In the middle of a call: block 0 is over, block 1 is not.
MIDDLE = "diffusion_model.blocks.1.cross_attn.o"


@pytest.fixture
def model():
    """A separate model for each test, which can change it."""
    return diffusion.load_model(KIND)


def held(model):
    """The hooks on a model, and the number and bytes of all tensors of the process."""
    gc.collect()
    modules = model.model.modules()
    hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules)
    plain = torch.Tensor, torch.nn.Parameter  # those of traces have no sizes
    tensors = [each for each in gc.get_objects() if type(each) in plain]
    return hooks, len(tensors), sum(each.nbytes for each in tensors)


def test_completed_and_aborted_runs_leave_the_model_as_it_was(model):
    """Every weight to the bit; and of many prompts with other LoRAs no hooks and no memory.

    An error stops a run before a module, in its forward, or in a hook of another's after it.
    """
    from comfy.model_management import InterruptProcessingException

    without, before, sizes = sample(model), loras.weights(model), []
    module, errors = model.model.get_submodule(MIDDLE), [ZeroDivisionError]
    errors.append(InterruptProcessingException)
    places = ["forward_pre_hook", "forward", "forward_hook"]
    ways = zip(loras.UNMERGED * 2, errors * 3, places * 2, strict=True)
    for number, (mode, error, where) in enumerate(ways):

        def fail(*_, error=error, **__):
            raise error

        patched = fast(model, lora(number % 2, parts=loras.ALL), 0.1 * number + 0.5, mode)
        expected = sample(patched)
        assert loras.weights(model) == before
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as hooks:
            if where == "forward":
                patch.setitem(module.__dict__, where, fail)
            else:
                hooks.enter_context(getattr(module, f"register_{where}")(fail))
            with pytest.raises(error):
                sample(patched)
        assert loras.weights(model) == before
        assert torch.equal(sample(model), without)
        assert torch.equal(sample(patched), expected)
        del patched
        sizes.append(held(model))
    assert sizes[1] == sizes[3] == sizes[5]


def test_other_loras_do_not_reload_the_model_and_a_merged_stack_is_loaded_once(model, monkeypatch):
    from comfy.model_patcher import ModelPatcher

    loads, load = [], ModelPatcher.load

    def counting(self, *args, **keywords):
        loads.append(args) if self.model is model.model else None
        return load(self, *args, **keywords)

    without = sample(model)
    monkeypatch.setattr(ModelPatcher, "load", counting)
    for mode in ("stream", "bypass"):
        one = fast(model, lora(0), 0.8, mode)
        none, report = apply(model, stack(lora(0), 0), mode)
        models = [one, fast(model, lora(0), 3.0, mode), fast(one, lora(1), -0.5, mode), none]
        results = [*map(sample, models)]
        assert all(map(torch.equal, results, map(sample, models)))
        assert min(map(relative_error, results, results[1:])) > loras.EFFECT
        assert results[-1].equal(without)
        assert "keys applied" not in report
    assert not loads

    def merged(strength=0.8, seed=0, blocks="", before=model):
        return apply(before, stack(lora(seed), strength, blocks), "merged")[0]

    first, again = merged(), merged()
    others = merged(0.7), merged(seed=1), merged(blocks="0"), merged(1, 1, before=first)
    assert len({str(each.patches_uuid) for each in (model, first, again, *others)}) == 6
    assert torch.equal(sample(first), sample(again))
    assert len(loads) == 1


@pytest.mark.parametrize(
    ("mode", "first", "what"),
    [("auto", "theirs", "hooks"), ("stream", "ours", "hooks"), ("bypass", "ours", "forward")],
)
def test_patches_of_other_nodes_apply_to_layers_with_a_lora(model, mode, first, what):
    """Hooks that double what it is given and halve what it gives; or a forward that adds to it."""
    module, patched = model.model.get_submodule(MIDDLE), fast(model, lora(0), 0.8, mode)
    if first == "ours":
        sample(patched)  # our hooks are there from now on
    if what == "hooks":
        module.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        module.register_forward_hook(lambda _, args, y: 0.25 * y)
    else:
        forward = module.forward
        module.forward = theirs = lambda x: forward(x) + x.flip(-1)
    result, expected = sample(patched), sample(core(model, lora(0), 0.8))
    assert what == "hooks" or module.forward is theirs
    assert relative_error(result, expected) < loras.ROUNDING
    without = sample(core(diffusion.load_model(KIND), lora(0), 0.8))
    assert relative_error(expected, without) > loras.EFFECT


@pytest.mark.filterwarnings("ignore")  # torch's warnings about surrounding code
def test_a_lora_on_a_compiled_model_recompiles_nothing(monkeypatch):
    """Neither another strength nor the first LoRA, whichever node is first in the workflow."""
    import comfy.ldm.wan.model
    import torch._dynamo
    from comfy.ldm.modules.attention import attention_pytorch
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    def compiled(model):  # as TorchCompileModel does, which only has backends for GPUs
        clone, options = model.clone(), {"guard_filter_fn": skip_torch_compile_dict}
        set_torch_compile_wrapper(model=clone, backend="eager", options=options)
        return clone

    def made():  # frames and graphs that were compiled, and where a graph ended early
        counts = torch._dynamo.utils.counters
        frames, graphs = counts["frames"]["ok"], counts["stats"]["unique_graphs"]
        return frames, graphs, sum(counts["graph_break"].values())

    # One block, whose attention does not ask for the free memory.
    known = diffusion.KINDS[KIND]
    small = dataclasses.replace(known, settings=known.settings | {"num_layers": 1})
    monkeypatch.setitem(diffusion.KINDS, KIND, small)
    monkeypatch.setattr(comfy.ldm.wan.model, "optimized_attention", attention_pytorch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    state = {key: value for key, value in diffusion.random_weights(KIND).items() if value.ndim < 3}
    lora = loras.save_lora(loras.lora_for(state, parts=("pairs",)), "linear.safetensors")
    model = diffusion.load_model(KIND)
    without, before = sample(model), compiled(model)
    expected = {strength: sample(core(model, lora, strength)) for strength in (0.8, -1.0)}
    for strength in (0.8, -1.0):
        result = sample(fast(before, lora, strength, "stream"))
        assert relative_error(result, expected[strength]) < loras.ROUNDING
        assert made() == (1, 1, 0)
    assert relative_error(sample(before), without) < loras.ROUNDING
    again = sample(fast(before, lora, 0.8, "stream"))
    assert relative_error(again, expected[0.8]) < loras.ROUNDING
    assert made() == (2, 2, 0)  # with the model without a LoRA
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("everything is discarded"))
    after = compiled(fast(diffusion.load_model(KIND), lora, 0.8, "stream"))
    assert relative_error(sample(after), expected[0.8]) < loras.ROUNDING
    torch._dynamo.reset()
