"""The series table: what a study says is what it holds, shard by shard and merged, and damage is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset, ShardWriter
from shardflow.format.facts import making
from shardflow.format.facts.making import attach_facts, role_of, series_of_study
from shardflow.format.facts.series import (
    OPTIONAL,
    ROLE_MIXED,
    SeriesManifest,
    SeriesTable,
    encode_series,
    merge_series,
    open_series,
)
from shardflow.format.table import Table, encode_table
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
        ("volume", {"modality": "PT", "corrected_image": ["DECY", "ATTN"]}, "attenuation_corrected"),
        ("volume", {"modality": "PT", "corrected_image": ["DECY"]}, "not_attenuation_corrected"),
        ("volume", {"modality": "PT"}, "unknown"),
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


def test_facts_of_neighboring_shards_are_made_at_once_and_again_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of one sample takes as long as one of hundreds, so not each of 100,000 shards has its own."""
    dataset = make_case_dataset(tmp_path / "a", num_samples=10, samples_per_shard=1)
    folder = tmp_path / "a" / SeriesManifest.folder(dataset.dataset_id)
    before = (folder / "series.tbl").read_bytes()
    shutil.rmtree(tmp_path / "a" / "facts")
    monkeypatch.setattr(making, "_GROUP_SAMPLES", 4)

    def stop(done: int, num_shards: int) -> None:
        assert num_shards == 10
        if done == 9:  # the first shard of the third group
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attach_facts(dataset, num_threads=1, on_shard=stop)
    assert len(list(folder.glob("*.studies.tbl"))) == 3
    assert attach_facts(dataset).num_shards_kept == 10
    assert (folder / "series.tbl").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "series.tbl"]


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


_USABLE: dict[str, object] = {
    "axis": {"group": 1, "index": 2, "name": "time", "num": 9, "value": 4.5},
    "diffusion": {"b_value_s_mm2": 700.0, "direction_lps": [0.6, 0.8, 0.0]},
    "frame_time_ms": 33.3,
    "pet": {"decay_correction": "START", "injected_dose_bq": 3.7e8, "suvbw_factor": 2e-4},
    "technical": {"breast_implant_present": "NO", "exposure_inu_as": 9500.0, "view_position": "RMLO"},
    "timing": {"acquired_after_s": 12.0},
    "ultrasound_regions": [
        {"box_px": [0, 0, 900, 900], "pixel_spacing_mm": None, "spatial_format": "waveform"},
        {"box_px": [0, 0, 90, 90], "pixel_spacing_mm": [0.3, 0.2], "spatial_format": "2d"},
    ],
}


def _usable_series(**more: object) -> dict[str, object]:
    plain = {"num_slices": 3, "rows": 4, "columns": 4, "dtype": "int16", "codec": "b2nd", "modality": "MG"}
    return {**plain, **more}


def test_facts_that_make_values_usable_are_columns() -> None:
    plain = Table(memoryview(encode_series([series_of_study({"series": [_usable_series()]})])), name="t")
    assert not {*OPTIONAL} & {*plain.column_names}
    table = SeriesTable(plain)
    for name in OPTIONAL:  # an expression may name them
        assert name in table.column_names
        missing = table.column(name).is_missing
        assert missing is not None
        assert missing.all()
    full = encode_series([series_of_study({"series": [_usable_series(), _usable_series(**_USABLE)]})])
    table = SeriesTable(Table(memoryview(full), name="t"))
    bare, found = table.facts_of(0)
    assert not bare.keys() & {*OPTIONAL}
    assert {name: found[name] for name in OPTIONAL if name in found} == {
        "axis": "time",
        "axis_index": 2,
        "axis_num": 9,
        "axis_value": 4.5,
        "acquired_after_s": 12.0,
        "b_value_s_mm2": 700.0,
        "decay_correction": "START",
        "exposure_mas": 9.5,
        "frame_time_ms": 33.3,
        "gradient_x": 0.6,
        "gradient_y": 0.8,
        "gradient_z": 0.0,
        "group": 1,
        "has_implant": False,
        "injected_dose_bq": 3.7e8,
        "num_regions": 2,
        "region_column_spacing_mm": 0.2,
        "region_row_spacing_mm": 0.3,
        "suvbw_factor": 2e-4,
        "view": "MLO",
    }
    assert found["role"] == "right_mlo"


def test_optional_columns_survive_a_merge_and_leave_with_their_series() -> None:
    studies = [{"series": [_usable_series(**_USABLE)]}, {"series": [_usable_series()]}]
    whole = encode_series(map(series_of_study, studies))
    parts = [encode_series([series_of_study(one)]) for one in studies]
    tables = [SeriesTable(Table(memoryview(part), name="t")) for part in parts]
    assert merge_series((table, np.array([0])) for table in tables) == whole
    table = SeriesTable(Table(memoryview(whole), name="t"))
    assert merge_series([(table, np.array([1]))]) == parts[1]


def test_a_table_of_an_earlier_revision_is_read_and_made_again(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a")
    folder = tmp_path / "a" / SeriesManifest.folder(dataset.dataset_id)
    new = (folder / "series.tbl").read_bytes()
    table = Table(memoryview(new), name="t")
    meta = {name: value for name, value in table.meta.items() if name != "revision"}
    names = [name for name in table.column_names if name not in OPTIONAL]
    former = encode_table({name: table.column(name) for name in names}, meta)
    (folder / "series.tbl").write_bytes(former)
    manifest = SeriesManifest.of(dataset.dataset_id, former)
    (folder / "manifest.json").write_bytes(manifest.encode())
    opened, _ = open_series(Dataset.open(tmp_path / "a"))
    assert opened.revision == 1
    missing = opened.column("suvbw_factor").is_missing
    assert missing is not None
    assert missing.all()
    assert attach_facts(dataset).num_shards_kept == 0
    assert (folder / "series.tbl").read_bytes() == new
