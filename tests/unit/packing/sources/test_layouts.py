"""Layouts without packing: settings, placements, reports; each kind has a recipe and a row on its page."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardflow.config import load_config
from shardflow.errors import ConfigError
from shardflow.format.reasons import Reason
from shardflow.packing import PackConfig
from shardflow.packing.config import InputsConfig
from shardflow.packing.sources.layouts.base import (
    LAYOUTS,
    LAYOUTS_GROUP,
    Layout,
    LayoutConfig,
    PlacedLayout,
    open_layout,
)
from shardflow.packing.sources.placement import DiscoveredFile, ImageForm, Placement
from shardflow.packing.sources.reports import BrokenReport
from tests.layout_trees import write_table

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[4]
# Those of studies; corpora of text have no layout (tests/unit/packing/corpora).
RECIPES = sorted(
    path
    for path in (REPOSITORY / "pipelines" / "recipes").glob("pack_*.toml")
    if path.name != "pack_corpus.toml"
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_whole(recipe: Path) -> None:
    assert load_config(PackConfig, recipe).inputs.layout.kind in LAYOUTS


def test_every_kind_has_a_recipe_and_a_row_on_the_page() -> None:
    assert {load_config(PackConfig, recipe).inputs.layout.kind for recipe in RECIPES} == set(LAYOUTS)
    page = (REPOSITORY / "docs" / "layouts.md").read_text(encoding="utf-8")
    assert all(f"| `{kind}`" in page for kind in LAYOUTS)
    assert all(recipe.name in page for recipe in RECIPES)


def test_no_layout_keeps_the_settings_of_old_datasets(tmp_path: Path) -> None:
    def content(layout: LayoutConfig) -> dict[str, object]:
        return PackConfig(
            output=tmp_path, private_dir=tmp_path, inputs=InputsConfig(dicom=(tmp_path,), layout=layout)
        ).content()

    assert "layout" not in content(LayoutConfig())
    assert "layout" in content(LayoutConfig(is_patient_study=True))
    assert str(tmp_path) not in json.dumps(content(LayoutConfig(kind="manifest", table=tmp_path / "t.csv")))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "folder", "pattern": "(?P<study>"}, "must be a regular expression"),
        ({"kind": "folder", "pattern": "(?P<stduy>.*)"}, "groups out of"),
        ({"kind": "folder"}, r"\(\?P<study>\.\.\.\)"),
        ({"kind": "rsna", "pattern": "x"}, "is of kind 'folder' alone"),
        ({"kind": "manifest"}, "needs a table of images"),
    ],
)
def test_mistaken_settings_are_named(settings: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        LayoutConfig(**settings)  # type: ignore[arg-type]


class WardLayout(PlacedLayout):
    """A layout of another package: ``WARD/PATIENT/STUDY/FILE``."""

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Read the names of the folders."""
        _, patient, study, name = path.split("/")
        return Placement(form=form, patient=patient, study=study, instance=name, attributes={})


def _offer(monkeypatch: pytest.MonkeyPatch, *offered: EntryPoint) -> None:
    def entry_points(*, group: str) -> tuple[EntryPoint, ...]:
        assert group == LAYOUTS_GROUP
        return offered

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)


def test_installed_packages_offer_further_layouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _offer(monkeypatch, EntryPoint("ward", f"{__name__}:WardLayout", LAYOUTS_GROUP))
    monkeypatch.setattr(EntryPoint, "load", lambda _: WardLayout)
    placed = _open("ward", tmp_path).place(_file("w7/p1/s2/a.png"))
    assert isinstance(placed, Placement)
    assert (placed.patient, placed.study) == ("p1", "s2")
    with pytest.raises(ConfigError, match=r"kind must be one of 'headers', .*, 'ward', got 'wart'"):
        LayoutConfig(kind="wart")


def test_a_layout_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _offer(monkeypatch, EntryPoint("ward", "no_such_module_here:Layout", LAYOUTS_GROUP))
    with pytest.raises(ConfigError, match=r"'ward' .* must be importable, got ModuleNotFoundError"):
        _open("ward", tmp_path)


def test_installed_packages_replace_no_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _offer(monkeypatch, EntryPoint("rsna", "no_such_module_here:Layout", LAYOUTS_GROUP))
    _open("rsna", tmp_path)


