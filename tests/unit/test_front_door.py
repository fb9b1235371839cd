"""The front door: every name resolves, and importing the package costs nothing."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardflow

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = Path(shardflow.__file__)
NOT_OFFERED = ("__future__", "typing", "shardflow._version")


def test_every_name_resolves_to_what_type_checkers_see() -> None:
    assert set(shardflow._SOURCES) == set(shardflow.__all__) - {"__version__"}
    assert set(shardflow.__all__) <= set(dir(shardflow))
    seen: dict[str, str] = {}
    for node in ast.walk(ast.parse(ROOT.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module not in (
            "__future__",
            "typing",
            "shardflow._version",
        ):
            seen |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    assert seen == dict(shardflow._SOURCES)
    assert all(getattr(shardflow, name) is not None for name in shardflow.__all__)
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
