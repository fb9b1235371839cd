"""The shape of the source: documented modules of one idea, re-exports only in packages, one place for each
heavy dependency, and no name of a module in a string that does not lead to one.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LINES = 700
"""Soft: a module is usually 100 to 500 lines; what is longer is read again before this number is raised."""
MAX_ENTRIES = 30
DRAWERS = {"utils", "helpers", "misc", "manager", "core"}
# Who may import what is heavy or particular to one side; everything else is forbidden to.
PLACES = {
    "pydicom": ("shardflow/packing/", "shardflow/synthetic/", "pipelines/demo/"),
    "imagecodecs": ("shardflow/packing/sources/dicom/", "shardflow/format/"),
    "torch": (
        "shardflow/training/",
        "shardflow/loading/tensors.py",
        "shardflow/loading/torch_dataset.py",
        "shardflow/cli/train.py",
        "shardflow/reports/token_classifier.py",  # where a model is set
    ),
    "transformers": (
        "shardflow/training/",
        "shardflow/reports/token_classifier.py",
        "shardflow/fields/conversations/rendering.py",  # the model's own processor
        "pipelines/",
    ),
    "pickle": (),
    "marshal": (),
    "shelve": (),
}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MODULE_NAME = re.compile(r"(?:shardflow|pipelines)(?:\.[a-z_]\w*)+(?::[A-Za-z_]\w*)?")
# Dotted names that are no modules: groups of entry points, files, and prefixes of metric names.
_OTHER_NAMES = re.compile(
    r"shardflow\.(?:attachment_kinds|codecs|layouts|processors|recognizers|report_extractors|report_lexicons|tables|"
    r"fish|zsh|json|run|cache|stage)\b"
)


def _modules() -> list[Path]:
    found = [*REPOSITORY.glob("shardflow/**/*.py"), *REPOSITORY.glob("pipelines/**/*.py")]
    return sorted(path.relative_to(REPOSITORY) for path in found)


MODULES = _modules()


def _tree(module: Path) -> ast.Module:
    return ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))


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
    lists_names = any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
        for node in tree.body
    )
    if lists_names and module.name != "__init__.py":
        yield "must not have __all__: only packages list what they re-export"
    defined = [node.name for node in tree.body if isinstance(node, _DEFINITIONS)]
    if module.name == "__init__.py" and [name for name in defined if not name.startswith("__")]:
        yield "must hold re-exports only"


def _imported(tree: ast.Module) -> set[str]:
    imported: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                imported |= {alias.name.split(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(name), level=0):
                imported.add(name.split(".")[0])
    return imported


def test_every_module_has_one_idea_and_keeps_to_its_place() -> None:
    problems = [f"{module} {problem}" for module in MODULES for problem in _problems_of(module)]
    assert not problems, "\n".join(problems)


def test_a_room_can_be_held_in_the_head() -> None:
    entries = Counter(module.parent for module in MODULES)
    crowded = {str(folder): count for folder, count in entries.items() if count > MAX_ENTRIES}
    assert not crowded


def _strings(tree: ast.Module) -> Iterator[str]:
    """String constants that are no docstrings."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value


@cache
def _leads_somewhere(name: str) -> bool:
    """Whether ``package.module``, ``package.module:name`` or ``package.module.name`` exists in a file."""
    place, _, attribute = name.partition(":")
    parts = place.split(".")
    while parts:
        path = REPOSITORY.joinpath(*parts)
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file():
            rest = [*place.split(".")[len(parts) :], *([attribute] if attribute else [])]
            if path.is_dir() and len(rest) == 1 and (path / f"{rest[0]}.py").is_file():
                return True
            return not rest or rest[0] in _bound(module)
        if path.is_dir():
            return len(parts) == len(place.split(".")) and not attribute
        parts.pop()
    return False


@cache
def _bound(module: Path) -> set[str]:
    """Names that a module gives to anything, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


def test_every_name_of_a_module_in_a_string_leads_to_one() -> None:
    """Processes are started, handlers found and objects patched by such strings, unseen by import linters."""
    paths = [
        *REPOSITORY.glob("shardflow/**/*.py"),
        *REPOSITORY.glob("pipelines/**/*.py"),
        *REPOSITORY.glob("tests/**/*.py"),
    ]
    lost = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in paths
        for text in _strings(ast.parse(path.read_text(encoding="utf-8")))
        for name in _MODULE_NAME.findall(text)
        if not _OTHER_NAMES.match(name) and not _leads_somewhere(name)
    ]
    assert not lost, "\n".join(lost)


def test_errors_of_the_system_are_told_by_what_it_says() -> None:
    """``OSError`` tells nobody that a disk is full; `os_reason` does."""
    sources = {path: (REPOSITORY / path).read_text(encoding="utf-8") for path in MODULES}
    bare = [
        f"{path}:{handler.lineno}"
        for path, source in sources.items()
        if "OSError" in source and ").__name__" in source
        for handler in ast.walk(ast.parse(source))
        if isinstance(handler, ast.ExceptHandler)
        and handler.type is not None
        and "OSError" in ast.unparse(handler.type)
        and f"type({handler.name}).__name__" in (text := ast.unparse(handler))
        and "errorcode" not in text
    ]
    assert not bare, f"use os_reason: {bare}"


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
