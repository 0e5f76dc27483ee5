"""Texts of a stack: block filters, strengths over a run, and the steps that they refer to."""

import math
import re
from pathlib import Path

import pytest

from fast_video_vae.lora.blocks import parse_blocks
from fast_video_vae.lora.schedule import parse_schedule, step_of

LAYERS = (
    "blocks.5.self_attn.q", "blocks.9.cross_attn.k_img", "blocks.12.ffn.0",
    "transformer_blocks.7.attn1.to_q", "input_blocks.4.1.transformer_blocks.0.attn1.to_q",
    "text_embedding.0", "img_emb.proj.1",
)  # fmt: skip

# Filters, and the factor of each layer.
FILTERS = {
    " \n": (1, 1, 1, 1, 1, 1, 1),
    "5-12,07": (1, 1, 1, 1, 0, 0, 0),
    "0,1,4": (0, 0, 0, 0, 1, 0, 0),  # the first number in a name, except at its end
    "!5,5-9=2": (0, 2, 0, 2, 0, 0, 0),  # an exclusion holds at any position
    "9=-1.5,5=0": (0, -1.5, 0, 0, 0, 0, 0),  # a factor chooses, too
    "9-12=0.5,0-,12=0.5": (1, 1, 0.5, 1, 1, 0, 0),  # the last item that fits gives it
    # Names choose layers, by whole segments in a row; case matters.
    "self_attn.q,blocks.q,attn,Ffn": (1, 0, 0, 0, 0, 0, 0),
    "blocks.?,attn*,ffn.[1]": (1, 1, 0, 1, 1, 0, 0),
    "*attn,!*_img": (1, 0, 0, 0, 0, 0, 0),
    # A layer has to pass the numbers and the names; only numbers exclude what is outside.
    "!5,!cross_attn": (0, 0, 1, 1, 1, 1, 1),
    "0-,9-12=0.5,*,ffn=0.5": (1, 0.5, 0.25, 1, 1, 1, 1),
    " 0 - 12 , ! cross_attn , ffn = .5 ": (0, 0, 0.5, 0, 0, 0, 0),
}


def test_a_filter_gives_a_factor_per_layer():
    found = {text: tuple(map(parse_blocks(text).factor, LAYERS)) for text in FILTERS}
    assert found == FILTERS


def run(steps, *phase):
    """Return the calls of a run; the sigmas fall evenly from 1."""
    return [(step, steps, 1 - step / steps, *phase) for step in range(steps)]


def two(high, low):
    """Return the calls of a run of two experts."""
    phases = [(phase, 2, step, of) for phase, of in enumerate((high, low)) for step in range(of)]
    return [call + phase for call, phase in zip(run(high + low), phases, strict=True)]


@pytest.mark.parametrize(
    ("text", "calls", "expected"),
    [
        (0.8, run(2), [0.8, 0.8]),  # from a FLOAT input
        ("0.8, -.5 , +1e1 ", run(6), [0.8, 0.8, -0.5, -0.5, 10, 10]),
        ("1,2,3,4", run(2), [1, 3]),  # more values than steps: 2 and 4 are left out
        ("1,2,3", two(2, 4), [1, 1, 2, 2, 3, 3]),  # without phases: over the run
        ("0.9,0.8;1.2,1.1,1", two(5, 4), [0.9] * 3 + [0.8] * 2 + [1.2, 1.2, 1.1, 1]),
        # The length of the phase is unknown: its values spread over the run.
        ("0.9,0.8;1.2,1.1,1", run(6, 1, 2), [1.2, 1.2, 1.1, 1.1, 1, 1]),
        ("1;0", run(2) + run(2, 1), [1, 1, 0, 0]),  # the number of phases is unknown
        ("1;1", run(2, 2, 3), [1, 1]),  # equal values fit any run
        # A strength is 0 outside its window, in which a step begins.
        ("1@0-0.3", run(30), [1] * 9 + [0] * 21),  # 0.3 is 9 / 30, in floating point too
        ("1,2@0.25-0.75", run(4), [0, 1, 2, 0]),  # the list spreads over the run
        ("1@sigma:0.75-0.5", run(4), [0, 1, 0, 0]),
        # Sigmas are in float32.
        ("1@sigma:0.1-0", [(0, 1, 0.10000000149011612)], [1]),
        ("1@sigma:1-0.1", [(0, 1, 0.10000000149011612)], [0]),
        ("0;1;0", two(1, 1)[:1], "'0;1;0' has 3 phases, but the run has 2"),
        ("1;0", run(1, 2), "'1;0' has no phase 2; expected 0 to 1"),
        ("1", [(-1, 4, 1.0)], "step is -1; expected 0 to 3"),
    ],
)
def test_a_schedule_gives_a_strength_per_call_or_an_error(text, calls, expected):
    schedule = parse_schedule(text)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            schedule.strength(*calls[0])
    else:
        assert [schedule.strength(*call) for call in calls] == expected


