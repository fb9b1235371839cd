"""The series table: what a study says is what it holds, shard by shard and merged, and damage is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset, ShardWriter
from shardflow.format.facts import attach_facts, role_of, series_of_study
from shardflow.format.series import ROLE_MIXED, SeriesManifest, encode_series, open_series
from tests.factories import make_dataset
from tests.field_cases import case_series, make_case, make_case_dataset

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("kind", "technical", "role"),
    [
        ("images", {"modality": "DX", "view_position": "PA"}, "frontal"),
        ("images", {"modality": "CR", "view_position": "LL"}, "lateral"),
        ("images", {"modality": "CR", "patient_orientation": ["L", "F"]}, "frontal"),
        ("images", {"modality": "CR", "patient_orientation": ["A", "F"]}, "lateral"),
        ("images", {"modality": "CR", "patient_orientation": ["L"]}, "unknown"),
        ("images", {"modality": "DX"}, "unknown"),
        ("images", {"modality": "MG", "view_position": "MLO", "image_laterality": "L"}, "left_mlo"),
        ("images", {"modality": "MG", "view_position": "RCC"}, "right_cc"),
        ("images", {"modality": "MG", "view_position": "CC"}, "unknown"),
        ("volume", {"modality": "CT", "has_contrast": True}, "contrast"),
        ("volume", {"modality": "CT", "has_contrast": False}, "non_contrast"),
        ("volume", {"modality": "CT"}, "unknown"),
        ("localizer", {"modality": "CT"}, "localizer"),
        ("secondary", {"modality": "OT"}, "secondary"),
        ("volume", {"modality": "MR", "image_type": ["DERIVED", "ADC"]}, "adc"),
        ("volume", {"modality": "MR", "repetition_time": 500.0, "echo_time": 10.0}, "t1"),
        (
            "volume",
            {"modality": "MR", "repetition_time": 500, "echo_time": 10, "has_contrast": True},
            "t1_contrast",
        ),
        (
            "volume",
            {"modality": "MR", "scanning_sequence": ["SE"], "repetition_time": 4000, "echo_time": 90},
            "t2",
        ),
        (
            "volume",
            {
                "modality": "MR",
                "scanning_sequence": ["IR"],
                "repetition_time": 9000,
                "echo_time": 120,
                "inversion_time": 2500,
            },
            "flair",
        ),
        ("volume", {"modality": "MR"}, "unknown"),
        ("frames", {"modality": "US"}, "unknown"),
    ],
)
def test_a_role_follows_from_technical_attributes(kind: str, technical: dict[str, object], role: str) -> None:
    assert role_of(kind, technical) == role


def test_the_order_of_acquisition_never_depends_on_surrogates() -> None:
    """Series are stored in an order that a secret key decides; source numbers order them here."""

    def study(order: list[int]) -> dict[str, object]:
        numbers = [7, 2, None, 4]
        series = [
            {"num_slices": 3, "rows": 4, "columns": 4, "dtype": "int16", "codec": "b2nd", "kind": "volume"}
            | {"series_number": numbers[place], "instance_numbers": [1]}
            for place in order
        ]
        return {"series": series}

    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        found = series_of_study(study(order))
        ranks = {order[place]: facts.counts["acquisition_order"] for place, facts in enumerate(found)}
        assert ranks == {1: 0, 3: 1, 0: 2, 2: 3}


def test_a_table_holds_what_the_studies_say(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a")
    table, _ = open_series(dataset)
    starts = table.first_series()
    assert len(starts) == dataset.samples.num_samples + 1
    for row in range(dataset.samples.num_samples):
        cases = case_series(row)
        rows = np.arange(starts[row], starts[row + 1])
        shapes = np.stack([table.array(name)[rows] for name in ("num_slices", "rows", "columns")], axis=1)
        assert shapes.tolist() == [list(case.shape) for case in cases]
        names = table.vocabulary("modality")
        assert [names[code] for code in table.array("modality")[rows]] == [case.modality for case in cases]
        assert table.column("flags.single_slice").values[rows].tolist() == [
            case.shape[0] == 1 for case in cases
        ]
    roles, first_image = table.vocabulary("role"), table.first_image()
    mixed = np.flatnonzero(table.array("role") == roles.index(ROLE_MIXED))
    assert len(mixed) == sum(row % 4 == 3 for row in range(dataset.samples.num_samples))
    image_roles = [table.vocabulary("image_role")[code] for code in table.array("image_role")]
    assert image_roles == ["frontal", "lateral"] * len(mixed)
    assert (np.diff(first_image)[mixed] == 2).all()


def test_the_merged_table_is_that_of_all_samples_at_once(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a", samples_per_shard=3)
    studies = [
        json.loads(dataset.read_fields(row, ["study.json"])["study.json"])
        for row in range(dataset.samples.num_samples)
    ]
    stored = dataset.store.read(f"{SeriesManifest.folder(dataset.dataset_id)}/series.tbl")
    assert stored == encode_series(series_of_study(study) for study in studies)


def test_the_series_of_known_shards_are_kept_and_damaged_ones_made_again(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a")
    num_shards = len(dataset.manifest.shards)
    assert attach_facts(dataset).num_shards_kept == num_shards
    path = tmp_path / "a" / SeriesManifest.folder(dataset.dataset_id) / "series.tbl"
    before = path.read_bytes()
    path.write_bytes(before[:-3])
    assert attach_facts(dataset).num_shards_kept == 0
    assert path.read_bytes() == before


def test_a_dataset_without_a_table_names_the_command(tmp_path: Path) -> None:
    dataset = Dataset.open(make_dataset(tmp_path / "a", make=make_case))
    with pytest.raises(ConfigError, match="shardflow attach DATASET --facts"):
        open_series(dataset)


def test_a_damaged_table_is_never_used(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a")
    folder = tmp_path / "a" / SeriesManifest.folder(dataset.dataset_id)
    table, manifest = folder / "series.tbl", folder / "manifest.json"
    whole = table.read_bytes()
    for place in range(40, len(whole), len(whole) // 60):
        table.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FormatError):
            _read_everything(dataset)
    table.write_bytes(whole[:-1])
    with pytest.raises(FormatError):
        open_series(dataset)
    table.write_bytes(whole)
    other = make_case_dataset(tmp_path / "b", num_samples=3)
    manifest.write_bytes(
        (tmp_path / "b" / SeriesManifest.folder(other.dataset_id) / "manifest.json").read_bytes()
    )
    with pytest.raises(FormatError, match="attach"):
        open_series(dataset)


def _read_everything(dataset: Dataset) -> None:
    table, _ = open_series(dataset)
    for name in (*table.column_names, "affine_lps", "flags", "first_series", "first_image", "image_role"):
        if not name.startswith("flags."):
            table.array(name)


def test_slices_that_no_study_describes_state_their_own_facts(tmp_path: Path) -> None:
    pixels = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    with ShardWriter(tmp_path / "a") as writer:
        writer.write({"__key__": "a", "s000.b2nd": pixels, "s001.npy": np.zeros((1, 5, 6, 3), np.uint8)})
        view = {"modality": "DX", "technical": {"view_position": "LL"}}
        writer.write({"__key__": "b", "s000.b2nd": pixels[:1], "study.json": {"series": [view]}})
        writer.write({"__key__": "c", "report.txt": "No effusion."})
    dataset = Dataset.open(str(tmp_path / "a"))
    attach_facts(dataset)
    table, _ = open_series(dataset)
    assert np.diff(table.first_series()).tolist() == [2, 1, 0]
    rows = {
        name: table.array(name).tolist()
        for name in ("series", "num_slices", "rows", "columns", "channels", "acquisition_order")
    }
    assert rows == {
        "series": [0, 1, 0],
        "num_slices": [2, 1, 1],
        "rows": [3, 5, 3],
        "columns": [4, 6, 4],
        "channels": [1, 3, 1],
        "acquisition_order": [0, 1, 0],
    }
    named = {
        name: [table.vocabulary(name)[code] for code in table.array(name).tolist()]
        for name in ("dtype", "codec", "role", "modality")
    }
    assert named == {
        "dtype": ["uint16", "uint8", "uint16"],
        "codec": ["b2nd", "npy", "b2nd"],
        "role": ["unknown", "unknown", "lateral"],
        "modality": ["", "", "DX"],
    }


def test_a_study_that_describes_fewer_series_than_are_stored_is_refused(tmp_path: Path) -> None:
    pixels = np.zeros((1, 3, 4), np.uint8)
    with ShardWriter(tmp_path / "a") as writer:
        writer.write(
            {"__key__": "a", "s000.b2nd": pixels, "s001.b2nd": pixels, "study.json": {"series": [{}]}}
        )
    with pytest.raises(FormatError, match="cannot be read as a study"):
        attach_facts(Dataset.open(str(tmp_path / "a")))
