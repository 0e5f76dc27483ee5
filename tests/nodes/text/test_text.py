"""Prompts in one pass of the text encoder, and from the cache, against ComfyUI's CLIPTextEncode."""

import asyncio
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fast_video_vae.tests.nodes.text.encoders import SENTENCES, encoder
from fast_video_vae.tests.nodes.vae.pairs import node, relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

FOX = "a red fox runs over the snow"
BOOK = "a (woman:1.3) reads a [book] beside the ((window)), soft shadows, film grain"
BLURRY = "blurry, low quality"
LONG = ", ".join([FOX, BOOK] * 12)  # more than the 512 tokens of umT5, the 77 of CLIP
SHORT = "a red fox runs"
EMPTY = "positive: the prompt is empty; expected text"


@pytest.fixture(autouse=True)
def cache(monkeypatch, comfyui):
    """An empty cache, and no failed compilation."""
    from fast_video_vae.nodes.text import batch, encode

    monkeypatch.setattr(encode, "cache", encode.TextCache())
    monkeypatch.setattr(batch, "_compiling", {"works": True})
    with torch.inference_mode():
        yield encode.cache


def encode(clip, positive, negative=BLURRY, **options):
    """Execute the node as ComfyUI does; return two lists of conditionings, and the report."""
    import execution

    from fast_video_vae.nodes.text.nodes import TextEncode

    inputs = {"clip": clip, "positive": positive, "negative": negative, **options}
    lists = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    outputs, *_ = asyncio.run(execution.get_output_data("prompt", "1", TextEncode, lists))
    positive, negative, (report,) = outputs
    return positive, negative, report


def by_core(clip, prompt):
    (conditioning,) = node("CLIPTextEncode", clip, prompt)
    return conditioning


def assert_equal(conditioning, expected):
    """Compare states, pooled output and masks, within 2e-6 of the largest value."""
    tensors = [each for each in tree_leaves(expected) if isinstance(each, torch.Tensor)]
    largest = max(each.abs().max().item() for each in tensors)
    # A larger batch is summed in another order.
    torch.testing.assert_close(conditioning, expected, rtol=0, atol=2e-6 * largest)


def check(clip, positive, negative=BLURRY, calls=None, **options):
    """Encode, compare with ComfyUI's own node, and return the report.

    `calls` are the expected batch sizes of the transformers' calls.
    """
    seen = []
    for module in clip.cond_stage_model.modules():
        if calls is not None and hasattr(module, "process_tokens"):
            module.transformer.register_forward_pre_hook(
                lambda _, __, keywords: seen.append(len(keywords["embeds"])), with_kwargs=True
            )
    first, second, report = encode(clip, positive, negative, **options)
    assert calls is None or seen == calls
    for found, prompts in ((first, positive), (second, negative)):
        given = prompts if isinstance(prompts, list) else [prompts] * len(found)
        assert_equal(found, [by_core(clip, prompt) for prompt in given])
    return report


@pytest.mark.parametrize("kind", ["wan", "sdxl"])
def test_all_prompts_take_one_call_per_transformer(kind):
    clip, transformers = encoder(kind), 2 if kind == "sdxl" else 1
    check(clip, [FOX, BOOK, LONG], [BLURRY, "", FOX])
    report = check(clip, [FOX, SHORT], calls=[3] * transformers)
    assert report.startswith(f"3 prompts: 0 from the cache, {transformers} forward call")


@pytest.mark.parametrize(
    ("kind", "positive", "negative", "calls"),
    [
        ("wan", [*SENTENCES, "a (fox:1.3)"], "", [6]),  # the reference for weights is ""
        ("wan", [FOX] * 3, FOX, [1]),  # equal prompts
        ("z_image", FOX, SHORT, [2]),  # the pads of the shorter one are masked
        ("z_image", "a fox<|endoftext|> in snow", f"{SHORT} in snow, at night", [2]),  # a pad
        ("z_image", LONG, "", [1, 1]),  # lengths that are far apart
        ("without masks", FOX, SHORT, [1, 1]),
    ],
)
def test_equal_rows_run_once_and_lengths_together_if_pads_are_few(kind, positive, negative, calls):
    from comfy_execution.utils import CurrentNodeContext

    from fast_video_vae.nodes.host import timing

    clip = encoder("z_image" if kind == "without masks" else kind)
    if kind == "without masks":
        clip.cond_stage_model.qwen3_4b.enable_attention_masks = False
    report = check(clip, positive, negative, calls=calls)
    with CurrentNodeContext("prompt", "1"):
        assert "conditioning" in timing.text()
    assert f" {len(calls)} forward call" in report
    assert f" {sum(calls)} row" in report
    assert (", 1 different: " in report) == (calls == [1])


