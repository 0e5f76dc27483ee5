"""The node that encodes all prompts in one pass."""

import re

from comfy.sd import CLIP
from comfy_api.latest import io

from ..host.input_checks import checked
from ..host.lazy import Later
from ..host.widgets import AUTO, CATEGORY, DTYPES
from .cache import copied

encoding = Later("nodes.text.encode")

# A line of three or more dashes separates the prompts of one text.
_BETWEEN = re.compile(r"^[ \t]*---+[ \t\r]*$", re.MULTILINE)

_EMPTY = "positive: the prompt is empty; expected text"

# Without fp16, because the activations of T5 exceed its range.
_DTYPES = {AUTO: None, **{name: DTYPES[name] for name in ("bf16", "fp32")}}


class TextEncode(io.ComfyNode):
    """Encode positive and negative prompts together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_TextEncode",
            display_name="Text Encode Batched (Fast)",
            category=CATEGORY,
            description="Encodes positive and negative prompts, lists of them too, in one pass of "
            "the text encoder, and remembers them. The result is that of CLIP Text Encode.",
            search_aliases=[
                "clip text encode",
                "prompt",
                "batched prompt",
                "prompt list",
                "positive prompt",
                "negative prompt",
                "text encoder",
                "encode prompt",
            ],
            is_input_list=True,
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoder. It stays as it is."),
                io.String.Input(
                    "positive",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="What is to be seen. Several prompts: a list, or one text with a line "
                    "of --- between them.",
                ),
                io.String.Input(
                    "negative",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="What is not to be seen; may be empty. One serves all positive "
                    "prompts; else as many as there are of these.",
                ),
                *_advanced(),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", is_output_list=True),
                io.Conditioning.Output("negative", display_name="negative", is_output_list=True),
                io.String.Output("report", display_name="report"),
            ],
        )

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
        count = _common_length(len(positives), len(negatives))
        conditionings, report = encoding.encode(
            _only("clip", clip),
            [*positives, *negatives],
            _DTYPES[_only("dtype", dtype or [AUTO])],
            compiled=_only("compile", compile or ["off"]) == "on",
            cache_size=_only("cache", cache or [0]),
        )
        first, second = conditionings[: len(positives)], conditionings[len(positives) :]
        return io.NodeOutput(_spread(first, count), _spread(second, count), str(report))


def _advanced() -> list[io.Input]:
    return [
        io.Combo.Input(
            "dtype",
            options=list(_DTYPES),
            default=AUTO,
            optional=True,
            advanced=True,
            tooltip="Number format of the encoder's computation. auto: ComfyUI's, fp32. bf16: "
            "0.4 to 0.7 of the time on a CPU that has it, with two digits; no longer the result "
            "of CLIP Text Encode.",
        ),
        io.Combo.Input(
            "compile",
            options=["off", "on"],
            default="off",
            optional=True,
            advanced=True,
            tooltip="on: the encoder goes through torch.compile. The first run takes half a minute "
            "to a minute more. Measured on a CPU: nothing won in fp32; with bf16 half the time.",
        ),
        io.Int.Input(
            "cache",
            default=32,
            min=0,
            max=4096,
            optional=True,
            advanced=True,
            tooltip="Prompts that are remembered, in at most 256 MiB of memory, by all nodes of "
            "this kind together. 0: none.",
        ),
    ]


def _prompts(texts: list[str]) -> list[str]:
    """Return the prompts of texts. A text with one prompt keeps its white space."""
    parts = [_BETWEEN.split(text) for text in texts]
    return [part if len(each) == 1 else part.strip("\r\n") for each in parts for part in each]


def _only(name: str, values: list) -> object:
    """Return the single value of an input that is not a list."""
    first = values[0] if values else None
    if any(value is not first and value != first for value in values[1:]):
        raise ValueError(f"{name}: got {len(values)} different values; expected one")
    if name == "clip" and first is None:
        raise ValueError(
            "clip: got None; expected a text encoder. The checkpoint has none: load it separately"
        )
    return first


def _common_length(positives: int, negatives: int) -> int:
    if not negatives:
        raise ValueError("negative: got an empty list; expected at least one prompt")
    if positives != negatives and 1 not in (positives, negatives):
        raise ValueError(
            f"negative: got {negatives} prompts; expected 1 or {positives}, as many as positive"
        )
    return max(positives, negatives)


def _spread(conditionings: list, count: int) -> list:
    """Return `count` conditionings, each in new lists and dicts."""
    if len(conditionings) == count:
        return conditionings
    return [copied(conditionings[0]) for _ in range(count)]
