"""Fields of columns: labels, facts and embeddings of attached tables in batches, of every unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.registry import read_fields
from shardflow.fields.units import open_unit
from shardflow.format import Dataset
from shardflow.format.facts.columns import num_unit_rows
from shardflow.format.tables import StoredColumn, TableUnit, write_table
from shardflow.loading import Loader
from shardflow.loading.rows.blend_file import open_blend
from shardflow.storage import LocalStore
from tests import forks
from tests.field_cases import CaseSeries, case_series, make_case_dataset, pixels_of
from tests.integration.loader_support import check_everywhere, number_of, open_loader, slots_of

SPEC = sf.BatchSpec(micro_batch_size=4, micro_batches_per_step=4, tail="mask")
CLASSES = ("absent", "größer", "present")


def attach(
    dataset: Dataset, name: str, unit: TableUnit = "study", *, classes: tuple[str, ...] = CLASSES
) -> None:
    """Write a table: values of row r follow from r; rows 2, 5, 8, ... have none."""
    rows = np.arange(num_unit_rows(dataset, unit))
    missing, all_there = rows % 3 == 2, np.zeros(len(rows), bool)
    vectors = np.stack([rows, -rows], axis=1).astype("f4")
    columns = [
        StoredColumn(name="edema", kind="bool", values=rows % 2 == 0, is_missing=missing),
        StoredColumn(name="count", kind="int", values=rows * 10, is_missing=missing),
        StoredColumn(name="score", kind="float", values=rows / 8, is_missing=all_there),
        StoredColumn(name="label", kind="category", values=rows % 3, is_missing=missing, names=classes),
        StoredColumn(name="vector", kind="floats", values=vectors, is_missing=missing),
        StoredColumn(name="word", kind="string", values=rows % 3, is_missing=missing, names=classes),
    ]
    write_table(LocalStore(dataset.store.url), dataset.dataset_id, name, unit, columns)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    made = make_case_dataset(tmp_path_factory.mktemp("columns") / "data")
    for unit in ("study", "series", "image"):
        attach(made, f"of_{unit}", unit)
    return Dataset.open(made.store.url)


def _images(dataset: Dataset) -> dict[tuple[int, int, int], int]:
    """Return the row in a table of images of each image: study, series, position."""
    every = [
        (study, series, image)
        for study in range(dataset.studies.num_samples)
        for series, case in enumerate(case_series(study))
        for image in range(case.shape[0])
    ]
    return {place: row for row, place in enumerate(every)}


@pytest.mark.parametrize(
    ("text", "is_chosen"),
    [
        ("of_image.score < 4", lambda row, case, image: row < 32),
        (
            "of_image.count > 100 and modality == 'CT'",
            lambda row, case, image: row % 3 != 2 and row > 10 and case.modality == "CT",
        ),
        (
            "of_image.edema or role == 'lateral'",
            lambda row, case, image: (row % 3 != 2 and row % 2 == 0) or _view(case, image) == "LL",
        ),
        ("of_image.score >= 0 and of_study.score < 0.5", lambda row, case, image: None),
    ],
)
def test_where_selects_images_and_series_by_columns_of_images(
    dataset: Dataset, text: str, is_chosen: Any
) -> None:
    rows = _images(dataset)
    wanted = set()
    for (study, series, image), row in rows.items():
        case = case_series(study)[series]
        chosen = study < 4 if is_chosen(row, case, image) is None else is_chosen(row, case, image)
        if chosen:
            wanted.add((study, series, image))
    assert 0 < len(wanted) < len(rows)
    fields = {"image": sf.Image(series="series >= 0"), "score": sf.Column("of_image.score")}
    seen = set()
    with loader(dataset, fields, unit="image", where=text) as batches:
        for batch in batches:
            for slot, one in enumerate(batch.info.units):
                if one is None or one.series is None or one.image is None:
                    continue
                place = (number_of(one.study_key), one.series, one.image)
                seen.add(place)
                case = case_series(place[0])[place[1]]
                assert batch.modalities[slot] == case.modality
                assert batch["score"][slot] == rows[place] / 8
                assert np.array_equal(np.squeeze(batch["image"][slot]), pixels_of(*place[:2])[place[2]])
        found = batches.dataset
        key = found.samples.sample_key(found.samples.num_samples - 1)
        assert np.array_equal(found.sample(key, fields)["score"], rows[_place_of(key)] / 8)
    assert seen == wanted
    if "of_study" in text or "role" in text:
        return
    inside = f"any({text.partition(' and ')[0]})" + "".join(text.partition(" and ")[1:])
    with loader(dataset, {}, unit="series", where=inside) as batches:
        found_series = {
            (number_of(u.study_key), u.series) for batch in batches for u in batch.info.units if u
        }
    assert found_series == {place[:2] for place in wanted}
    quoted = text.replace("modality", "series.modality")
    with loader(dataset, {}, where=f"any({quoted})") as batches:
        studies = {number_of(key) for batch in batches for key in batch.info.sample_keys if key}
    assert studies == {place[0] for place in wanted}


def _place_of(key: str) -> tuple[int, int, int]:
    study, _, rest = key.partition("s")
    series, _, image = rest.partition("i")
    return number_of(study), int(series), int(image)


def _view(case: CaseSeries, image: int) -> str:
    views = case.images or [case.technical]
    return str(views[image].get("view_position", "")) if image < len(views) else ""


def test_images_chosen_by_columns_have_an_identity_of_their_own(dataset: Dataset) -> None:
    def digest(where: str) -> str:
        return open_unit(dataset, "image", where).dataset_id

    assert digest("of_image.score >= 0") == digest("series >= 0")
    assert digest("of_image.score >= 0 and modality == 'CR'") == digest("modality == 'CR'")
    parts = [digest(f"of_image.score {sign} 4") for sign in ("<", "<=", ">=")]
    assert len({*parts, digest("series >= 0")}) == 4
    assert digest("not of_image.score >= 4") == parts[0]
    with pytest.raises(ConfigError, match=r"any\(of_image.score"):
        open_unit(dataset, "series", "of_image.score < 4")
    with pytest.raises(ConfigError, match="selects no series with images"):
        open_unit(dataset, "image", "of_image.score < 0")


FIELDS: dict[str, sf.Field] = {
    "edema": sf.Column("of_study.edema", missing="pad"),
    "count": sf.Column("of_study.count", missing="pad"),
    "score": sf.Column("of_study.score"),
    "label": sf.Column("of_study.label", missing="pad"),
    "vector": sf.Column("of_study.vector", missing="pad"),
    "numbers": sf.Columns(("of_study.edema", "of_study.s*", "of_study.count"), missing="pad"),
}


def loader(dataset: Dataset, fields: Any = None, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, FIELDS if fields is None else fields, **settings)


def test_values_masks_and_classes(dataset: Dataset) -> None:
    seen = 0
    with loader(dataset) as batches:
        for batch in batches:
            assert batch["edema"].dtype == bool
            assert batch["count"].dtype == batch["label"].dtype == np.int64
            assert batch["score"].dtype == batch["vector"].dtype == batch["numbers"].dtype == np.float32
            assert batch["vector"].shape == (4, 2)
            assert batch.info.classes == {"label": CLASSES}
            assert batch.info.columns == {"numbers": ("of_study.edema", "of_study.score", "of_study.count")}
            for slot, number in slots_of(batch):
                row, there = dataset.studies.find(batch.info.sample_keys[slot] or ""), number % 3 != 2
                seen += 1
                assert row == number
                for name in ("edema", "count", "label", "vector"):
                    assert batch[f"{name}_mask"][slot] == there
                assert batch["edema"][slot] == (there and row % 2 == 0)
                assert batch["count"][slot] == (row * 10 if there else 0)
                assert batch["score"][slot] == row / 8
                assert batch["label"][slot] == (row % 3 if there else -1)
                assert batch["vector"][slot].tolist() == ([row, -row] if there else [0, 0])
                assert batch["numbers_mask"][slot].tolist() == [there, 1, there]
                assert batch["numbers"][slot].tolist() == [there and row % 2 == 0, row / 8, row * 10 * there]
            padding = [slot for slot, key in enumerate(batch.info.sample_keys) if key is None]
            assert not batch["edema_mask"][padding].any()
            assert (batch["label"][padding] == -1).all()
    assert seen == dataset.studies.num_samples


def test_a_wider_dtype_holds_the_same_values(dataset: Dataset) -> None:
    names = ("of_study.edema", "of_study.count")
    fields = {
        "plain": sf.Columns(names, missing="pad"),
        "float": sf.Columns(names, missing="pad", dtype="float32"),
        "count": sf.Column("of_study.edema", missing="pad", dtype="int64"),
        "vector": sf.Column("of_study.vector", missing="pad", dtype="float32"),
        "label": sf.Column("of_study.label", missing="pad", dtype="int64"),
    }
    with loader(dataset, fields) as batches:
        for batch in batches:
            assert batch["plain"].dtype == batch["count"].dtype == np.int64
            assert batch["float"].dtype == batch["vector"].dtype == np.float32
            assert batch["label"].dtype == np.int64
            assert (batch["label"][batch["label_mask"] == 0] == -1).all()
            np.testing.assert_array_equal(batch["float"], batch["plain"])
            np.testing.assert_array_equal(batch["count"], batch["plain"][:, 0])


def test_single_samples_are_read_once_a_loader_is_imported(dataset: Dataset) -> None:
    code = f"""
