"""Strengths over a run: the lists of Wan2GP's guide, and the window of steps."""

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_video_vae.lora.blocks import parse_blocks
from fast_video_vae.lora.schedule import parse_schedule, step_of

quick = settings(derandomize=True, deadline=None, max_examples=100)


def run(text, steps, **phase):
    """Return the strengths of a run, one per step; the sigmas fall evenly from 1."""
    schedule = parse_schedule(text)
    return [schedule.strength(step, steps, 1 - step / steps, **phase) for step in range(steps)]


def two_experts(text, high, low):
    """Return the strengths of `high` steps of the high-noise expert and `low` of the other."""
    schedule = parse_schedule(text)
    phases = [(0, step, high) for step in range(high)] + [(1, step, low) for step in range(low)]
    return [
        schedule.strength(step, high + low, 1 - step / (high + low), phase, 2, at, length)
        for step, (phase, at, length) in enumerate(phases)
    ]


@pytest.mark.parametrize(
    ("text", "steps", "expected"),
    [
        ("0.8", 3, [0.8] * 3),
        (0.8, 3, [0.8] * 3),  # from a FLOAT input
        (1, 2, [1, 1]),
        ("-1.5", 2, [-1.5] * 2),
        ("+12.", 1, [12]),
        (" .5 , 1e1 ", 2, [0.5, 10]),
        ("0.9,0.8,0.7", 30, [0.9] * 10 + [0.8] * 10 + [0.7] * 10),  # Wan2GP's guide
        ("0.8,0.7,0.5", 6, [0.8, 0.8, 0.7, 0.7, 0.5, 0.5]),  # Wan2GP's guide
        ("1,2,3", 4, [1, 1, 2, 3]),  # floor(i * 3 / 4)
        ("1,2,3,4", 2, [1, 3]),  # more values than steps: 2 and 4 are left out
        ("1,2,3", 1, [1]),
    ],
)
def test_a_list_spreads_evenly_over_the_run(text, steps, expected):
    assert run(text, steps) == expected


@pytest.mark.parametrize(
    ("text", "high", "low", "expected"),
    [
        ("1,2,3", 2, 4, [1, 1, 2, 2, 3, 3]),  # without phases: over the run
        ("1;0", 2, 2, [1, 1, 0, 0]),
        ("0;1", 1, 3, [0, 1, 1, 1]),
        ("0.9,0.8;1.2,1.1,1", 2, 3, [0.9, 0.8, 1.2, 1.1, 1]),  # Wan2GP's guide
        ("0.9,0.8;1.2,1.1,1", 5, 4, [0.9] * 3 + [0.8] * 2 + [1.2, 1.2, 1.1, 1]),
        ("0.5;0,0.7", 2, 4, [0.5, 0.5, 0, 0, 0.7, 0.7]),
        ("1;0", 0, 2, [0, 0]),  # a run that starts below the boundary
        ("2;2", 1, 1, [2, 2]),
    ],
)
def test_a_phase_spreads_over_its_own_steps(text, high, low, expected):
    assert two_experts(text, high, low) == expected


@pytest.mark.parametrize(
    ("text", "steps", "phase", "expected"),
    [
        # The length of the phase is unknown: its values spread over the run.
        ("0.9,0.8;1.2,1.1,1", 6, {"phase": 1, "phases": 2}, [1.2, 1.2, 1.1, 1.1, 1, 1]),
        ("0.9,0.8;1", 4, {"phase": 0, "phases": 2, "phase_step": 1}, [0.9, 0.9, 0.8, 0.8]),
        # The number of phases is unknown.
        ("1;0", 2, {}, [1, 1]),
        ("1;0", 2, {"phase": 1}, [0, 0]),
        ("1;1", 2, {"phase": 2, "phases": 3}, [1, 1]),  # equal values fit any run
        ("0;1;0", 2, {"phase": 1, "phases": 3}, [1, 1]),
        ("0;1;0", 2, {"phase": 2, "phases": 3}, [0, 0]),
    ],
)
def test_the_number_of_a_phase_selects_its_values(text, steps, phase, expected):
    assert run(text, steps, **phase) == expected


@pytest.mark.parametrize(
    ("text", "phase", "said"),
    [
        ("0;1;0", (0, 2), "'0;1;0' has 3 phases, but the run has 2"),
        ("1;0", (0, 3), "'1;0' has 2 phases, but the run has 3"),
        ("1;0", (2, 1), "'1;0' has no phase 2; expected 0 to 1"),
        ("1;0", (0, 2, 2, 2), "step is 2; expected 0 to 1"),
    ],
)
def test_a_wrong_phase_or_step_is_an_error(text, phase, said):
    with pytest.raises(ValueError, match=said):
        parse_schedule(text).strength(0, 4, 1.0, *phase)
    for step in (4, -1):
        with pytest.raises(ValueError, match=f"step is {step}; expected 0 to 3"):
            parse_schedule(text).strength(step, 4, 1.0)


@pytest.mark.parametrize(
    ("text", "steps", "expected"),
    [
        ("1@0-0.5", 4, [1, 1, 0, 0]),
        ("1@0.5-1", 4, [0, 0, 1, 1]),
        ("1 @ 0 - .5", 4, [1, 1, 0, 0]),
        ("1,2@0.25-0.75", 4, [0, 1, 2, 0]),  # the list spreads over the run, not the window
        ("1@0-0.3", 30, [1] * 9 + [0] * 21),
        ("1@0-0.01", 4, [1, 0, 0, 0]),  # the first step begins in the window
        ("1@0.1-0.2", 4, [0] * 4),  # no step begins in the window
        ("1@sigma:1-0.5", 4, [1, 1, 0, 0]),
        ("1@sigma:0.75-0", 4, [0, 1, 1, 1]),
        ("1@sigma:100-0.9", 4, [1, 0, 0, 0]),
        ("1;0@0-0.5", 4, [1, 1, 0, 0]),
    ],
)
def test_a_strength_is_zero_outside_its_window(text, steps, expected):
    assert run(text, steps) == expected


