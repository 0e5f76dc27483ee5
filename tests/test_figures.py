"""Every figure of the README, docs/ and the help pages comes from a row, the code or a test."""

import re
from urllib.parse import unquote

import pytest

from fast_video_vae.tests.tools.figures.claims import CLAIMS, README, TEXTS
from fast_video_vae.tests.tools.figures.page import filled, named, without_tables
from fast_video_vae.tests.tools.figures.rows import ROOT
from fast_video_vae.tests.tools.figures.tables import TABLES

COMMAND = "python tests/tools/figures/write.py"

# A number with a unit of a result, or the words for one. "512 x 512" is a size, "1.9x" a ratio.
UNITS = (
    "ms|s|seconds?|minutes?|hours?|[KMGT]i?B|dB|%|percent|fps|x(?! ?[0-9]| decoder)|times|levels"
    "|launches|TFLOP/s"
)
NUMBER = r"(?<![\w.-])[0-9][0-9,]*(?:\.[0-9]+)?"
MEASURED = re.compile(
    rf"{NUMBER}(?:(?: (?:to|and|or) |-)[0-9.]+)? ?(?:{UNITS})(?!\w)|[0-9]e-[0-9]|\b0\.[0-9]+ of"
    r"|\btwice (?:as|the (?:time|memory))|\bhalf the (?:time|memory)"
    r"|\b(?:two|three|four|five|ten) times (?:as|the|faster|slower)"
    r"|\ba (?:third|quarter|tenth|hundredth) of (?:the|a) (?:time|memory|work|step)"
)

# Not prose: code, inline code, and the targets of links.
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|<[^>]*>", re.DOTALL | re.MULTILINE)

texts = pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)


def prose(page):
    """A page in one line, without tables from rows and without code."""
    return " ".join(CODE.sub(" ", without_tables(page)).split())


def figures_without_source(page, claims):
    """The figures of a page that are in no claim, with the words before them."""
    said, free = prose(page), []
    covered = [
        range(found.start(), found.end())
        for claim in claims
        for found in re.finditer(re.escape(prose(claim)), said)
    ]
    for found in MEASURED.finditer(said):
        if not any(found.start() in span for span in covered):
            free.append(said[max(0, found.start() - 40) : found.end()])
    return free


@texts
def test_the_tables_have_the_figures_of_the_rows(path):
    page = path.read_text(encoding="utf-8")
    assert page == filled(page), f"stale: {COMMAND}"
    assert set(named(page)) <= set(TABLES)
    assert len(re.findall(r"<!-- end of rows -->", page)) == len(named(page))


def test_every_table_stands_once():
    used = [name for path in TEXTS for name in named(path.read_text(encoding="utf-8"))]
    assert sorted(used) == sorted(TABLES)


@texts
def test_every_claim_is_said_with_its_figures(path):
    said = prose(path.read_text(encoding="utf-8"))
    for claim in CLAIMS.get(path, []):
        assert prose(claim.said) in said


@texts
def test_every_figure_has_a_source(path):
    claims = [claim.said for claim in CLAIMS.get(path, [])]
    page = path.read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if not named_tests(line)]
    assert figures_without_source("\n".join(lines), claims) == []


@texts
def test_a_line_that_names_a_test_has_its_figures(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        sources = [(path.parent / unquote(target)) for _, target in named_tests(line)]
        if sources:
            found = "".join(source.read_text(encoding="utf-8") for source in sources)
            assert figures_missing_in(prose(line), found) == []


def figures_missing_in(text, source):
    """The numbers of the figures of a text that are not in the source of a test."""
    figures = [found.group() for found in MEASURED.finditer(text)]
    numbers = [number for each in figures for number in re.findall(r"[0-9]e-[0-9]|[0-9.]+", each)]
    return [number for number in numbers if number not in source]


def test_every_claim_has_a_source_with_its_figures():
    for claims in CLAIMS.values():
        for claim in claims:
            assert (claim.values is None) == bool(claim.tests), claim.text
            for test in claim.tests:
                path, _, name = test.partition("::")
                source = (ROOT / path).read_text(encoding="utf-8")
                assert f"def {name}(" in source, test
                assert figures_missing_in(claim.said, source) == [], test


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3.5 s.",
        "10-15 s",
        "12 percent",
        "0.35 of the activations",
        "twice as fast",
        "three times the memory",
        "a tenth of the time",
        "within 1e-5",
        "2.0 times as long",
        "59 of 255 levels",
        "a 1.9x speed-up",
        "331 MiB",
        "17 %",
    ],
)
def test_a_figure_is_found(text):
    assert figures_without_source(text, [])
    assert not figures_without_source(text, [text])


@pytest.mark.parametrize(
    "text", ["512 x 512", "81 frames", "16 bits", "`--budget 480s`", "PyTorch 2.6"]
)
def test_sizes_options_and_versions_are_no_figures(text):
    assert not figures_without_source(text, [])


def named_tests(page):
    """Names and paths of the tests that a page links."""
    return re.findall(r"\[(test_\w+)\]\(((?:\.\./)?tests/[^)]+)\)", page)


@texts
def test_every_test_that_is_named_exists(path):
    for name, target in named_tests(path.read_text(encoding="utf-8")):
        source = (path.parent / unquote(target)).read_text(encoding="utf-8")
        assert f"def {name}(" in source, name


def test_every_unique_ability_names_its_test():
    section = README.read_text(encoding="utf-8").partition("\n## What nobody else does\n")[2]
    claims = re.findall(r"^- .*$", section.partition("\n## ")[0], flags=re.MULTILINE)
    assert claims
    assert [claim for claim in claims if len(named_tests(claim)) != 1] == []
