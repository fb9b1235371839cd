"""The front door: every name resolves, and importing the package costs nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardflow

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = Path(shardflow.__file__)
NOT_OFFERED = ("__future__", "typing", "shardflow._lazy", "shardflow._version")
LAZY = tuple(
    ".".join(path.parent.relative_to(ROOT.parents[1]).parts)
    for path in sorted(ROOT.parent.rglob("__init__.py"))
    if "lazy_names(" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("package", LAZY)
def test_every_name_resolves_to_what_type_checkers_see(package: str) -> None:
    front = importlib.import_module(package)
    sources = {name: _absolute(source, package) for name, source in front._SOURCES.items()}
    assert set(sources) == set(front.__all__) - {"__version__"}
    assert set(front.__all__) <= set(dir(front))
    seen: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(str(front.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module not in NOT_OFFERED:
            seen |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    assert seen == sources
    assert all(getattr(front, name) is not None for name in front.__all__)


def _absolute(source: str, package: str) -> str:
    source = package + source if source.startswith(".") else source
    return source if ":" in source else ":".join(source.rsplit(".", 1))


def test_open_is_that_of_a_dataset() -> None:
    assert shardflow.open == shardflow.Dataset.open


def test_the_import_is_light() -> None:
    code = (
        "import sys; before = set(sys.modules); import shardflow; dir(shardflow);"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        cwd=ROOT.parents[1],
    )
    assert not {"numpy", "torch", "cv2", "pydicom", "pyarrow", "rich"} & set(done.stdout.split())
    assert "shardflow" in done.stdout.split()


def test_no_name_is_a_submodule() -> None:
    submodules = {found.name for found in pkgutil.iter_modules([str(ROOT.parent)])}
    assert not submodules & set(shardflow.__all__)


def test_an_unknown_name_is_an_attribute_error_with_the_nearest_name() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Loadr'; did you mean 'Loader'"):
        _ = shardflow.Loadr  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        _ = shardflow.xyzzy  # type: ignore[attr-defined]
