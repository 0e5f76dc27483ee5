"""The node that encodes all prompts in one pass."""

import re
from typing import Any

from comfy.sd import CLIP

from ..host.api import io
from ..host.input_checks import checked
from ..host.lazy import Later
from ..host.widgets import AUTO, CATEGORY, DTYPES

encoding = Later("nodes.text.encode")

# A line of three or more dashes separates the prompts of one text.
_BETWEEN = re.compile(r"^[ \t]*---+[ \t\r]*$", re.MULTILINE)

_EMPTY = "positive: the prompt is empty; expected text"

# Without fp16, because the activations of T5 exceed its range.
_DTYPES = {AUTO: None, **{name: DTYPES[name] for name in ("bf16", "fp32")}}

_TEXTS = {
    "clip": "CLIP text encoder. The input CLIP is not modified.",
    "positive": "Text of the positive prompt. Several prompts: a list, or one text with a line of "
    "--- between the prompts.",
    "negative": "Text of the negative prompt; may be empty. One prompt is used for all positive "
    "prompts; otherwise the numbers of prompts must match.",
    "dtype": "Data type of the text encoder. auto: fp32, as in ComfyUI. bf16: 0.4 to 0.7 of the "
    "time on a CPU with bf16 support, at a precision of about two digits; the result differs from "
    "CLIP Text Encode.",
    "compile": "on: compiles the text encoder with torch.compile; the first run takes 30 to 60 "
    "seconds longer. Measured on a CPU: no gain in fp32, half the time in bf16.",
    "cache": "Number of cached prompts, at most 256 MiB of memory, shared by all nodes of this "
    "type. 0: no cache.",
}


class TextEncode(io.ComfyNode):
    """Encode positive and negative prompts together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        prompt = {"multiline": True, "dynamic_prompts": True}

        def late(name: str) -> dict[str, Any]:
            return {"optional": True, "advanced": True, "tooltip": _TEXTS[name]}

        return io.Schema(
            node_id="FastVAE_TextEncode",
            display_name="Text Encode Batched (Fast)",
            category=CATEGORY,
            description="Encodes positive and negative prompts, also lists of prompts, in one "
            "pass of the text encoder and caches the results. The result is that of CLIP Text "
            "Encode.",
            search_aliases=[
                "clip text encode", "prompt", "batched prompt", "prompt list", "positive prompt",
                "negative prompt", "text encoder", "encode prompt",
            ],
            is_input_list=True,
            inputs=[
                io.Clip.Input("clip", tooltip=_TEXTS["clip"]),
                io.String.Input("positive", tooltip=_TEXTS["positive"], **prompt),
                io.String.Input("negative", tooltip=_TEXTS["negative"], **prompt),
                io.Combo.Input("dtype", options=list(_DTYPES), default=AUTO, **late("dtype")),
                io.Combo.Input("compile", options=["off", "on"], default="off", **late("compile")),
                io.Int.Input("cache", default=32, min=0, max=4096, **late("cache")),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", is_output_list=True),
                io.Conditioning.Output("negative", display_name="negative", is_output_list=True),
                io.String.Output("report", display_name="report"),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, positive: list[str | None]) -> bool | str:
        """Reject an empty prompt before anything is loaded; a linked prompt is None."""
        texts = [text for text in positive if text is not None]
        return True if all(map(str.strip, _prompts(texts))) else _EMPTY

    @classmethod
    @checked
    def execute(
        cls,
        clip: list[CLIP | None],
        positive: list[str],
        negative: list[str],
        dtype: list[str] | None = None,
        compile: list[str] | None = None,
        cache: list[int] | None = None,
    ) -> io.NodeOutput:
        """Encode all prompts."""
        positives, negatives = _prompts(positive), _prompts(negative)
        if not positives or not all(map(str.strip, positives)):
            raise ValueError(_EMPTY)
        if not negatives:
            raise ValueError("negative: got an empty list; expected at least one prompt")
        first, second = len(positives), len(negatives)
        if first != second and 1 not in (first, second):
            raise ValueError(
                f"negative: got {second} prompts; expected 1 or {first}, as many as positive"
            )
        conditionings, report = encoding.encode(
            _only("clip", clip),
            [*positives, *negatives],
            _DTYPES[_only("dtype", dtype or [AUTO])],
            compiled=_only("compile", compile or ["off"]) == "on",
            cache_size=_only("cache", cache or [0]),
        )
        count = max(first, second)
        both = _spread(conditionings[:first], count), _spread(conditionings[first:], count)
        return io.NodeOutput(*both, report)


def _prompts(texts: list[str]) -> list[str]:
    """Return the prompts of texts. A text with one prompt keeps its white space."""
    parts = [_BETWEEN.split(text) for text in texts]
    return [part if len(each) == 1 else part.strip("\r\n") for each in parts for part in each]


def _only(name: str, values: list) -> object:
    """Return the single value of an input that is not a list."""
    if not values:
        raise ValueError(f"{name}: got an empty list; expected one value")
    if any(value is not values[0] and value != values[0] for value in values):
        raise ValueError(f"{name}: got {len(values)} different values; expected one")
    return values[0]


def _spread(conditionings: list, count: int) -> list:
    """Return `count` conditionings, each in new lists and dicts."""
    if len(conditionings) == count:
        return conditionings
    return [encoding.copied(conditionings[0]) for _ in range(count)]
