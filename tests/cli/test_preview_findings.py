"""``shardflow preview --findings``: the report's findings are marked, and their slices stand beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.factories as factories
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.viewing import read_findings, render_findings
from shardflow.viewing.typeface import ASSERTIONS, Typeface, lay_out
from tests.cli.conftest import Call

pytestmark = pytest.mark.fast

TEXT = (
    "INDICATION: History of cancer. Rule out pneumonia.\n\n"
    "FINDINGS: There is a 9 mm nodule in the right upper lobe (series 1, image 2). No effusion. "
    "Possible edema."
)
YELLOW = (255, 215, 94)


def packed(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, **more: Any) -> Dataset:
    """Write one sample of four slices with a report and further fields."""
    made = factories.make_sample

    def make(number: int, **options: Any) -> factories.MadeSample:
        sample = made(number, **options)
        fields = {name: payload for name, payload in sample.fields.items() if name != "report.txt"}
        if text is not None:
            fields["report.txt"] = text.encode()
        fields |= {name: json.dumps(value).encode() for name, value in more.items()}
        facts = replace(sample.facts, text_bytes=len(fields.get("report.txt", b"")))
        return replace(sample, fields=dict(sorted(fields.items())), facts=facts)

    monkeypatch.setattr(factories, "make_sample", make)
    return Dataset.open(factories.make_dataset(folder, num_samples=1, slices=4, size=(32, 32)))


def count(png: bytes, colour: tuple[int, int, int]) -> int:
    picture = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR_RGB)
    assert picture is not None
    return int((picture == colour).all(axis=2).sum())


def rgb(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def test_report_is_read_here_where_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = read_findings(packed(tmp_path / "d", monkeypatch, TEXT), 0)
    assert not view.is_stored
    assert [[tile.number for tile in row.tiles] for row in view.rows] == [[1, 2, 4]]
    assert {view.unaligned[number] for number in view.unaligned} >= {"ABSENT", "HISTORICAL", "HYPOTHETICAL"}
    picture = render_findings(view)
    assert picture == render_findings(view)
    for style in ASSERTIONS.values():
        # The legend has each once; the text has each once more.
        assert count(picture, rgb(style.tint)) > 800
    assert count(picture, YELLOW) == 0


def test_stored_fields_are_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entity = {
        "span": [10, 20],
        "concept": "x",
        "assertion": "present",
        "anatomy": None,
        "laterality": "",
        "size_mm": [],
    }
    evidence = [{"rule": "E3", "confidence": 0.95, "rois": [0]}]
    entry = {
        "entity": 0,
        "series": 0,
        "slices": [3],
        "weights": [1.0],
        "confidence": 0.95,
        "evidence": evidence,
    }
    fields: dict[str, Any] = {
        "report.json": {"sections": [], "entities": [entity], "mentions": []},
        "alignment.json": {"threshold": 0.7, "entities": [entry], "unaligned": [], "unresolved": []},
        "annotations.json": {
            "rois": [{"roi": 0, "series": 0, "label": "x", "slices": [{"slice": 3, "box_px": [4, 4, 9, 9]}]}]
        },
    }
    view = read_findings(packed(tmp_path / "d", monkeypatch, TEXT, **fields), 0)
    assert view.is_stored
    assert [tile.index for tile in view.rows[0].tiles] == [3]
    assert [one.box for one in view.rows[0].tiles[0].outlines] == [(4, 4, 9, 9)]
    boxed = count(render_findings(view), YELLOW)
    assert boxed > 200
    # An outline takes the place of its box.
    fields["annotations.json"]["rois"][0]["polygons"] = [[[4, 4, 9, 4, 4, 9]]]
    monkeypatch.undo()
    outlined = read_findings(packed(tmp_path / "e", monkeypatch, TEXT, **fields), 0)
    assert 0 < count(render_findings(outlined), YELLOW) < boxed


def test_what_does_not_fit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "FINDINGS: " + " ".join(
        f"There is a {size} mm nodule (series 1, image 2)." for size in range(2, 12)
    )
    view = read_findings(packed(tmp_path / "d", monkeypatch, text), 0, num_findings=3)
    assert (len(view.rows), view.num_left_out) == (3, 7)
    assert render_findings(replace(view, rows=(), text="\n" * 500))


def test_command(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path / "d", monkeypatch, TEXT)
    said = call("preview", tmp_path / "d", "train:0", "--findings", "-o", tmp_path / "a.png", "--json")
    assert said.code == 0
    assert (said.last_line["findings"], said.last_line["placed"]) == (5, 1)
    assert said.last_line["bytes"] == (tmp_path / "a.png").stat().st_size


@pytest.mark.parametrize("option", ["--series=1", "--slices=3"])
def test_options_that_findings_do_not_heed_are_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    packed(tmp_path / "d", monkeypatch, TEXT)
    refused = call("preview", tmp_path / "d", "train:0", "--findings", option, "-o", tmp_path / "a.png")
    assert (refused.code, "--series and --slices must be left out" in refused.err) == (2, True)
    assert not (tmp_path / "a.png").exists()


def test_sample_without_a_report_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--findings"):
        read_findings(packed(tmp_path / "d", monkeypatch, None), 0)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab \n(,", max_size=200))
def test_lines_know_their_places(text: str) -> None:
    for line in lay_out(text, Typeface(18), 60):
        assert text[line.start : line.start + len(line.text)] == line.text
    kept = "".join(line.text for line in lay_out(text, Typeface(18), 60))
    assert kept.replace(" ", "") == text.replace(" ", "").replace("\n", "")
