"""Statistics of fields: equal to NumPy over all pixels, inside of masks too, for any threads and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.codecs import encode_array
from shardflow.format.facts.series import open_series
from shardflow.format.keys import mask_field, mask_prefix
from shardflow.loading import LoaderConfig, select
from shardflow.loading.statistics import PERCENTILES, Histogram, field_statistics
from tests.factories import MadeSample, make_dataset
from tests.field_cases import case_series, make_case, pixels_of

NUM = 14
CT = "modality == 'CT' and kind == 'volume'"
FIELDS = """
[fields.ct]
type = "slices"
series = "modality == 'CT' and kind == 'volume'"
missing = "drop"
[fields.organ]
type = "mask"
like = "ct"
missing = "pad"
"""


def region_of(number: int) -> NDArray[np.uint8]:
    """The first CT volume of a study has a region; that of every second study."""
    generator = np.random.Generator(np.random.PCG64([number, 3]))
    return generator.integers(0, 2, case_series(number)[0].shape, np.uint8)


def make_annotated(number: int, **_: Any) -> MadeSample:
    extra: dict[str, bytes] = {}
    if number % 8 == 1:
        mask = region_of(number)
        entry = {
            "roi": 0,
            "series": 0,
            "label": "liver",
            "code": None,
            "kind": "contour",
            "source": "rtstruct",
            "slices": [{"slice": one, "box_px": [0, 0, 16, 16], "fraction": 0.5} for one in range(len(mask))],
            "mask": mask_prefix(0, 0),
            "polygons": None,
            "flags": [],
        }
        extra["annotations.json"] = json.dumps(
            {"format_version": 1, "rois": [entry], "dangling": []}
        ).encode()
        extra |= {mask_field(0, 0, one, "b2nd"): encode_array("b2nd", mask[one]) for one in range(len(mask))}
    return make_case(number, extra=extra)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("stats") / "data"
    url = make_dataset(folder, num_samples=NUM, samples_per_shard=4, make=make_annotated, facts=True)
    return Dataset.open(url)


def check(found: Any, values: NDArray[Any]) -> None:
    assert found["num_pixels"] == values.size
    assert found["mean"] == pytest.approx(values.mean(dtype=np.float64), rel=1e-12)
    assert found["std"] == pytest.approx(values.std(dtype=np.float64), rel=1e-12)
    assert (found["min"], found["max"]) == (values.min(), values.max())
    expected = np.percentile(values.astype(np.float64), PERCENTILES)
    np.testing.assert_allclose(list(found["percentiles"].values()), expected, rtol=1e-12)


def volumes() -> list[int]:
    return [number for number in range(NUM) if number % 4 == 1]


def test_numbers_are_those_of_all_pixels_and_of_the_foreground(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "fields.toml", tmp_path / "found.json"
    file.write_text(FIELDS, encoding="utf-8")
    arguments = ["stats", dataset.store.url, "--fields", str(file), "-o", str(output)]
    assert cli.main([*arguments, "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(output.read_text())
    assert cli.main([*arguments, "--threads", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert (found["num_samples"], found["num_bad"]) == (len(volumes()), 0)
    ct = found["fields"]["ct"]
    # The volume that was acquired first is the second one of each study.
    check(ct["channels"][0], np.concatenate([pixels_of(number, 1).ravel() for number in volumes()]))
    assert ct["units"] == {"HU": 2 * len(volumes())}
    assert ct["num_series"] == 2 * len(volumes())
    assert ct["series"]["num_slices"]["percentiles"]["50"] == np.median(
        [case.shape[0] for number in volumes() for case in case_series(number)[:2]]
    )
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "ct (HU), 4 samples" in shown
    assert "foreground is that of 2 samples with a mask" in shown


def test_the_foreground_is_that_of_the_mask(dataset: Dataset) -> None:
    fields = {
        "ct": sf.Slices(series="num_slices >= 6 and kind == 'volume'", missing="drop"),
        "organ": sf.Mask(like="ct", missing="pad"),
    }
    one = field_statistics(select(dataset, "train"), fields)["fields"]["ct"]
    check(one["channels"][0], np.concatenate([pixels_of(number, 0).ravel() for number in volumes()]))
    marked = [number for number in volumes() if number % 8 == 1]
    inside = [pixels_of(number, 0)[region_of(number) == 1] for number in marked]
    assert one["foreground"]["num_samples"] == len(marked)
    check(one["foreground"]["channels"][0], np.concatenate(inside))


def test_spacings_are_percentiles_of_the_table(tmp_path: Path) -> None:
    made = Dataset.open(make_dataset(tmp_path / "data", num_samples=12, slices=(2, 6), facts=True))
    fields = {"image": sf.Slices(missing="pad")}
    one = field_statistics(select(made, "train"), fields, percentiles=(10, 50))["fields"]["image"]
    table, _ = open_series(made)
    for name in ("row_spacing_mm", "slice_spacing_mm", "rows"):
        values = np.asarray(table.array(name), np.float64)
        known = values[np.isfinite(values)]
        assert one["series"][name]["num_missing"] == len(values) - len(known)
        found = list(one["series"][name]["percentiles"].values())
        assert found == ([None, None] if not len(known) else np.percentile(known, [10, 50]).tolist())


def test_of_volumes_all_stored_voxels_count(dataset: Dataset) -> None:
    volume = sf.Volume(series=CT, roi_size=(2, 3, 4), windows=["lung"], missing="drop")
    slices = sf.Slices(series=CT, missing="drop")
    organ = sf.Mask(like="ct", missing="pad")
    found = [
        field_statistics(select(dataset, "train"), {"ct": one, "organ": organ}) for one in (volume, slices)
    ]
    assert found[0] == found[1]


def test_images_of_several_sizes_and_color_and_units_are_counted_by_channel(dataset: Dataset) -> None:
    fields = {"views": sf.Image(series="modality in ('CR', 'DX')", num_images="all", missing="drop")}
    found = field_statistics(select(dataset, "train"), fields, config=LoaderConfig(num_threads=2))
    pixels = [
        pixels_of(number, series).ravel().astype(np.int64)
        for number in range(NUM)
        for series, case in enumerate(case_series(number))
        if case.modality in ("CR", "DX")
    ]
    check(found["fields"]["views"]["channels"][0], np.concatenate(pixels))


def test_letterboxes_count_for_nothing(dataset: Dataset) -> None:
    boxed = sf.Image(series="modality == 'CR'", size=(40, 80), fit="letterbox", missing="drop")
    one = field_statistics(select(dataset, "train"), {"views": boxed})["fields"]["views"]["channels"][0]
    with sf.Loader(
        dataset,
        split="train",
        seed=1,
        batch=sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1),
        fields={"views": boxed},
    ) as loader:
        values = []
        for batch in loader:
            row, column, rows, columns = batch["views_box"][0].tolist()
            values.append(batch["views"][0, 0, row : row + rows, column : column + columns].ravel())
    check(one, np.concatenate(values))


@pytest.mark.parametrize(
    ("fields", "options", "sentence"),
    [
        ({"report": sf.Text(missing="pad")}, {}, "No field of the file delivers pictures"),
        ({"a": sf.Image(size=(8, 8), tiles=4, missing="pad")}, {}, "show pixels twice"),
        ({"a": sf.Image(missing="pad")}, {"percentiles": (101,)}, "Percentiles are from 0 to 100"),
    ],
)
def test_slips_are_one_sentence(dataset: Dataset, fields: Any, options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        field_statistics(select(dataset, "train"), fields, **options)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["u1", "i2", "u2", "?", "f4", "i4", "f8"]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 5000),
    st.integers(1, 4),
)
def test_a_histogram_equals_numpy(dtype: str, seed: int, num: int, num_blocks: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    kind = np.dtype(dtype)
    values: NDArray[Any]
    if kind.kind == "f":
        values = (generator.normal(scale=10.0 ** generator.integers(-3, 6), size=num)).astype(kind)
        values[generator.random(num) < 0.1] = 0
    elif kind.kind == "b":
        values = generator.random(num) < 0.3
    else:
        limits = np.iinfo(kind)
        values = generator.integers(limits.min, limits.max, num, dtype=kind, endpoint=True)
    histogram = Histogram(kind)
    for part in np.array_split(values, num_blocks):
        histogram.add(part)
    if kind.kind == "f":
        histogram.add(np.array([np.nan, np.inf], kind))
        assert histogram.num_not_finite == 2
    found = histogram.describe(PERCENTILES)
    wide = values.astype(np.float64)
    assert found["num_pixels"] == num
    assert (found["min"], found["max"]) == (wide.min(), wide.max())
    assert found["mean"] == pytest.approx(wide.mean(), rel=1e-9, abs=1e-12 * np.abs(wide).max())
    assert found["std"] == pytest.approx(wide.std(), rel=1e-9, abs=1e-9 * np.abs(wide).max())
    expected = np.percentile(wide, PERCENTILES)
    percentiles = np.array(list(found["percentiles"].values()))
    if histogram.is_exact:
        np.testing.assert_allclose(percentiles, expected, rtol=1e-12)
        return
    # Both neighbors that a percentile lies between are right to one part in 4096.
    ranks = np.array(PERCENTILES) / 100 * (num - 1)
    ordered = np.sort(wide)
    size = np.maximum(
        np.abs(ordered[np.floor(ranks).astype(int)]), np.abs(ordered[np.ceil(ranks).astype(int)])
    )
    assert (np.abs(percentiles - expected) <= size / 4096 + 1e-30).all()


def test_nothing_has_no_numbers() -> None:
    found = Histogram(np.dtype("i2")).describe((50,))
    assert found["num_pixels"] == 0
    assert found["mean"] is None
    assert found["percentiles"] == {"50": None}
