"""Real files: every one ends in an outcome, whatever is wrong with it, and the bytes do not depend on
processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pydicom.data
import pytest

from tests.pack_case import PackCase, read_ledger

BUNDLED = Path(pydicom.data.__file__).parent / "test_files"
ANYTHING = (
    "policy.max_quarantined_share=1.0",
    "policy.on_bad_instance=drop_instance",
    "shards.target_bytes=4MiB",
)


def _pack_twice(case: PackCase, roots: list[Path]) -> None:
    setting = "inputs.dicom=" + json.dumps([str(root) for root in roots])
    first = case.pack(setting, *ANYTHING, "execution.num_processes=2")
    rows = read_ledger(case.output)
    num_files = sum(path.is_file() for root in roots for path in root.rglob("*"))
    assert len(rows) == first.inputs["total"] == num_files
    assert sum(first.inputs[name] for name in ("packed", "skipped", "quarantined")) == num_files
    assert not {reason for reason in first.reasons if reason.startswith("WORKER_")}
    dataset = case.open()
    for row in range(dataset.samples.num_samples):
        study = json.loads(dataset.read_fields(row, ["study.json"])["study.json"])
        assert study["sample_key"] == dataset.samples.sample_key(row)
        assert sum(series["num_slices"] for series in study["series"]) == dataset.samples.gather(
            "num_slices", row
        )
    shutil.rmtree(case.output)
    assert case.pack(setting, *ANYTHING, "execution.num_processes=1").dataset_id == first.dataset_id


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


def test_all_files_that_come_with_pydicom(case: PackCase) -> None:
    _pack_twice(case, [BUNDLED])


def test_real_series(case: PackCase, shared_data: Path) -> None:
    _pack_twice(case, [shared_data / "mr_ge_fruit", shared_data / "ct_philips_phantom"])


@pytest.mark.slow
def test_everything_there_is(case: PackCase, shared_data: Path) -> None:
    _pack_twice(case, [shared_data, BUNDLED])
