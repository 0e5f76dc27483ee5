"""The texts of the nodes: schemas, locales, help pages and the README's table agree.

A page gives the default of an input as "`auto` (default)"; "Empty" is the empty text, "On" and
"Off" are those of a switch. A page in Chinese has the same names and numbers, and the name of the
Chinese UI before each input.
"""

import re

import pytest

from fast_video_vae.tests.nodes.checkout import PACK
from fast_video_vae.tests.nodes.server import NODES
from fast_video_vae.tests.tools.locales import LOCALES, english, inputs, node_infos, written

pytestmark = pytest.mark.comfyui

LANGUAGES = sorted(path.name for path in LOCALES.iterdir())
every_language = pytest.mark.parametrize("language", LANGUAGES)

# Letters that a text of this language has and an English one does not.
LETTERS = {"zh": r"[\u4e00-\u9fff]"}

# Choices between files, between devices, and between ComfyUI's own samplers.
LISTS = {"vae_name", "lora_name", "devices", "sampler_name", "scheduler"}

NUMBERS = {"INT", "FLOAT"}
WIDGETS = {"COMBO", "BOOLEAN", "STRING"} | NUMBERS
WORDS = {"on": True, "off": False, "empty": ""}  # defaults that a page writes as words

# Not translated: flags, placeholders, numbers, and words such as h264 or VAE.
TOKEN = re.compile(r"--[\w-]+|%\w+%|\d+(?:\.\d+)?|\b[A-Za-z]*(?:[A-Z][A-Za-z]*[A-Z]|\d)\w*")

# The frontend reads names and descriptions as message patterns with these special characters.
PATTERN = set("{}@|")

# The tables of a help page and the names in them.
TABLE = re.compile(r"^\| (?:Input|Output|输入|输出) \|.*\n((?:\|.*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| (?:([^`|]+) )?`([^`]+)` \| (.*) \|$", re.MULTILINE)

DEFAULT = re.compile(r"(?:`([^`]+)`|(\S+)) \(default\)")
NAME = re.compile(r"`([^`\n]+)`")
BOLD = re.compile(r"\*\*(\w+)\*\*")
RANGE = re.compile(r"(-?\d+(?:\.\d+)?) to (-?\d+(?:\.\d+)?)")


@pytest.fixture(scope="module")
def infos(comfyui):
    return node_infos()


def leaves(tree, path=()):
    """Every text of a tree with the keys that lead to it."""
    for key, value in tree.items():
        where = (*path, key)
        yield from [(where, value)] if isinstance(value, str) else leaves(value, where)


def page_of(server, node, language="en"):
    """A page as ComfyUI serves it."""
    path = f"{node}.md" if language == "en" else f"{node}/{language}.md"
    return server.get(f"/extensions/{server.name}/docs/{path}").decode()


def rows_of(page):
    """The cells of the tables of a page: a translation, a name, and a text."""
    return [row for table in TABLE.findall(page) for row in ROW.findall(table)]


def names(info, language):
    """The inputs and outputs of a node as the frontend shows them in this language."""
    texts = written(language)[info["name"]]
    for name, *_ in inputs(info):
        yield texts["inputs"][name.replace(".", "_")]["name"]
    for at, name in enumerate(info["output_name"]):
        shown = texts.get("outputs", {}).get(str(at), {})
        yield shown.get("name", name if language == "en" else "")


def wrong_in(text, kind, options, choices, everywhere):
    """Say which default or limit in the text of an input is not the schema's."""
    default, given = options.get("default", ""), DEFAULT.findall(text)
    if kind in WIDGETS and default != "" and not given:
        yield f"no default; the schema has {default!r}"
    for quoted, bare in given:
        word = quoted or bare
        if kind in NUMBERS and re.fullmatch(r"-?[\d.]+", word):
            word = float(word)
        elif kind == "BOOLEAN" or default == "":
            word = WORDS.get(word.lower())
        if word != default:
            yield f"{word} (default); the schema has {default!r}"
    yield from (f"the page lacks {each}" for each in choices - everywhere)
    if kind in NUMBERS:
        limits = options["min"], options["max"]
        yield from (each for each in RANGE.findall(text) if (*map(float, each),) != limits)


