"""The structure: imports between layers, one name per idea, and sizes of files and functions.

Each rule is a function from the sources to the places that break it, so that every rule is also
shown to fail on a violation that is planted in a copy of the sources.
"""

import ast
import functools
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from fast_video_vae.tests.builders import pyproject

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "lora", "vae", "nodes")
PACK = "fast_video_vae"

# What each layer may import in addition to itself; the longest prefix of a path counts.
_LAYERS = "kernels vae/layers"
_MODELS = f"{_LAYERS} vae/models"
_PLANNING = f"{_MODELS} vae/planning"
_WRITER = "vae/pinned_memory.py vae/background_writer.py"
_STREAMING = f"{_PLANNING} vae/sharding vae/streaming vae/validation.py {_WRITER}"
_MODEL = f"{_STREAMING} vae/weights.py vae/model.py"
_CHECKPOINT = f"{_MODEL} vae/checkpoint_io vae/checkpoint.py"
_BENCH = f"{_CHECKPOINT} vae/bench"
_HOST = "kernels lora vae nodes/host"
_SUBJECTS = f"{_HOST} nodes/vae nodes/lora nodes/text nodes/preview"
MAY_IMPORT = {
    "__init__.py": "nodes",
    "kernels": "",
    "lora": "kernels",
    # vae/__init__.py, which has the public names
    "vae": f"{_BENCH} vae/media vae/preview vae/demo",
    "vae/layers": _LAYERS,
    "vae/models": _LAYERS,
    "vae/validation.py": "vae/models/config.py",
    "vae/planning": _MODELS,
    "vae/pinned_memory.py": "kernels",
    "vae/background_writer.py": "vae/pinned_memory.py",
    "vae/streaming": f"{_PLANNING} vae/sharding vae/validation.py {_WRITER}",
    "vae/weights.py": _MODELS,
    "vae/sharding": f"{_PLANNING} vae/sharding",
    "vae/model.py": f"{_STREAMING} vae/weights.py",
    "vae/checkpoint.py": f"{_MODEL} vae/checkpoint_io",
    "vae/checkpoint_io": "kernels",
    "vae/media": f"kernels {_WRITER}",
    "vae/preview": f"{_MODELS} vae/checkpoint_io vae/validation.py vae/streaming/precision.py",
    "vae/bench": _CHECKPOINT,
    "vae/cli": f"{_BENCH} vae/media vae/demo",
    "vae/demo": "",
    "nodes": f"{_SUBJECTS} nodes/video nodes/sampling nodes/benchmark nodes/wan_wrapper nodes/mlp",
    "nodes/host": "kernels lora vae",
    "nodes/vae": _HOST,
    "nodes/lora": _HOST,
    "nodes/text": _HOST,
    "nodes/preview": _HOST,
    "nodes/video": _SUBJECTS,
    "nodes/sampling": _SUBJECTS,
    "nodes/benchmark": _SUBJECTS,
    "nodes/wan_wrapper": _SUBJECTS,
    "nodes/mlp": "kernels nodes/host",
}
# The files of a folder that other folders may import.
DOORS = {
    "kernels": {"kernels"},
    "lora": {"lora"},
    "vae": {"vae", "vae/media", "vae/preview", "vae/bench"},
}
COMFYUI = {
    "comfy", "comfy_api", "comfy_api_nodes", "comfy_execution", "comfy_extras", "execution",
    "folder_paths", "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip

LONGEST_FILE, LONGEST_TEST_FILE, MEDIAN_FILE = 400, 500, 180
LONGEST_FUNCTION = 60
MOST_FILES = 16
CONTRACT = "kernels/__init__.py"

Sources = dict[str, str]  # path from the root: text


def sources() -> Sources:
    paths = [ROOT / "__init__.py", *(p for f in FOLDERS for p in (ROOT / f).rglob("*.py"))]
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in sorted(paths)}


def found(module: str, tree: Sources) -> str | None:
    """The file of a module that is named by its path, if it is ours."""
    for path in (f"{module}.py", f"{module}/__init__.py" if module else "__init__.py"):
        if path in tree:
            return path
    return None


