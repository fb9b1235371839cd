"""The recipe that shows attachments, records and reports runs on generated data, as its comments say."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pydicom
import pytest

from shardflow.cli import main as cli
from shardflow.config import load_config
from shardflow.format import Dataset
from shardflow.packing import PackConfig
from tests.pack_case import REPOSITORY, read_ledger

RECIPE = Path("pipelines", "recipes", "pack_attachments.toml")
CANARY = "Quaxbury"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: the recipe in its place, input as its comments make it, a laboratory's file."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / RECIPE).parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / RECIPE, folder / RECIPE)
    size = ["--studies", "6", "--seed", "7", "--size", "64", "--slices", "6:12", "--modality", "CT"]
    assert cli.main(["synth", str(folder / "input"), *size]) == 0
    beside = folder / "input" / "attachments"
    beside.mkdir()
    (folder / "input" / "annotations.csv").rename(beside / "annotations.csv")
    header = pydicom.dcmread(next((folder / "input" / "dicom").rglob("*.dcm")), stop_before_pixels=True)
    taken = f"{header.StudyDate[:4]}-{header.StudyDate[4:6]}-{header.StudyDate[6:]}T08:00:00"
    rows = [
        {"taken": taken, "hb": 13.2, "unit": "g/dL", "arm": "left", "remark": f"Drawn by {CANARY}."},
        {"taken": taken, "hb": 4, "unit": "g/dL", "arm": "tail", "street": "4711 Zorblatt Crescent"},
    ]
    lab = {"lab": {"patient": {"number": str(header.PatientID), "name": CANARY}, "rows": rows}}
    (beside / "lab.json").write_text(json.dumps(lab), encoding="utf-8")
    assert cli.main(["pack", "--config", str(folder / RECIPE)]) == 0
    return folder


def test_every_file_ends_as_the_recipe_says(folder: Path) -> None:
    rows = read_ledger(folder / "dataset")
    assert not [row for row in rows if row["outcome"] == "quarantined"]
    kinds = Counter((row["kind"], row["outcome"]) for row in rows)
    assert kinds["attachment", "packed"] >= 2  # boxes of some studies, the laboratory's rows
    assert kinds["report", "packed"] == 6


def test_samples_hold_what_the_sections_are_for(folder: Path) -> None:
    dataset = Dataset.open(folder / "dataset")
    samples = [dataset.read_fields(row) for row in range(dataset.samples.num_samples)]
    names = Counter(name for fields in samples for name in fields)
    assert names["report.json"] == names["alignment.json"] == names["report.txt"] == 6
    regions = [region for one in samples if "annotations.json" in one for region in _json(one, "annotations")]
    assert len(regions) >= names["annotations.json"] > 0
    (lab,) = [fields for fields in samples if "records.json" in fields]
    facts = json.loads(lab["records.json"])["facts"]
    assert {fact["source"] for fact in facts} == {"mapped-lab"}
    text = json.dumps(facts)
    assert '"left"' in text
    assert '"tail"' not in text
    assert "Zorblatt" not in text
    assert "Drawn by" in lab["document.000.txt"].decode()
    assert not any(CANARY.encode() in payload for fields in samples for payload in fields.values())


def _json(fields: dict[str, bytes], part: str) -> list[object]:
    rois: list[object] = json.loads(fields[f"{part}.json"])["rois"]
    return rois


def test_it_differs_from_the_defaults_only_where_it_says_so() -> None:
    """A setting that is renamed or gets another default is seen here, before a reader copies it."""
    config = load_config(PackConfig, REPOSITORY / RECIPE)
    usual = load_config(PackConfig, REPOSITORY / RECIPE.with_name("pack_folders.toml"))
    assert config.reports == usual.reports
    assert config.alignment == usual.alignment
    assert config.attachments.window_hours == 48
    assert [mapping.name for mapping in config.records.mappings] == ["lab"]
