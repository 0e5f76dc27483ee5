"""The help pages of the nodes, and the README's table of nodes, agree with the schemas.

A page gives the default of an input as "`auto` (default)"; "Empty" is the empty text, "On" and
"Off" are those of a switch. It explains an option as "`fp16`: ...", or names it in a list.
"""

import re
from typing import Any, NamedTuple

import pytest

from fast_video_vae.tests.nodes.checkout import PACK
from fast_video_vae.tests.nodes.server import NODES
from fast_video_vae.tests.tools.locales import node_infos

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
ADVANCED = re.compile(r"^(`.*`) (?:are advanced inputs|is an advanced input)\.", re.MULTILINE)

_NUMBER = r"(-?\d+(?:\.\d+)?)"
RANGE = re.compile(rf"{_NUMBER} to {_NUMBER}")
EXPLAINED = re.compile(rf"`{_NUMBER}`(?: \(default\)|:)")


class Input(NamedTuple):
    """An input of a node's schema, by its label."""

    name: str
    label: str
    kind: str
    options: dict[str, Any]

    @property
    def choices(self):
        """The options of a choice that the page has to name; none of other inputs."""
        return [] if self.name in LISTS else [str(each) for each in self.options.get("options", [])]


@pytest.fixture(scope="module")
def infos(comfyui):
    return node_infos()


def inputs(info):
    for group in ("required", "optional"):
        for name, (kind, *more) in info["input"].get(group, {}).items():
            options = more[0] if more else {}
            yield Input(name, options.get("display_name") or name, kind, options)


def rows(page):
    """The text of each input and output by its name; a name that is both has the input's."""
    found = [row for table in TABLE.findall(page) for row in ROW.findall(table)]
    return dict(reversed(found))


def wrong_defaults(page, schema):
    """Defaults of the page that are not the schema's, and defaults that it does not give."""
    for each in schema:
        given = DEFAULT.findall(rows(page)[each.label])
        default = each.options.get("default", "")
        required = each.kind in WIDGETS and default != ""
        if required and not given:
            yield f"{each.label}: the page has no default; the schema has {default!r}"
        for quoted, bare in given:
            if not is_value(quoted or bare, default):
                yield f"{each.label}: {quoted or bare} (default); the schema has {default!r}"


def wrong_options(page, schema):
    """Options that the page lacks, and words in the place of an option that are none."""
    on_page = {*NAME.findall(page), *BOLD.findall(page)}
    for each in schema:
        for option in each.choices:
            if option not in on_page:
                yield f"{each.label}: the page lacks the option {option}"
        for run, colon in RUN.findall(rows(page)[each.label]) if each.choices else ():
            names = NAME.findall(run)
            if colon or "(default)" in run or set(names) & set(each.choices):
                for name in set(names) - set(each.choices):
                    yield f"{each.label}: {name} is no option"


def wrong_advanced(page, schema):
    """Inputs that are advanced on the page or in the schema alone."""
    given = {name for names in ADVANCED.findall(page) for name in NAME.findall(names)}
    for name in given ^ {each.label for each in schema if each.options.get("advanced")}:
        yield f"{name}: advanced {'on the page' if name in given else 'in the schema'} only"


def wrong_limits(page, schema):
    """Ranges that are not the schema's, and values outside of its range."""
    for each in schema:
        if each.kind not in ("INT", "FLOAT"):
            continue
        text, limits = rows(page)[each.label], (each.options["min"], each.options["max"])
        for low, high in RANGE.findall(text):
            if (float(low), float(high)) != limits:
                yield f"{each.label}: {low} to {high}; the schema has {limits}"
        for value in EXPLAINED.findall(text):
            if not limits[0] <= float(value) <= limits[1]:
                yield f"{each.label}: {value}; the schema has {limits}"


RULES = [wrong_defaults, wrong_options, wrong_advanced, wrong_limits]


def is_value(text, value):
    """Whether a text of a page is a value of a widget."""
    if isinstance(value, bool) or value == "":
        return WORDS.get(text.lower()) == value
    if isinstance(value, int | float):
        return re.fullmatch(r"-?[\d.]+", text) is not None and float(text) == value
    return text == value


def listed_nodes(readme):
    """The names and the links of the README's table of nodes."""
    section = readme.partition("\n## Nodes\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", section, re.MULTILINE)


