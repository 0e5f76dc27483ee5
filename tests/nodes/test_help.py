"""The help pages of the nodes, and the README's table of nodes, agree with the schemas.

A page gives the default of an input as "`auto` (default)"; "Empty" is the empty text, "On" and
"Off" are those of a switch. It explains an option as "`fp16`: ...", or names it in a list.
"""

import re

import pytest

from fast_video_vae.tests.nodes.checkout import PACK
from fast_video_vae.tests.nodes.server import NODES
from fast_video_vae.tests.tools.locales import inputs, node_infos
from fast_video_vae.vae import media

pytestmark = pytest.mark.comfyui

# Choices between files, between devices, and between ComfyUI's own samplers.
LISTS = {"vae_name", "lora_name", "devices", "sampler_name", "scheduler"}

WIDGETS = {"COMBO", "INT", "FLOAT", "BOOLEAN", "STRING"}
WORDS = {"on": True, "off": False, "empty": ""}  # defaults that a page writes as words

# The tables of a help page and the names in them.
TABLE = re.compile(r"^\| (?:Input|Output) \|.*\n((?:\|.*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.MULTILINE)

DEFAULT = re.compile(r"(?:`([^`]+)`|(\S+)) \(default\)")
NAME = re.compile(r"`([^`]+)`")
BOLD = re.compile(r"\*\*(\w+)\*\*")
# One name in backquotes or several in a row, and what comes after them.
_ITEM = r"`[^`]+`(?: \(default\))?"
RUN = re.compile(rf"({_ITEM}(?:(?:, | or | and ){_ITEM})*)(:?)")
# Suffixes of images, and those of files whose workflow ComfyUI does not open.
IMAGES, UNOPENED = {"png", "exr"}, {"mkv", "exr"}
ADVANCED = re.compile(r"^(`.*`) (?:are advanced inputs|is an advanced input)\.", re.MULTILINE)
_NUMBER = r"(-?\d+(?:\.\d+)?)"
RANGE = re.compile(rf"{_NUMBER} to {_NUMBER}")
EXPLAINED = re.compile(rf"`{_NUMBER}`(?: \(default\)|:)")


@pytest.fixture(scope="module")
def infos(comfyui):
    return node_infos()


def labelled(info):
    """Name, label, type and options of each input."""
    for name, kind, options in inputs(info):
        yield name, options.get("display_name") or name, kind, options


def rows(page):
    """Each input and output of a page, and its text."""
    return [row for table in TABLE.findall(page) for row in ROW.findall(table)]


def wrong_default(text, kind, options):
    """Say which default of a text is not the schema's, or is missing."""
    default, given = options.get("default", ""), DEFAULT.findall(text)
    if kind in WIDGETS and default != "" and not given:
        yield f"no default; the schema has {default!r}"
    for quoted, bare in given:
        word = quoted or bare
        number = isinstance(default, int | float) and not isinstance(default, bool)
        if number and re.fullmatch(r"-?[\d.]+", word):
            word = float(word)
        elif isinstance(default, bool) or default == "":
            word = WORDS.get(word.lower())
        if word != default:
            yield f"{word} (default); the schema has {default!r}"


def wrong_options(text, choices, everywhere):
    """Say which choices the page lacks, and which words in the place of one are none."""
    yield from (f"the page lacks {each}" for each in set(choices) - everywhere)
    for run, colon in RUN.findall(text) if choices else ():
        names = set(NAME.findall(run))
        if colon or "(default)" in run or names & set(choices):
            yield from (f"{each} is no option" for each in names - set(choices))


def wrong_limits(text, options):
    """Say which range is not the schema's, and which value is outside of it."""
    least, most = options["min"], options["max"]
    for low, high in RANGE.findall(text):
        if (float(low), float(high)) != (least, most):
            yield f"{low} to {high}"
    yield from (each for each in EXPLAINED.findall(text) if not least <= float(each) <= most)


def test_every_node_has_a_help_page(infos, server):
    for info in infos:
        text = server.get(f"/extensions/{server.name}/docs/{info['name']}.md").decode()
        assert text.startswith(f"# {info['display_name']}\n")
        expected = [*(label for _, label, *_ in labelled(info)), *info["output_name"]]
        assert [name for name, _ in rows(text)] == expected


def test_the_help_pages_agree_with_the_schemas(infos):
    wrong = []
    for info in infos:
        page = (PACK / "web" / "docs" / f"{info['name']}.md").read_text(encoding="utf-8")
        texts, everywhere = dict(reversed(rows(page))), {*NAME.findall(page), *BOLD.findall(page)}
        for name, label, kind, options in labelled(info):
            choices = [] if name in LISTS else [str(each) for each in options.get("options", [])]
            found = [*wrong_default(texts[label], kind, options)]
            found += wrong_options(texts[label], choices, everywhere)
            found += wrong_limits(texts[label], options) if kind in ("INT", "FLOAT") else []
            wrong += [f"{info['name']}, {label}: {each}" for each in found]
        advanced = {name for names in ADVANCED.findall(page) for name in NAME.findall(names)}
        assert advanced == {
            label for _, label, _, options in labelled(info) if options.get("advanced")
        }, info["name"]
    assert wrong == []


# `test_browser.py` drops a file of each codec into the frontend.
@pytest.mark.parametrize("name", ["DecodeVideo", "EncodeVideo"])
def test_the_video_pages_say_which_files_open_their_workflow(name):
    page = (PACK / "web" / "docs" / f"FastVAE_{name}.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^- .*\bworkflow\b.*`mkv`.*", page, re.MULTILINE)
    opens, _, rest = line.partition("does not open" if name == "DecodeVideo" else ";")
    suffixes = {codec: media.codec_named(codec).suffix[1:] for codec in media.CODECS}
    videos = {each for each in suffixes.values() if name == "DecodeVideo" or each not in IMAGES}
    assert {*NAME.findall(opens)} == {each for each in videos if each not in UNOPENED}
    assert {*NAME.findall(rest)} == {each for each in videos if each in UNOPENED}


def test_the_readme_lists_every_node_in_menu_order():
    readme = (PACK / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Nodes\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", section, re.MULTILINE)
    assert listed == [(title, f"web/docs/{key}.md") for key, title in NODES.items()]
