"""The import contracts, on paper and in a real interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dicom_factory import make_study

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "pydicom", "imagecodecs", "cv2", "blosc2", "numpy", "matplotlib", "rich")
MODELS = {"torch", "transformers"}
NUMERICS = {"numpy", "cv2", "blosc2", "pydicom", *MODELS}
RUN_CONFIG = ["--config", "pipelines/recipes/train_reports_cpu.toml", "--print-config"]

IMPORT_EVERYTHING = """
import importlib, pkgutil
for name in {names}:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if found.name not in {{"shardflow.training.hf", "shardflow.training.trl"}}:
            importlib.import_module(found.name)
"""
# The two are for the loops of others, whose package datasets imports the readers of all that it finds.

# What each kind of process has imported when its own work begins: when a packing process sets its limits, a
# loader process and the health monitor of a rank have started, a command answers.
STARTS = {
    "front door": ("import shardflow", set(HEAVY)),
    "packing process before its limits": ("import shardflow.packing.engines.worker", {*HEAVY, "asyncio"}),
    "loader process": (
        "import shardflow.loading.process_main",
        {*MODELS, "blosc2", "pydicom", "imagecodecs"},
    ),
    "health monitor": ("import shardflow.training.health.side", {*HEAVY, "asyncio"}),
    "settings of a run": (
        f"from shardflow.training.__main__ import main; main({RUN_CONFIG})",
        {*MODELS, "pydicom", "imagecodecs"},
    ),
    "rank of a run without a model of transformers, in whole copies": (
        "import sys, shardflow.training.run; assert 'torch.distributed.tensor' not in sys.modules",
        {"transformers", "blosc2", "pydicom", "imagecodecs"},
    ),
    "shardflow --help": ("from shardflow.cli.main import build_parser; build_parser('')", NUMERICS),
    "shardflow pack without a terminal": (
        "from shardflow.cli.main import build_parser; build_parser('pack')",
        {*NUMERICS, "rich"},
    ),
    "packing job of folders, which sends and fetches nothing": (
        "import shardflow.packing.job",
        {*MODELS, "asyncio", "blosc2", "http", "imagecodecs", "pydicom", "rapidfuzz", "ssl"},
    ),
    # What finds people in texts is imported for the first text, because its patterns take long to compile.
    "packing process before its first text": ("import shardflow.packing.handlers", {"blosc2", "rapidfuzz"}),
    "help of commands that import what they need when they run": (
        "from shardflow.cli import main; [*map(main.build_parser, 'doctor info plan train verify'.split())]",
        NUMERICS,
    ),
    "shardflow metrics, which reads a run and no dataset": (
        "import sys, shardflow.cli.runs; assert 'shardflow.format.dataset' not in sys.modules",
        {*MODELS, "blosc2", "pydicom", "imagecodecs", "cv2"},
    ),
}


def _imported(code: str, *arguments: str) -> set[str]:
    """Run code in a fresh interpreter; returns the top-level packages that it imported."""
    code += "\nimport sys; print('imported', *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("imported")[2].split())


def _imported_by_all_of(*names: str) -> set[str]:
    """Import modules and everything below them."""
    return _imported(IMPORT_EVERYTHING.format(names=names))


def test_layers_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.fast
@pytest.mark.parametrize(("code", "unwanted"), STARTS.values(), ids=STARTS)
def test_process_starts_without_what_it_does_not_need(code: str, unwanted: set[str]) -> None:
    assert not _imported(code) & unwanted


def test_packing_never_imports_torch() -> None:
    rooms = ("format", "packing", "reports", "storage", "synthetic", "viewing")
    assert not _imported_by_all_of(*(f"shardflow.{room}" for room in rooms), "pipelines.pack") & MODELS


def test_native_images_are_packed_without_the_readers_of_others(tmp_path: Path) -> None:
    """Each process of a job would pay for them (docs/adr/0031)."""
    image = make_study(tmp_path, num_slices=1).files[0]
    code = """
import pathlib, sys
import shardflow.packing.handlers, shardflow.packing.job
from shardflow.packing.deid.allowlist import KEYWORDS
from shardflow.packing.sources.dicom.attributes import read_attributes
from shardflow.packing.sources.dicom.headers import read_header
from shardflow.packing.sources.dicom.pixels import iter_slices
path = pathlib.Path(sys.argv[1])
assert len(list(iter_slices(path, read_header(path)))) == 1 and read_attributes(path, KEYWORDS)
"""
    assert not _imported(code, str(image)) & {"pydicom", "nibabel", "imagecodecs", "requests"}


def test_loading_and_training_never_import_pydicom() -> None:
    imported = _imported_by_all_of("shardflow.loading", "shardflow.training")
    assert "torch" in imported
    assert not imported & {"pydicom", "imagecodecs"}


def test_commands_import_neither_side_before_they_run() -> None:
    """``shardflow info`` works in both images, so the console script needs neither torch nor pydicom."""
    assert not _imported_by_all_of("shardflow.cli") & {*MODELS, "pydicom", "imagecodecs", "matplotlib"}