def test_every_node_has_a_help_page(infos, server):
    for info in infos:
        text = server.get(f"/extensions/{server.name}/docs/{info['name']}.md").decode()
        assert text.startswith(f"# {info['display_name']}\n")
        expected = [*(each.label for each in inputs(info)), *info["output_name"]]
        found = [name for table in TABLE.findall(text) for name, _ in ROW.findall(table)]
        assert found == expected


@pytest.mark.parametrize("rule", RULES)
def test_the_help_pages_agree_with_the_schemas(infos, rule):
    wrong = []
    for info in infos:
        page = (PACK / "web" / "docs" / f"{info['name']}.md").read_text(encoding="utf-8")
        wrong += [f"{info['name']}: {each}" for each in rule(page, list(inputs(info)))]
    assert wrong == []


def test_the_readme_lists_every_node_in_menu_order():
    readme = (PACK / "README.md").read_text(encoding="utf-8")
    assert listed_nodes(readme) == [(title, f"web/docs/{key}.md") for key, title in NODES.items()]


# A page and its schema, which agree.
PAGE = """# Node

| Input | Description |
|---|---|
| `vae` | Not modified. |
| `bit depth` | As in `codec`. `auto` (default): see the table. `8`: small. `10` or `16`. |
| `codec` | See the table. `h264` (default). |
| `quality` | From 0 to 100. `70` (default): good. `0`: small. |
| `frames` | Empty (default): all. |
| `prefix` | Start of the name. `video/x` (default). |
| `hardware` | On the GPU. Off (default). |

`frames` and `hardware` are advanced inputs.

| Codec | File |
|---|---|
| **h264** | mp4 |
| **png** | folder |
"""
SCHEMA = [
    Input("vae", "vae", "VAE", {}),
    Input("depth", "bit depth", "COMBO", {"options": ["auto", "8", "10", "16"], "default": "auto"}),
    Input("codec", "codec", "COMBO", {"options": ["h264", "png"], "default": "h264"}),
    Input("quality", "quality", "INT", {"default": 70, "min": 0, "max": 100}),
    Input("frames", "frames", "STRING", {"default": "", "advanced": True}),
    Input("prefix", "prefix", "STRING", {"default": "video/x"}),
    Input("hardware", "hardware", "BOOLEAN", {"default": False, "advanced": True}),
]


@pytest.mark.parametrize("rule", RULES)
def test_a_page_that_agrees_has_no_complaint(rule):
    assert list(rule(PAGE, SCHEMA)) == []


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (wrong_defaults, "`auto` (default)", "`8` (default)"),
        (wrong_defaults, "`70` (default)", "`80` (default)"),
        (wrong_defaults, "`70` (default)", "high (default)"),
        (wrong_defaults, "`70` (default)", "`70`"),
        (wrong_defaults, "`video/x` (default)", "Empty (default)"),
        (wrong_defaults, "Empty (default)", "`40-` (default)"),
        (wrong_defaults, "Off (default)", "On (default)"),
        (wrong_defaults, "Off (default)", ""),
        (wrong_options, "`8`: small", "small"),
        (wrong_options, "| **png** | folder |\n", ""),
        (wrong_options, "`8`: small", "`8`: small. `12`: more"),
        (wrong_options, "`10` or `16`", "`10`, `12` or `16`"),
        (wrong_options, "`h264` (default)", "`h264` (default) or `ffv1`"),
        (wrong_advanced, "`frames` and `hardware` are advanced inputs", ""),
        (wrong_advanced, "`frames` and", "`frames`, `quality` and"),
        (wrong_advanced, "`frames` and `hardware` are advanced", "The last two are advanced"),
        (wrong_limits, "From 0 to 100", "From 1 to 100"),
        (wrong_limits, "From 0 to 100", "From 0 to 99.5"),
        (wrong_limits, "`0`: small", "`-1`: small"),
    ],
)  # fmt: skip
def test_a_rule_finds_a_planted_violation(rule, before, after):
    planted = PAGE.replace(before, after)
    assert planted != PAGE
    assert list(rule(planted, SCHEMA))


def test_the_table_of_nodes_is_read_from_its_section():
    row = "| [{0} (Fast)](web/docs/{0}.md) | Text with a [link](docs/x.md). |\n"
    table = f"| Node | Use |\n|---|---|\n{row.format('One')}{row.format('Two')}"
    readme = f"# Pack\n\n{row.format('No')}\n## Nodes\n\n{table}\n## Next\n\n{row.format('No')}"
    names = ["One", "Two"]
    assert listed_nodes(readme) == [(f"{name} (Fast)", f"web/docs/{name}.md") for name in names]
    assert listed_nodes(readme.replace("## Nodes", "## Others")) == []
