"""The demo's comparisons can fail, its reports say that they are generated, and all of it runs (slow)."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.demo.story import TrainingJob, first_difference, planned_sequence
from pipelines.demo.studies import GENERATED, find_studies, input_folders, write_reports

REPOSITORY = Path(__file__).resolve().parents[2]
SEQUENCE = [(0, step, micro, 0, f"key{step}{micro}") for step in range(3) for micro in range(2)]


@pytest.mark.fast
def test_equal_sequences_have_no_difference() -> None:
    assert first_difference(list(SEQUENCE), list(SEQUENCE)) is None


@pytest.mark.fast
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (SEQUENCE[:-1], "5 slots instead of 6"),
        (SEQUENCE[1:], "slot 0"),
        ([*SEQUENCE, SEQUENCE[-1]], "7 slots instead of 6"),
        ([*SEQUENCE[:2], SEQUENCE[3], SEQUENCE[2], *SEQUENCE[4:]], "slot 2"),
        ([*SEQUENCE[:5], (0, 2, 1, 0, None)], "slot 5"),
    ],
    ids=["lost", "shifted", "doubled", "swapped", "masked"],
)
def test_any_difference_is_named(found: list[tuple[int, int, int, int, str | None]], said: str) -> None:
    assert said in str(first_difference(found, SEQUENCE))


@pytest.mark.fast
def test_plan_without_its_fillers_is_a_sequence() -> None:
    lines = [
        {"step": 0, "rank": 0, "micro": 0, "keys": ["a"], "weights": [1]},
        {"step": 0, "rank": 0, "micro": 2, "keys": [None], "weights": [0]},
        {"step": 0, "rank": 1, "micro": 1, "keys": [None], "weights": [0]},
    ]
    printed = "\n".join(map(json.dumps, lines))
    expected = [(4, 0, 0, 0, "a"), (4, 0, 1, 0, None)]
    assert planned_sequence([(4, printed)], micro_batches_per_step=2) == expected


def test_every_report_is_generated_and_tells_of_its_own_study(tmp_path: Path) -> None:
    studies = find_studies(input_folders(tmp_path / "no" / "repository"))
    assert {study.modality for study in studies.values()} >= {"CT", "MR", "CR"}
    assert sum(study.num_slices > 1 for study in studies.values()) >= 3
    write_reports(studies, tmp_path / "reports.csv")
    with (tmp_path / "reports.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["study_instance_uid"]: row["text"] for row in csv.DictReader(file)}
    assert rows.keys() == studies.keys()
    assert all(text.startswith(GENERATED) for text in rows.values())
    assert all(f"Impression: {studies[uid].modality}" in text for uid, text in rows.items())
    assert len(set(rows.values())) > len(rows) // 2


def test_folder_of_somebody_else_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.demo", "--output", tmp_path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "years of work"


def test_job_that_is_broken_off_leaves_nothing_behind(tmp_path: Path) -> None:
    """As torchrun does, the job starts a process in a session of its own; the guard in conftest sees it."""

    def break_off() -> None:
        code = "import subprocess; subprocess.run(['sleep', '60'], start_new_session=True)"
        command, log = ["python", "-c", code], tmp_path / "log"
        with TrainingJob.start(command, run=tmp_path, log=log, folder=tmp_path) as job:
            while not job._descendants():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()


@pytest.mark.slow
@pytest.mark.distributed
def test_whole_demo_holds_what_it_claims(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.demo", "--output", tmp_path / "out"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The folder of this test has the word in its name.
    assert done.stdout.replace(str(tmp_path), "").count("holds") == 3
    assert "\x1b" not in done.stdout
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
