"""Every figure of the README, docs/ and the help pages comes from a row, the code or a test."""

import re
from urllib.parse import unquote

import pytest

from fast_video_vae.tests.tools.figures.claims import CLAIMS, README, TEXTS
from fast_video_vae.tests.tools.figures.rows import ROOT
from fast_video_vae.tests.tools.figures.tables import TABLES, filled, named, without_tables

COMMAND = "python tests/tools/figures/write.py"

# A number with a unit of a result. "512 x 512" is a size, "1.9x" a ratio.
UNITS = (
    "ms|s|seconds?|minutes?|hours?|[KMGT]i?B|dB|%|x(?! ?[0-9]| decoder)|times|levels|launches"
    "|TFLOP/s"
)
MEASURED = re.compile(
    rf"(?<![\w.-])[0-9][0-9,]*(?:\.[0-9]+)?(?: (?:to|and) [0-9.]+)? ?(?:{UNITS})(?!\w)|[0-9]e-[0-9]"
)

# Not prose: code, inline code, and the targets of links.
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|<[^>]*>", re.DOTALL | re.MULTILINE)

texts = pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)


def prose(page):
    """A page in one line, without tables from rows, code, and lines that name a test of theirs."""
    lines = [line for line in without_tables(page).splitlines() if not named_tests(line)]
    return " ".join(CODE.sub(" ", "\n".join(lines)).split())


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
    assert set(named(page)) == set(TABLES) & set(named(page))
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
    assert figures_without_source(path.read_text(encoding="utf-8"), claims) == []


def test_every_claim_has_one_source_that_exists():
    for claims in CLAIMS.values():
        for claim in claims:
            assert (claim.values is None) == bool(claim.test), claim.text
            if claim.test:
                path, _, name = claim.test.partition("::")
                assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), claim.test


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3.5 s.",
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