def test_every_node_has_a_description_search_aliases_and_useful_tooltips(infos):
    """A tooltip has the meanings of choices between words."""
    for info in infos:
        assert info["description"].endswith("."), info["name"]
        aliases = info["search_aliases"]
        assert len({*aliases}) == len(aliases) >= 3, info["name"]
        assert aliases == [alias for alias in aliases if alias.strip() and alias.islower()]
        for name, kind, options in inputs(info):
            tooltip, where = options["tooltip"], (info["name"], name)
            assert tooltip, where
            choices = options.get("options", kind if isinstance(kind, list) else [])
            if choices and not name.endswith("_name"):  # the choices of those are files
                assert any(str(each) in tooltip for each in [*choices, "(Fast)"]), where


@pytest.mark.parametrize("language", [each for each in LANGUAGES if each != "en"])
def test_a_translation_is_complete_and_keeps_numbers_names_and_choices(infos, language):
    texts, have = dict(leaves(english(infos))), dict(leaves(written(language)))
    assert have.keys() == texts.keys()
    choices = {
        (info["name"], "inputs", name, "tooltip"): {str(each) for each in options["options"]}
        for info in infos
        for name, _, options in inputs(info)
        if "options" in options
    }
    for path, text in texts.items():
        assert have[path] == have[path].strip()
        if path[-1] == "name":  # names such as VAE are the same everywhere
            continue
        assert re.search(LETTERS[language], have[path]), ".".join(path)
        words = {*re.findall(r"[\w.-]+", text)}
        kept = {re.sub("(?<=[A-Z])s$", "", token) for token in TOKEN.findall(text)}  # LoRAs
        kept |= {word for word in words & choices.get(path, set()) if f"{word}:" in text}
        assert [token for token in kept if token not in have[path]] == [], ".".join(path)
    categories = written(language, "main")["nodeCategories"]
    assert categories.keys() == {name for info in infos for name in info["category"].split("/")}
    assert all(re.search(LETTERS[language], text) for text in categories.values())


@every_language
def test_the_server_offers_texts_that_are_no_message_patterns(infos, server, language):
    offered, stale = server.get("/i18n")[language]["nodeDefs"], "python tests/tools/locales.py"
    assert offered == (english(infos) if language == "en" else written(language)), stale
    for path, text in leaves(offered):
        assert path[-1] == "tooltip" or not PATTERN & {*text}, ".".join(path)


def test_every_node_has_a_help_page_that_agrees_with_its_schema(infos, server):
    wrong = []
    for info in infos:
        page = page_of(server, info["name"])
        assert page.startswith(f"# {info['display_name']}\n")
        rows = rows_of(page)
        assert [row[:2] for row in rows] == [("", name) for name in names(info, "en")]
        everywhere = {*NAME.findall(page), *BOLD.findall(page)}
        for (_, label, text), (name, kind, options) in zip(rows, inputs(info), strict=False):
            choices = set() if name in LISTS else {str(each) for each in options.get("options", [])}
            found = wrong_in(text, kind, options, choices, everywhere)
            wrong += [f"{info['name']}, {label}: {each}" for each in found]
    assert wrong == []


def test_a_translated_page_has_every_line_name_and_number_of_the_english_one(infos, server):
    def content(page):
        outline = [line[:2] for line in page.splitlines() if line.startswith(("#", "- ", "|"))]
        return outline, {*NAME.findall(page)}, {*re.findall(r"\d+(?:\.\d+)?", page)}

    for info in infos:
        page = page_of(server, info["name"], "zh")
        assert content(page) == content(page_of(server, info["name"])), info["name"]
        assert page.startswith(f"# {written('zh')[info['name']]['display_name']}\n")
        labels = zip(names(info, "zh"), names(info, "en"), strict=True)
        assert [row[:2] for row in rows_of(page)] == [*labels]


def test_the_readme_lists_every_node_in_menu_order():
    readme = (PACK / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Nodes\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", section, re.MULTILINE)
    assert listed == [(title, f"web/docs/{key}.md") for key, title in NODES.items()]
