"""The cache of prompts shares no memory with nodes that write into a conditioning."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from fast_video_vae.tests.nodes.text.encoders import encoder
from fast_video_vae.tests.nodes.vae.pairs import node, relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

# A larger batch is summed in another order: float32 rounding through a few layers.
ROUNDING = 2e-6

FOX = "a red fox runs over the snow"
BOOK = "a (woman:1.3) reads a [book] by the window"

Pair = namedtuple("Pair", ["first", "second"])


@pytest.fixture(autouse=True)
def cache(monkeypatch, comfyui):
    """An empty cache for the node."""
    from fast_video_vae.nodes.text import encode
    from fast_video_vae.nodes.text.cache import TextCache

    monkeypatch.setattr(encode, "cache", TextCache())
    with torch.inference_mode():
        yield encode.cache


def encode(clip, positive, negative="", cache=8):
    """Execute the node; return two lists of conditionings, and the report."""
    from fast_video_vae.nodes.text.nodes import TextEncode

    inputs = {"clip": [clip], "positive": positive, "negative": [negative], "cache": [cache]}
    return TextEncode.PREPARE_CLASS_CLONE(None).execute(**inputs).args


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


@pytest.mark.parametrize("kind", ["wan", "sdxl", pytest.param("z_image", marks=pytest.mark.slow)])
def test_a_node_that_writes_into_the_result_does_not_change_the_next(kind):
    """The states, pooled outputs and masks equal those of ComfyUI's CLIPTextEncode."""
    clip = encoder(kind)
    positive, negative, _ = encode(clip, [FOX, BOOK], FOX)
    expected = kept([positive, negative])
    for run in range(3):
        overwrite([positive, negative])
        positive, negative, report = encode(clip, [FOX, BOOK], FOX)
        assert "2 from the cache, 0 forward calls" in report, run
        assert_same([positive, negative], expected)
    for ours, prompt in ((positive[0], FOX), (positive[1], BOOK), (negative[0], FOX)):
        (theirs,) = node("CLIPTextEncode", clip, prompt)
        pairs = zip(tensors(ours), tensors(theirs), strict=True)
        assert all(relative_error(a.float(), b.float()) <= ROUNDING for a, b in pairs)


@pytest.mark.parametrize("cache", [0, 8], ids=["without a cache", "with a cache"])
def test_the_results_of_one_run_share_no_memory(cache):
    clip = encoder("sd1")
    for _ in range(2):  # the second run has hits
        (first, twin, other), negatives, _ = encode(clip, [FOX, FOX, BOOK], FOX, cache)
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

    cache, given = TextCache(), conditioning()
    before = kept(given)
    cache.put(("key",), given, most=9)
    assert_same(given, before)
    overwrite(given)  # the caller keeps its tensors
    for _ in range(2):
        found = cache.get(("key",))
        assert_same(found, before)
        overwrite(found)
        found[0][1]["reference_latents"].append(None)
        found[0][1]["conditioning_llama3"]["more"][0].clear()
        found[0][1].clear()


def test_a_copy_has_the_same_structure():
    from fast_video_vae.nodes.text.cache import TextCache

    cache, hooks = TextCache(), object()
    given = conditioning()
    given[0][1]["hooks"] = hooks
    cache.put(("key",), given, most=9)
    found = cache.get(("key",))
    assert repr(found) == repr(given)
    rest = found[0][1]
    assert rest["hooks"] is hooks  # objects are shared: they have an identity
    assert type(rest["pair"]) is Pair
    assert type(rest["ordered"]) is OrderedDict
    assert type(rest["sized"]) is tuple


def test_all_tensors_count_as_memory():
    from fast_video_vae.nodes.text.cache import TextCache

    cache, given = TextCache(), conditioning()
    expected = sum(tensor.nbytes for tensor in tensors(given))
    cache.put(("a",), given, most=2)
    assert cache.nbytes == expected
    cache.put(("a",), given, most=2)
    cache.put(("b",), given, most=2)
    assert cache.nbytes == 2 * expected
    cache.get(("a",))[0][1].clear()
    cache.put(("c",), [[torch.zeros(1, 4), {}]], most=1)
    assert (len(cache), cache.nbytes) == (1, 16)
    small = TextCache(most_bytes=expected - 1)
    small.put(("a",), given, most=2)
    assert (len(small), small.nbytes) == (0, 0)


def test_a_view_does_not_keep_its_whole_memory_alive():
    from fast_video_vae.nodes.text.cache import TextCache

    cache, batch = TextCache(), torch.zeros(100, 4, 8)
    cache.put(("key",), [[batch[3:4], {}]], most=2)
    ((states, _),) = cache.get(("key",))
    assert cache.nbytes == states.nbytes == states.untyped_storage().nbytes() == 128