def test_a_placement_comes_back_from_json() -> None:
    placement = Placement(
        form="nifti",
        patient="p",
        study="s",
        number=3,
        attributes={"PatientAge": ("041Y",)},
        spacing_mm=(1.0, 2.0, 3.0),
        rescale=(1.0, -1024.0),
    )
    assert Placement.from_json(json.loads(json.dumps(placement.to_json()))) == placement
    assert "041Y" not in repr(placement)


def _open(kind: str, folder: Path, **settings: object) -> Layout:
    reports = folder / "reports"
    reports.mkdir(exist_ok=True)
    layout = LayoutConfig(kind=kind, **settings)  # type: ignore[arg-type]
    return open_layout(InputsConfig(dicom=(folder,), reports=reports, layout=layout), ("train", "val"))


def _file(path: str) -> DiscoveredFile:
    return DiscoveredFile(root_index=0, relative_path=path, num_bytes=1)


@pytest.mark.parametrize(
    ("kind", "path", "expected"),
    [
        ("mimic-cxr", "files/p10/p17/s5/a-b.dcm.gz", ("17", "5", "")),
        ("mimic-cxr", "files/p10/p17/s5/a-b.jpg", ("17", "5", "5/a-b")),
        ("mimic-cxr", "files/p10/p17/s5/index.html", Reason.NOT_IMAGE),
        ("mimic-cxr", "files/p10/p17/s5.txt", Reason.LAYOUT_FILE),
        ("mimic-cxr", "other/a.dcm", Reason.NOT_IN_LAYOUT),
        (
            "chexpert",
            "CheXpert-v1.0/valid/patient1/study2/view1_frontal.jpg",
            ("patient1", "patient1/study2"),
        ),
        ("chexpert", "train.csv", Reason.LAYOUT_FILE),
        ("chexpert", "logo.png", Reason.NOT_IN_LAYOUT),
        ("ct-rate", "dataset/train_fixed/train_12_b_2.nii.gz", ("train_12", "train_12_b", "train_12_b_2")),
        ("ct-rate", "train_12.nii.gz", Reason.NOT_IN_LAYOUT),
        ("rsna", "train_images/11/22/7.dcm", ("", "11", "11/22")),
        ("rsna", "train.csv", Reason.ANNOTATION_FILE),
        ("lidc", "a/069.xml", Reason.ANNOTATION_FILE),
        ("openi", "CXR1.png", Reason.NOT_IN_LAYOUT),
    ],
)
def test_paths_say_whose_a_file_is(
    tmp_path: Path, kind: str, path: str, expected: tuple[str, ...] | Reason
) -> None:
    placed = _open(kind, tmp_path).place(_file(path))
    if isinstance(placed, Placement):
        assert (placed.patient, placed.study, placed.series)[: len(expected)] == expected
    else:
        assert placed is expected


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<a><parentImage id='x'/></a>", Reason.EMPTY_REPORT),
        (b"<a>", Reason.REPORT_UNREADABLE),
        (b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", Reason.REPORT_UNREADABLE),
    ],
)
def test_xml_that_is_no_report_is_named(tmp_path: Path, data: bytes, reason: Reason) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "1.xml").write_bytes(data)
    (record,) = _open("openi", tmp_path).reports()
    assert isinstance(record, BrokenReport)
    assert record.reason is reason


def test_an_image_that_two_reports_name_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    for name in ("1", "2"):
        text = f"<a><parentImage id='same'/><parentImage id='own{name}'/></a>"
        (tmp_path / "reports" / f"{name}.xml").write_text(text, encoding="utf-8")
    layout = _open("openi", tmp_path)
    assert layout.place(_file("same.png")) is Reason.AMBIGUOUS_LINK
    assert isinstance(layout.place(_file("own1.png")), Placement)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"slope": "2", "intercept": "-8"}, (2.0, -8.0)),
        ({"slope": "2"}, (2.0, 0.0)),
        ({"intercept": "-8"}, (1.0, -8.0)),
        ({}, None),
        ({"slope": "0", "intercept": "-8"}, Reason.INVALID_IMAGE_DESCRIPTION),
        ({"slope": "nan"}, Reason.INVALID_IMAGE_DESCRIPTION),
        ({"intercept": "inf"}, Reason.INVALID_IMAGE_DESCRIPTION),
        ({"intercept": "air"}, Reason.INVALID_IMAGE_DESCRIPTION),
        ({"number": "9" * 5000}, Reason.INVALID_IMAGE_DESCRIPTION),
    ],
)
@pytest.mark.parametrize("path", ["a.nii", "a.png"])
def test_a_row_rescales_as_it_says_or_not_at_all(
    tmp_path: Path, path: str, stated: dict[str, str], expected: tuple[float, float] | Reason | None
) -> None:
    row = {"path": path, "patient": "p", "study": "s", "slope": "", "intercept": "", "number": "", **stated}
    table = write_table(tmp_path / "t.csv", [row])
    layout = _open("manifest", tmp_path, table=table, volume_facts="table")
    placed = layout.place(_file(path))
    assert (placed.rescale if isinstance(placed, Placement) else placed) == expected
    elsewhere = _open("manifest", tmp_path, table=table).place(_file(path))
    if isinstance(elsewhere, Placement) and path == "a.nii":
        assert elsewhere.rescale is None  # the header of the volume says it


