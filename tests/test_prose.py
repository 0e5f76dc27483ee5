"""How the project writes: no riddles, shapes for tensors, a line for every argument and error.

Each rule is a function from texts to the places that break it, and is also shown to fail on a
planted violation. `SKIPPED` lists every exception with its reason.
"""

import ast
import functools
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("kernels", "lora", "vae", "nodes")

# Words that hide the noun, with what to write instead.
WORDS = {
    r"told|tells?|telling": "logs, reports, shows, returns",
    r"besides?": "next to, in addition to, with; LoRA mode: bypass",
    r"likewise": "also",
    r"so many": "`n`, or the count's name",
    r"(?:no|some|any|every)body": "no caller, another thread, all: name it",
    r"who|whom|whoever": "the caller, the user, the backend that",
    r"what leaves": "the output",
    r"lone": "single",
    r"still|stillness": "static; or leave the adverb out",
    r"alike": "equal, the same, identical",
    r"rests": "is static",
    r"without loss": "lossless",
    r"(?:does|do) not mind": "ignores",
}
_WORD = re.compile(rf"(?i)\b(?:{'|'.join(WORDS)})\b")
# A sentence without its noun: "Whose.", "The one.", "Of which.", "That it took."
_FRAGMENT = re.compile(
    r"(?:^|[.:;!?]\s+)((?:Whose|Which|The ones?|Of which|Nobody|That|Those|What|So)\.)(?=\s|$)"
)
_SEE = re.compile(r"\s*(?:See|As)\b[^.]*\.?\s*")
_SHAPE = re.compile(r"`[^`]*\[[^`]*\][^`]*`")
_SECTION = re.compile(r"^\s*(?:Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)

LONGEST_MESSAGE = 160

# Files that are not read, with the reason.
SKIPPED = {
    "README.md": "it is the front page, with its own style and tests",
    "tests/test_prose.py": "it holds the words",
}

# Allowed words by path, with the reason.
_PROMPT = "the negative prompt that was published with Wan has 'still picture'"
ALLOWED = {
    ("vae/media/av_input.py", "tell"): "the name of the method of Python's file objects",
    ("example_workflows/3 Wan 2.2 14B - stock graph made fast.json", "still"): _PROMPT,
    ("example_workflows/4 Wan 2.2 14B - two experts in four steps.json", "still"): _PROMPT,
    ("example_workflows/5 Wan 2.2 5B - image to video.json", "still"): _PROMPT,
    ("example_workflows/9 WanVideoWrapper - with the fast VAE.json", "still"): _PROMPT,
}

# ComfyUI calls these by name with the inputs of the node's schema, which has a text for each.
_OF_COMFYUI = {"execute", "define_schema", "fingerprint_inputs", "validate_inputs"}


class Text(NamedTuple):
    """A piece of prose and its place."""

    place: str  # path:line
    text: str


def files(*patterns: str) -> list[Path]:
    """Files of the project, without what was built or installed in the checkout."""
    tops = (*PRODUCT, "tests", "docs", "web", "locales", "example_workflows", ".ci", ".github")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    found += [path for top in tops for pattern in patterns for path in (ROOT / top).rglob(pattern)]
    return sorted(path for path in set(found) if _relative(path) not in SKIPPED)


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def sources() -> dict[str, str]:
    """The Python files: path and text."""
    return {_relative(path): path.read_text(encoding="utf-8") for path in files("*.py")}


def comments(path: str, text: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Text(f"{path}:{token.start[0]}", token.string.lstrip("# "))


@functools.lru_cache(maxsize=1)  # a file is read several times in a row
def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def strings(path: str, text: str) -> Iterator[Text]:
    """Docstrings; in the product also every other string that reads as prose."""
    in_product = path.startswith(PRODUCT)
    nodes = nodes_of(text)
    joined = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    documented = docstring_nodes(nodes)
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            value = "".join(
                part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in joined:
            value = node.value
        else:
            continue
        if " " in value and (in_product or node in documented):
            yield Text(f"{path}:{node.lineno}", value)


def docstring_nodes(nodes: Iterable[ast.AST]) -> set[ast.expr]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    bodies = [node.body for node in nodes if isinstance(node, kinds)]
    return {body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)}


def names(path: str, text: str) -> Iterator[Text]:
    """Words of the names that a file gives: functions, classes, arguments, variables."""
    for node in nodes_of(text):
        given = {
            ast.FunctionDef: "name", ast.AsyncFunctionDef: "name", ast.ClassDef: "name",
            ast.arg: "arg", ast.Attribute: "attr",
        }.get(type(node))  # fmt: skip
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            given = "id"
        if given:
            words = re.sub(r"([A-Z][a-z])", r" \1", getattr(node, given)).replace("_", " ")
            yield Text(f"{path}:{node.lineno}", words)


def pages() -> Iterator[Text]:
    """Every text that is not Python: help pages, notes, translations, workflows, kernels."""
    patterns = ("*.md", "*.cpp", "*.cu", "*.cuh", "*.h", "*.yml", "*.yaml", "run", "*.toml")
    for path in files(*patterns):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield Text(f"{_relative(path)}:{number}", line)
    for path in files("*.json"):
        if path.parts[-2] in ("en", "example_workflows"):
            for value in _values(json.loads(path.read_text(encoding="utf-8"))):
                yield Text(_relative(path), value)


def _values(data: object) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _values(value)


@functools.cache
def texts() -> list[Text]:
    read = [
        found
        for path, text in sources().items()
        for kind in (comments, strings, names)
        for found in kind(path, text)
    ]
    return [*read, *pages()]


def listed_words(found: Iterable[Text]) -> list[str]:
    wrong = []
    for place, text in found:
        path = place.partition(":")[0]
        matches = (match.group() for match in _WORD.finditer(text))
        wrong += [f"{place}: {word}" for word in matches if (path, word.lower()) not in ALLOWED]
        wrong += [f"{place}: {match.group(1)}" for match in _FRAGMENT.finditer(text)]
    return wrong


class Function(NamedTuple):
    """A public function or method of the product."""

    place: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    doc: str
    kinds: frozenset[str]  # names of its decorators

    @property
    def arguments(self) -> list[ast.arg]:
        """All of them, but for `self` and `cls`."""
        args = self.node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        return [arg for arg in every if arg and arg.arg not in ("self", "cls")]

    @property
    def takes_tensors(self) -> bool:
        """An annotation of it names `Tensor`."""
        annotations = [arg.annotation for arg in self.arguments] + [self.node.returns]
        return any("Tensor" in ast.unparse(each) for each in annotations if each)

    @property
    def returns(self) -> bool:
        """It returns or yields something."""
        written = ast.unparse(self.node.returns) if self.node.returns else "None"
        if "contextmanager" in self.kinds and written.endswith("[None]"):
            return False
        return written not in ("None", "NoReturn")

    @property
    def raises(self) -> bool:
        """It raises an error of its own."""
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        ahead: list[ast.AST] = list(self.node.body)
        while ahead:
            node = ahead.pop()
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                return True
            if not isinstance(node, inner):
                ahead += ast.iter_child_nodes(node)
        return False


def functions(tree: dict[str, str]) -> Iterator[Function]:
    """Public functions of the product, methods of public classes among them."""
    for path, text in tree.items():
        if not path.startswith(PRODUCT):
            continue
        ahead: list[ast.AST] = list(ast.parse(text).body)
        while ahead:
            node = ahead.pop(0)
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                ahead += node.body
            elif isinstance(node, ast.If | ast.Try):
                ahead += ast.iter_child_nodes(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") or node.name in _OF_COMFYUI:
                    continue
                decorators = {
                    ast.unparse(each.func if isinstance(each, ast.Call) else each).split(".")[-1]
                    for each in node.decorator_list
                }
                # A Triton kernel takes pointers; the function that launches it has the shapes.
                if not decorators & {"jit", "autotune", "overload"}:
                    doc = ast.get_docstring(node) or ""
                    place = f"{path}:{node.lineno} {node.name}"
                    yield Function(place, node, doc, frozenset(decorators))


def undocumented(tree: dict[str, str]) -> list[str]:
    """Public names without a docstring, or with one that only points elsewhere."""
    wrong = [f"{each.place}: no docstring" for each in functions(tree) if not each.doc]
    for path, text in tree.items():
        if not path.startswith(PRODUCT):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                doc, name = ast.get_docstring(node), getattr(node, "name", "module")
                if doc is not None and _SEE.fullmatch(doc):
                    wrong.append(f"{path}: {name} only says {doc!r}")
                if isinstance(node, ast.ClassDef) and not name.startswith("_") and not doc:
                    wrong.append(f"{path}: {name} has no docstring")
    return wrong


def without_shape(tree: dict[str, str]) -> list[str]:
    """Functions on tensors that give no shape in backquotes."""
    return [
        each.place for each in functions(tree) if each.takes_tensors and not _SHAPE.search(each.doc)
    ]


def without_sections(tree: dict[str, str]) -> list[str]:
    """Functions with arguments, results or errors that the docstring leaves out.

    A docstring of one line is enough where it names every argument in backquotes and nothing is
    raised. All others have `Args`, `Returns` and `Raises` where there are any.
    """
    wrong = []
    for each in functions(tree):
        doc, missing = each.doc, []
        has = {match.group().strip().rstrip(":") for match in _SECTION.finditer(doc)}
        quoted = " ".join(re.findall(r"`[^`]*`", doc))
        named = [re.search(rf"\b{arg.arg}\b", quoted) for arg in each.arguments]
        is_line = "\n" not in doc.strip()
        if each.raises and "Raises" not in has:
            missing.append("Raises")
        if each.arguments and "Args" not in has and not (is_line and all(named)):
            missing.append("Args")
        is_property = bool(each.kinds & {"property", "cached_property"})
        if each.returns and not has & {"Returns", "Yields"} and not is_line and not is_property:
            missing.append("Returns")
        if missing:
            wrong.append(f"{each.place}: {', '.join(missing)}")
    return wrong


def long_messages(tree: dict[str, str]) -> list[str]:
    """Errors and warnings with more than `LONGEST_MESSAGE` characters, without their values."""
    wrong = []
    for path, text in tree.items():
        if not path.startswith(PRODUCT):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for part in node.exc.args:
                    said = _written(part)
                    if len(said) > LONGEST_MESSAGE or "\n" in said:
                        wrong.append(f"{path}:{node.lineno}: {len(said)} characters")
    return wrong


def _written(node: ast.expr) -> str:
    """The literal text of a string, with nothing in place of its values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_written(part) for part in node.values)
    return ""


RULES = [undocumented, without_shape, without_sections, long_messages]


def test_no_text_has_a_listed_word():
    assert listed_words(texts()) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_follow_the_rule(rule):
    assert rule(sources()) == []


def test_every_exception_is_needed():
    assert [path for path in SKIPPED if not (ROOT / path).exists()] == []
    found = {
        (place.partition(":")[0], match.group().lower())
        for place, text in texts()
        for match in _WORD.finditer(text)
    }
    assert [each for each in ALLOWED if each not in found] == []


@pytest.mark.parametrize(
    "text",
    [
        "What refers to itself is told once.",
        "Frames: so many.",
        "name: Whose.",
        "Two products beside the layer",
        "vp9 is without loss and does not mind it",
        "Nobody asks for it",
    ],
)
def test_a_riddle_is_found(text):
    assert listed_words(iter([Text("a.py:1", text)]))


@pytest.mark.parametrize("text", ["cloned weights", "the rest of the frames", "alone", "tallest"])
def test_plain_words_pass(text):
    assert not listed_words(iter([Text("a.py:1", text)]))


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (comments, "x = 1  # whom it may concern\n"),
        (strings, '"""Tells the size."""\n'),
        (strings, 'raise ValueError(f"{x} is told")\n'),
        (names, "def test_pictures_stand_still():\n    pass\n"),
        (names, "class LoneFrame:\n    pass\n"),
    ],
)
def test_every_kind_of_text_is_read(read, text):
    assert listed_words(read("vae/a.py", text))


_DOC = '    """Do it to `x`.\n\n    Args:\n        x: It.\n'
PLANTED = [
    (undocumented, "def f() -> None:\n    pass\n"),
    (undocumented, 'def f() -> None:\n    """See `g`."""\n'),
    (undocumented, "class A:\n    x = 1\n"),
    (without_shape, 'def f(x: Tensor) -> None:\n    """Use `x`."""\n'),
    (
        without_shape,
        'class A:\n    """A."""\n\n    def f(self) -> Tensor:\n        """Make `n` frames."""\n',
    ),
    (without_sections, 'def f(x: int) -> None:\n    """Do it."""\n'),
    (without_sections, f'def f(x: int) -> int:\n{_DOC}    """\n'),
    (without_sections, f'def f(x: int) -> None:\n{_DOC}    """\n    raise ValueError("x")\n'),
    (without_sections, 'def f(x: int) -> None:\n    """Use `x`."""\n    raise ValueError("x")\n'),
    (long_messages, f'def f() -> None:\n    raise ValueError(f"{{x}} {"a" * 200}")\n'),
]


@pytest.mark.parametrize(("rule", "text"), PLANTED)
def test_a_violation_is_found(rule, text):
    assert rule({"vae/a.py": text})


@pytest.mark.parametrize(
    "text",
    [
        'def f(x: Tensor) -> Tensor:\n    """Return `x` `[B, C]`, doubled."""\n',
        "def _f(x):\n    pass\n",
        'class A:\n    """A."""\n\n    @property\n    def n(self) -> int:\n        """Size."""\n',
    ],
)
def test_plain_functions_pass(text):
    assert [place for rule in RULES for place in rule({"vae/a.py": text})] == []