def test_a_schedule_has_a_text_and_lists_its_strengths():
    for text, shown, values in (
        (" -1,1e-07 ;1234567.5;-0", "-1,1e-07;1234567.5;0", (-1, 1e-7, 1234567.5, 0)),
        ("1;2@0-0.123456789", "1;2@0-0.123456789", (1, 2, 0)),
        ("1@0-1", "1", (1,)),  # the window is the whole run
        ("1@sigma:1-0", "1@sigma:1-0", (1, 0)),  # sigmas can be above 1
    ):
        schedule = parse_schedule(text)
        assert (str(schedule), schedule.values()) == (shown, values)
        assert hash(parse_schedule(shown)) == hash(schedule)
    assert [parse_schedule("0;1,2").values(phase) for phase in (0, 1)] == [(0,), (1, 2)]


INVALID = {
    parse_schedule: (
        "", "1,,2", "1;,2", "one", "1 2", "0x10", "1_0", "\u0661", "1e999", math.nan, "1;0;1;0",
        "1@", "@0-1", "1@0-1@0-1", "1@step:0-1", "1@0%-50%", "1@0-1.1", "1@-0.1-1", "1@0-nan",
        "1@0.5-0.5", "1@sigma:0.9", "1@sigma:1e999-0", "1@sigma:0.9-0.9",
    ),
    parse_blocks: (
        ",", "ffn,,5", "ffn.", "!", "!!5", "5!", "=0.5", "-5", "5-7-9", "1.5", "5 7", "self attn",
        "19-0", "9" * 5000,  # more digits than Python converts to an int
        "5=", "5=half", "5=inf", "5=1=2", "!5=0.5",
    ),
}  # fmt: skip


def test_an_invalid_text_is_a_one_line_error():
    for parse, text in ((parse, text) for parse, texts in INVALID.items() for text in texts):
        said = rf"^(strength|blocks) {re.escape(repr(str(text)))}.*expected.*\Z"  # in one line
        with pytest.raises(ValueError, match=said):
            parse(text)


def test_the_sigma_of_a_call_determines_its_step():
    falling, rising = [1.0, 0.9375, 0.8333, 0.625, 0.0], [0.0, 0.5, 1.0]
    for sigmas, steps in (
        # A solver of two stages calls within a step; the end of the run belongs to the last one.
        (falling, {14.6: 0, 0.9375: 1, 0.9: 1, 0.01: 3, 0.0: 3}),
        (falling, {0.8333000001: 2, 0.83329999: 2}),  # through float32 and back
        ([1.0, 0.9, 0.9, 0.5], {0.9: 2, 0.5: 2}),  # the first 0.9 is a step of no length
        ([1.0], {1.0: 0}),
        (rising, {0.0: 0, 0.3: 0, 0.5: 1, 1.0: 1}),  # a run that adds noise
    ):
        assert {sigma: step_of(sigma, sigmas) for sigma in steps} == steps
    with pytest.raises(ValueError, match="sigmas is empty"):
        step_of(1.0, [])


def test_examples_of_the_help_page_parse():
    page = Path(__file__).parents[2] / "web" / "docs" / "FastVAE_LoraStack.md"
    for heading, parse in (("Strength", parse_schedule), ("Blocks", parse_blocks)):
        section = page.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
        examples = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
        assert len(examples) >= 7
        assert all(map(parse, examples))
