"""The Python reference documents the front door, name by name, and its docstrings are there to be read."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import shardflow

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
DIRECTIVE = re.compile(r"^::: shardflow\.(?:\w+\.)*(\w+)$", re.MULTILINE)


def _exports(package: Path) -> list[str]:
    """Read ``__all__`` of a package, without importing anything heavy."""
    for node in ast.parse(package.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return sorted(ast.literal_eval(value))
    return []


def test_public_names_are_frozen(golden: Callable[[str, object], None]) -> None:
    """Of the front door and of each room."""
    rooms = sorted(REPOSITORY.glob("shardflow/**/__init__.py"))
    names = {".".join(room.parent.relative_to(REPOSITORY).parts): _exports(room) for room in rooms}
    golden("public-api", {room: listed for room, listed in names.items() if listed})


def test_reference_documents_every_name_of_the_front_door_once() -> None:
    documented = Counter(DIRECTIVE.findall(PAGE))
    assert documented == Counter(name for name in shardflow.__all__ if name != "__version__")


@pytest.mark.parametrize("name", [name for name in shardflow.__all__ if name != "__version__"])
def test_name_of_the_front_door_has_a_docstring(name: str) -> None:
    documented = getattr(shardflow, name).__doc__
    assert documented
    assert not documented.startswith(f"{name}(")  # what a dataclass writes about itself