def test_a_reports_table_without_its_column_is_refused_when_the_layout_opens(tmp_path: Path) -> None:
    reports = tmp_path / "reports.csv"
    reports.write_text("study_instance_uid,findings\n1,SENTINEL\n", encoding="utf-8")
    inputs = InputsConfig(dicom=(tmp_path,), reports=reports)
    with pytest.raises(ConfigError, match="must have one column 'text', got 0"):
        open_layout(inputs, ("train", "val"))


def test_a_column_called_report_unlinks_nothing(tmp_path: Path) -> None:
    images = [
        {"path": f"{name}.png", "patient": "p", "accession": name, "study": f"s-{name}", "report": named}
        for name, named in (("a", ""), ("b", "R-2"))
    ]
    texts = [
        {"report": "1", "patient": "p", "accession": "a", "text": "by its order"},
        {"report": "R-2", "patient": "p", "accession": "a", "text": "by its own number"},
        {"report": "3", "patient": "p", "accession": "c", "text": "of another study"},
        {"report": "4", "patient": "", "accession": "a", "text": "two hospitals count alike"},
    ]
    inputs = InputsConfig(
        dicom=(tmp_path,),
        reports=write_table(tmp_path / "texts.csv", texts),
        layout=LayoutConfig(kind="manifest", table=write_table(tmp_path / "images.csv", images)),
    )
    found = [one.study_instance_uid for one in open_layout(inputs, ("train", "val")).reports()]
    assert found == ["s-a", "s-b", "3", "4"]


def test_numbers_that_came_through_a_float_join_or_are_named(tmp_path: Path) -> None:
    exact, long = "1234567890123456", "9912345678901234"
    images = [
        {"path": f"{name}.png", "patient": "17", "accession": name, "study": f"s-{name}"}
        for name in (exact, long)
    ]
    texts = [
        {"patient": "17.0", "accession": f"{exact}.0", "text": "every digit is there"},
        {"patient": "17", "accession": f"{long}.0", "text": "beyond what a float holds"},
        {"patient": "17", "accession": "1.23456789012346E+15", "text": "of a spreadsheet"},
        {"patient": "17", "accession": "4711", "text": "of another study"},
    ]

    def read(table: Path, reports: Path) -> list[str]:
        inputs = InputsConfig(
            dicom=(tmp_path,), reports=reports, layout=LayoutConfig(kind="manifest", table=table)
        )
        found = open_layout(inputs, ("train", "val")).reports()
        return [one.reason if isinstance(one, BrokenReport) else one.study_instance_uid for one in found]

    table = write_table(tmp_path / "images.csv", images)
    rounded = str(Reason.ROUNDED_IDENTIFIER)
    expected = [f"s-{exact}", rounded, rounded, "17/4711"]
    assert read(table, write_table(tmp_path / "texts.csv", texts)) == expected

    floats = pa.table(
        {
            "patient": [17.0, 17.0],
            "accession": [float(exact), float(long)],
            "text": ["a", "b"],
        }
    )
    pq.write_table(floats, tmp_path / "texts.parquet")
    assert read(table, tmp_path / "texts.parquet") == expected[:2]

    # Images whose numbers are rounded: their reports are named, not lost.
    images[1]["accession"] = "9.91234567890123E+15"
    assert read(
        write_table(tmp_path / "rounded.csv", images),
        write_table(tmp_path / "whole.csv", [{"patient": "17", "accession": long, "text": "whole"}]),
    ) == [rounded]
