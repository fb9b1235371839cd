"""The shape of the source: small modules, sorted public names, one place for each heavy dependency."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LINES = 400
DRAWERS = {"utils", "helpers", "common", "misc", "manager", "core"}
# Who may import what is heavy or particular to one side; everything else is forbidden to.
PLACES = {
    "pydicom": ("shardflow/sources/dicom/", "pipelines/demo"),
    "imagecodecs": ("shardflow/sources/dicom/",),
    "torch": ("shardflow/training/", "shardflow/loading/torch_dataset.py", "pipelines/train.py"),
    "transformers": ("shardflow/training/", "pipelines/"),
    "pickle": (),
    "marshal": (),
    "shelve": (),
}


def _modules() -> list[Path]:
    found = [*REPOSITORY.glob("shardflow/**/*.py"), *REPOSITORY.glob("pipelines/**/*.py")]
    return sorted(path.relative_to(REPOSITORY) for path in found)


MODULES = _modules()


def _tree(module: Path) -> ast.Module:
    return ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))


def _public_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names: list[str] = ast.literal_eval(value)
                return names
    return None


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_module_is_small_and_says_what_it_is(module: Path) -> None:
    num_lines = len((REPOSITORY / module).read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, (
        f"{module} has {num_lines} lines, at most {MAX_LINES}; give each idea a module"
    )
    assert ast.get_docstring(_tree(module)), f"{module} must open with a docstring"
    assert not DRAWERS & {module.stem, *module.parent.parts}, f"{module} must be named for its one idea"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_public_names_are_sorted_and_exist(module: Path) -> None:
    tree = _tree(module)
    names = _public_names(tree)
    if names is None:
        definitions = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ]
        assert not definitions, f"{module} defines {definitions} and has no __all__"
        return
    assert names == sorted(names), f"{module}: __all__ must be sorted"
    assert len(names) == len(set(names)), f"{module}: __all__ names something twice"
    bound = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                bound |= {alias.asname or alias.name for alias in aliases}
    lazily = {"__getattr__"} & bound
    assert lazily or set(names) <= bound, f"{module}: __all__ names {sorted(set(names) - bound)}, not defined"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_heavy_imports_have_one_place(module: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(_tree(module)):
        match node:
            case ast.Import(names=aliases):
                imported |= {alias.name.split(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(name), level=0):
                imported.add(name.split(".")[0])
    for dependency, places in PLACES.items():
        if dependency in imported:
            assert module.as_posix().startswith(places or ("-",)), f"{module} must not import {dependency}"


def _tracked_text() -> list[Path]:
    """Files that git tracks or would track, read as text; every file where git is absent."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listing = [str(path) for path in MODULES]
    suffixes = {".py", ".md", ".toml", ".txt", ".sh", ""}
    return [
        REPOSITORY / name
        for name in listing
        if Path(name).suffix in suffixes and (REPOSITORY / name).is_file()
    ]


def test_every_todo_has_a_slug() -> None:
    mark = "TO" + "DO"
    bare = re.compile(rf"\b(?:{mark}(?!\([a-z0-9][a-z0-9-]+\))|FIXME|XXX|HACK)\b")
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in _tracked_text()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert not found, f"write {mark}(slug) with an open issue, or do it: {found}"


def test_no_shell_or_python_file_holds_a_registry_address() -> None:
    address = re.compile(r"(?:index-url|extra-index-url|find-links)\s*[= ]\s*['\"]?https?:")
    found = [path.name for path in _tracked_text() if address.search(path.read_text(encoding="utf-8"))]
    assert not found