@pytest.mark.parametrize("change", ["LoRA", "layer", "minimum length", "weights"])
def test_clones_with_other_settings_do_not_affect_each_other(change):
    """Neither in the cache, nor in the modules, which they share."""
    clip = encoder("wan" if change == "minimum length" else "sd1")
    other = encoder("sd1", seed=1) if change == "weights" else clip.clone()
    if change == "LoRA":
        state = clip.patcher.model.state_dict()
        name = next(name for name in state if name.endswith("q_proj.weight"))
        other.add_patches({name: (torch.randn(state[name].shape),)}, 1.0)
    elif change == "layer":
        other.clip_layer(-2)
    elif change == "minimum length":
        other.set_tokenizer_option("umt5xxl_min_length", 700)
    for each, cached in ((clip, 0), (other, 0), (clip, 2)):
        assert f": {cached} from the cache" in check(each, FOX, cache=8)
    one, two = by_core(clip, FOX)[0][0], by_core(other, FOX)[0][0]
    assert one.shape != two.shape or relative_error(one, two) > 1e-3


def test_an_embedding_applies_also_after_its_file_changed(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    clip, prompt = encoder("sd1"), "a fox, embedding:style in (snow:1.2)"
    monkeypatch.setattr(clip.tokenizer.clip_l, "embedding_directory", str(tmp_path))
    monkeypatch.setattr(clip.tokenizer.clip_l, "embedding_size", 32)
    for _ in range(2):
        save_file({"emb_params": torch.randn(2, 32)}, tmp_path / "style.safetensors")
        check(clip, [prompt, FOX], cache=8)


def test_a_stop_leaves_the_clip_unchanged(monkeypatch):
    from comfy import model_management

    def attributes():
        given = map(vars, (clip, *clip.cond_stage_model.modules()))
        return [{k: dict(v) if isinstance(v, dict) else v for k, v in x.items()} for x in given]

    stop = lambda *_: model_management.interrupt_current_processing(True)  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda forward: forward)
    clip = encoder("sdxl")
    expected = by_core(clip, FOX)
    hook = clip.cond_stage_model.clip_g.transformer.register_forward_pre_hook(stop)
    before = attributes()
    with pytest.raises(model_management.InterruptProcessingException):
        encode(clip, FOX, dtype="bf16", compile="on")
    assert attributes() == before
    hook.remove()
    model_management.interrupt_current_processing(False)
    torch.testing.assert_close(by_core(clip, FOX), expected, rtol=0, atol=0)


def test_a_batch_out_of_memory_continues_in_halves():
    def fail(_, __, keywords):
        if len(keywords["embeds"]) > 1:
            raise torch.OutOfMemoryError("no memory")

    clip = encoder("wan")
    transformer = clip.cond_stage_model.umt5xxl.transformer
    transformer.register_forward_pre_hook(fail, with_kwargs=True)
    check(clip, [FOX, BLURRY], "", calls=[1, 1, 1])


@pytest.mark.parametrize("is_hooked", [False, True])
def test_an_unbatchable_clip_encodes_prompts_one_by_one(is_hooked, caplog):
    import comfy.hooks

    clip = encoder("sd1")
    if is_hooked:
        clip.patcher.forced_hooks = comfy.hooks.HookGroup()
        clip.patcher.forced_hooks.add(comfy.hooks.WeightHook())
        clip.use_clip_schedule = True
    else:  # another pack's method
        part = clip.cond_stage_model.clip_l
        part.encode_token_weights = part.encode_token_weights
    with caplog.at_level(logging.INFO):
        assert "encoded one after the other" in check(clip, FOX, calls=[1, 1])
    (line,) = [each.message for each in caplog.records if "one after the other" in each.message]
    assert "\n" not in line


