"""The tutorial and the how-to pages run from their first line to their last, as one who follows them would.

Commands are the installed ones, files are written where the pages say so, nothing is left out but what
carries ``no-test`` and its reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY, all_blocks, is_script_page, write_script
from tests.docs.reader import make_reader_folder

PAGES = sorted({block.page for block in all_blocks() if is_script_page(block.page)})
TUTORIAL = Path("docs/tutorial.md")
_TIMEOUT_S = 1100  # of a machine with much else to do; half a minute of two quiet cores


def _run(page: Path, folder: Path) -> tuple[int, str, str]:
    """Run a page in a folder; nothing it started stays behind."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    process = subprocess.Popen(
        ["bash", "-c", write_script(page)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{page} did not end in {_TIMEOUT_S} s:\n{err[-3000:]}")
    return process.returncode, out, err


@pytest.mark.timeout(1200)
@pytest.mark.distributed
def test_the_tutorial_runs_from_an_empty_folder(tmp_path: Path) -> None:
    code, out, err = _run(TUTORIAL, tmp_path)
    assert code == 0, f"{out[-1000:]}\n{err[-3000:]}"
    assert "This dataset is already packed." in out
    assert '"outcome": "stopped"' in out
    assert "exit code 75" in out
    assert '"outcome": "finished"' in out
    assert "micro-batches as they were planned" in out
    assert (tmp_path / "my-project" / "my-dataset" / "report.html").is_file()
    made = {path.name for path in (tmp_path / "my-project").iterdir()}
    assert made >= {
        "my-dataset",
        "my-private",
        "my-safe",
        "study.png",
        "my-tokenizer",
        "my-run",
    }


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reader_folder(tmp_path_factory.mktemp("made"))


LONG = frozenset({Path("docs/howto/templates.md")})  # trains and resumes: a minute of two quiet cores


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in LONG else [])
        for page in PAGES
        if page != TUTORIAL
    ],
    ids=str,
)
def test_a_how_to_page_runs(page: Path, reader: Path, tmp_path: Path) -> None:
    code, out, err = _run(page, shutil.copytree(reader, tmp_path / "reader"))
    assert code == 0, f"{out[-1000:]}\n{err[-3000:]}"
