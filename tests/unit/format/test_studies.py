"""Facts of studies: what study.json says is what the table holds, and which study of a person came before."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset, ShardWriter
from shardflow.format.facts.making import attach_facts
from shardflow.format.facts.series import SeriesManifest
from shardflow.format.facts.studies import (
    NO_NUMBER,
    NO_ROW,
    StudiesManifest,
    StudyFacts,
    facts_of_study,
    open_studies,
    previous_rows,
)
from tests.factories import make_dataset

pytestmark = pytest.mark.fast


def series(modality: str, **facts: object) -> dict[str, object]:
    return {"modality": modality, "kind": "volume", **facts}


@pytest.mark.parametrize(
    ("study", "strings", "numbers", "patient_key"),
    [
        ({"series": []}, {}, {}, ""),
        (
            {
                "series": [
                    series("PT", body_part="CHEST", technical={"manufacturer": "A"}),
                    series("CT", body_part="CHEST", technical={"manufacturer": "B"}),
                    series("OT", kind="localizer", body_part="HEAD"),
                ],
                "patient": {"age_years": 61, "sex": "F", "patient_key": "abc234"},
                "dates": {"mode": "days", "study_day": 900123},
            },
            {"modalities": "CT+PT", "body_part": "CHEST", "manufacturer": "mixed", "sex": "F"},
            {"age_years": 61, "study_day": 900123},
            "abc234",
        ),
        (
            {
                "series": [series("CT", kind="localizer", body_part="HEAD")],
                "patient": {"age_years": None, "sex": None},
                "dates": {"mode": "shift", "study_date": "2019-12-31"},
            },
            {"modalities": "CT", "body_part": "HEAD"},
            {"study_day": 737424, "study_year": 2019},
            "",
        ),
        # Nothing but a surrogate is taken as the key of a person.
        ({"series": [], "patient": {"patient_key": "Doe^Jane"}, "dates": {"mode": "remove"}}, {}, {}, ""),
    ],
)
def test_facts_follow_from_study_json(
    study: dict[str, object], strings: dict[str, str], numbers: dict[str, float], patient_key: str
) -> None:
    assert facts_of_study(study) == StudyFacts(strings=strings, numbers=numbers, patient_key=patient_key)


@pytest.mark.parametrize("seed", range(20))
def test_the_earlier_study_is_the_latest_of_an_earlier_day_in_the_same_split(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.randrange(1, 60)
    persons = [rng.choice(["", "a", "b", "c", "dd"]) for _ in range(num_rows)]
    days = [rng.choice([NO_NUMBER, *range(6)]) for _ in range(num_rows)]
    num_slices = [rng.randrange(3) for _ in range(num_rows)]
    cut = rng.randrange(num_rows + 1)
    splits = [range(cut), range(cut, num_rows)]

    def expected(row: int) -> int:
        (split,) = (span for span in splits if row in span)
        earlier = [
            (days[other], num_slices[other], -other)
            for other in split
            if persons[row] and persons[other] == persons[row] and NO_NUMBER < days[other] < days[row]
        ]
        return -max(earlier)[2] if earlier else NO_ROW

    found = previous_rows(np.array(persons, "S"), np.array(days, "<i4"), np.array(num_slices), splits)
    assert found.tolist() == [expected(row) for row in range(num_rows)]


def test_samples_that_no_study_describes_have_missing_values(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a") as writer:
        writer.write({"__key__": "a", "s000.b2nd": np.zeros((1, 3, 4), np.uint8)})
        writer.write({"__key__": "b", "report.txt": "No effusion."})
    dataset = Dataset.open(str(tmp_path / "a"))
    attach_facts(dataset)
    table, _ = open_studies(dataset)
    for name in table.column_names:
        missing = table.column(name).is_missing
        assert missing is not None
        assert missing.all(), name


def test_a_dataset_that_has_the_series_table_alone_is_completed(tmp_path: Path) -> None:
    dataset = Dataset.open(make_dataset(tmp_path / "a"))
    with pytest.raises(ConfigError, match="shardflow attach DATASET --facts"):
        open_studies(dataset)
    attach_facts(dataset)
    folder = tmp_path / "a" / StudiesManifest.folder(dataset.dataset_id)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    before = (tmp_path / "a" / SeriesManifest.folder(dataset.dataset_id) / "series.tbl").read_bytes()
    for path in folder.iterdir():
        path.unlink()
    assert attach_facts(dataset).num_shards_kept == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert (tmp_path / "a" / SeriesManifest.folder(dataset.dataset_id) / "series.tbl").read_bytes() == before
    assert attach_facts(dataset).num_shards_kept == len(dataset.manifest.shards)


def test_a_damaged_table_is_never_used(tmp_path: Path) -> None:
    dataset = Dataset.open(make_dataset(tmp_path / "a"))
    attach_facts(dataset)
    path = tmp_path / "a" / StudiesManifest.folder(dataset.dataset_id) / "studies.tbl"
    whole = path.read_bytes()
    for place in range(40, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FormatError):
            open_studies(dataset)[0].verify()
