"""Prompts in one pass of the text encoder, against ComfyUI's own CLIPTextEncode."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.tests.nodes.text import encoders
from fast_video_vae.tests.nodes.text.encoders import BLURRY, BOOK, FOX, by_core, encode, encoder
from fast_video_vae.tests.nodes.text.encoders import encode_as_core as check
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

LONG = ", ".join([FOX, BOOK] * 12)  # more than the 512 tokens of umT5, the 77 of CLIP
SHORT = "a red fox runs"
EMPTY = "positive: the prompt is empty; expected text"


@pytest.mark.parametrize("kind", encoders.KINDS)
def test_all_prompts_take_one_call_per_transformer(kind):
    clip, transformers = encoder(kind), 2 if kind in ("sdxl", "flux") else 1
    check(clip, [FOX, BOOK, LONG], [BLURRY, "", FOX])
    report = check(clip, [FOX, SHORT], calls=[3] * transformers)
    assert report.startswith(f"3 prompts: 0 from the cache, {transformers} forward call")


@pytest.mark.parametrize(
    ("kind", "positive", "negative", "calls"),
    [
        ("wan", FOX, "", [2]),
        ("wan", [*encoders.SENTENCES, "a (fox:1.3)"], "", [6]),  # the reference for weights is ""
        ("wan", [FOX, "a (fox:1.3)", "a (book:0.5)"], BLURRY, [5]),
        ("wan", [FOX] * 3, FOX, [1]),  # equal prompts
        ("z_image", FOX, SHORT, [2]),  # the pads of the shorter one are masked
        ("z_image", "a fox<|endoftext|> in snow", f"{SHORT} in snow, at night", [2]),  # a pad
        ("z_image", LONG, "", [1, 1]),  # lengths that are far apart
    ],
)
def test_equal_rows_run_once_and_lengths_together_if_pads_are_few(kind, positive, negative, calls):
    from comfy_execution.utils import CurrentNodeContext

    from fast_video_vae.nodes.host import timing

    report = check(encoder(kind), positive, negative, calls=calls)
    with CurrentNodeContext("prompt", "1"):
        assert "conditioning" in timing.text()
    assert f" {len(calls)} forward call" in report
    assert f" {sum(calls)} row" in report
    assert (", 1 different: " in report) == (calls == [1])


def test_an_encoder_that_does_not_mask_pads_runs_lengths_separately():
    clip = encoder("z_image")
    clip.cond_stage_model.qwen3_4b.enable_attention_masks = False
    check(clip, FOX, SHORT, calls=[1, 1])


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


def test_an_encoder_may_be_called_with_other_options(monkeypatch):
    """As by ACE-Step 1.5, which reads two layers."""
    clip = encoder("sd1")
    model, own = type(clip.cond_stage_model), type(clip.cond_stage_model).encode_token_weights

    def twice(self, tokens):
        states, pooled = own(self, tokens)
        self.set_clip_options({"layer": -2})
        return torch.cat([states, own(self, tokens)[0]], dim=1), pooled

    monkeypatch.setattr(model, "encode_token_weights", twice)
    check(clip, [FOX, BOOK], calls=[4, 4])


def test_an_embedding_applies_also_after_its_file_changed(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    clip, prompt = encoder("sd1"), "a fox, embedding:style in (snow:1.2)"
    monkeypatch.setattr(clip.tokenizer.clip_l, "embedding_directory", str(tmp_path))
    monkeypatch.setattr(clip.tokenizer.clip_l, "embedding_size", 32)
    for _ in range(2):
        save_file({"emb_params": torch.randn(2, 32)}, tmp_path / "style.safetensors")
        check(clip, [prompt, FOX], cache=8)
    error = relative_error(by_core(clip, prompt)[0][0], by_core(clip, "a fox, in snow")[0][0])
    assert error > 0.01


def state_of(clip):
    """Return all attributes of a CLIP and of its modules, also parts and hooks."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in given.items()}
        for given in map(vars, (clip, *clip.cond_stage_model.modules()))
    ]


