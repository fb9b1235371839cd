"""The import contracts hold, and hold in a real interpreter as well as on paper."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dicom_factory import make_study

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "pydicom", "imagecodecs", "cv2", "blosc2", "numpy", "matplotlib", "rich")

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for name in {names}:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
print(*sorted(set({heavy}) & set(sys.modules)))
"""


def _loaded(*names: str) -> set[str]:
    """Which heavy packages a fresh interpreter holds after importing modules and all that lies below them."""
    code = IMPORT_EVERYTHING.format(names=names, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_layers_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.fast
def test_importing_the_root_loads_nothing_heavy() -> None:
    code = f"import shardflow, sys; print(*(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_packing_never_loads_torch() -> None:
    below = ("packing", "sources", "deid", "epochs", "shards", "storage")
    loaded = _loaded(*(f"shardflow.{name}" for name in below), "pipelines.pack")
    assert not loaded & {"torch", "transformers"}


def test_native_images_are_packed_without_what_reads_others(tmp_path: Path) -> None:
    """Each process of a job would pay for it (docs/adr/0031)."""
    image = make_study(tmp_path, num_slices=1).files[0]
    code = (
        "import pathlib, sys, shardflow.packing.handlers, shardflow.packing.job\n"
        "from shardflow.packing.deid.allowlist import KEYWORDS\n"
        "from shardflow.packing.sources.dicom.pixels import iter_slices; from shardflow.packing.sources.dicom.attributes import read_attributes; from shardflow.packing.sources.dicom.headers import read_header\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "assert len(list(iter_slices(path, read_header(path)))) == 1 and read_attributes(path, KEYWORDS)\n"
        "print(*{'pydicom', 'nibabel', 'imagecodecs', 'requests'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(image)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_loading_and_training_never_load_pydicom() -> None:
    loaded = _loaded("shardflow.loading", "shardflow.training", "shardflow.training.__main__")
    assert "torch" in loaded
    assert not loaded & {"pydicom", "imagecodecs"}


def test_the_formats_tools_load_neither_side() -> None:
    """``shardflow info`` must work in both images, so the console script needs neither torch nor pydicom."""
    tools = ("bench_measure", "cli", "info", "plan", "preview", "report", "verify")
    loaded = _loaded(*(f"pipelines.{tool}" for tool in tools), "shardflow.viewing")
    assert not loaded & {"torch", "transformers", "pydicom", "imagecodecs", "matplotlib"}
