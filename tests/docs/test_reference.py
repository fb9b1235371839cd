"""Every public name stands in docs/reference.md with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "reference.md"
HEAD = """\
# Public names

What each package exports; everything else may move without notice. The sentences are the first paragraphs of
the docstrings (`make golden` renews this page). Each name leads to its source, where the rest of them stands:
arguments, shapes, units, errors.
"""


def _exports(package: Path) -> dict[str, str]:
    """Public names of a package and the modules they come from, without importing anything heavy."""
    tree = ast.parse(package.read_text(encoding="utf-8"))
    origin: dict[str, str] = {}
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                origin |= {alias.asname or alias.name: module for alias in aliases}
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names = ast.literal_eval(value)
    own = ".".join(package.parent.relative_to(REPOSITORY).parts)
    return {name: origin.get(name, own) for name in names}


def _describe(module: str, name: str) -> tuple[str, Path]:
    """The first paragraph of a name's docstring (a constant's is the string below it), and its source."""
    path = REPOSITORY.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return _sentence(ast.get_docstring(node)), path
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if (
                found == name
            ):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        return _sentence(text), path
                return "", path
            case ast.ImportFrom(module=str(origin), names=aliases, level=0):
                if any((alias.asname or alias.name) == name for alias in aliases):
                    return _describe(origin, name)
    return "", path


def _sentence(docstring: str | None) -> str:
    paragraph = (docstring or "").strip().split("\n\n")[0]
    plain = re.sub(r":[a-z]+:(?=`)", "", paragraph).replace("``", "`")
    return " ".join(plain.split())


def _packages() -> dict[str, dict[str, str]]:
    found = sorted(REPOSITORY.glob("shardflow/**/__init__.py"))
    pages = {".".join(path.parent.relative_to(REPOSITORY).parts): _exports(path) for path in found}
    pages |= {
        f"shardflow.{path.stem}": _exports(path)
        for path in sorted(REPOSITORY.glob("shardflow/*.py"))
        if path.name != "__init__.py"
    }
    # A module's own names belong to it; _exports gives the package as origin where nothing is imported.
    for page, names in pages.items():
        for name, origin in names.items():
            if origin == "shardflow":
                names[name] = page
    # A part that its package exports whole is documented there.
    whole = {
        page for page, names in pages.items() if names.keys() <= pages.get(page.rpartition(".")[0], {}).keys()
    }
    return {page: names for page, names in sorted(pages.items()) if names and page not in whole}


def test_every_public_name_is_in_the_reference(
    golden: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    pages = _packages()
    golden("public-api", {page: sorted(names) for page, names in pages.items()})
    lines = [HEAD]
    undocumented = []
    for page, names in pages.items():
        lines.append(f"\n## {page}\n\n")
        for name, origin in names.items():
            sentence, source = _describe(origin, name)
            if not sentence:
                undocumented.append(f"{page}.{name}")
            lines.append(f"- [`{name}`](../{source.relative_to(REPOSITORY).as_posix()}): {sentence}\n")
    assert not undocumented, f"public names without a docstring: {undocumented}"
    text = "".join(lines)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, (
        "docs/reference.md is out of date; renew it with: make golden"
    )
