"""The directions of import: nodes -> vae, lora, kernels; vae -> kernels; lora -> kernels."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "": {"nodes"},  # when ComfyUI calls; see test_the_root_imports_nothing
    "nodes": {"vae", "lora", "kernels"},
    "vae": {"kernels"},
    "lora": {"kernels"},
    "kernels": set(),
}
COMFYUI = {
    "comfy", "comfy_api", "comfy_api_nodes", "comfy_execution", "comfy_extras", "execution",
    "folder_paths", "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip
SOURCES = sorted(ROOT.glob("*.py")) + sorted(
    path for folder in MAY_IMPORT if folder for path in (ROOT / folder).rglob("*.py")
)


def imports(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Level (dots), module and names of every import in a file, those in functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_downwards(path):
    inside = path.relative_to(ROOT).parts[:-1]
    folder = inside[0] if inside else ""
    for level, module, names in imports(path):
        if level == 0:
            top = module.split(".")[0]
            assert top != "fast_video_vae", f"{module}: our own imports are relative"
            assert folder == "nodes" or top not in COMFYUI, f"only nodes/ imports {module}"
            continue
        assert level <= len(inside) + 1, f"{'.' * level}{module} leaves the pack"
        origin = inside[: len(inside) + 1 - level]
        for name in [module] if module else names:
            target = (*origin, *name.split("."))
            if target[0] != folder:
                assert target[0] in MAY_IMPORT[folder], f"{folder}/ may not import {target[0]}/"
                assert len(target) == 1, f"{target[0]}/ is entered through its __init__.py"


def test_the_root_imports_nothing():
    root = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    assert not [node for node in root.body if isinstance(node, ast.Import | ast.ImportFrom)]


def test_no_file_is_a_drawer_for_everything():
    assert not [path for path in SOURCES if path.stem in {"utils", "util", "common", "helpers"}]


def test_every_folder_of_sources_is_in_the_wheel():
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(tomllib.loads(text)["tool"]["setuptools"]["packages"])
    found = {path.relative_to(ROOT).parent.parts for path in SOURCES}
    assert {".".join(("fast_video_vae", *parts)) for parts in found} == listed
