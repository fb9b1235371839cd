"""Findings that a person looks at and corrects, and phrases that no lexicon knows."""

from __future__ import annotations

import csv
import stat
from pathlib import Path

import pytest

from shardflow.cli.main import main
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.entities import EntityDataset, EntityRules
from shardflow.reports.entity_views import build_view
from shardflow.reports.review import COLUMNS, count_unknown, read_corrections, write_findings
from tests.entity_datasets import make_entity_dataset


def fill_in(path: Path, answers: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    """Answer rows by label, as a person does in a spreadsheet."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.update(answers.get(row["label"], {}))
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return rows


def labels(dataset: Dataset, name: str) -> dict[str, int]:
    table = EntityDataset.beside(dataset, name).samples
    found: dict[str, int] = {}
    for code in table.column("label").tolist():
        found[table.labels[code]] = found.get(table.labels[code], 0) + 1
    return found


def test_corrections_go_out_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = make_entity_dataset(tmp_path / "data")
    build_view(dataset, EntityRules())
    before = labels(dataset, "entity")
    path = tmp_path / "review.csv"
    url = str(tmp_path / "data")
    arguments = ["-o", str(path), "--least", "0.1", "--most", "1.0"]
    assert main(["reports", "review", url, *arguments]) == 0
    assert "radiograph" not in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    rows = fill_in(
        path,
        {
            "pleural effusion": {"right": "n"},
            "pneumonia": {"right": "y"},
            "cardiomegaly": {"new_label": "Pericardial effusions"},
        },
    )
    assert [float(row["probability"]) * float(row["confidence"]) for row in rows] == sorted(
        float(row["probability"]) * float(row["confidence"]) for row in rows
    )
    made = ["entities", url, "--corrections", str(path), "--name", "reviewed", "--processes", "1"]
    assert main(made) == 0
    assert "left out:" in capsys.readouterr().out
    after = labels(dataset, "reviewed")
    assert "pleural effusion" in before
    assert "pleural effusion" not in after
    assert after["pericardial effusion"] == before["cardiomegaly"]
    table = EntityDataset.beside(dataset, "reviewed").samples
    pneumonia = table.labels.index("pneumonia")
    is_pneumonia = table.column("label") == pneumonia
    assert set(table.column("assertion")[is_pneumonia].tolist()) == {0}  # present: a person has seen it
    # The same corrections make the same view; others need another name.
    assert main(made) == 0
    fill_in(path, {"pneumonia": {"right": "n"}})
    assert main(made) == 2


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"right": "perhaps"}, r"column right holds y or n, got another word \(line 2\)"),
        ({"new_assertion": "maybe"}, r"new_assertion must be one of .*line 2"),
        ({"new_label": "secret name"}, r"new_label must be a finding of the lexicon.*line 2"),
    ],
)
def test_a_slip_in_a_correction_is_named_by_its_line(
    tmp_path: Path, cells: dict[str, str], message: str
) -> None:
    path = tmp_path / "review.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerow({"finding": "a0e0", **cells})
    with pytest.raises(ConfigError, match=message) as caught:
        read_corrections(path)
    assert "secret" not in str(caught.value)


def test_nothing_to_review_is_said(tmp_path: Path) -> None:
    dataset = make_entity_dataset(tmp_path / "data", splits={"train": 3})
    with pytest.raises(ConfigError, match="no finding with slices is between"):
        write_findings(dataset, tmp_path / "x.csv", rules=EntityRules(), least=0.001, most=0.002)
    assert not (tmp_path / "x.csv").exists()


def test_phrases_that_nobody_knows_are_counted_by_reports(tmp_path: Path) -> None:
    texts = [
        "INDICATION: Gribble.\nFINDINGS: There is a small zorblax in the right lung. No effusion.",
        "FINDINGS: Zorblax again seen. Stable zorblax. Frobnic change is likely.",
        "IMPRESSION: No zorblax.",
    ]
    counts, num_reports = count_unknown(texts)
    assert num_reports == 3
    assert counts["zorblax"] == 3
    assert "gribble" not in counts
    assert not {"effusion", "small", "lung", "stable", "no", "seen"} & set(" ".join(counts).split())
    german, _ = count_unknown(
        ["Befund: Kein Gribbel der rechten Lunge. Kein Pneumothorax.", "Reperti: Non gribbel."]
    )
    assert german == {"gribbel": 1}
    data = tmp_path / "data"
    make_entity_dataset(data)
    assert main(["reports", "lint", str(data), "-o", str(tmp_path / "lint.csv")]) == 0
    assert (tmp_path / "lint.csv").read_text().startswith("phrase,reports\n")
    assert stat.S_IMODE((tmp_path / "lint.csv").stat().st_mode) == 0o600
