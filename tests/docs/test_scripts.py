"""The tutorial and the how-to pages run from their first line to their last, as one who follows them would.

Files are written where the pages say so, nothing is left out but what carries ``no-test`` and its reason.
Commands of long pages are the installed ones, as are those of the tutorial that start processes of their own
(packing, and training on several ranks). All others are forks of processes that have imported what they need,
and pack and count tokens without processes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import forks
from tests.docs.blocks import REPOSITORY, all_blocks, is_script_page, write_script

PAGES = sorted({block.page for block in all_blocks() if is_script_page(block.page)})
TUTORIAL = Path("docs/tutorial.md")
_INSTALLED = Path(sys.executable).parent
_TIMEOUT_S = 1100  # of a machine with much else to do; half a minute of two quiet cores


def _run(page: Path, folder: Path, *programs: Path) -> tuple[int, str, str]:
    """Run a page in a folder, with ``programs`` before others; nothing it started stays behind."""
    places = [*map(str, programs), str(_INSTALLED), os.environ["PATH"]]
    environment = os.environ | {
        "PATH": os.pathsep.join(places),
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
    installed = f'exec {shlex.quote(str(_INSTALLED / "shardflow"))} "$@"'
    programs = _write_programs(tmp_path / "bin", {"pack*|*--nproc-per-node*": installed})
    code, out, err = _run(TUTORIAL, tmp_path, programs)
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


def _write_programs(folder: Path, other_ways: Mapping[str, str]) -> Path:
    """Write a ``python`` and a ``shardflow`` that are forks; return the folder.

    Args:
        folder: Gets them.
        other_ways: What is run in place of ``shardflow``, by a shell pattern of its arguments.
    """
    stand_in = [sys.executable, "-I", "-S", forks.__file__]
    torch = [*stand_in, forks.rank_server()]
    command = shlex.join([*torch, "-W", "default", str(_INSTALLED / "shardflow")])
    cases = [
        *other_ways.items(),
        ("pack*", f'set -- "$@" --set execution.num_processes=1; {_inline(stand_in)}'),
        ("tokenize*", f'exec {command} "$@" --threads 1'),
        ("bench*|generate*|train\\ *", f'exec {command} "$@"'),
        ("*", _inline(stand_in)),
    ]
    ways = "".join(f"{pattern}) {way} ;;\n" for pattern, way in cases)
    folder.mkdir()
    for name, text in (
        ("python", f'exec {shlex.join(torch)} "$@"\n'),
        ("shardflow", f'case "$*" in\n{ways}esac\n'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def _inline(stand_in: Sequence[str]) -> str:
    return f'exec {shlex.join([*stand_in, forks.command_server(), "-m", "tests.inline_engine"])} "$@"'


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose ``python`` and ``shardflow`` are forks."""
    return _write_programs(tmp_path_factory.mktemp("programs") / "bin", {})


# It trains, kills the children of a command, which a forked one does not have, and resumes: a minute of two
# quiet cores.
LONG = frozenset({Path("docs/howto/templates.md")})


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow, pytest.mark.timeout(1200)] if page in LONG else [])
        for page in PAGES
        if page != TUTORIAL
    ],
    ids=str,
)
def test_a_how_to_page_runs(page: Path, reader: Path, forked: Path, tmp_path: Path) -> None:
    programs = [] if page in LONG else [forked]
    code, out, err = _run(page, shutil.copytree(reader, tmp_path / "reader"), *programs)
    assert code == 0, f"{out[-1000:]}\n{err[-3000:]}"
