"""The README and the pages that it links: a first screen, links that exist, nothing unreachable."""

import re
from urllib.parse import unquote

from fast_video_vae.tests.tools import figures

ROOT = figures.ROOT
README = ROOT / "README.md"
PAGES = [
    *(README, ROOT / "CHANGELOG.md", ROOT / "vae/demo/README.md"),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("web/docs/**/*.md")),
    ROOT / "tests/README.md",
    *sorted(ROOT.glob("tests/benchmarks/*.md")),
]
PICTURE_BYTES = 3_000_000

# Where a new user decides: a screen.
FIRST_SCREEN = 40

NAMED_TEST = re.compile(r"\[(test_\w+)\]\(([^)]+\.py)\)")
SCRIPT = re.compile(r"python (tests/\w+/\w+\.py)")
TARGET = re.compile(r'\]\(([^)]+)\)|(?:href|src)="([^"]+)"')


def text_of(path):
    return path.read_text(encoding="utf-8")


def without_code(path):
    return re.sub(r"^```.*?^```$", "", text_of(path), flags=re.DOTALL | re.MULTILINE)


def targets(path):
    """Links of a page to files and headings, without those to other sites."""
    page = re.sub(r"`[^`\n]*`", "", without_code(path))
    found = [unquote(one or other) for one, other in TARGET.findall(page)]
    return [target for target in found if not re.match(r"https?:", target)]


def anchors(path):
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    for path in PAGES:
        for target in targets(path):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            assert file.exists(), (path, target)
            assert not anchor or anchor in anchors(file), (path, target)


def test_every_test_and_script_that_a_page_names_exists():
    for path in PAGES:
        for name, target in NAMED_TEST.findall(text_of(path)):
            assert f"def {name}(" in text_of(path.parent / unquote(target)), (path, name)
        scripts = () if path.name == "LOG.md" else SCRIPT.findall(text_of(path))
        assert [each for each in scripts if not (ROOT / each).is_file()] == [], path


def test_every_unique_ability_names_its_test():
    section = text_of(README).partition("\n## What no other pack does\n")[2]
    claims = re.findall(r"^- .*$", section.partition("\n## ")[0], flags=re.MULTILINE)
    assert claims
    assert [claim for claim in claims if len(NAMED_TEST.findall(claim)) != 1] == []


def test_the_tables_have_the_figures_of_the_rows():
    for path in figures.PAGES:
        page = text_of(path)
        assert page == figures.filled(page), f"stale: {path}: python tests/tools/figures.py"


def test_every_page_is_linked():
    linked = {
        (path.parent / each.partition("#")[0]).resolve() for path in PAGES for each in targets(path)
    }
    assert [path for path in (ROOT / "docs").glob("*.md") if path.resolve() not in linked] == []
    assert [
        path
        for path in (ROOT / "media").iterdir()
        if path.resolve() not in linked and path.stem not in ("icon", "banner")
    ] == []
    workflows = sorted((ROOT / "example_workflows").iterdir())
    assert [path.name for path in workflows if path.resolve() not in linked] == []


def test_the_readme_is_short():
    shown = re.sub(r"<!-- rows.*?-->", "", text_of(README), flags=re.DOTALL)
    assert 130 <= len(shown.splitlines()) <= 170


def test_the_first_screen_shows_a_picture_the_installation_and_a_first_run():
    screen = text_of(README).splitlines()[:FIRST_SCREEN]
    wanted = [r"!\[.*\]\(media/.*\)", "## Install", r"git clone .*", "## First run", r"1\. .*"]
    found = [
        next((n for n, line in enumerate(screen) if re.fullmatch(each, line)), None)
        for each in wanted
    ]
    assert None not in found
    assert found == sorted(found)


def test_pictures_load_fast():
    sizes = {path.name: path.stat().st_size for path in (ROOT / "media").iterdir()}
    assert [name for name, size in sizes.items() if size > PICTURE_BYTES] == []


def test_both_commands_are_alone_in_their_blocks():
    blocks = re.findall(r"```bash\n(.*?)```", text_of(README), flags=re.DOTALL)
    assert 'pip install ".[cli]" && fast-video-vae demo\n' in blocks
    assert 'pip install ".[test]" && pytest\n' in blocks


def test_the_page_of_the_architecture_names_what_is_there():
    page, picture = text_of(ROOT / "docs/architecture.md"), text_of(ROOT / "media/architecture.svg")
    hands = re.findall(r"^\| \d+ \| `([\w/]+\.py)`: `(\w+)`", page, flags=re.MULTILINE)
    assert len(hands) == 10
    for path, name in hands:
        assert re.search(rf"^ *(?:def|class) {name}\b", text_of(ROOT / path), re.MULTILINE), name
        assert f">{path}<" in picture
    for path in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page):
        assert (ROOT / path).exists(), path
    rooms = re.findall(r">(\w+(?:/|\.py)(?:, \w+(?:/|\.py))*)<", picture)
    known = {path.name for path in ROOT.rglob("*") if ".git" not in path.parts}
    assert {each.strip("/") for room in rooms for each in room.split(", ")} <= known
