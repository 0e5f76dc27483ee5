"""The help pages of the nodes, and the README's table of nodes, agree with the schemas.

A page gives the default of an input as "`auto` (default)"; "Empty" is the empty text, "On" and
"Off" are those of a switch. It explains an option as "`fp16`: ...", or names it in a list. Pages
in Chinese do so in the words of `READ_AS`, with the name of the Chinese UI before each input.
"""

import re

import pytest

from fast_video_vae.tests.nodes.checkout import PACK
from fast_video_vae.tests.nodes.server import NODES
from fast_video_vae.tests.tools.locales import inputs, node_infos, written
from fast_video_vae.vae import media

pytestmark = pytest.mark.comfyui

# The page of a node below docs/: the frontend asks for that of its language, then for the English.
PAGES = {"en": "{}.md", "zh": "{}/zh.md"}
every_language = pytest.mark.parametrize("language", PAGES)

# What the words and signs of a page stand for in the patterns below.
READ_AS = {
    **{"| 输入 |": "| Input |", "| 输出 |": "| Output |", "关闭（默认）": " Off (default)"},  # noqa: RUF001
    **{"留空（默认）": " Empty (default)", "（默认）": " (default)", "：": ": ", "、": ", "},  # noqa: RUF001
    **{" 或 ": " or ", " 和 ": " and ", " 到 ": " to ", "是高级输入": "are advanced inputs"},
    **{"工作流": "workflow", "无法打开": "does not open", "；": ";", "。": ". "},  # noqa: RUF001
}

# Choices between files, between devices, and between ComfyUI's own samplers.
LISTS = {"vae_name", "lora_name", "devices", "sampler_name", "scheduler"}

WIDGETS = {"COMBO", "INT", "FLOAT", "BOOLEAN", "STRING"}
WORDS = {"on": True, "off": False, "empty": ""}  # defaults that a page writes as words

# The tables of a help page and the names in them.
TABLE = re.compile(r"^\| (?:Input|Output) \|.*\n((?:\|.*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| (?:([^`|]+) )?`([^`]+)` \| (.*) \|$", re.MULTILINE)

DEFAULT = re.compile(r"(?:`([^`]+)`|(\S+)) \(default\)")
NAME = re.compile(r"`([^`\n]+)`")
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


def page_of(server, node, language):
    """A page as ComfyUI serves it, in the words of the patterns."""
    path = PAGES[language].format(node)
    text = server.get(f"/extensions/{server.name}/docs/{path}").decode()
    for words, meaning in READ_AS.items() if language != "en" else ():
        text = text.replace(words, meaning)
    return text


def rows(page):
    """Each input and output of a page: its translated name, its name and its text."""
    return [row for table in TABLE.findall(page) for row in ROW.findall(table)]


def names(info, language):
    """The inputs and outputs of a node as the frontend shows them in this language."""
    texts = written(language)[info["name"]]
    outputs = texts.get("outputs", {})
    for name, *_ in inputs(info):
        yield texts["inputs"][name.replace(".", "_")]["name"]
    for at, name in enumerate(info["output_name"]):
        yield outputs.get(str(at), {}).get("name", name if language == "en" else "")


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
        found = set(NAME.findall(run))
        if colon or "(default)" in run or found & set(choices):
            yield from (f"{each} is no option" for each in found - set(choices))


def wrong_limits(text, options):
    """Say which range is not the schema's, and which value is outside of it."""
    least, most = options["min"], options["max"]
    for low, high in RANGE.findall(text):
        if (float(low), float(high)) != (least, most):
            yield f"{low} to {high}"
    yield from (each for each in EXPLAINED.findall(text) if not least <= float(each) <= most)


@every_language
def test_every_node_has_a_help_page_that_agrees_with_its_schema(infos, server, language):
    wrong = []
    for info in infos:
        page = page_of(server, info["name"], language)
        assert page.startswith(f"# {written(language)[info['name']]['display_name']}\n")
        labels = [*names(info, "en")]
        translated = [*names(info, language)] if language != "en" else [""] * len(labels)
        assert [row[:2] for row in rows(page)] == [*zip(translated, labels, strict=True)]
        texts = [text for *_, text in rows(page)]
        everywhere = {*NAME.findall(page), *BOLD.findall(page)}
        for label, text, (name, kind, options) in zip(labels, texts, inputs(info), strict=False):
            choices = [] if name in LISTS else [str(each) for each in options.get("options", [])]
            found = [*wrong_default(text, kind, options)]
            found += wrong_options(text, choices, everywhere)
            found += wrong_limits(text, options) if kind in ("INT", "FLOAT") else []
            wrong += [f"{info['name']}, {label}: {each}" for each in found]
        advanced = {name for line in ADVANCED.findall(page) for name in NAME.findall(line)}
        assert advanced == {
            label
            for label, (*_, options) in zip(labels, inputs(info), strict=False)
            if options.get("advanced")
        }, info["name"]
    assert wrong == []


@pytest.mark.parametrize("node", NODES)
def test_a_translated_page_has_every_line_name_and_number_of_the_english_one(server, node):
    def content(page):
        outline = [line[:2] for line in page.splitlines() if line.startswith(("#", "- ", "|"))]
        return outline, {*NAME.findall(page)}, {*re.findall(r"\d+(?:\.\d+)?", page)}

    assert content(page_of(server, node, "zh")) == content(page_of(server, node, "en"))


# `test_browser.py` drops a file of each codec into the frontend.
@every_language
@pytest.mark.parametrize("name", ["DecodeVideo", "EncodeVideo"])
def test_the_video_pages_say_which_files_open_their_workflow(server, name, language):
    page = page_of(server, f"FastVAE_{name}", language)
    (line,) = re.findall(r"^- .*workflow.*`mkv`.*", page, re.MULTILINE)
    opens, _, rest = line.rpartition("does not open" if name == "DecodeVideo" else ";")
    suffixes = {codec: media.codec_named(codec).suffix[1:] for codec in media.CODECS}
    videos = {each for each in suffixes.values() if name == "DecodeVideo" or each not in IMAGES}
    assert {*NAME.findall(opens)} == {each for each in videos if each not in UNOPENED}
    assert {*NAME.findall(rest)} == {each for each in videos if each in UNOPENED}


def test_the_readme_lists_every_node_in_menu_order():
    readme = (PACK / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Nodes\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", section, re.MULTILINE)
    assert listed == [(title, f"web/docs/{key}.md") for key, title in NODES.items()]