@pytest.mark.parametrize("end", ["success", "error", "interrupt"])
def test_every_end_leaves_the_clip_unchanged(end, monkeypatch):
    from comfy import model_management

    def work(*_):
        if end == "error":
            raise RuntimeError
        model_management.interrupt_current_processing(end == "interrupt")

    monkeypatch.setattr(torch, "compile", lambda forward: forward)
    clip = encoder("sdxl")
    expected = by_core(clip, FOX)
    hook = clip.cond_stage_model.clip_g.transformer.register_forward_pre_hook(work)
    before, ends = state_of(clip), contextlib.nullcontext()
    if end != "success":
        ends = pytest.raises((RuntimeError, model_management.InterruptProcessingException))
    with ends:
        encode(clip, FOX, dtype="bf16", compile="on")
    assert state_of(clip) == before
    hook.remove()
    encoders.assert_equal(by_core(clip, FOX), expected, tolerance=0)


def test_a_batch_out_of_memory_continues_in_halves():
    def fail(_, __, keywords):
        if len(keywords["embeds"]) > 1:
            raise torch.OutOfMemoryError("no memory")

    clip = encoder("wan")
    transformer = clip.cond_stage_model.umt5xxl.transformer
    transformer.register_forward_pre_hook(fail, with_kwargs=True)
    check(clip, [FOX, BLURRY], "", calls=[1, 1, 1])


@pytest.mark.parametrize("what", ["encode_token_weights", "forward", "hooks"])
def test_an_unbatchable_clip_encodes_prompts_one_by_one(what, caplog):
    import comfy.hooks
    from comfy.sd1_clip import SDClipModel

    clip = encoder("sd1")
    part = clip.cond_stage_model.clip_l
    if what == "encode_token_weights":  # another pack's
        part.encode_token_weights = part.encode_token_weights
    elif what == "forward":  # of another class
        own = {"forward": lambda self, tokens: SDClipModel.forward(self, tokens)}
        part.__class__ = type("Other", (type(part),), own)
    else:
        clip.patcher.forced_hooks = comfy.hooks.HookGroup()
        clip.patcher.forced_hooks.add(comfy.hooks.WeightHook())
        clip.use_clip_schedule = True
    with caplog.at_level(logging.INFO):
        assert "encoded one after the other" in check(clip, FOX, calls=[1, 1])
    (line,) = [each.message for each in caplog.records if "one after the other" in each.message]
    assert "\n" not in line


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"dtype": "bf16"}, 1e-5, 0.05),
        pytest.param({"compile": "on"}, 0, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_bf16_and_compiled_blocks_change_the_result_little(options, least, most, caplog):
    clip = encoder("wan")
    check(clip, FOX, dtype="fp32", cache=8)
    (((states, _),),), _, report = encode(clip, FOX, cache=8, **options)
    assert "0 from the cache" in report
    assert "torch.compile" not in caplog.text
    exact = by_core(clip, FOX)[0][0]
    assert states.dtype == torch.float32
    assert least <= (states - exact).norm() / exact.norm() < most


def test_an_encoder_that_fails_to_compile_runs_uncompiled(monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nmore of it")

    monkeypatch.setattr(torch, "compile", lambda forward: broken)
    for _ in range(2):
        assert "1 forward call," in check(encoder("wan"), FOX, compile="on")
    (line,) = [each.message for each in caplog.records if "torch.compile" in each.message]
    assert line.endswith("RuntimeError: no compiler")


@pytest.mark.parametrize("dashes", ["\n---\n", "\r\n ----- \r\n"])
def test_dashes_or_lists_separate_prompts_and_one_prompt_is_repeated(dashes):
    clip, one = encoder("sd1"), f"\n  {FOX} -- and --- dashes\n\n"  # keeps its white space
    for given in ((FOX + dashes + BOOK, one), (one, [FOX, BOOK])):
        *both, report = encode(clip, *given)
        assert report.startswith("3 prompts: ")
        for found, text in zip(both, given, strict=True):
            assert found[0] is not found[1]
            prompts = [one] * 2 if text == one else [FOX, BOOK]
            for conditioning, prompt in zip(found, prompts, strict=True):
                encoders.assert_equal(conditioning, by_core(clip, prompt))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"positive": [f"{FOX}\n---\n "]}, EMPTY),
        ({"positive": []}, EMPTY),
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
    linked, refused = [None, *given["positive"]], message == EMPTY and given["positive"]
    assert TextEncode.validate_inputs(positive=linked) == (EMPTY if refused else True)
