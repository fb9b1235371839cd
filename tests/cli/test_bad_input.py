"""Bad input to ``shardflow pack``: a clear error or a reason in the ledger, and nothing is lost."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from shardflow.format import Dataset
from tests.cli.conftest import Call

pytestmark = pytest.mark.usefixtures("packs_inline")

BUNDLED = Path(str(files("pydicom"))) / "data" / "test_files"
CT_UID = "1.3.6.1.4.1.5962.1.2.1.20040119072730.12322"
MR_UID = "1.3.6.1.4.1.5962.1.2.4.20040826185059.5457"


@dataclass(frozen=True, slots=True)
class Job:
    """A folder with input and a recipe, and the command that packs it."""

    folder: Path
    call: Call

    def add(self, name: str) -> Path:
        """Copy a bundled file into the input."""
        return Path(shutil.copy(BUNDLED / name, self.folder / "dicom" / name))

    def report(self, *uids: str) -> None:
        """Write a table with a report for each study."""
        with (self.folder / "reports.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["study_instance_uid", "text"])
            table.writerows([uid, f"Secret words of study {number}."] for number, uid in enumerate(uids))

    def pack(self, *overrides: str) -> tuple[int, dict[str, Any], str]:
        """Run the command: exit code, summary line, standard error."""
        options = [part for override in overrides for part in ("--set", override)]
        called = self.call("pack", "--config", self.folder / "pack.toml", "--json", *options)
        return called.code, called.last_line, called.err

    def outcomes(self) -> Counter[tuple[str, str | None]]:
        """Kind of input and reason of every row of the ledger."""
        lines = (self.folder / "dataset" / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "outcome" in row]
        return Counter((row["kind"], row["reason"]) for row in rows)


@pytest.fixture
def job(tmp_path: Path, call: Call) -> Job:
    (tmp_path / "dicom").mkdir()
    (tmp_path / "pack.toml").write_text(
        """
        output = "dataset"
        private_dir = "private"
        [inputs]
        dicom = ["dicom"]
        reports = "reports.csv"
        [splits]
        train = 1
        [policy]
        max_quarantined_share = 0.9
        [execution]
        num_processes = 1
        """,
        encoding="utf-8",
    )
    made = Job(tmp_path, call)
    made.report()
    return made


@pytest.mark.fast
def test_unknown_key_names_the_nearest_known_one(job: Job) -> None:
    code, said, err = job.pack("execution.num_proceses=2")
    assert code == 2
    assert "num_processes" in said["error"]
    assert "num_processes" in err
    assert "Traceback" not in err
    assert not (job.folder / "dataset").exists()


@pytest.mark.fast
@pytest.mark.parametrize("arguments", [[], ["--config"], ["--config", "x.toml", "--append", "--retry"]])
def test_wrong_arguments_are_one_line_as_for_every_command(arguments: list[str], call: Call) -> None:
    called = call("pack", *arguments)
    assert called.code == 2
    assert called.out == ""
    assert called.err.count("\n") == 1
    assert called.err.startswith("shardflow: ")
    assert called.err.endswith("see: shardflow pack --help\n")


@pytest.mark.fast
def test_a_configuration_error_is_printed_once(job: Job) -> None:
    called = job.call("pack", "--config", job.folder / "pack.toml", "--set", "execution.num_proceses=2")
    assert called.code == 2
    assert (called.out + called.err).count("num_proceses") == 1


@pytest.mark.fast
def test_missing_recipe(job: Job) -> None:
    (job.folder / "pack.toml").unlink()
    code, said, err = job.pack()
    assert code == 2
    assert said["error"]
    assert "Traceback" not in err


@pytest.mark.fast
@pytest.mark.parametrize("missing", ["dicom", "reports.csv"])
def test_missing_input(job: Job, missing: str) -> None:
    path = job.folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, said, err = job.pack()
    assert code == 2
    assert said["error"]
    assert "Traceback" not in err


def test_no_dicom_found(job: Job) -> None:
    (job.folder / "dicom" / "notes.txt").write_text("nothing here", encoding="utf-8")
    code, said, _ = job.pack()
    assert code in {1, 2}
    assert "error" in said
    assert not list(job.folder.glob("dataset/manifest-*"))


def test_report_without_study_and_study_without_report(job: Job) -> None:
    job.add("CT_small.dcm")
    job.add("MR_small.dcm")
    job.report(CT_UID, "1.2.3.4")
    code, summary, _ = job.pack("policy.require_report=true")
    assert code == 0
    assert summary["inputs"]["total"] == 4
    assert job.outcomes() == {
        ("dicom", None): 1,
        ("dicom", "STUDY_WITHOUT_REPORT"): 1,
        ("report", None): 1,
        ("report", "REPORT_WITHOUT_STUDY"): 1,
    }
    dataset = Dataset.open(job.folder / "dataset")
    assert dataset.samples.num_samples == 1
    assert dataset.read_fields(0)["report.txt"] == b"Secret words of study 0."


def test_study_without_report_is_packed_where_none_is_required(job: Job) -> None:
    job.add("CT_small.dcm")
    job.add("MR_small.dcm")
    job.report("1.2.3.4")
    code, _, said = job.pack()
    assert code == 0
    assert "2 of 2 studies have no report, and are packed without one\n" in said
    dataset = Dataset.open(job.folder / "dataset")
    assert json.loads(dataset.read_fields(0)["study.json"])["has_report"] is False


def test_truncated_file_is_quarantined_and_its_neighbours_are_packed(job: Job) -> None:
    job.add("CT_small.dcm")
    cut = job.add("MR_small.dcm")
    cut.write_bytes(cut.read_bytes()[:-3000])
    job.report(CT_UID, MR_UID)
    code, summary, err = job.pack()
    assert code == 0
    assert job.outcomes()["dicom", "PIXEL_DATA_TRUNCATED"] == 1
    assert job.outcomes()["dicom", None] == 1
    assert sum(job.outcomes().values()) == summary["inputs"]["total"] == 4
    assert job.call("verify", job.folder / "dataset").code == 0
    assert MR_UID not in err


def test_too_much_quarantine_ends_with_code_3_and_publishes_nothing(job: Job) -> None:
    job.add("CT_small.dcm")
    cut = job.add("MR_small.dcm")
    cut.write_bytes(cut.read_bytes()[:-3000])
    code, summary, _ = job.pack("policy.max_quarantined_share=0.1")
    assert code == 3
    assert summary["inputs"]["quarantined"] == 1
    assert not list(job.folder.glob("dataset/manifest-*"))
    code, _, _ = job.pack("policy.max_quarantined_share=0.9")
    assert code == 0
    assert job.call("verify", job.folder / "dataset").code == 0


def test_nothing_of_the_input_shows_in_what_is_said(job: Job) -> None:
    cut = job.add("MR_small.dcm")
    cut.write_bytes(cut.read_bytes()[:-3000])
    (job.folder / "dicom" / "DOE_JOHN.dcm").write_bytes(b"DICM" * 100)
    job.add("CT_small.dcm")
    job.report(CT_UID)
    called = job.call("pack", "--config", job.folder / "pack.toml")
    assert called.code == 0
    for secret in ("DOE_JOHN", CT_UID, MR_UID, "Secret words", "CompressedSamples"):
        assert secret not in called.out + called.err
