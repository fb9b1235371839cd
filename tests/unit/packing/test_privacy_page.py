"""The officer's page counts images by rule, and says when it shows a part of the pictures only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardflow.errors import FormatError
from shardflow.format.reasons import Reason
from shardflow.packing import privacy_page
from shardflow.packing.deid.pixel_rules import PAGE, TEXT, load_rules
from shardflow.packing.privacy_page import _RULES, _count_images, _images, _thumbnails


@pytest.mark.parametrize(("limit", "shown"), [(2, ["input1", "input2"]), (3, ["input0", "input1", "input2"])])
def test_the_last_pictures_are_shown_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, shown: list[str]
) -> None:
    monkeypatch.setattr(privacy_page, "_MOST_PICTURES", limit)
    entry = {"png": "", "reason": "BURNED_IN_ANNOTATION", "rules": ["page"], "sample_key": "k"}
    lines = [json.dumps({**entry, "input": f"input{number}"}) + "\n" for number in range(3)]
    (tmp_path / "pictures-00.jsonl").write_text("".join(lines), encoding="ascii")
    manifest: Any = SimpleNamespace(extra={"plan_digest": "00"})
    page = _thumbnails(manifest, tmp_path)
    assert [f"input{number}" for number in range(3) if f"input{number}" in page] == shown
    assert ("the last 2 of 3; all are in pictures-00.jsonl" in page) == (limit == 2)


def _ledger(folder: Path, *entries: dict[str, Any]) -> Any:
    lines = [json.dumps({"kind": "dicom", "reason": None, **entry}) + "\n" for entry in entries]
    (folder / "inputs-00.jsonl").write_text("".join(lines), encoding="ascii")
    return SimpleNamespace(extra={"plan_digest": "00"})


def test_images_are_counted_by_rule_out_of_all_and_a_rule_of_the_site_is_called_one(tmp_path: Path) -> None:
    held = {"reason": "BURNED_IN_ANNOTATION", "rules": ["ultrasound", "our_grabber"]}
    face = {"reason": "FACE_RISK", "rules": ["declared"]}
    blanked = {"rules": ["text", "ultrasound"], "blanked": [[0, 0, 4, 9]]}
    others = [{"kind": "report"}, {"kind": "attachment"}, {"reason": "DAMAGED_IMAGE"}, {}]
    page = _images(_count_images(_ledger(tmp_path, held, face, blanked, *others), tmp_path))
    assert "Of 5 images among the inputs 2 (40.00 %) were held back, and 1 (20.00 %) were packed" in page
    for rule, said, *counts in (
        ("ultrasound", "ultrasound", 1, 1),
        ("our_grabber", "rule of the site", 1, 0),
        ("text", "text was found in the pixels", 0, 1),
        ("declared", "the file declares a face (RecognizableVisualFeatures = YES)", 1, 0),
    ):
        cells = "".join(f"<td class=number>{count}</td>" for count in counts)
        assert f"<code>{rule}</code></td><td>{said}</td>{cells}" in page


def test_a_missing_ledger_is_said_and_a_damaged_one_refused(tmp_path: Path) -> None:
    manifest: Any = SimpleNamespace(extra={"plan_digest": "00"})
    assert "no ledger of this version" in _images(_count_images(manifest, tmp_path))
    (tmp_path / "inputs-00.jsonl").write_text('{"kind": "dicom"}\n', encoding="ascii")
    with pytest.raises(FormatError, match="holds a damaged line"):
        _count_images(manifest, tmp_path)


def test_every_shipped_rule_is_explained() -> None:
    """One that is not would be called a rule of the site."""
    rules = load_rules()
    named = {
        (Reason.BURNED_IN_ANNOTATION, name) for name in (PAGE, TEXT, *(one.name for one in rules.burned_in))
    }
    named |= {(Reason.FACE_RISK, name) for name in ("volume", *(one.name for one in rules.faces))}
    assert set(_RULES) == named
