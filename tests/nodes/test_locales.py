"""The texts of the nodes: complete in the schemas and every language."""

import re

import pytest

from fast_video_vae.tests.tools.locales import LOCALES, english, node_infos, written

pytestmark = pytest.mark.comfyui

TRANSLATIONS = sorted(path.name for path in LOCALES.iterdir() if path.name != "en")
COMMAND = "python tests/tools/locales.py"

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


@pytest.fixture(scope="module")
def texts(infos):
    return dict(leaves(english(infos)))


def leaves(tree, path=()):
    """Every text of a tree with the keys that lead to it."""
    for key, value in tree.items():
        if isinstance(value, str):
            yield (*path, key), value
        else:
            yield from leaves(value, (*path, key))


def inputs(infos):
    """Node id, input id, type and options of every input."""
    for info in infos:
        for group in ("required", "optional"):
            for name, (kind, *options) in info["input"].get(group, {}).items():
                yield info["name"], name, kind, options[0] if options else {}


def test_every_node_has_a_description_and_search_aliases(infos):
    for info in infos:
        assert info["description"].endswith("."), info["name"]
        aliases = info["search_aliases"]
        assert len(aliases) >= 3, info["name"]
        assert aliases == [alias for alias in aliases if alias.strip() and alias.islower()]
        assert len(set(aliases)) == len(aliases)


def test_a_tooltip_has_the_unit_of_a_number_and_the_meanings_of_choices(infos):
    """For a choice between words, not between files; or it names the node that explains them."""
    for node, name, kind, options in inputs(infos):
        tooltip = options["tooltip"]
        assert tooltip, (node, name)
        is_seed = options.get("control_after_generate")  # any number is as good as another
        if kind in ("INT", "FLOAT") and not is_seed:
            assert UNIT.search(tooltip), (node, name)
        choices = options.get("options", kind if isinstance(kind, list) else [])
        if choices and not name.endswith("_name"):
            assert any(str(each) in tooltip for each in [*choices, "(Fast)"]), (node, name)


def test_the_english_file_has_the_texts_of_the_schemas(infos):
    assert written("en") == english(infos), f"stale: {COMMAND}"


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_a_translation_is_complete(texts, language):
    have = dict(leaves(written(language)))
    missing = [".".join(path) for path in texts if path not in have]
    assert missing == [], f"locales/{language}/nodeDefs.json lacks these"
    assert [".".join(path) for path in have if path not in texts] == []


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_a_translation_is_in_its_language(language):
    for path, text in leaves(written(language)):
        if path[-1] != "name":  # names such as VAE are the same everywhere
            assert re.search(LETTERS[language], text), ".".join(path)
        assert text == text.strip()


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_a_translation_keeps_numbers_names_and_choices(infos, texts, language):
    have = dict(leaves(written(language)))
    choices = {
        (node, "inputs", name, "tooltip"): {str(choice) for choice in options.get("options", [])}
        for node, name, _, options in inputs(infos)
    }
    for path, text in texts.items():
        if path[-1] == "name" or path not in have:
            continue
        words = set(re.findall(r"[\w.-]+", text))
        kept = {singular(token) for token in TOKEN.findall(text)}
        kept |= {word for word in words & choices.get(path, set()) if f"{word}:" in text}
        assert [token for token in kept if token not in have[path]] == [], ".".join(path)


@pytest.mark.parametrize("language", ["en", *TRANSLATIONS])
def test_names_and_descriptions_are_no_message_patterns(language):
    for path, text in leaves(written(language)):
        if path[-1] != "tooltip":
            assert not PATTERN & set(text), ".".join(path)


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_the_category_is_translated(infos, language):
    names = {name for info in infos for name in info["category"].split("/")}
    translated = written(language, "main")["nodeCategories"]
    assert translated.keys() == names
    assert all(re.search(LETTERS[language], text) for text in translated.values())


def test_the_server_offers_every_language(server):
    offered = server.get("/i18n")
    for language in ["en", *TRANSLATIONS]:
        assert offered[language]["nodeDefs"] == written(language)


def singular(token):
    """LoRAs are LoRA in a language without plurals."""
    return token.removesuffix("s") if re.search("[A-Z]s$", token) else token
