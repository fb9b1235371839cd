"""Scores of indexed reports by their headings, on reports made for the purpose."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.reports.openi import (
    HEADINGS,
    compose_views,
    findings_of,
    part_of,
    read_findings,
    read_reports,
    score_part,
)
from shardflow.reports import EntityFinder, load_lexicon

pytestmark = pytest.mark.fast

REPORT = """<eCitation><uId id="{uid}"/><MedlineCitation><Article><Abstract>
<AbstractText Label="INDICATION">Chest pain. Rule out pneumonia.</AbstractText>
<AbstractText Label="FINDINGS">{findings}</AbstractText>
<AbstractText Label="IMPRESSION"></AbstractText>
</Abstract></Article></MedlineCitation><MeSH>{headings}</MeSH></eCitation>"""


def archive(folder: Path, reports: Sequence[tuple[str, str, Sequence[str]]]) -> Path:
    path = folder / "NLMCXR_reports.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for uid, findings, headings in reports:
            majors = "".join(f"<major>{one}</major>" for one in headings)
            data = REPORT.format(uid=uid, findings=findings, headings=majors).encode()
            info = tarfile.TarInfo(f"ecgen-radiology/{uid}.xml")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def of_part(part: str, count: int) -> list[str]:
    return [uid for uid in (f"CXR{number}" for number in range(1, 200)) if part_of(uid) == part][:count]


def test_halves_never_change() -> None:
    assert Counter(part_of(f"CXR{number}") for number in range(1, 4001)) == {
        "development": 1975,
        "test": 2025,
    }
    assert [part_of(f"CXR{number}") for number in (1, 2, 10)] == ["test", "test", "development"]


def test_views_are_counted_as_they_were_and_as_they_are(tmp_path: Path) -> None:
    uids = of_part("development", 1) + of_part("test", 1)
    found = compose_views(archive(tmp_path, [(uid, "Cardiomegaly. No effusion.", []) for uid in uids]))
    assert found["before"]["label"] == {"chest pain": 2, "cardiomegaly": 2}
    assert found["now"]["label"] == {"cardiomegaly": 2}
    assert found["left_out_now"] == {"symptom, present, in indication": 2}


def test_reports_are_scored_by_their_headings(tmp_path: Path) -> None:
    uids = of_part("development", 4)
    held = of_part("test", 1)
    path = archive(
        tmp_path,
        [
            (uids[0], "Small right effusion. No pneumothorax.", ["Pleural Effusion/right/small"]),
            (uids[1], "Possible effusion. Aorta is tortuous.", ["Aorta/tortuous"]),
            (uids[2], "Mild cardiomegaly.", ["normal"]),
            (uids[3], "Cardiomegaly.", ["No Indexing"]),
            (held[0], "Pneumothorax.", ["Pneumothorax/apex/left"]),
        ],
    )
    wheel = tmp_path / "torchxrayvision.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(path, f"torchxrayvision/data/{path.name}")
    assert read_reports(wheel, "development") == read_reports(path, "development")
    assert [one.uid for one in read_reports(path, "test")] == held

    def all_negated(texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]) -> list[list[bool]]:
        assert [text[slice(*one)] for text, row in zip(texts, spans, strict=True) for one in row] == [
            "effusion", "pneumothorax", "effusion", "tortuous", "cardiomegaly",
        ]  # fmt: skip
        return [[False for _ in row] for row in spans]

    errors: list[str] = []
    scored = score_part(path, "development", all_negated, errors)
    assert scored["reports"] == 3
    effusion = scored["findings"]["pleural effusion"]
    assert (effusion["headings"], effusion["found"], effusion["right"]) == (1, 1, 1)
    assert scored["findings"]["tortuosity"]["f1"] == 1.0
    assert scored["findings"]["cardiomegaly"]["precision"] == 0.0
    assert scored["findings"]["pneumonia"]["found"] == 0
    plain = scored["negspacy_on_the_same_spans"]["findings"]
    assert (plain["pneumothorax"]["found"], plain["pleural effusion"]["found"]) == (1, 2)
    assert [error.split(" | ")[:3] for error in errors] == [["cardiomegaly", "no heading", uids[2]]]
    # Errors of the test half are not read.
    held_errors: list[str] = []
    score_part(path, "test", None, held_errors)
    assert held_errors == []


def test_an_entity_counts_for_the_nearest_finding() -> None:
    finder, lexicon = EntityFinder(), load_lexicon()

    def counted(text: str) -> list[tuple[str, ...]]:
        return [findings_of(one, lexicon) for one in finder.find(text)]

    assert counted("Rib fracture. Calcified granuloma. Consolidation.") == [
        ("fracture",),
        ("granuloma",),
        ("consolidation",),
    ]
    assert counted("Hydropneumothorax. Kyphosis. Nodular opacity.") == [
        ("pleural effusion", "pneumothorax"),
        (),
        ("opacity",),
    ]
    assert HEADINGS.keys() <= lexicon.concepts.keys()


def test_indications_are_not_counted(tmp_path: Path) -> None:
    (uid,) = of_part("development", 1)
    reports = read_reports(archive(tmp_path, [(uid, "Clear.", ["normal"])]), "development")
    assert reports[0].text.startswith("INDICATION: Chest pain. Rule out pneumonia.")
    assert read_findings(reports) == [[]]
