"""Prompts in one pass of the text encoder, against ComfyUI's own CLIPTextEncode."""

import logging
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.tests.nodes.text.encoders import (
    BLURRY,
    BOOK,
    FOX,
    ROUNDING,
    by_core,
    count,
    encode,
    encoder,
    listed,
)
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


LONG = ", ".join([FOX, BOOK] * 12)  # more than the 512 tokens of umT5, the 77 of CLIP

EMPTY = "positive: the prompt is empty; expected text"

every_kind = pytest.mark.parametrize(
    "kind",
    [
        "wan",
        "sdxl",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("qwen_image", "z_image", "klein", "sd1", "flux")
        ),
    ],
)


def assert_equal(conditioning, expected, tolerance=ROUNDING):
    """Compare all entries of two conditionings: states, pooled output and masks."""
    assert len(conditioning) == len(expected)
    for (states, rest), (expected_states, expected_rest) in zip(
        conditioning, expected, strict=True
    ):
        assert states.dtype == expected_states.dtype
        assert relative_error(states, expected_states) <= tolerance
        assert rest.keys() == expected_rest.keys()
        for key, value in expected_rest.items():
            if isinstance(value, torch.Tensor):
                assert rest[key].dtype == value.dtype
                assert relative_error(rest[key].float(), value.float()) <= tolerance
            else:
                assert rest[key] == value


def encode_as_core(clip, positive, negative=BLURRY, calls=None, **options):
    """Encode, compare with ComfyUI's own node, check the `calls`, and return the report."""
    seen = [] if calls is None else count(clip)
    first, second, report = encode(clip, positive, negative, **options)
    assert calls is None or seen == calls
    prompts = [each for text in (positive, negative) for each in listed(text)]
    for conditioning, prompt in zip(first + second, prompts, strict=True):
        assert_equal(conditioning, by_core(clip, prompt))
    return report


@every_kind
def test_one_call_per_transformer_gives_the_result_of_comfyui(kind):
    clip, transformers = encoder(kind), 2 if kind in ("sdxl", "flux") else 1
    encode_as_core(clip, [FOX, BOOK, LONG], [BLURRY, "", FOX])
    calls = count(clip)
    _, _, report = encode(clip, [FOX, "a red fox runs"], BLURRY, cache=8)
    assert calls == [3] * transformers
    assert report.startswith(f"3 prompts: 0 from the cache, {transformers} forward call")
    _, _, report = encode(clip, [FOX, "a red fox runs"], BLURRY, cache=8)
    assert calls == [3] * transformers
    assert "3 from the cache, 0 forward calls" in report


def test_equal_prompts_are_encoded_once():
    from fast_video_vae.nodes.host import timing

    clip = encoder("wan")
    calls = count(clip)
    positive, negative, report = encode(clip, [FOX, FOX, BLURRY, FOX], FOX)
    assert calls == [2]
    assert "5 prompts, 2 different" in report
    assert len(positive) == len(negative) == 4
    assert_equal(positive[3], by_core(clip, FOX))
    assert "conditioning" in timing.text()


def test_weighted_prompts_share_one_empty_row():
    clip = encoder("sd1")
    calls = count(clip)
    encode(clip, ["a (fox:1.3)", "a (book:0.5)"], "")
    assert calls == [3]  # CLIP's empty prompt is the negative one


@pytest.mark.parametrize(
    ("positive", "negative", "masks"),
    [
        (LONG, "", True),  # lengths that are far apart
        (FOX, "a red fox runs", False),  # an encoder that does not mask pads
    ],
)
def test_prompts_run_separately_if_pads_are_costly_or_unmasked(positive, negative, masks):
    clip = encoder("z_image")
    clip.cond_stage_model.qwen3_4b.enable_attention_masks = masks
    encode_as_core(clip, positive, negative, calls=[1, 1])


def test_a_pad_token_in_the_prompt_acts_as_in_comfyui():
    prompt = "a fox<|endoftext|> in the snow"
    encode_as_core(encoder("z_image"), prompt, FOX + " in the snow, at night, alone")


