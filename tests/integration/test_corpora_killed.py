"""A corpus has the same bytes for any number of processes, and after kill -9 of everything at any moment."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from shardflow.format.checks.verification import verify
from tests.corpora_case import CorpusCase, make_lines
from tests.forks import REPOSITORY
from tests.pack_case import tree_digests
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("packs_inline")


def _make(folder: Path) -> CorpusCase:
    case = CorpusCase(folder)
    case.prepare()
    lines = make_lines(500, 1)
    lines[3], lines[200], lines[499] = b"{", b"", lines[0]
    case.write("a.jsonl", lines)
    case.write("b/c.jsonl", make_lines(40, 2), end=b"\r\n")
    (case.texts / "d.jsonl.gz").write_bytes(gzip.compress(b"\n".join([*make_lines(90, 3), lines[1]])))
    text = case.config_path.read_text(encoding="utf-8").replace("num_processes = 1", "num_processes = 2")
    case.config_path.write_text(text.replace("[policy]", '[policy]\nduplicates = "skip"'), encoding="utf-8")
    return case


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Inputs, and the digests of the dataset that an undisturbed job makes of them."""
    case = _make(tmp_path_factory.mktemp("undisturbed"))
    summary = case.pack()
    assert (summary.num_parts, summary.reasons) == (
        6,
        {"DUPLICATE_TEXT": 2, "EMPTY_LINE": 1, "INVALID_JSON": 1},
    )
    assert verify(str(case.output)).is_whole
    digests = tree_digests(case.output)
    shutil.rmtree(case.output)
    return case.folder, digests


@pytest.fixture
def case(tmp_path: Path, expected: tuple[Path, dict[str, str]]) -> CorpusCase:
    """The same inputs in a folder of the test's own."""
    case = CorpusCase(tmp_path / "job")
    # Modification times too: they tell a resumed job that its parts are still good.
    shutil.copytree(expected[0], case.folder, ignore=shutil.ignore_patterns("corpus-*.jsonl"))
    return case


@pytest.mark.parametrize("num_processes", sampled([1, 3], {3}))
def test_the_number_of_processes_does_not_show(
    case: CorpusCase, expected: tuple[Path, dict[str, str]], num_processes: int
) -> None:
    case.pack(f"execution.num_processes={num_processes}")
    assert tree_digests(case.output) == expected[1]


POINTS = [
    ("phase:duplicates", 0),
    ("advance:duplicates:3", 0),
    ("advance:parts:3", 3),
    ("advance:parts:6", 6),
    ("advance:index:2", 6),
    ("phase:manifest", 6),
    ("cleaning", 0),
]


@pytest.mark.parametrize(("point", "num_kept"), sampled(POINTS, {POINTS[2], POINTS[5], POINTS[6]}))
def test_a_killed_job_goes_on_and_does_no_finished_part_again(
    case: CorpusCase, expected: tuple[Path, dict[str, str]], point: str, num_kept: int
) -> None:
    if not point.startswith("advance:"):  # no packing process is at work then
        text = case.config_path.read_text(encoding="utf-8")
        case.config_path.write_text(text.replace("num_processes = 2", "num_processes = 1"), encoding="utf-8")
    done = case.drive(point)
    assert done.returncode == -signal.SIGKILL, done.stderr
    is_published = point == "cleaning"
    assert bool(list(case.output.glob("manifest*"))) is is_published
    if is_published:
        assert verify(str(case.output)).is_whole
    summary = case.pack("execution.num_processes=1")
    assert summary.status == ("already_packed" if is_published else "packed")
    # The killed job's processes may have finished a part that it had not heard of.
    assert num_kept <= summary.num_parts_kept <= num_kept + 2
    assert tree_digests(case.output) == expected[1]


@pytest.mark.parametrize(("kind", "part"), sampled([("scan", 2), ("pack", 4)], {("pack", 4)}))
def test_a_job_killed_inside_a_process_goes_on(
    case: CorpusCase, expected: tuple[Path, dict[str, str]], kind: str, part: int
) -> None:
    case.write_faults(**{kind: {str(part): "group"}})
    assert case.drive("none").returncode == -signal.SIGKILL
    case.pack()
    assert tree_digests(case.output) == expected[1]


@pytest.mark.slow
def test_jobs_killed_at_random_end_with_the_same_bytes(
    case: CorpusCase, expected: tuple[Path, dict[str, str]]
) -> None:
    rng = random.Random(int(os.environ.get("SHARDFLOW_KILL_SEED", "7")))
    for _ in range(3):
        process = subprocess.Popen(
            case.command("none"),
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(rng.uniform(0.3, 2.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    case.pack()
    assert tree_digests(case.output) == expected[1]
    assert not (case.output / ".work").exists()
