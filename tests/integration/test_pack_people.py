"""People that a report names and only another place of a header knows: items of sequences, other studies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence

from shardflow.packing.versions.removal import Withdrawn, remove
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import PackCase, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

_REPORT = "No effusion. Compared with the images that Okonkwo-Brandt requested. FINDINGS: nodule of 5 mm."
_HIDDEN = "Okonkwo"


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    return case


def _nested(dataset: FileDataset, _: int) -> None:
    """The requesting physician two sequences deep, in UTF-8 that only the file itself declares."""
    deeper = Dataset()
    deeper.RequestingPhysician = "Okonkwo-Brandt^Zofia"
    item = Dataset()
    item.RequestAttributesSequence = Sequence([deeper])
    dataset.OriginalAttributesSequence = Sequence([item])


def _coded(dataset: FileDataset, _: int) -> None:
    """An operator whose name is the meaning of a code."""
    code = Dataset()
    code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = "7", "99LOCAL", "Okonkwo-Brandt, Zofia"
    person = Dataset()
    person.PersonIdentificationCodeSequence = Sequence([code])
    dataset.OperatorIdentificationSequence = Sequence([person])


def _plain(dataset: FileDataset, _: int) -> None:
    dataset.RequestingPhysician = "Okonkwo-Brandt^Zofia"


def _report(case: PackCase, study: MadeStudy) -> str:
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(study.study_instance_uid))
    return dataset.read_fields(row, ["report.txt"])["report.txt"].decode()


@pytest.mark.parametrize("change", [_nested, _coded])
def test_names_in_items_of_sequences_are_found(
    case: PackCase, change: Callable[[FileDataset, int], None]
) -> None:
    study = make_study(case.dicom / "a", num_slices=2, change=change)
    case.write_reports({study.study_instance_uid: _REPORT})
    case.pack()
    text = _report(case, study)
    assert _HIDDEN not in text
    assert text.startswith("No effusion. Compared with the images that [NAME] requested.")


def test_names_of_the_patients_other_studies_are_found(case: PackCase) -> None:
    first = make_study(case.dicom / "a", patient="P", study="A", num_slices=2)
    make_study(case.dicom / "b", patient="P", study="B", num_slices=2, change=_plain)
    stranger = make_study(case.dicom / "c", patient="Q", num_slices=2)
    case.write_reports({first.study_instance_uid: _REPORT, stranger.study_instance_uid: _REPORT})
    case.pack("deid.report_text=scrub")  # strict leaves out every unknown name
    assert _HIDDEN not in _report(case, first)
    # Nobody else's headers are asked.
    assert _HIDDEN in _report(case, stranger)


@pytest.mark.parametrize("lies_beside", [True, False])
def test_a_later_study_knows_the_people_of_packed_ones(case: PackCase, lies_beside: bool) -> None:
    """The bytes of a next version are the same whether its patients' packed files lie among the inputs."""
    make_study(case.dicom / "a", patient="P", study="A", num_slices=6, change=_plain)
    case.write_reports({})
    case.pack()
    new = case.folder / "new"
    later = make_study(new / "b", patient="P", study="B", num_slices=2)
    case.write_reports({later.study_instance_uid: _REPORT})
    folders = [str(new), str(case.dicom)] if lies_beside else [str(new)]
    summary = case.pack(f"inputs.dicom={json.dumps(folders)}", mode="append")
    assert summary.num_known_inputs == (6 if lies_beside else 0)
    assert summary.inputs["packed"] == 6 + 2 + 1
    assert _HIDDEN not in _report(case, later)


def test_a_packed_study_whose_files_are_gone_stays_as_it_is(case: PackCase) -> None:
    make_study(case.dicom / "a", patient="P", study="A", num_slices=3, change=_plain)
    case.write_reports({})
    case.pack()
    shutil.rmtree(case.dicom / "a")
    later = make_study(case.dicom / "b", patient="P", study="B", num_slices=2)
    case.write_reports({later.study_instance_uid: "Clear."})
    summary = case.pack(mode="append")
    assert (summary.inputs["packed"], summary.inputs["quarantined"]) == (3 + 2 + 1, 0)


def test_counts_of_a_version_are_of_its_own_samples(case: PackCase) -> None:
    kept = make_study(case.dicom / "a", patient="P", num_slices=2, change=_plain)
    gone = make_study(case.dicom / "b", patient="Q", num_slices=2, change=_plain)
    case.write_reports({study.study_instance_uid: _REPORT for study in (kept, gone)})
    case.pack("shards.target_bytes=1MiB", "splits.val=0")

    def counts() -> dict[str, int]:
        recorded: Any = case.open().manifest.extra["deidentification"]
        return dict(recorded["counts"])

    assert counts() == {"report_name": 2}
    before = tree_digests(case.output)
    remove(case.output, case.private, Withdrawn(patients=["Q"]))
    assert counts() == {"report_name": 1}
    assert before.items() <= tree_digests(case.output).items()
