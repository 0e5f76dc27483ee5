"""Parse the strengths of one LoRA over a sampling run from one line of text.

    schedule = list [";" list [";" list]] ["@" window]
    list     = number {"," number}
    window   = fraction "-" fraction  |  "sigma:" number "-" number

Lists and phases are those of Wan2GP (docs/LORAS.md, "Lora Multipliers"; `expand_slist` in
shared/utils/loras_mutipliers.py): a list of n values is spread evenly, so that step i of N has
value `floor(i n / N)`. With more values than steps some are skipped. A list without `;` ignores the
phases; with `;` it is spread over the steps of its phase. `1;0` is 1 in the first phase (the
high-noise expert) only. The help page of LoRA Stack (Fast) has more examples.

The window is specific to this pack. It includes its start but not its end, so that `@0-0.3` and
`@0.3-1` divide the run. A step is in it if its start is; a list is spread over the run or its phase
as if there were no window. Sigma falls during a run: from 1 to 0 in Wan and other flow models, from
larger values in others.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PHASES = 3

# Relative: sigmas are rounded to float32, eps 6e-8, and by the arithmetic of the solvers.
# Neighbours in a list differ by more than 8e-5, even at 1000 steps and a shift of 12.
SIGMA_TOLERANCE = 1e-5

_EXPECTED = "expected numbers such as '1', '0.9,0.8' (steps) or '1;0' (phases)"
_EXPECTED_WINDOW = (
    "expected fractions of the run such as '@0-0.5', or falling sigmas such as '@sigma:1-0.9'"
)
_SIZE = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_NUMBER = re.compile(rf"[+-]?{_SIZE}")
_WINDOW = re.compile(rf"(sigma\s*:)?\s*({_SIZE})\s*-\s*({_SIZE})")


@dataclass(frozen=True)
class Window:
    """The part of a run outside which a strength is 0."""

    start: float  # included: a fraction of the run or a sigma
    end: float  # excluded; above `start` as a fraction, below it as a sigma
    by_sigma: bool = False

    def holds(self, fraction: float, sigma: float) -> bool:
        """Return whether a call at `sigma` is in the window, after `fraction` of the steps."""
        if self.by_sigma:
            return self.start >= sigma * (1 - SIGMA_TOLERANCE) > self.end
        return self.start <= fraction < self.end

    def __str__(self) -> str:
        name = "sigma:" if self.by_sigma else ""
        return f"{name}{_shown(self.start)}-{_shown(self.end)}"


@dataclass(frozen=True)
class Schedule:
    """Strengths over a run, from `parse_schedule`; `str` returns the text."""

    phases: tuple[tuple[float, ...], ...]  # one to three, of one or more values each
    window: Window | None = None  # outside it every strength is 0

    def strength(
        self,
        step: int,
        steps: int,
        sigma: float,
        phase: int = 0,
        phases: int = 1,
        phase_step: int | None = None,
        phase_steps: int | None = None,
    ) -> float:
        """Return the strength for one model call.

        Args:
            step: Step of the run, from 0; for a call between two steps the current one: `step_of`.
            steps: Steps of the run. If each expert has its own sampler, steps of that sampler.
            sigma: Noise level of the call.
            phase: The expert that is called, from 0, the one for high noise.
            phases: Number of phases of the run. 1: unknown, and `phase` is used as it is.
            phase_step: Step within the phase, from 0.
            phase_steps: Steps of the phase; None: unknown, a list is spread over the whole run.

        Raises:
            ValueError: A step is out of range, or the schedule does not have the phases.
        """
        _check_step(step, steps)
        values = self._of_phase(phase, phases)
        at, length = step, steps
        if len(self.phases) > 1 and phase_step is not None and phase_steps is not None:
            _check_step(phase_step, phase_steps)
            at, length = phase_step, phase_steps
        # Both sides round once, 9 / 30 as well as "0.3", so that equal values compare equal.
        if self.window is not None and not self.window.holds(step / steps, sigma):
            return 0.0
        # In integers: a sum of ten times 0.1 is below 1, and the next value would be a step late.
        return values[at * len(values) // length]

    def values(self, phase: int | None = None) -> tuple[float, ...]:
        """Return the different strengths of a phase, or (None) of all, in the order of the text.

        With a window also 0. A `ValueError`: the schedule has phases, but not this one.
        """
        lists = self.phases if phase is None else (self._of_phase(phase, 1),)
        outside = () if self.window is None else (0.0,)
        return tuple(dict.fromkeys((*(value for values in lists for value in values), *outside)))

    def _of_phase(self, phase: int, phases: int) -> tuple[float, ...]:
        count = len(self.phases)
        if len(set(self.phases)) == 1:
            return self.phases[0]
        if phases not in (1, count):
            raise ValueError(
                f"strength '{self}' has {count} phases, but the run has {phases}; "
                "expected the same number, or one list for all"
            )
        if not 0 <= phase < count:
            raise ValueError(f"strength '{self}' has no phase {phase}; expected 0 to {count - 1}")
        return self.phases[phase]

    def __str__(self) -> str:
        text = ";".join(",".join(_shown(value) for value in values) for values in self.phases)
        return text if self.window is None else f"{text}@{self.window}"


def parse_schedule(text: str | float) -> Schedule:
    """Parse a schedule; the syntax is in the module's docstring.

    Any finite strength is allowed, also negative and large ones. Spaces around parts are ignored.
    A ValueError: a value is empty or not finite, there are more than three phases, or the window is
    not valid: fractions outside 0-1, or a start that is not before its end.
    """
    text = str(text)
    body, mark, window = text.partition("@")
    lists = body.split(";")
    if len(lists) > MAX_PHASES:
        raise ValueError(
            f"strength {text!r} has {len(lists)} phases; expected at most {MAX_PHASES}"
        )
    phases = tuple(tuple(_strength(piece, text) for piece in values.split(",")) for values in lists)
    return Schedule(phases, _window(window, text) if mark else None)


def parse_number(text: str) -> float | None:
    """Return the finite decimal number in `text`, with spaces around it at most, or None."""
    match = _NUMBER.fullmatch(text.strip())
    value = float(match.group()) if match else math.inf
    return value + 0.0 if math.isfinite(value) else None  # -0.0 + 0.0 is 0.0


def step_of(sigma: float, sigmas: Sequence[float]) -> int:
    """Return the step of a run that a model call at `sigma` belongs to.

    A step lasts from one sigma of the list to the next; solvers with several stages also call the
    model between the two. `sigmas` are one more than the steps, falling, with repetitions and a 0
    at the end allowed; rising ones, of a run that adds noise, are read in their own direction. A
    call before the first belongs to step 0, one at the end of the list to the last step. A
    ValueError: there are no sigmas.
    """
    if len(sigmas) == 0:
        raise ValueError("the list of sigmas is empty; expected one more sigma than steps")
    direction = 1 if sigmas[0] >= sigmas[-1] else -1
    reached = direction * sigma - SIGMA_TOLERANCE * abs(sigma)
    steps = range(max(len(sigmas) - 1, 1))
    return next((step for step in reversed(steps) if direction * sigmas[step] >= reached), 0)


def _check_step(step: int, steps: int) -> None:
    if not 0 <= step < steps:
        raise ValueError(f"step is {step}; expected 0 to {steps - 1}")


def _strength(piece: str, text: str) -> float:
    value = parse_number(piece)
    if value is None:
        raise ValueError(
            f"strength {text!r}: {piece.strip()!r} is not a finite number; {_EXPECTED}"
        )
    return value


def _window(piece: str, text: str) -> Window | None:
    """Parse the window after the `@` of `text`; None: the whole run."""
    match = _WINDOW.fullmatch(piece.strip())
    if match:
        by_sigma, start, end = bool(match[1]), float(match[2]), float(match[3])
        if by_sigma and math.inf > start > end:
            return Window(start, end, by_sigma)
        if not by_sigma and start < end <= 1:
            return None if (start, end) == (0, 1) else Window(start, end)
    raise ValueError(f"strength {text!r}: {piece.strip()!r} is not a window; {_EXPECTED_WINDOW}")


def _shown(value: float) -> str:
    """Return the shortest text that parses back to `value`."""
    return repr(value).removesuffix(".0")
