"""Heads that no description names: flagged, held back or freed of the face, as the settings say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from pydicom.dataset import Dataset as Attributes

from shardflow.format.codecs import decode_array
from shardflow.packing.deid.heads import Head, HeadFinder
from tests.dicom_factory import make_study
from tests.pack_case import PackCase
from tests.phantoms import Scan, head, scan, torso

pytestmark = pytest.mark.usefixtures("packs_inline")

LOOSE = ("policy.max_quarantined_share=1.0", "shards.target_bytes=64MiB")


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


def _write(case: PackCase, name: str, volume: Scan, description: str) -> str:
    """Write a volume as MR; return its sample key."""
    pixels = np.clip(volume.pixels, 0, 4000).astype(np.uint16)
    affine = volume.affine_lps

    def change(dataset: Attributes, index: int) -> None:
        dataset.SeriesDescription, dataset.BodyPartExamined = description, ""
        dataset.Rows, dataset.Columns = pixels.shape[1:]
        dataset.PixelData = pixels[index].tobytes()
        dataset.PixelSpacing = [float(affine[1, 1]), float(affine[0, 0])]
        dataset.SliceThickness = float(affine[2, 2])
        origin = affine @ [0, 0, index, 1]
        dataset.ImagePositionPatient = [float(one) for one in origin[:3]]

    study = make_study(
        case.dicom / name, patient=name, modality="MR", num_slices=len(pixels), size=(8, 8), change=change
    )
    return case.key.surrogate("study", study.study_instance_uid)


def _volumes() -> tuple[Scan, Scan, Scan]:
    whole = scan(head(), contrast="T1", center=(0, -8, -30), spacing=(4, 4, 6), count=(64, 64, 42))
    slab = scan(head(), contrast="T1", center=(0, 0, 20), spacing=(4, 4, 5), count=(64, 64, 14))
    belly = scan(torso(), contrast="T1", spacing=(6.5, 6.5, 6), count=(64, 64, 20))
    return whole, slab, belly


def _series(case: PackCase, key: str) -> Any:
    dataset = case.open()
    row = dataset.samples.find(key)
    return json.loads(dataset.read_fields(row, ["study.json"])["study.json"])["series"][0]


def test_a_head_is_flagged_by_its_volume(case: PackCase) -> None:
    whole, _, belly = _volumes()
    keys = [_write(case, "H1", whole, "220FOV"), _write(case, "B1", belly, "vol")]
    case.pack(*LOOSE)
    assert [_series(case, key)["deidentification"]["face_risk"] for key in keys] == [True, False]
    extra: Any = case.open().manifest.extra["deidentification"]
    assert extra["counts"]["face_risk_series"] == 1


def test_what_a_header_calls_a_head_is_flagged_without_a_search(
    case: PackCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[HeadFinder] = []
    find = HeadFinder.find

    def count(finder: HeadFinder, read: Any) -> Head | None:
        searched.append(finder)
        return find(finder, read)

    monkeypatch.setattr(HeadFinder, "find", count)
    _, slab, belly = _volumes()
    called, other = _write(case, "H1", slab, "t1_mprage_sag"), _write(case, "B1", belly, "vol")
    case.pack(*LOOSE)
    assert [_series(case, key)["deidentification"]["face_risk"] for key in (called, other)] == [True, False]
    assert len(searched) == 1


def test_heads_are_held_back_and_the_rule_is_named(case: PackCase) -> None:
    whole, slab, belly = _volumes()
    _write(case, "H1", whole, "220FOV")
    _write(case, "H2", slab, "t1_mprage_sag")
    kept = _write(case, "B1", belly, "vol")
    summary = case.pack(*LOOSE, 'deid.face_risk="quarantine"')
    assert summary.reasons == {"FACE_RISK": 42 + 14}
    assert case.open().samples.num_samples == 1
    assert case.open().samples.find(kept) == 0
    (ledger,) = case.private.glob("inputs-*.jsonl")
    lines = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    rules = {Path(line["path"]).parent.name: line.get("rules") for line in lines}
    assert rules == {"H1": ["volume"], "H2": ["head"], "B1": None}


def test_faces_are_cut_off_and_what_cannot_be_cut_is_held_back(case: PackCase) -> None:
    whole, slab, belly = _volumes()
    cut = _write(case, "H1", whole, "220FOV")
    _write(case, "H2", slab, "vol")
    kept = _write(case, "B1", belly, "vol")
    summary = case.pack(*LOOSE, 'deid.face_risk="deface"')
    assert summary.reasons == {"FACE_RISK": 14}
    dataset = case.open()
    extra: Any = dataset.manifest.extra["deidentification"]
    assert extra["counts"]["defaced_slices"] == 42
    assert "113102" in extra["profile_codes"]
    assert _series(case, cut)["deidentification"]["defaced"] is True
    assert "defaced" not in _series(case, kept)["deidentification"]
    row = dataset.samples.find(cut)
    stored = dataset.read_fields(row)
    names = sorted(name for name in stored if name.startswith("s000."))
    slices = np.stack([decode_array("b2nd", stored[name]) for name in names])
    before = np.clip(whole.pixels, 0, 4000).astype(np.uint16)
    assert slices.shape == before.shape
    assert whole.face is not None
    assert whole.brain is not None
    hidden = slices.reshape(len(slices), -1).min(axis=1)[:, None, None]
    # The face is gone, whatever it was before; the brain is bit for bit the same.
    assert (slices == hidden)[whole.face].all()
    assert (slices == before)[whole.brain].mean() > 0.997


def test_a_page_of_text_is_held_back_whatever_it_declares(case: PackCase) -> None:
    page = np.zeros((512, 640), np.uint8)
    for line in range(12):
        cv2.putText(page, "Total exam DLP 980.44 mGy-cm", (16, 30 + 24 * line), 0, 0.5, 255, 1, cv2.LINE_AA)

    def change(dataset: Attributes, index: int) -> None:
        dataset.SeriesDescription, dataset.BurnedInAnnotation = "vol", "NO"
        dataset.Rows, dataset.Columns = page.shape
        dataset.PixelData = (page.astype(np.uint16) * 8).tobytes()

    make_study(case.dicom / "page", patient="P1", study="A", num_slices=1, change=change)
    kept = make_study(case.dicom / "image", patient="P1", study="B", num_slices=1)
    summary = case.pack(*LOOSE, "deid.trust_declared_clean=true")
    assert summary.reasons == {"BURNED_IN_ANNOTATION": 1}
    assert case.open().samples.find(case.key.surrogate("study", kept.study_instance_uid)) == 0
    (ledger,) = case.private.glob("inputs-*.jsonl")
    lines = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    assert [line["rules"] for line in lines if "rules" in line] == [["page"]]
    beside = case.output.parent
    other = (f'output="{beside}/out2"', f'private_dir="{beside}/private2"', 'deid.accept=["page"]')
    assert case.pack(*LOOSE, *other).studies["packed"] == 2
