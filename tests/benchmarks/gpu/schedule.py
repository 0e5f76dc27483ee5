"""The order of a run: which section and which case comes next within the budget.

Each section has its own seconds, and those that the sections before it left over. The time source
is an argument, so that order and budget can be tested without waiting.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .clock import Clock
from .rows import Case, NotRun, Results, Rows
from .session import Session


@dataclass(frozen=True)
class Section:
    """A part of the run, with the rows of one question."""

    name: str
    cases: Callable[[Session], list[Case]]
    seconds: float  # its share of a run of 25 minutes


def planned_ends(sections: Sequence[Section], start: float, until: float) -> dict[str, float]:
    """Return when each section ends at the latest if none exceeds its seconds.

    Args:
        sections: The sections that have rows to measure, in order.
        start: Time at which the first one begins.
        until: End of the run. A run that is longer than the sections' seconds gives each of them
            proportionally more; a shorter one runs the first sections in full.

    Returns:
        The times by name.
    """
    scale = max(1.0, (until - start) / max(1e-9, sum(section.seconds for section in sections)))
    ends, end = {}, start
    for section in sections:
        end += section.seconds * scale
        ends[section.name] = min(end, until)
    return ends


def run_sections(
    rows: Rows, clock: Clock, sections: Iterable[Section], session: Session
) -> Iterator[str]:
    """Run what the file lacks of `sections`, in order; yield the label after each case."""
    ahead = [section for section in sections if not rows.is_done(section.name)]
    ends = planned_ends(ahead, clock.now(), clock.until)
    for section in ahead:
        # A section keeps its own seconds when the ones before it took longer than planned.
        clock.section_until = max(ends[section.name], clock.now() + section.seconds)
        rows.begin(section.name, ["all"])  # in case the process ends while it makes the cases
        try:
            cases = section.cases(session)
        except Exception as error:  # whatever building a VAE raises
            rows.add(section.name, "all", error)
        else:
            yield from run_cases(rows, clock, section.name, cases)
        rows.finish(section.name)


def run_cases(rows: Rows, clock: Clock, section: str, cases: Iterable[Case]) -> Iterator[str]:
    """Run the cases of a section that the file lacks; yield the label after each."""
    for case in cases:
        missing = [name for name in map(case.row, case.kinds) if not rows.has(section, name)]
        if not missing:
            continue
        rows.begin(section, missing)
        for kind, result in _results(case, clock):
            name = case.row(kind)
            if name in missing:
                missing.remove(name)
                rows.add(section, name, result)
        rows.end()
        yield case.label


def check_fits(expected_s: float, left_s: float) -> None:
    """Raise `NotRun` if `expected_s` exceeds `left_s`.

    Raises:
        NotRun: It does; the message has both.
    """
    if expected_s > left_s:
        raise NotRun(f"it would take {expected_s:.0f} s; {max(left_s, 0):.0f} s were left")


def _results(case: Case, clock: Clock) -> Results:
    error: Exception = RuntimeError("the case yielded no such row")
    try:
        if clock.left() <= 0:
            budget = "run" if clock.until <= clock.section_until else "section"
            raise NotRun(f"the budget of the {budget} was used up")
        check_fits(case.expected_s(), clock.left())
        yield from case.run()
    except Exception as caught:  # whatever a kernel, a driver or a peer raises
        error = caught
    yield from ((kind, error) for kind in case.kinds)