from shardflow.errors import ShardflowError
from shardflow.format import Dataset
dataset = Dataset.open({dataset.store.url!r})
try:
    dataset[0]
except ShardflowError as error:
    exec(str(error).rpartition("or ")[2].rstrip("."))  # what it says helps
first = dataset[0]
assert len(first)
"""
    loader_alone = """
from shardflow.loading import Loader
from shardflow.format.dataset import _SAMPLE_READERS
assert _SAMPLE_READERS
"""
    for one in (code, loader_alone):
        done = forks.run(["-c", one], is_fresh=True)
        assert done.returncode == 0, done.stderr


def test_batches_are_equal_on_any_number_of_ranks_and_after_a_resume(dataset: Dataset) -> None:
    fields = {**FIELDS, "image": sf.Image(series="kind == 'images'", size=(8, 8), missing="pad")}
    check_everywhere(lambda **settings: loader(dataset, fields, **settings))


@pytest.mark.parametrize("unit", ["series", "image"])
def test_values_of_a_study_repeat_for_its_series_and_images(dataset: Dataset, unit: str) -> None:
    fields = {
        "study": sf.Column("of_study.score"),
        "series": sf.Column("of_series.score"),
        **({"image": sf.Column("of_image.score")} if unit == "image" else {}),
    }
    seen: dict[str, set[float]] = {name: set() for name in fields}
    with loader(dataset, fields, unit=unit) as batches:
        for batch in batches:
            for slot, place in enumerate(batch.info.units):
                if place is not None:
                    assert batch["study"][slot] * 8 == number_of(place.study_key)
                    for name in fields:
                        seen[name].add(float(batch[name][slot]))
    assert len(seen["study"]) == dataset.studies.num_samples
    assert len(seen["series"]) > len(seen["study"])
    if unit == "image":
        assert len(seen["image"]) > len(seen["series"])


def test_samples_without_a_value_are_dropped_or_refused(dataset: Dataset) -> None:
    def keys(fields: Any) -> set[int]:
        with loader(dataset, fields) as batches:
            return {number for batch in batches for _, number in slots_of(batch)}

    everything = set(range(dataset.studies.num_samples))
    assert keys({"a": sf.Column("of_study.edema", missing="drop")}) == {n for n in everything if n % 3 != 2}
    assert keys({"a": sf.Columns("of_study.[!lvw]*", missing="drop")}) == everything
    with pytest.raises(ConfigError, match=r"4 of 14 samples have no value of of_study\.edema.*missing='pad'"):
        loader(dataset, {"a": sf.Column("of_study.edema")})


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        (sf.Column("of_study.edem", missing="pad"), r"There is no column 'of_study\.edem'; did you mean"),
        (sf.Column("labels", missing="pad"), "There is no column 'labels'"),
        (sf.Column("of_study.word", missing="pad"), "too many different texts for classes"),
        (sf.Column("of_series.score"), "a value for each series, and samples are of unit 'study'"),
        (sf.Columns("of_study.w*", missing="pad"), r"are of_study\.word \(string\), which no array holds"),
        (sf.Columns("of_study.v*", missing="pad"), "use sf.Column for each"),
        (sf.Columns(("of_study.label", "of_study.score"), missing="pad"), "category, float"),
        (sf.Columns(("of_study.vector",), missing="pad"), "hold lists"),
        (sf.Column("of_study.score", dtype="int64"), "kind float, which dtype='int64' does not.*'float32'"),
        (sf.Column("of_study.label", missing="pad", dtype="float32"), "kind category.*'int64', or leave"),
    ],
)
def test_a_slip_is_one_sentence_before_step_0(dataset: Dataset, field: sf.Field, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loader(dataset, {"a": field})


def test_a_wildcard_takes_what_an_array_holds_and_names_the_rest(
    dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    def found(*patterns: str) -> tuple[str, ...]:
        with loader(dataset, {"a": sf.Columns(patterns, missing="pad")}) as batches:
            return tuple(next(iter(batches)).info.columns["a"])

    numbers = ("of_study.edema", "of_study.count", "of_study.score")
    assert found("of_study.*") == numbers
    assert "of_study.label (category), of_study.vector (floats), of_study.word (string)" in caplog.text
    caplog.clear()
    assert found("of_study.l*") == ("of_study.label",)
    assert found("of_study.label", "of_study.[lw]*") == ("of_study.label",)
    assert "leaves out of_study.word (string)" in caplog.text
    facts = found("facts.*")
    assert "facts.num_slices" in facts
    assert "facts.patient_key" not in facts
    assert "facts.patient_key (string)" in caplog.text


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="column is the name of a column"):
        sf.Column("")
    with pytest.raises(ConfigError, match="columns names no column"):
        sf.Columns(())
    with pytest.raises(ConfigError, match="dtype is one of None, 'bool', 'int64', 'float32', got 'float64'"):
        sf.Columns("chexpert.*", dtype="float64")


def test_fields_files_name_columns(dataset: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "fields.toml"
    file.write_text(
        '[fields.score]\ntype = "column"\ncolumn = "of_study.score"\n'
        '[fields.labels]\ntype = "columns"\ncolumns = ["of_study.edema"]\nmissing = "pad"\n'
    )
    fields = read_fields(file)
    assert fields == {
        "score": sf.Column("of_study.score"),
        "labels": sf.Columns("of_study.edema", missing="pad"),
    }
    assert dataset.sample(4, fields)["score"] == 0.5


def test_a_newer_table_changes_the_content_and_a_resume_reads_its_own(tmp_path: Path) -> None:
    made = make_case_dataset(tmp_path / "data")
    attach(made, "labels")
    fields = {"label": sf.Column("labels.label", missing="pad")}
    with loader(Dataset.open(made.store.url), fields) as first:
        lock, state, content = first.lock(), first.state_dict(), first.lock()["content_id"]
        before = [batch["label"].tolist() for batch in first]
    attach(made, "labels", classes=("a", "b", "c"))
    rows = np.arange(made.studies.num_samples)
    column = StoredColumn(
        name="label", kind="category", values=rows * 0, is_missing=rows < 0, names=("only",)
    )
    write_table(LocalStore(made.store.url), made.dataset_id, "labels", "study", [column])
    newest = Dataset.open(made.store.url)
    with loader(newest, fields) as other:
        assert other.lock()["content_id"] != content
        assert [batch["label"].tolist() for batch in other] != before
    with loader(newest, fields, lock=lock) as resumed:
        assert resumed.lock() == lock
        assert resumed.lock()["content_id"] == content
        resumed.load_state_dict(state)
        assert [batch["label"].tolist() for batch in resumed] == before


def test_components_of_a_blend_share_classes(tmp_path: Path) -> None:
    for name, classes in (("a", ("left", "right", "x")), ("b", ("center", "left", "right"))):
        made = make_case_dataset(tmp_path / name)
        attach(made, "labels", classes=classes)
    blend = tmp_path / "blend.toml"
    blend.write_text("".join(f'[[component]]\ndataset = "{name}"\n' for name in ("a", "b")))
    names = {0: ("left", "right", "x"), 1: ("center", "left", "right")}
    with open_loader(open_blend(blend), SPEC, {"label": sf.Column("labels.label", missing="pad")}) as batches:
        for batch in batches:
            assert batch.info.classes == {"label": ("center", "left", "right", "x")}
            for slot, number in slots_of(batch):
                component = batch.components[slot]
                found = batch["label"][slot]
                expected = names[component][number % 3] if number % 3 != 2 else None
                assert (batch.info.classes["label"][found] if found >= 0 else None) == expected


def _renamed(sample: dict[str, Any]) -> dict[str, Any]:
    return {"target": sample["label"], "both": sample["numbers"]}


@pytest.mark.parametrize("execution", ["threads", "process"])
def test_names_of_classes_and_columns_survive_a_transform(dataset: Dataset, execution: str) -> None:
    with loader(dataset, transform=_renamed, execution=execution) as batches:
        for batch in batches:
            assert {*batch} == {"target", "both"}
            assert batch.info.classes == {"label": CLASSES}
            assert batch.info.columns == {"numbers": ("of_study.edema", "of_study.score", "of_study.count")}
