"""The structure: imports go down, through the doors and in no circle; sizes; what is packaged."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from fast_video_vae.tests.builders import pyproject

ROOT = Path(__file__).resolve().parents[1]

# The lowest floor first: a file imports from its own floor and from those in the lines before.
FLOORS = """kernels
lora vae/layers vae/checkpoint_io vae/demo vae/pinned_memory.py
vae/models vae/background_writer.py
vae/planning vae/media vae/validation.py vae/weights.py
vae/streaming
vae/model.py
vae/checkpoint.py
vae/bench
vae/cli vae
nodes/host
nodes/vae nodes/lora nodes/text nodes/preview nodes/mlp
nodes/video nodes/sampling nodes/benchmark nodes/wan_wrapper
nodes/upscale
nodes
__init__.py"""
TOPS = ("kernels", "lora", "vae", "nodes")
RANKS = {each: rank for rank, line in enumerate(FLOORS.splitlines()) for each in line.split()}
DOORS = {"kernels", "lora", "vae", "vae/media", "vae/bench"}  # seen from above
LONGEST_FILE, LONGEST_FUNCTION, MOST_FILES = 350, 55, 16
CONTRACT = "kernels/__init__.py"  # of any length
INTERFACE = "nodes/host/api.py"  # imports ComfyUI's interface for packs


def sources():
    """The text of each file of the product by its path."""
    paths = [ROOT / "__init__.py", *(p for top in TOPS for p in ROOT.glob(f"{top}/**/*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(paths)}


@functools.cache
def nodes_of(text):
    return [*ast.walk(ast.parse(text))]


def imports(path, tree):
    """Yield the files of ours that a file imports; where it imports by name, strings count too."""
    folder = path.split("/")[:-1]
    by_name = any(word in tree[path] for word in ("import_module(", "Later("))
    for node in nodes_of(tree[path]):
        found = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1] + (node.module or "").split(".")
            base = "/".join(filter(None, base))
            init = nodes_of(tree.get(f"{base}/__init__.py", ""))
            init = [each for each in init if isinstance(each, ast.ImportFrom) and each.module]
            taken = {a.name for each in init for a in each.names}
            found = [[base] if a.name in taken else [f"{base}/{a.name}", base] for a in node.names]
        elif by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.lstrip(".")
            base = folder[: len(folder) - max(len(node.value) - len(name) - 1, 0)]
            found = [["/".join([*base, *name.split(".")]), name.replace(".", "/")]]
        for modules in found:
            files = [file for each in modules for file in (f"{each}.py", f"{each}/__init__.py")]
            yield from [file for file in files if file in tree and file != path][:1]


def wrong_imports(tree):
    def floor_of(path):
        return max((each for each in RANKS if f"{path}/".startswith(f"{each}/")), key=len)

    for path in tree:
        top, floor = path.split("/")[0], floor_of(path)
        for target in imports(path, tree):
            other, above = target.split("/")[0], floor_of(target)
            if {top, other} == {"lora", "vae"} or (floor != above and RANKS[floor] <= RANKS[above]):
                yield f"{path} imports {target}"
            if top != other and other in DOORS and target.removesuffix("/__init__.py") not in DOORS:
                yield f"{path} enters {other}/ through {target}"


def circles(tree):
    graph = {path: {*imports(path, tree)} for path in tree}
    while ends := [path for path, targets in graph.items() if not targets & graph.keys()]:
        graph = {path: targets for path, targets in graph.items() if path not in ends}
    yield from graph


def too_large(tree):
    counts = Counter(path.rpartition("/")[0] for path in tree)
    yield from (folder for folder, count in counts.items() if count > MOST_FILES)
    for path, text in tree.items():
        if len(text.splitlines()) > LONGEST_FILE and path != CONTRACT:
            yield path
        for node in nodes_of(text):
            if isinstance(node, ast.FunctionDef) and node.name != "define_schema":
                kernel = path.startswith("kernels/triton_ops/") and node.decorator_list
                if node.end_lineno - node.lineno >= LONGEST_FUNCTION and not kernel:
                    yield f"{path}: {node.name}"


def other_interfaces(tree):
    wanted = re.compile(r"^ *(from|import) comfy_api\b", re.MULTILINE)
    yield from (path for path in tree if wanted.search(tree[path]) and path != INTERFACE)


def not_packaged(tree):
    folders = {f"fast_video_vae/{path}".rpartition("/")[0].replace("/", ".") for path in tree}
    yield from folders ^ {*pyproject()["tool"]["setuptools"]["packages"]}


# Each rule, and what breaks it: a file and what is written at its end.
RULES = [
    (wrong_imports, "vae/layers/conv.py", "from ..models import config\n"),
    (wrong_imports, "nodes/host/progress.py", 'x = Later("nodes.vae.comfy_vae")\n'),
    (wrong_imports, "nodes/vae/nodes.py", "from ...vae.model import VideoVAE\n"),
    (circles, "kernels/errors.py", 'import_module(".dispatch", __package__)\n'),
    (too_large, "lora/keys.py", "def long():\n" + "    pass\n" * LONGEST_FUNCTION),
    (too_large, "lora/keys.py", "#\n" * LONGEST_FILE),
    (other_interfaces, "nodes/vae/nodes.py", "from comfy_api.latest import io\n"),
    (not_packaged, "lora/forms/__init__.py", ""),
]


@pytest.mark.parametrize(("rule", "path", "text"), RULES)
def test_the_sources_follow_a_rule_which_finds_a_violation(rule, path, text):
    tree = sources()
    assert [*rule(tree)] == []
    assert [*rule(tree | {path: tree.get(path, "") + text})]