def test_a_window_of_sigma_tolerates_float32():
    float32 = 0.10000000149011612  # 0.1, rounded to float32
    assert parse_schedule("1@sigma:0.1-0").strength(0, 1, float32) == 1
    assert parse_schedule("1@sigma:1-0.1").strength(0, 1, float32) == 0


@quick
@given(st.integers(1, 120), st.integers(1, 99), st.booleans())
def test_adjacent_windows_cover_the_run_once(steps, percent, by_sigma):
    cut = percent / 100
    texts = (f"1@sigma:1-{cut}", f"1@sigma:{cut}-0") if by_sigma else (f"1@0-{cut}", f"1@{cut}-1")
    before, after = (run(text, steps) for text in texts)
    assert [a + b for a, b in zip(before, after, strict=True)] == [1] * steps
    if not by_sigma:
        assert before.count(1) == math.ceil(Fraction(percent, 100) * steps)


@pytest.mark.parametrize(
    "text", ["0.8", "-1,1e-07;1234567.5;0", "1@0.3-1", "1;0@0-0.123456789", "1@sigma:14.6-0.9"]
)
def test_the_text_of_a_schedule_parses_to_the_same_schedule(text):
    schedule = parse_schedule(text)
    assert str(schedule) == text
    assert hash(parse_schedule(f" {text} ")) == hash(schedule)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.8", (0.8,)),
        ("1,1;1", (1,)),
        ("1;0", (1, 0)),
        ("2,1,2;3", (2, 1, 3)),
        ("-0", (0,)),  # and its text is 0
        ("0,0;0", (0,)),
        ("0@0-0.5", (0,)),
        ("1@0-0.5", (1, 0)),
        ("1@0-1", (1,)),  # the window is the whole run
        ("1@sigma:1-0", (1, 0)),  # sigmas can be above 1
    ],
)
def test_a_schedule_lists_its_possible_strengths(text, values):
    assert parse_schedule(text).values() == values
    schedule = parse_schedule("0;1,2")
    assert [schedule.values(phase) for phase in (0, 1)] == [(0,), (1, 2)]
    assert parse_schedule("1,2").values(7) == (1, 2)  # the same for all phases
    assert "-" not in str(parse_schedule(text)).partition("@")[0]


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ",", "1,", ",1", "1,,2", "1;", ";1", "1;,2",  # empty pieces
        "one", "1 2", "1;0 0;1", "1|", "1..2", "0x10", "1_0", "\u0661",  # no numbers
        "nan", "inf", "-inf", "1e999", math.nan, math.inf,
        "1;0;1;0", "1;;;",  # too many phases
        "1@", "@0-1", "1@0", "1@0-", "1@0-1@0-1", "1@0,1", "1@step:0-1", "1@0%-50%",
        "1@0-1.1", "1@-0.1-1", "1@0-nan", "1@0-1e999",  # outside 0-1
        "1@0.5-0.5", "1@0.5-0.2", "1@1-0",  # reversed or empty
        "1@sigma:", "1@sigma:0.9", "1@sigma:0.9-1", "1@sigma:0.9-0.9", "1@sigma:1e999-0",
        "1@sigma:1--1", "1@sigma:nan-0",
    ],
)  # fmt: skip
def test_an_invalid_schedule_is_a_one_line_error(text):
    with pytest.raises(ValueError, match="expected") as error:
        parse_schedule(text)
    assert f"strength {str(text)!r}" in str(error.value)
    assert "\n" not in str(error.value)


LIGHTNING = [1.0, 0.9375, 0.8333, 0.625, 0.0]


@pytest.mark.parametrize(
    ("sigma", "sigmas", "expected"),
    [
        (1.0, LIGHTNING, 0),
        (0.9375, LIGHTNING, 1),
        (0.625, LIGHTNING, 3),
        (0.0, LIGHTNING, 3),  # the end of the run belongs to the last step
        (0.9, LIGHTNING, 1),  # a solver of two stages, within step 1
        (0.01, LIGHTNING, 3),
        (14.6, LIGHTNING, 0),  # above the first
        (0.8333000001, LIGHTNING, 2),  # through float32 and back
        (0.83329999, LIGHTNING, 2),
        (0.9, [1.0, 0.9, 0.9, 0.5], 2),  # the first 0.9 is a step of no length
        (0.5, [1.0, 0.9, 0.5], 1),  # a run that stops before 0
        (0.5, [0.5, 0.5], 0),
        (1.0, [1.0], 0),
        (0.0, [0.0, 0.5, 1.0], 0),  # a run that adds noise
        (0.3, [0.0, 0.5, 1.0], 0),
        (0.5, [0.0, 0.5, 1.0], 1),
        (1.0, [0.0, 0.5, 1.0], 1),
    ],
)
def test_the_sigma_of_a_call_determines_its_step(sigma, sigmas, expected):
    assert step_of(sigma, sigmas) == expected


def test_a_run_without_sigmas_is_an_error():
    with pytest.raises(ValueError, match="sigmas is empty"):
        step_of(1.0, [])


@pytest.mark.parametrize(
    ("heading", "parse"), [("Strength", parse_schedule), ("Blocks", parse_blocks)]
)
def test_examples_of_the_help_page_parse(heading, parse):
    page = Path(__file__).parents[2] / "web" / "docs" / "FastVAE_LoraStack.md"
    section = page.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    examples = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(examples) >= 7
    for example in examples:
        parse(example)
