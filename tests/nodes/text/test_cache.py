"""The cache of prompts: its limits, and that it shares no memory with nodes that write."""

import gc
import weakref
from collections import namedtuple

import pytest
import torch

from fast_video_vae.tests.nodes.text.encoders import FOX, assert_equal, by_core, encode, encoder

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize("cache", [0, 8])
def test_a_node_that_writes_into_a_result_changes_no_other(cache):
    clip = encoder("sdxl")
    for run in range(3):
        (first, twin, other), negatives, report = encode(clip, [FOX, FOX, "x"], FOX, cache=cache)
        assert (": 2 from the cache, 0 forward calls" in report) == (cache > 0 and run > 0)
        for states, rest in (*twin, *negatives[0]):
            states.fill_(7)
            rest.pop("pooled_output").fill_(7)
        for found, prompt in ((first, FOX), (negatives[1], FOX), (other, "x")):
            assert_equal(found, by_core(clip, prompt))
        first[0][0].fill_(7)


def test_nested_tensors_are_copied_and_counted():
    from fast_video_vae.nodes.text.cache import TextCache

    cache, zeros, hooks = TextCache(), torch.zeros(3), object()
    nested = {"list": [{"mask": zeros, "hooks": hooks}], "pair": Pair(zeros, (zeros, "x"))}
    given = [[zeros, nested]]
    before = repr(given)  # hooks have an identity: they are shared
    cache.put(("key",), given, most=9)
    zeros.fill_(7)
    for _ in range(2):
        ((first, rest),) = found = cache.get(("key",))
        assert repr(found) == before
        for tensor in (first, rest["list"].pop()["mask"], rest["pair"].first, rest["pair"][1][0]):
            tensor.fill_(7)
    assert cache.nbytes == 4 * 12


def test_the_oldest_use_goes_above_the_limit_of_number_or_memory():
    from fast_video_vae.nodes.text.cache import TextCache

    cache, given = TextCache(most_bytes=200), [[torch.zeros(25), {}]]  # 100 bytes
    for name in ("a", "a", "b"):
        cache.put((name,), given, most=9)
    assert cache.get(("a",)) is not None
    cache.put(("c",), given, most=9)
    assert [cache.get((name,)) is None for name in "bac"] == [True, False, False]
    cache.put(("d",), given, most=2)
    assert [cache.get((name,)) is None for name in "acd"] == [True, False, False]
    assert cache.nbytes == 200
    cache.put(("e",), given * 3, most=9)  # too large by itself
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_deleted_clip_is_freed_with_its_cache_entries(cache):
    import comfy.model_management

    clip = encoder("sd1")
    encode(clip, [FOX, "x"], cache=2)
    assert len(cache) == 2
    model = weakref.ref(clip.cond_stage_model)
    del clip
    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models_gc()
    gc.collect()
    assert model() is None
    encode(encoder("sd1", seed=1), FOX, "", cache=9)
    assert len(cache) == 2
