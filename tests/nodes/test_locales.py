"""The texts of the nodes: complete in the schemas and every language."""

import re

import pytest

from fast_video_vae.tests.tools.locales import LOCALES, english, inputs, node_infos, written

pytestmark = pytest.mark.comfyui

TRANSLATIONS = sorted(path.name for path in LOCALES.iterdir() if path.name != "en")

# Letters that a text of this language has and an English one does not.
LETTERS = {"zh": r"[\u4e00-\u9fff]"}

# Not translated: flags, placeholders, numbers, and words such as h264 or VAE.
TOKEN = re.compile(r"--[\w-]+|%\w+%|\d+(?:\.\d+)?|\b[A-Za-z]*(?:[A-Z][A-Za-z]*[A-Z]|\d)\w*")

# The frontend reads names and descriptions as message patterns with these special characters.
PATTERN = set("{}@|")

# A tooltip of a number must have a unit or the meaning of a value.
UNIT = re.compile(r"frame|pixel|second|step|noise level|percent|%|\bGB|\bMB|times|\bof\b|-?\d+: ")


@pytest.fixture(scope="module")
def infos(comfyui):
    return node_infos()


def leaves(tree, path=()):
    """Every text of a tree with the keys that lead to it."""
    for key, value in tree.items():
        if isinstance(value, str):
            yield (*path, key), value
        else:
            yield from leaves(value, (*path, key))


def test_every_node_has_a_description_search_aliases_and_useful_tooltips(infos):
    """A tooltip has the unit of a number, and the meanings of choices between words."""
    for info in infos:
        assert info["description"].endswith("."), info["name"]
        aliases = info["search_aliases"]
        assert len({*aliases}) == len(aliases) >= 3, info["name"]
        assert aliases == [alias for alias in aliases if alias.strip() and alias.islower()]
        for name, kind, options in inputs(info):
            tooltip, where = options["tooltip"], (info["name"], name)
            assert tooltip, where
            is_seed = options.get("control_after_generate")  # any number is as good as another
            if kind in ("INT", "FLOAT") and not is_seed:
                assert UNIT.search(tooltip), where
            choices = options.get("options", kind if isinstance(kind, list) else [])
            if choices and not name.endswith("_name"):  # the choices of those are files
                assert any(str(each) in tooltip for each in [*choices, "(Fast)"]), where


def test_the_english_file_has_the_texts_of_the_schemas(infos):
    assert written("en") == english(infos), "stale: python tests/tools/locales.py"


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_a_translation_is_complete_and_keeps_numbers_names_and_choices(infos, language):
    texts, have = dict(leaves(english(infos))), dict(leaves(written(language)))
    assert {".".join(path) for path in have} == {".".join(path) for path in texts}
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
        words = set(re.findall(r"[\w.-]+", text))
        kept = {re.sub("(?<=[A-Z])s$", "", token) for token in TOKEN.findall(text)}  # LoRAs
        kept |= {word for word in words & choices.get(path, set()) if f"{word}:" in text}
        assert [token for token in kept if token not in have[path]] == [], ".".join(path)
    names = {name for info in infos for name in info["category"].split("/")}
    categories = written(language, "main")["nodeCategories"]
    assert categories.keys() == names
    assert all(re.search(LETTERS[language], text) for text in categories.values())


@pytest.mark.parametrize("language", ["en", *TRANSLATIONS])
def test_the_server_offers_texts_that_are_no_message_patterns(server, language):
    offered = server.get("/i18n")[language]["nodeDefs"]
    assert offered == written(language)
    for path, text in leaves(offered):
        assert path[-1] == "tooltip" or not PATTERN & set(text), ".".join(path)
