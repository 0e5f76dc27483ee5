"""The cache of prompts: when it answers, and that it shares no memory with nodes that write."""

import gc
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch

from fast_video_vae.tests.nodes.text.encoders import (
    BLURRY,
    BOOK,
    FOX,
    ROUNDING,
    by_core,
    encode,
    encoder,
)
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


Pair = namedtuple("Pair", ["first", "second"])


def tensors(value):
    """Return all tensors in lists, dicts and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for each in value for tensor in tensors(each)]


def overwrite(value):
    for tensor in tensors(value):
        tensor.fill_(7)


def kept(value):
    return [tensor.clone() for tensor in tensors(value)]


def assert_same(value, expected):
    assert len(tensors(value)) == len(expected)
    for tensor, each in zip(tensors(value), expected, strict=True):
        assert tensor.dtype == each.dtype
        assert torch.equal(tensor, each)


@pytest.mark.parametrize("kind", ["wan", "sdxl"])
def test_a_node_that_writes_into_the_result_does_not_change_the_next(kind):
    """The states, pooled outputs and masks equal those of ComfyUI's CLIPTextEncode."""
    clip = encoder(kind)
    positive, negative, _ = encode(clip, [FOX, BOOK], FOX, cache=8)
    expected = kept([positive, negative])
    for run in range(3):
        overwrite([positive, negative])
        positive[0][0][1].clear()
        positive, negative, report = encode(clip, [FOX, BOOK], FOX, cache=8)
        assert "2 from the cache, 0 forward calls" in report, run
        assert_same([positive, negative], expected)
    for ours, prompt in ((positive[0], FOX), (positive[1], BOOK), (negative[0], FOX)):
        pairs = zip(tensors(ours), tensors(by_core(clip, prompt)), strict=True)
        assert all(relative_error(a.float(), b.float()) <= ROUNDING for a, b in pairs)


@pytest.mark.parametrize("cache", [0, 8], ids=["without a cache", "with a cache"])
def test_the_results_of_one_run_share_no_memory(cache):
    clip = encoder("sd1")
    for _ in range(2):  # the second run has hits
        (first, twin, other), negatives, _ = encode(clip, [FOX, FOX, BOOK], FOX, cache=cache)
        expected = kept([first, other, negatives[1:]])
        overwrite([twin, negatives[0]])
        assert_same([first, other, negatives[1:]], expected)


def conditioning():
    """Return a conditioning with all containers that its dict may hold."""
    numbers = iter(range(1, 100))

    def tensor(*shape):
        return torch.full(shape, float(next(numbers)))

    rest = {
        "pooled_output": tensor(1, 8),
        "attention_mask": torch.ones(1, 4, dtype=torch.int64),
        "reference_latents": [tensor(1, 16, 1, 2, 2), tensor(1, 16, 1, 2, 2)],
        "conditioning_llama3": {"states": tensor(3, 4), "more": [{"mask": tensor(2)}]},
        "sized": (tensor(5), "text", None),
        "pair": Pair(tensor(2), 3),
        "ordered": OrderedDict(a=tensor(6)),
        "area": (8, 8, 0, 0),
        "strength": 0.5,
        "nothing": None,
    }
    return [[tensor(1, 4, 32), rest], [tensor(1, 2, 32), {"pooled_output": None}]]


def test_nested_tensors_are_copied_on_both_ways():
    from fast_video_vae.nodes.text.cache import TextCache

    cache, given, hooks = TextCache(), conditioning(), object()
    given[0][1]["hooks"] = hooks
    before, structure = kept(given), repr(conditioning()[0][1]["sized"][1:])
    cache.put(("key",), given, most=9)
    assert_same(given, before)
    overwrite(given)  # the caller keeps its tensors
    for _ in range(2):
        found = cache.get(("key",))
        assert_same(found, before)
        rest = found[0][1]
        assert rest.keys() == given[0][1].keys()
        assert rest["hooks"] is hooks  # objects are shared: they have an identity
        assert type(rest["pair"]) is Pair
        assert type(rest["ordered"]) is OrderedDict
        assert repr(rest["sized"][1:]) == structure
        overwrite(found)
        rest["reference_latents"].append(None)
        rest["conditioning_llama3"]["more"][0].clear()
        rest.clear()


def test_all_tensors_count_as_memory():
    from fast_video_vae.nodes.text.cache import TextCache

    cache, given = TextCache(), conditioning()
    expected = sum(tensor.nbytes for tensor in tensors(given))
    for name, nbytes in (("a", expected), ("a", expected), ("b", 2 * expected)):
        cache.put((name,), given, most=2)
        assert cache.nbytes == nbytes
    cache.put(("c",), [[torch.zeros(100, 4, 8)[3:4], {}]], most=1)
    ((states, _),) = cache.get(("c",))
    # A view does not keep its whole memory alive.
    assert cache.nbytes == states.nbytes == states.untyped_storage().nbytes() == 128
    assert (len(cache), cache.get(("b",))) == (1, None)
    small = TextCache(most_bytes=2 * expected)
    for name in "abc":
        small.put((name,), given, most=9)
    assert (small.get(("a",)), len(small), small.nbytes) == (None, 2, 2 * expected)
    small.put(("d",), [*given, *given, *given], most=9)  # too large by itself
    assert (len(small), small.nbytes) == (0, 0)
    small.put(("e",), given, most=0)
    assert (len(small), small.nbytes) == (0, 0)


@pytest.mark.parametrize("change", ["LoRA", "clip", "layer", "prompt"])
def test_the_cache_distinguishes_prompts_clips_and_their_patches(change):
    clip, prompt = encoder("sd1"), FOX
    state = clip.patcher.model.state_dict()
    name = next(name for name in state if name.endswith("q_proj.weight"))
    other = encoder("sd1", seed=1) if change == "clip" else clip.clone()
    if change == "LoRA":
        other.add_patches({name: (torch.randn(state[name].shape),)}, 1.0)
    elif change == "layer":
        other.clip_layer(-2)
    elif change == "prompt":
        prompt = BOOK
    encode(clip, FOX, FOX, cache=8)
    (found,), _, report = encode(other, prompt, prompt, cache=8)
    assert "0 from the cache" in report
    assert relative_error(found[0][0], by_core(other, prompt)[0][0]) <= ROUNDING
    (found,), _, report = encode(clip, FOX, FOX, cache=8)
    assert "1 from the cache" in report
    assert relative_error(found[0][0], by_core(clip, FOX)[0][0]) <= ROUNDING
    assert relative_error(by_core(other, prompt)[0][0], found[0][0]) > 1e-3


def test_the_cache_keeps_the_most_recently_used_prompts(cache):
    clip = encoder("sd1")
    encode(clip, [f"fox {number}" for number in range(6)], "", cache=3)
    assert len(cache) == 3
    encode(clip, "fox 5", "fox 4", cache=3)
    encode(clip, "fox 9", "fox 4", cache=3)
    _, _, report = encode(clip, "fox 5", "fox 9", cache=3)
    assert "2 from the cache" in report


def test_a_deleted_clip_is_freed_with_its_cache_entries(cache):
    import comfy.model_management

    clip = encoder("sd1")
    encode(clip, FOX, BLURRY, cache=8)
    model = weakref.ref(clip.cond_stage_model)
    del clip
    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models_gc()
    gc.collect()
    assert model() is None
    encode(encoder("sd1", seed=1), FOX, BLURRY, cache=8)
    assert len(cache) == 2
