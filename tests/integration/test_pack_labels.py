"""Label tables that public collections distribute are attached when their layout is packed."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shardflow.format.dataset import Dataset
from shardflow.format.facts.columns import open_columns
from shardflow.packing import pack
from shardflow.packing.sources.layouts.archives import CHEXPERT_LABELS
from tests.layout_trees import (
    MadeTree,
    make_chexpert,
    make_ct_rate,
    make_lidc,
    make_mimic,
    make_openi,
    make_padchest,
    make_rsna,
    write_table,
)
from tests.pack_case import PackCase

pytestmark = pytest.mark.usefixtures("packs_inline")

_FINDINGS = {**dict.fromkeys(CHEXPERT_LABELS, ""), "Edema": "1.0", "Pneumonia": "-1.0", "Fracture": "0.0"}


def with_chexpert(folder: Path) -> tuple[MadeTree, dict[str, Mapping[str, Any]]]:
    tree = make_chexpert(folder)
    rows = [
        {"Path": f"CheXpert-v1.0/{view}.jpg", "Sex": "Male", "Age": "67", **_FINDINGS}
        for view in (
            "train/patient00001/study1/view1_frontal",
            "train/patient00001/study1/view2_lateral",
            "train/patient00001/study2/view1_frontal",
        )
    ]
    table = write_table(folder / "train.csv", rows)
    settings = (*(one for one in tree.settings if "table=" not in one and "reports=" not in one),)
    found = MadeTree(
        images=tree.images,
        studies=tree.studies,
        settings=(*settings, f"inputs.layout.table={table}"),
        secrets=tree.secrets,
    )
    return found, {
        f"chexpert.{name}": {
            "patient00001/study1": value,
            "patient00001/study2": value,
        }
        for name, value in (("edema", 1), ("pneumonia", -1), ("fracture", 0))
    }


def with_mimic(folder: Path) -> tuple[MadeTree, dict[str, Mapping[str, Any]]]:
    tree = make_mimic(folder)
    for name in ("chexpert", "negbio"):
        plain = write_table(
            folder / f"mimic-cxr-2.0.0-{name}.csv",
            [
                {"subject_id": "10000032", "study_id": "50414267", **_FINDINGS},
                {"subject_id": "10000764", "study_id": "57375967", **_FINDINGS, "Edema": "0.0"},
            ],
        )
    # The last one as it is distributed, the other unpacked.
    (folder / f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    edema = {"50414267": 1, "53189527": None, "57375967": 0}
    split = {"50414267": "train", "53189527": "train", "57375967": "validate"}
    return tree, {"chexpert.edema": edema, "negbio.edema": edema, "official.split": split}


def with_ct_rate(folder: Path) -> tuple[MadeTree, dict[str, Mapping[str, Any]]]:
    tree = make_ct_rate(folder)
    for split, names in (("train", ("train_1_a_1", "train_1_a_2")), ("valid", ("valid_7_a_1",))):
        rows = [{"VolumeName": f"{name}.nii.gz", "Lung nodule": int(split == "train")} for name in names]
        write_table(folder / f"{split}_predicted_labels.csv", rows)
    return tree, {"abnormalities.lung_nodule": {"train_1_a": 1, "valid_7_a": 0}}


def with_padchest(folder: Path) -> tuple[MadeTree, dict[str, Mapping[str, Any]]]:
    tree = make_padchest(folder)
    with (folder / "padchest.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    studies = list(dict.fromkeys(row["StudyID"] for row in rows))
    labels = {studies[0]: "['pleural effusion', 'cardiomegaly']", studies[1]: "['normal']"}
    write_table(folder / "padchest.csv", [{**row, "Labels": labels[row["StudyID"]]} for row in rows])
    return tree, {
        "padchest.pleural_effusion": {studies[0]: True, studies[1]: False},
        "padchest.normal": {studies[0]: False, studies[1]: True},
    }


def with_rsna(folder: Path) -> tuple[MadeTree, dict[str, Mapping[str, Any]]]:
    tree = make_rsna(folder)
    write_table(
        tree.images / "train.csv", [{"study_id": "4003253", "spinal_canal_stenosis_l1_l2": "Normal/Mild"}]
    )
    return tree, {"rsna.spinal_canal_stenosis_l1_l2": {"4003253": "Normal/Mild"}}


def with_openi(folder: Path) -> tuple[MadeTree, dict[str, Mapping[str, Any]]]:
    tree = make_openi(folder)
    terms = {"1": ("Opacity/lung/base/left", "Cardiomegaly/borderline", "Opacity/round"), "2": ("normal",)}
    for study, headings in terms.items():
        path = folder / "openi-reports" / f"{study}.xml"
        majors = "".join(f"<major>{heading}</major>" for heading in headings)
        text = path.read_text(encoding="utf-8")
        mesh = f"<MeSH>{majors}<automatic>lung opacity</automatic></MeSH></eCitation>"
        path.write_text(text.replace("</eCitation>", mesh), encoding="utf-8")
    return tree, {
        "mesh.opacity": {"1": True, "2": False},
        "mesh.cardiomegaly": {"1": True, "2": False},
        "mesh.normal": {"1": False, "2": True},
    }


def with_openi_not_indexed(folder: Path) -> tuple[MadeTree, dict[str, Mapping[str, Any]]]:
    tree, expected = with_openi(folder)
    path = folder / "openi-reports" / "2.xml"
    path.write_text(path.read_text(encoding="utf-8").replace("normal</major>", "No Indexing</major>"))
    return tree, {name: {"1": by["1"], "2": None} for name, by in expected.items() if name != "mesh.normal"}


def with_lidc(folder: Path) -> tuple[MadeTree, dict[str, Mapping[str, Any]]]:
    tree = make_lidc(folder)
    (study,) = tree.studies

    def session(*nodules: Mapping[str, int]) -> str:
        rated = "".join(
            "<unblindedReadNodule><characteristics>"
            + "".join(f"<{name}>{value}</{name}>" for name, value in nodule.items())
            + "</characteristics></unblindedReadNodule>"
            for nodule in nodules
        )
        small = "<unblindedReadNodule><noduleID>9</noduleID></unblindedReadNodule>"
        return f"<readingSession>{rated}{small}</readingSession>"

    body = session({"malignancy": 5, "internalStructure": 1}, {"malignancy": 2}) + session({"malignancy": 4})
    (path,) = tree.images.rglob("069.xml")
    path.write_text(
        '<LidcReadMessage xmlns="http://www.nih.gov"><ResponseHeader>'
        f"<StudyInstanceUID>{study}</StudyInstanceUID></ResponseHeader>{body}</LidcReadMessage>",
        encoding="utf-8",
    )
    path.with_name("070.xml").write_text("<LidcReadMessage><broken", encoding="utf-8")
    return tree, {
        "lidc.num_readers": {study: 2},
        "lidc.num_rated": {study: 3},
        "lidc.malignancy_mean": {study: pytest.approx(11 / 3)},
        "lidc.malignancy_max": {study: 5},
        "lidc.internal_structure_max": {study: 1},
    }


@pytest.mark.parametrize(
    "make",
    [
        with_chexpert,
        with_mimic,
        with_ct_rate,
        with_padchest,
        with_rsna,
        with_openi,
        with_openi_not_indexed,
        with_lidc,
    ],
)
def test_labels_of_a_collection_are_attached(
    make: Callable[[Path], tuple[MadeTree, dict[str, Mapping[str, Any]]]], tmp_path: Path
) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    tree, expected = make(tmp_path / "tree")
    summary = pack(case.config(*tree.settings, "policy.max_quarantined_share=1.0"))
    assert summary.status == "packed"
    dataset = case.open()
    columns = open_columns(dataset)
    for name, by_study in expected.items():
        found = columns.column(name)
        for study, value in by_study.items():
            row = dataset.studies.find(case.sample_key(study))
            is_missing = found.is_missing is not None and found.is_missing[row]
            stored = None if is_missing else found.values[row].item()
            assert (found.names[stored] if found.names and stored is not None else stored) == value, name
    for path in (path for path in case.output.rglob("*") if path.is_file()):
        assert not any(secret.encode() in path.read_bytes() for secret in tree.secrets), path.name


def test_labels_that_cannot_be_used_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    tree, _ = with_rsna(tmp_path / "tree")
    write_table(tree.images / "train.csv", [{"study_id": "1", "stenosis": "Severe"}])
    assert pack(case.config(*tree.settings)).status == "packed"
    assert "labels rsna of the layout are not attached: None of the 1 rows" in caplog.text
    assert not Dataset.open(case.output).tables