def test_bf16_and_compiled_blocks_change_the_result_little(monkeypatch, caplog):
    clip, real, compiled = encoder("wan"), torch.compile, []
    eager = lambda forward: compiled.append(forward) or real(forward, backend="eager")  # noqa: E731
    monkeypatch.setattr(torch, "compile", eager)
    check(clip, FOX, dtype="fp32", cache=8)
    exact = by_core(clip, FOX)[0][0]
    for options, least, most in (({"dtype": "bf16"}, 1e-5, 0.05), ({"compile": "on"}, 0, 1e-5)):
        (((states, _),),), _, report = encode(clip, FOX, cache=8, **options)
        assert "0 from the cache" in report
        assert states.dtype == torch.float32
        assert least <= (states - exact).norm() / exact.norm() < most
    blocks = clip.cond_stage_model.umt5xxl.transformer.encoder.block
    assert compiled == [type(blocks[0]).forward] * len(blocks)
    assert "torch.compile" not in caplog.text


def test_an_encoder_that_fails_to_compile_runs_uncompiled(monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nmore of it")

    monkeypatch.setattr(torch, "compile", lambda forward: broken)
    for _ in range(2):
        assert "1 forward call," in check(encoder("wan"), FOX, compile="on")
    (line,) = [each.message for each in caplog.records if "torch.compile" in each.message]
    assert line.endswith("RuntimeError: no compiler")


def test_dashes_or_lists_separate_prompts_and_one_prompt_is_repeated():
    clip, one = encoder("sd1"), f"\n  {FOX} -- and --- dashes\n\n"  # keeps its white space
    both, twice = ([by_core(clip, each) for each in texts] for texts in ([FOX, BOOK], [one] * 2))
    dashed = f"{FOX}\r\n ----- \r\n{BOOK}"
    for *given, expected in ((dashed, one, [both, twice]), (one, [FOX, BOOK], [twice, both])):
        *found, report = encode(clip, *given)
        assert report.startswith("3 prompts: ")
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"positive": [f"{FOX}\n---\n "]}, EMPTY),
        ({"positive": ["x"] * 3}, "negative: got 2 prompts; expected 1 or 3, as many as positive"),
        ({"negative": []}, "negative: got an empty list; expected at least one prompt"),
        ({"clip": []}, "clip: got an empty list; expected one value"),
        ({"dtype": ["bf16", "fp32"]}, "dtype: got 2 different values; expected one"),
    ],
)
def test_errors_are_one_line_before_anything_is_loaded(inputs, message):
    from fast_video_vae.nodes.text.nodes import TextEncode

    untouched = SimpleNamespace(tokenize=pytest.fail, encode_from_tokens_scheduled=pytest.fail)
    given = {"clip": [untouched], "positive": [FOX], "negative": ["", ""], **inputs}
    with pytest.raises(ValueError, match=r"^\w+: ") as caught:
        TextEncode.execute(**given)
    assert str(caught.value) == message
    linked = [None, *given["positive"]]
    assert TextEncode.validate_inputs(positive=linked) == (EMPTY if message == EMPTY else True)


@pytest.mark.parametrize("cache", [0, 8])
def test_a_node_that_writes_into_a_result_changes_no_other(cache):
    clip = encoder("sdxl")
    for run in range(3):
        (first, twin, other), negatives, report = encode(clip, [FOX, FOX, "x"], FOX, cache=cache)
        assert (": 2 from the cache, 0 forward calls" in report) == (cache > 0 and run > 0)
        for states, rest in (*twin, *negatives[0]):
            states.fill_(7)
            rest.pop("pooled_output").fill_(7)
        assert_equal(
            [first, negatives[1], other], [by_core(clip, each) for each in (FOX, FOX, "x")]
        )
        first[0][0].fill_(7)
    *_, report = encode(clip, [FOX], "x", cache=0)
    assert ": 0 from the cache" in report  # what is there is not read


def test_the_oldest_use_goes_above_the_limit_of_number_or_memory():
    from fast_video_vae.nodes.text.encode import TextCache

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
