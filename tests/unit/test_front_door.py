"""The front door: every name resolves, and importing the package costs nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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


@pytest.mark.parametrize("name", ["absent.loader", "", "__wrapped__", "_nope", "nope"])
def test_hasattr_of_what_there_is_not_is_false(name: str) -> None:
    assert not hasattr(shardflow, name)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of three lazy names, of which two cannot be imported."""
    folder = tmp_path / "lazy_front"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from shardflow._lazy import lazy_names\n"
        "names = {'Good': '.good:Good', 'Broken': '.broken:Broken', 'Absent': '.good:Absent'}\n"
        "__getattr__, __dir__ = lazy_names(__name__, names)\n"
    )
    (folder / "good.py").write_text("class Good: pass\n")
    (folder / "broken.py").write_text("import sys\nsys.gone_in_this_version\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "lazy_front"
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_front"]:
        del sys.modules[name]


@pytest.mark.parametrize(("name", "why"), [("Broken", "gone_in_this_version"), ("Absent", "'Absent'")])
def test_a_name_that_fails_to_import_says_why(package: str, name: str, why: str) -> None:
    front = importlib.import_module(package)
    with pytest.raises(ImportError, match=f"cannot import '{name}' from 'lazy_front': .*{why}"):
        exec(f"from {package} import {name}")
    with pytest.raises(ImportError, match=why):
        hasattr(front, name)


def test_a_submodule_is_imported_as_any_other(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    front = importlib.import_module(package)
    with pytest.raises(AttributeError, match=r"'good'; write `import lazy_front\.good` first$"):
        _ = front.good
    stub = ModuleType("lazy_front.stub")  # of a test, without a file
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    found: dict[str, object] = {}
    exec(f"from {package} import Good, good, stub", found)
    assert found["stub"] is stub
    assert found["Good"] is front.Good is front.good.Good