def test_the_layer_and_tokenizer_options_of_the_clip_apply():
    clip = encoder("sdxl")
    skipped = clip.clone()
    skipped.clip_layer(-3)
    encode_as_core(skipped, FOX, cache=8)
    assert "0 from the cache" in encode_as_core(clip, FOX, cache=8)
    assert relative_error(by_core(clip, FOX)[0][0], by_core(skipped, FOX)[0][0]) > 0.01
    padded = encoder("wan")
    padded.set_tokenizer_option("umt5xxl_min_length", 700)
    encode_as_core(padded, FOX)
    assert by_core(padded, FOX)[0][0].shape[1] == 700


def test_an_embedding_within_a_prompt_applies(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    save_file({"emb_params": torch.randn(2, 32)}, tmp_path / "style.safetensors")
    clip = encoder("sd1")
    monkeypatch.setattr(clip.tokenizer.clip_l, "embedding_directory", str(tmp_path))
    monkeypatch.setattr(clip.tokenizer.clip_l, "embedding_size", 32)
    prompt = "a fox, embedding:style in (snow:1.2)"
    encode_as_core(clip, prompt, cache=8)
    plain = by_core(clip, "a fox, in (snow:1.2)")
    assert relative_error(by_core(clip, prompt)[0][0], plain[0][0]) > 0.01
    save_file({"emb_params": torch.randn(2, 32)}, tmp_path / "style.safetensors")
    encode_as_core(clip, prompt, cache=8)


def state_of(clip):
    """Return the public attributes of a CLIP and of its modules."""
    return [
        {key: value for key, value in vars(part).items() if not key.startswith("_")}
        for part in (clip, *clip.cond_stage_model.modules())
    ]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_error_leaves_the_clip_unchanged(error):
    clip = encoder("sdxl")
    expected, before = by_core(clip, FOX), state_of(clip)

    def fail(*_):
        raise error

    hook = clip.cond_stage_model.clip_l.transformer.register_forward_pre_hook(fail)
    with pytest.raises(type(error)):
        encode(clip, FOX, BLURRY)
    hook.remove()
    assert state_of(clip) == before
    assert_equal(by_core(clip, FOX), expected, tolerance=0)


def test_an_interrupt_ends_the_pass():
    import comfy.model_management

    clip = encoder("sdxl")
    calls = count(clip)
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        encode(clip, FOX, BLURRY)
    assert calls == []
    encode(clip, FOX, BLURRY)


def test_a_pass_out_of_memory_continues_with_half_batches():
    clip = encoder("wan")
    prompts = [FOX, BLURRY, LONG]
    expected = [by_core(clip, prompt) for prompt in prompts]
    sizes = count(clip)

    def fail(_, __, keywords):
        if len(keywords["embeds"]) > 1:
            raise torch.OutOfMemoryError("no memory")

    transformer = clip.cond_stage_model.umt5xxl.transformer
    transformer.register_forward_pre_hook(fail, with_kwargs=True)
    positive, _, _ = encode(clip, prompts, FOX)
    assert sizes[-2:] == [1, 1]
    for conditioning, each in zip(positive, expected, strict=True):
        assert_equal(conditioning, each)


@pytest.mark.parametrize("what", ["method of another pack", "forward of its own", "hooks"])
def test_an_unbatchable_clip_encodes_prompts_one_by_one(what, caplog):
    import comfy.hooks

    clip = encoder("sd1")
    model = clip.cond_stage_model
    if what == "method of another pack":
        own = model.clip_l.encode_token_weights
        model.clip_l.encode_token_weights = lambda pairs: own(pairs)
    elif what == "forward of its own":
        kind = type(model.clip_l)
        model.clip_l.__class__ = type(
            "Other", (kind,), {"forward": lambda self, tokens: kind.forward(self, tokens)}
        )
    else:
        clip.patcher.forced_hooks = comfy.hooks.HookGroup()
        clip.patcher.forced_hooks.add(comfy.hooks.WeightHook())
        clip.use_clip_schedule = True
    with caplog.at_level(logging.INFO):
        report = encode_as_core(clip, FOX)
    (line,) = [each.message for each in caplog.records if "one after the other" in each.message]
    assert "\n" not in line
    assert "encoded one after the other" in report


@pytest.mark.parametrize("kind", ["wan", pytest.param("z_image", marks=pytest.mark.slow)])
def test_bf16_has_an_error_below_five_percent(kind):
    clip = encoder(kind)
    (exact,), _, _ = encode(clip, FOX, BLURRY, dtype="fp32", cache=8)
    assert_equal(exact, by_core(clip, FOX))
    (rounded,), _, report = encode(clip, FOX, BLURRY, dtype="bf16", cache=8)
    assert "0 from the cache" in report
    assert rounded[0][0].dtype == torch.float32
    error = (rounded[0][0] - exact[0][0]).norm() / exact[0][0].norm()
    assert 1e-5 < error < 0.05


@pytest.mark.slow
def test_a_compiled_encoder_gives_the_same():
    from fast_video_vae.nodes.text import shadow

    clip = encoder("wan")
    expected = by_core(clip, FOX)
    (positive,), _, _ = encode(clip, FOX, BLURRY, compile="on")
    assert shadow._compiling["works"]
    assert_equal(positive, expected, tolerance=1e-5)
    assert_equal(by_core(clip, FOX), expected, tolerance=0)


def test_an_encoder_that_fails_to_compile_runs_uncompiled(monkeypatch, caplog):
    from fast_video_vae.nodes.text import shadow

    def broken(*_, **__):
        raise RuntimeError("no compiler\nmore of it")

    monkeypatch.setattr(shadow, "_compiling", {"works": True})
    monkeypatch.setattr(shadow, "_compiled", lambda kind: broken)
    for _ in range(2):
        encode_as_core(encoder("wan"), FOX, compile="on")
    (line,) = [each.message for each in caplog.records if "torch.compile" in each.message]
    assert line.endswith("RuntimeError: no compiler")


def test_dashes_separate_prompts_and_one_prompt_keeps_white_space():
    clip = encoder("wan")
    positive, _, _ = encode(clip, f"{FOX}\n---\n{BOOK}\r\n ----- \r\n{BLURRY}\n", "")
    for conditioning, prompt in zip(positive, [FOX, BOOK, BLURRY], strict=True):
        assert_equal(conditioning, by_core(clip, prompt))
    encode_as_core(clip, f"\n  {FOX} -- and --- dashes\n\n", "")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"positive": ["  \n"]}, EMPTY),
        ({"positive": []}, EMPTY),
        ({"positive": [FOX, ""]}, EMPTY),
        ({"positive": [f"{FOX}\n---\n"]}, EMPTY),
        (
            {"positive": [FOX] * 3, "negative": ["", ""]},
            "negative: got 2 prompts; expected 1 or 3, as many as positive",
        ),
        ({"negative": []}, "negative: got an empty list; expected at least one prompt"),
        (
            {"clip": [None]},
            "clip: got None; expected a text encoder. "
            "The checkpoint has none: load it from its own file",
        ),
        ({"dtype": ["bf16", "fp32"]}, "dtype: got 2 different values; expected one"),
    ],
)
def test_errors_are_one_line_before_anything_is_loaded(inputs, message):
    from fast_video_vae.nodes.text.nodes import TextEncode

    untouched = SimpleNamespace(tokenize=pytest.fail, encode_from_tokens_scheduled=pytest.fail)
    given = {"clip": [untouched], "positive": [FOX], "negative": [""], **inputs}
    with pytest.raises(ValueError, match=r"^\w+: ") as caught:
        TextEncode.execute(**given)
    assert str(caught.value) == message


def test_an_empty_prompt_is_refused_before_the_run():
    from fast_video_vae.nodes.text.nodes import TextEncode

    given = {"": EMPTY, f"{FOX}\n---\n ": EMPTY, FOX: True, None: True}  # None: linked
    for prompt, said in given.items():
        assert TextEncode.validate_inputs(positive=[prompt]) == said


@pytest.mark.parametrize(("positive", "negative"), [([FOX, BOOK], [BLURRY]), ([FOX], [BOOK, ""])])
def test_comfyui_passes_lists_and_one_prompt_is_repeated(positive, negative):
    import asyncio

    import execution

    from fast_video_vae.nodes.text.nodes import TextEncode

    clip = encoder("sd1")
    inputs = {"clip": [clip], "positive": positive, "negative": negative, "cache": [8]}
    outputs, *_ = asyncio.run(execution.get_output_data("prompt", "1", TextEncode, inputs))
    *both, (report,) = outputs
    for found, prompts in zip(both, (positive, negative), strict=True):
        assert len(found) == 2
        assert found[0] is not found[1]
        assert_equal(found[1], by_core(clip, prompts[-1]))
    assert report.startswith(f"{len(positive) + len(negative)} prompts")