def imports(path: str, tree: Sources) -> Iterator[tuple[str, str | None]]:
    """Yield the files of this project that a file imports, each with the imported name.

    Imports in functions and under `TYPE_CHECKING` count, and so does every string that names a
    module of ours, in a file that imports by name.
    """
    package = path.rpartition("/")[0]
    for base, name in _written_imports(package, tree[path]):
        if name is None:
            file = found(base, tree)
            if file and file != path:
                yield file, None
            continue
        home, file = found(base, tree), found(f"{base}/{name}" if base else name, tree)
        if home and (file is None or name in _bound(tree[home])):
            yield home, name
        elif file:
            yield file, None


@functools.cache
def _written_imports(package: str, text: str) -> list[tuple[str, str | None]]:
    """Return the relative imports and module strings of a file: path of a module, name or None."""
    written: list[tuple[str, str | None]] = []
    for node in _nodes(text):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [_above(package, node.level - 1), *(node.module or "").split(".")]
            written += [("/".join(filter(None, base)), alias.name) for alias in node.names]
    if _imports_by_string(text):
        for node in _nodes(text):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = node.value.lstrip(".")
                dots = len(node.value) - len(named)
                if named and named.replace(".", "").replace("_", "").isalnum():
                    origins = [_above(package, dots - 1)] if dots else [package, ""]
                    path = named.replace(".", "/")
                    written += [("/".join(filter(None, [each, path])), None) for each in origins]
    return written


