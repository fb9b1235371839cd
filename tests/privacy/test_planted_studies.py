"""A sample of the generated studies of benchmarks/privacy: nothing planted comes out, and nobody is torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.privacy import studies

pytest.importorskip("onnxruntime", reason="the extra pixels is not installed")

NOTHING = (
    "found_in_bytes",
    "dates_found",
    "lines_readable",
    "pages_packed",
    "faces_published",
    "persons_in_two_splits",
    "persons_under_two_keys",
    "held_back_by_mistake",
)


def test_no_identifier_text_or_face_of_generated_studies_is_published(tmp_path: Path) -> None:
    planted = studies.make_studies(tmp_path, 6)
    found = studies.measure(planted)
    assert {name: found[name] for name in NOTHING} == dict.fromkeys(NOTHING, 0)
    assert found["persons_packed"] == 6
    # All that may come out was in the inputs, and would be seen.
    assert min(found[name] for name in ("lines", "images_with_text_packed", "pages", "heads_packed")) >= 1
    assert found["reasons"]["BURNED_IN_ANNOTATION"] >= found["pages"]


@pytest.mark.slow
def test_what_is_planted_is_found_where_nothing_is_removed(tmp_path: Path) -> None:
    """The measurement itself, without the rules that it measures."""
    planted = studies.make_studies(tmp_path, 6)
    settings = ('deid.pixel_text="off"', 'deid.face_risk="flag"', 'deid.report_text="keep"')
    accept = 'deid.accept=["declared", "ultrasound", "ultrasound_class", "page"]'
    found = studies.measure(planted, *settings, accept)
    assert found["found_in_bytes"] > 20
    assert found["dates_found"] > 5
    assert found["lines_readable"] == found["lines"] > 0
    assert (found["pages_packed"], found["faces_published"]) == (found["pages"], found["heads"])
