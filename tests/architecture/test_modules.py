"""The shape of the source: small modules, sorted public names, one place for each heavy dependency."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LINES = 400
DRAWERS = {"utils", "helpers", "common", "misc", "manager", "core"}
# Who may import what is heavy or particular to one side; everything else is forbidden to.
PLACES = {
    "pydicom": (
        "shardflow/sources/dicom/",
        "shardflow/annotations/",
        "shardflow/waveforms/",
        "shardflow/synthetic/",
        "pipelines/demo/",
    ),
    "imagecodecs": ("shardflow/sources/dicom/", "shardflow/shards/htj2k.py"),
    "torch": (
        "shardflow/training/",
        "shardflow/loading/torch_dataset.py",
        "pipelines/train.py",
    ),
    "transformers": ("shardflow/training/", "pipelines/"),
    "pickle": (),
    "marshal": (),
    "shelve": (),
}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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


def _isort_style(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order that ruff (RUF022) keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def _problems_of(module: Path) -> Iterator[str]:
    tree = _tree(module)
    num_lines = len((REPOSITORY / module).read_text(encoding="utf-8").splitlines())
    if num_lines > MAX_LINES:
        yield f"has {num_lines} lines, at most {MAX_LINES}: give each idea a module"
    if not ast.get_docstring(tree):
        yield "must open with a docstring"
    if DRAWERS & {module.stem, *module.parent.parts}:
        yield "must be named for its one idea"
    imported = _imported(tree)
    for dependency, places in PLACES.items():
        if dependency in imported and not module.as_posix().startswith(places or ("-",)):
            yield f"must not import {dependency}"
    yield from _problems_of_names(tree)


def _imported(tree: ast.Module) -> set[str]:
    imported: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                imported |= {alias.name.split(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(name), level=0):
                imported.add(name.split(".")[0])
    return imported


def _problems_of_names(tree: ast.Module) -> Iterator[str]:
    names = _public_names(tree)
    if names is None:
        defined = [node.name for node in tree.body if isinstance(node, _DEFINITIONS)]
        if any(not name.startswith("_") for name in defined):
            yield "defines public names and has no __all__"
        return
    if names != sorted(set(names), key=_isort_style):
        yield "__all__ must be sorted, each name once"
    bound = {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                bound |= {alias.asname or alias.name for alias in aliases}
    if "__getattr__" not in bound and not set(names) <= bound:
        yield f"__all__ names {sorted(set(names) - bound)}, not defined"


def test_every_module_is_small_named_and_keeps_to_its_place() -> None:
    problems = [f"{module} {problem}" for module in MODULES for problem in _problems_of(module)]
    assert not problems, "\n".join(problems)


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