@functools.cache
def _bound(text: str) -> set[str]:
    """Return the names that a file imports or defines."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module:  # `from . import x` is a file
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


@functools.cache
def _nodes(text: str) -> list[ast.AST]:
    """Every node that a rule may ask about, of a file."""
    kinds = (
        ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        | ast.Attribute | ast.Call | ast.Constant
    )  # fmt: skip
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def _above(package: str, levels: int) -> str:
    parts = package.split("/") if package else []
    return "/".join(parts[: len(parts) - levels])


def _imports_by_string(text: str) -> bool:
    names = {
        getattr(node.func, "id", getattr(node.func, "attr", ""))
        for node in _nodes(text)
        if isinstance(node, ast.Call)
    }
    return bool(names & {"import_module", "Later", "__import__"})


def _floor(path: str) -> str:
    inside = [floor for floor in MAY_IMPORT if path == floor or path.startswith(f"{floor}/")]
    return max(inside, key=len)


def upward_imports(tree: Sources) -> list[str]:
    wrong = []
    for path in tree:
        floor = _floor(path)
        allowed = [floor, *MAY_IMPORT[floor].split()]
        for target, _ in imports(path, tree):
            if not any(target == each or target.startswith(f"{each}/") for each in allowed):
                wrong.append(f"{path} imports {target}")
    return wrong


def side_entrances(tree: Sources) -> list[str]:
    wrong = []
    for path in tree:
        for target, _ in imports(path, tree):
            top = target.split("/")[0]
            if top == path.split("/")[0] or top not in DOORS:
                continue
            if target.removesuffix("/__init__.py") not in DOORS[top]:
                wrong.append(f"{path} enters {top}/ through {target}")
    return wrong


def circles(tree: Sources) -> list[str]:
    graph = {path: {target for target, _ in imports(path, tree)} - {path} for path in tree}
    wrong, done = [], set()

    def visit(path: str, way: list[str]) -> None:
        if path in way:
            wrong.append(" -> ".join([*way[way.index(path) :], path]))
        elif path not in done:
            for target in sorted(graph[path]):
                visit(target, [*way, path])
            done.add(path)

    for path in graph:
        visit(path, [])
    return wrong


def private_names_across_files(tree: Sources) -> list[str]:
    wrong = []
    for path, text in tree.items():
        for target, name in imports(path, tree):
            if name and name.startswith("_"):
                wrong.append(f"{path} takes {name} from {target}")
        ours = {
            alias.asname or alias.name
            for node in _nodes(text)
            if isinstance(node, ast.ImportFrom) and node.level
            for alias in node.names
        }
        for node in _nodes(text):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                if private and node.value.id in ours:
                    wrong.append(f"{path}: {node.value.id}.{node.attr}")
    return wrong


def names_twice(tree: Sources) -> list[str]:
    homes = defaultdict(list)
    for path, text in tree.items():
        for node in _nodes(text):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    return [f"{name}: {paths}" for name, paths in homes.items() if len(paths) > 1]


def long_files(tree: Sources) -> list[str]:
    lengths = {path: len(text.splitlines()) for path, text in tree.items() if path != CONTRACT}
    wrong = [f"{path}: {n} lines" for path, n in lengths.items() if n > LONGEST_FILE]
    median = statistics.median(lengths.values())
    return wrong + [f"median {median:g} lines"] * (median > MEDIAN_FILE)


def long_functions(tree: Sources) -> list[str]:
    wrong = []
    for path, text in tree.items():
        for node in _nodes(text):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = node.end_lineno - node.lineno + 1
            kernel = path.startswith("kernels/triton_ops/") and node.decorator_list
            if lines > LONGEST_FUNCTION and not kernel and node.name != "define_schema":
                wrong.append(f"{path}: {node.name} has {lines} lines")
    return wrong


def full_folders(tree: Sources) -> list[str]:
    counts = Counter(path.rpartition("/")[0] for path in tree)
    return [f"{folder}: {n} files" for folder, n in counts.items() if n > MOST_FILES]


def comfyui_below_nodes(tree: Sources) -> list[str]:
    wrong = []
    for path, text in tree.items():
        for node in _nodes(text):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            else:
                continue
            for module in modules:
                top = module.split(".")[0]
                if top == PACK or (top in COMFYUI and not path.startswith("nodes/")):
                    wrong.append(f"{path} imports {module}")
    return wrong


def drawers(tree: Sources) -> list[str]:
    names = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    return [path for path in tree if path.rpartition("/")[2] in names]


def not_in_the_wheel(tree: Sources) -> list[str]:
    listed = set(pyproject()["tool"]["setuptools"]["packages"])
    folders = {path.rpartition("/")[0] for path in tree}
    needed = {".".join(filter(None, [PACK, *folder.split("/")])) for folder in folders}
    return sorted(needed ^ listed)


def _planted(path: str, text: str) -> Sources:
    tree = sources()
    return tree | {path: tree.get(path, '"""A file."""\n') + text}


_LONG = "def long():\n" + "    pass\n" * LONGEST_FUNCTION
# Each rule, and what breaks it: a file and what is written at its end.
RULES = [
    (upward_imports, "vae/layers/conv.py", "from ..models import config\n"),
    (upward_imports, "vae/media/codecs.py", "from ..layers.conv import Conv\n"),
    (upward_imports, "nodes/host/progress.py", 'x = Later("nodes.vae.comfy_vae")\n'),
    (upward_imports, "kernels/checks.py", "if TYPE_CHECKING:\n    from ..lora import Bank\n"),
    (side_entrances, "nodes/vae/nodes.py", "from ...vae.model import VideoVAE\n"),
    (side_entrances, "lora/keys.py", "def f():\n    from ..kernels.dispatch import run\n"),
    (circles, "vae/layers/workspace.py", "from .causal_conv import CausalConv3d\n"),
    (circles, "kernels/checks.py", "if TYPE_CHECKING:\n    from . import BackendError\n"),
    (circles, "kernels/errors.py", 'import_module(".dispatch", __package__)\n'),
    (private_names_across_files, "lora/keys.py", "from .blocks import _number\n"),
    (private_names_across_files, "lora/keys.py", "from . import blocks\nblocks._number\n"),
    (names_twice, "vae/demo/__init__.py", "class VideoVAE:\n    pass\n"),
    (long_files, "lora/keys.py", "#\n" * LONGEST_FILE),
    (long_functions, "lora/keys.py", _LONG),
    (long_functions, "lora/keys.py", "class A:\n" + textwrap.indent(_LONG, "    ")),
    (comfyui_below_nodes, "lora/keys.py", "def f():\n    import folder_paths\n"),
    (comfyui_below_nodes, "lora/keys.py", "from fast_video_vae.kernels import run\n"),
    (drawers, "lora/utils.py", ""),
    (not_in_the_wheel, "lora/forms/__init__.py", ""),
]


@pytest.mark.parametrize("rule", dict.fromkeys(row[0] for row in RULES), ids=lambda r: r.__name__)
def test_the_sources_follow_the_rule(rule):
    assert rule(sources()) == []


def test_no_folder_has_too_many_files():
    assert full_folders(sources()) == []
    many = {f"lora/a{n}.py": "" for n in range(MOST_FILES)}
    assert full_folders(sources() | many)


@pytest.mark.parametrize(("rule", "path", "text"), RULES)
def test_the_rule_finds_a_violation(rule, path, text):
    assert set(rule(_planted(path, text))) - set(rule(sources()))


def test_test_files_can_be_read_too():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert not {path: n for path, n in lengths.items() if n > LONGEST_TEST_FILE}
