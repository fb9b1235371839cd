"""Trees of volumes with their labels: voxels, affines and label maps are those that other readers see."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - as everyone does
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format.codecs import decode_array
from shardflow.format.dataset import Dataset
from shardflow.format.facts.columns import open_columns
from shardflow.format.keys import mask_field
from tests.layout_trees import VolumeTree, make_bids, make_msd, make_nnunet, make_pairs, make_totalsegmentator
from tests.pack_case import PackCase, read_ledger

pytestmark = pytest.mark.usefixtures("packs_inline")

EVERYTHING = "policy.max_quarantined_share=1"
TREES: dict[str, Callable[[Path], VolumeTree]] = {"msd": make_msd, "nnunet": make_nnunet, "pairs": make_pairs}
_LPS: NDArray[np.float64] = np.diag([-1.0, -1.0, 1.0, 1.0])


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


def _load(path: Path | None) -> Any:
    assert path is not None
    return nibabel.load(path)


class Packed:
    """One packed study, read without the loader."""

    def __init__(self, dataset: Dataset, key: str) -> None:
        self.fields = dataset.read_fields(dataset.samples.find(key))
        self.series = json.loads(self.fields["study.json"])["series"]
        found = self.fields.get("annotations.json")
        self.regions: list[dict[str, Any]] | None = None if found is None else json.loads(found)["rois"]

    def number_of(self, channel: str | None) -> int:
        (found,) = (at for at, one in enumerate(self.series) if one.get("channel") == channel)
        return found

    def voxels(self, series: int) -> NDArray[Any]:
        """Return the stored volume ``(slices, rows, columns)``."""
        names = sorted(
            name for name in self.fields if name.startswith(f"s{series:03d}.") and ".m" not in name
        )
        return np.stack([decode_array("b2nd", self.fields[name]) for name in names if name.endswith(".b2nd")])

    def mask(self, series: int, label: str | None, value: int | None = None) -> NDArray[np.uint8]:
        facts = self.series[series]
        whole = np.zeros((facts["num_slices"], facts["rows"], facts["columns"]), np.uint8)
        for region in self.regions or ():
            if (region["series"], region["label"]) == (series, label) and value in (
                None,
                region.get("value"),
            ):
                for place in region["slices"]:
                    name = mask_field(series, region["roi"], place["slice"], "b2nd")
                    whole[place["slice"]] |= decode_array("b2nd", self.fields[name])
        return whole


def in_file(
    packed: NDArray[Any], affine_lps: Any, shape: tuple[int, ...], affine: NDArray[Any]
) -> NDArray[Any]:
    """Put stored voxels into the order of a file, each by its place alone."""
    places = np.stack(np.meshgrid(*map(np.arange, shape), np.ones(1), indexing="ij"), axis=-1)[:, :, :, 0]
    at = np.rint(places @ (np.linalg.inv(np.array(affine_lps)) @ _LPS @ affine).T).astype(int)
    found: NDArray[Any] = packed[at[..., 2], at[..., 1], at[..., 0]]
    return found


@pytest.mark.parametrize("kind", TREES)
def test_voxels_and_labels_are_those_of_nibabel_and_simpleitk(case: PackCase, kind: str) -> None:
    tree = TREES[kind](case.folder)
    summary = case.pack(*tree.settings)
    assert summary.inputs["quarantined"] == 0, summary.reasons
    dataset = case.open()
    assert sum(map(len, dataset.splits.values())) == len(tree.cases)
    for study, made in tree.cases.items():
        packed = Packed(dataset, case.sample_key(study))
        assert len(packed.series) == len(made.images)
        for channel, (path, point) in made.images.items():
            series = packed.number_of(channel)
            image = _load(path)
            values = np.asanyarray(image.dataobj)
            values = values if point is None else values[..., point]
            facts = packed.series[series]
            assert "axis" not in facts
            stored = in_file(packed.voxels(series), facts["affine_lps"], values.shape, image.affine)
            assert np.array_equal(stored, values)
            other = sitk.ReadImage(str(path))
            for index in np.ndindex(2, 2, 2):
                corner = [int(at * (size - 1)) for at, size in zip(index, values.shape, strict=True)]
                more = [] if point is None else [point]
                there = np.array(other.TransformIndexToPhysicalPoint([*corner, *more])[:3])
                pixel = np.linalg.solve(np.array(facts["affine_lps"]), [*there, 1.0])
                assert np.abs(pixel - np.rint(pixel)).max() < 1e-3
                column, row, level = np.rint(pixel[:3]).astype(int)
                assert packed.voxels(series)[level, row, column] == other.GetPixel(*corner, *more)
            if made.label is None:
                assert packed.regions is None
                continue
            label = _load(made.label)
            labels = np.asanyarray(label.dataobj)
            if packed.regions is None:
                raise AssertionError("labels are packed, also where nothing is marked")
            for name, numbers in tree.classes.items():
                mask = in_file(packed.mask(series, name), facts["affine_lps"], labels.shape, label.affine)
                assert np.array_equal(mask, np.isin(labels, numbers))
    written = b"".join(path.read_bytes() for path in case.output.rglob("*") if path.is_file())
    assert not [secret for secret in tree.secrets if secret.encode() in written]


def _change(
    path: Path, change: Callable[[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]
) -> None:
    image = _load(path)
    values, affine = change(np.asanyarray(image.dataobj).copy(), image.affine.copy())
    nibabel.Nifti1Image(values, affine).to_filename(path)  # type: ignore[no-untyped-call]


def _moved(values: NDArray[Any], affine: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    affine[:3, 3] += 0.6 * affine[:3, 1]
    return values, affine


def _with_nine(values: NDArray[Any], affine: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    values[0, 0, 0] = 9
    return values, affine


FAULTS: dict[str, tuple[Callable[[Path], object], dict[str, int], bool]] = {
    "no labels": (
        lambda root: (root / "labelsTr/made_001.nii.gz").unlink(),
        {"MISSING_FILE": 1, "STUDY_QUARANTINED": 2},
        False,
    ),
    "no second channel": (
        lambda root: (root / "imagesTr/made_001_0001.nii.gz").unlink(),
        {"MISSING_FILE": 1, "STUDY_QUARANTINED": 2},
        False,
    ),
    "another shape": (
        lambda root: _change(root / "labelsTr/made_001.nii.gz", lambda v, a: (v[:, :-1], a)),
        {"LABELS_OFF_GRID": 1},
        True,
    ),
    "another place": (
        lambda root: _change(root / "labelsTr/made_001.nii.gz", _moved),
        {"LABELS_OFF_GRID": 1},
        True,
    ),
    "an unknown number": (
        lambda root: _change(root / "labelsTr/made_001.nii.gz", _with_nine),
        {"UNKNOWN_LABEL": 1},
        True,
    ),
    "fractions": (
        lambda root: _change(root / "labelsTr/made_001.nii.gz", lambda v, a: (v / np.float32(3), a)),
        {"UNKNOWN_LABEL": 1},
        True,
    ),
    "no volume": (
        lambda root: (root / "labelsTr/made_001.nii.gz").write_bytes(b"<html>"),
        {"HEADER_UNREADABLE": 1},
        True,
    ),
    "labels alone": (
        lambda root: shutil.copy(root / "labelsTr/made_001.nii.gz", root / "labelsTr/made_777.nii.gz"),
        {"ATTACHMENT_WITHOUT_STUDY": 1},
        True,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_labels_has_its_outcome(case: PackCase, fault: str) -> None:
    spoil, reasons, is_packed = FAULTS[fault]
    tree = make_nnunet(case.folder)
    spoil(tree.images)
    summary = case.pack(*tree.settings, EVERYTHING)
    found = Counter(row["reason"] for row in read_ledger(case.output) if row["reason"])
    assert found == summary.reasons
    assert found == {"LAYOUT_FILE": 1, **reasons}
    dataset = case.open()
    spoiled = "Dataset017_Made/made_001"
    keys = {row["sample_key"] for row in read_ledger(case.output) if row["outcome"] == "packed"}
    wanted = {*tree.cases} - (set() if is_packed else {spoiled})
    assert keys == {case.sample_key(study) for study in wanted}
    if is_packed and "ATTACHMENT_WITHOUT_STUDY" not in reasons:
        # Nothing says that nothing is marked.
        assert Packed(dataset, case.sample_key(spoiled)).regions is None


def test_a_channel_that_nobody_named_is_not_in_the_layout(case: PackCase) -> None:
    tree = make_nnunet(case.folder)
    made = tree.images / "imagesTr" / "made_001_0001.nii.gz"
    made.with_name("made_001_0002.nii.gz").write_bytes(made.read_bytes())
    assert case.pack(*tree.settings, EVERYTHING).reasons == {"LAYOUT_FILE": 1, "NOT_IN_LAYOUT": 1}


def test_a_file_with_fewer_channels_is_refused(case: PackCase) -> None:
    tree = make_msd(case.folder)
    _change(tree.images / "imagesTr" / "MADE_001.nii.gz", lambda values, affine: (values[..., 0], affine))
    summary = case.pack(*tree.settings, EVERYTHING)
    assert summary.reasons["INVALID_IMAGE_DESCRIPTION"] == 1
    assert summary.inputs["packed"] == 6


def test_labels_that_are_not_there_can_be_left_out(case: PackCase) -> None:
    tree = make_nnunet(case.folder)
    (tree.images / "labelsTr" / "made_001.nii.gz").unlink()
    assert case.pack(*tree.settings, "inputs.layout.missing_files=ignore").reasons == {"LAYOUT_FILE": 1}
    assert Packed(case.open(), case.sample_key("Dataset017_Made/made_001")).regions is None


DESCRIPTIONS: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "must be a readable JSON file"),
    "a list": ([], "must be a JSON object"),
    "no channels": ({"labels": {"a": 1}}, "must name its channels"),
    "channels from 1": ({"channel_names": {"1": "CT"}, "labels": {"a": 1}}, "must name its channels"),
    "no labels": ({"channel_names": {"0": "CT"}}, "must have labels such as"),
    "a broken number": ({"channel_names": {"0": "CT"}, "labels": {"a": 1.5}}, "must have labels such as"),
    "a name too long": (
        {"channel_names": {"0": "CT"}, "labels": {"a" * 65: 1}},
        "must have names of 1 to 64",
    ),
}


@pytest.mark.parametrize("mistake", DESCRIPTIONS)
def test_mistakes_in_a_description_are_named(case: PackCase, mistake: str) -> None:
    content, expected = DESCRIPTIONS[mistake]
    tree = make_nnunet(case.folder)
    text = content if isinstance(content, str) else json.dumps(content)
    (tree.images / "dataset.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected):
        case.pack(*tree.settings)


def test_cases_are_patients_only_if_someone_says_so(case: PackCase) -> None:
    tree = make_nnunet(case.folder)
    with pytest.raises(ConfigError, match=r"set layout\.is_patient_study = true"):
        case.pack(*tree.settings, "inputs.layout.is_patient_study=false")
    table = case.folder / "cases.csv"
    rows = [f"{study.split('/')[1]},P-{number // 2}" for number, study in enumerate(tree.cases)]
    table.write_text("\n".join(["case,patient", *rows]) + "\n", encoding="utf-8")
    case.pack(*tree.settings, "inputs.layout.is_patient_study=false", f"inputs.layout.table={table}")
    dataset = case.open()
    people: Counter[str] = Counter()
    for study in tree.cases:
        fields = dataset.read_fields(dataset.samples.find(case.sample_key(study)), ["study.json"])
        people[json.loads(fields["study.json"])["patient"]["patient_key"]] += 1
    assert sorted(people.values()) == [1, 2, 2]


@pytest.mark.parametrize("storage", ["slices", "bricks"])
def test_volume_and_mask_deliver_what_nibabel_reads(case: PackCase, storage: str) -> None:
    tree = make_nnunet(case.folder)
    settings = (f"volumes.storage={storage}", "volumes.brick_shape=[2, 4, 3]", "splits={train = 1, test = 0}")
    case.pack(*tree.settings, *settings)
    made = {case.sample_key(study): one for study, one in tree.cases.items() if one.label is not None}
    names = {name for row in range(len(tree.cases)) for name in case.open().read_fields(row)}
    assert bool([name for name in names if ".m" in name and "volume" in name]) == (storage == "bricks")
    assert bool([name for name in names if ".m" in name and ".i" in name]) == (storage == "slices")
    size = (13, 13, 13)
    fields: dict[str, sf.Field] = {
        "flair": sf.Volume(
            series="channel == 'FLAIR'", center="middle", roi_size=(13, 13, 13), valid_mask=True
        ),
        "parts": sf.Mask(like="flair", labels=[*tree.classes], merge="stack"),
    }
    spec = sf.BatchSpec.simple(global_batch_size=1, micro_batch_size=1)
    places = np.stack([*np.meshgrid(*map(np.arange, size), indexing="ij"), np.ones(size)], axis=-1)
    seen: list[str] = []
    with sf.Loader(sf.open(case.output), split="train", seed=1, batch=spec, fields=fields) as loader:
        for batch in loader:
            (key,) = batch.info.sample_keys
            assert key is not None
            seen.append(key)
            image, label = (_load(path) for path in (made[key].images["FLAIR"][0], made[key].label))
            at = places @ (np.linalg.inv(image.affine) @ _LPS @ batch["flair_affine"][0]).T
            assert np.abs(at - np.rint(at)).max() < 1e-3
            at = np.rint(at[..., :3]).astype(int)
            is_inside = ((at >= 0) & (at < image.shape)).all(axis=-1)
            assert np.array_equal(batch["flair_valid"][0, 0] == 1, is_inside)
            assert is_inside.sum() == np.prod(image.shape)
            at = np.moveaxis(np.clip(at, 0, np.array(image.shape) - 1), -1, 0)
            voxels, labels = (np.asanyarray(one.dataobj)[tuple(at)] for one in (image, label))
            assert np.array_equal(batch["flair"][0, 0][is_inside], voxels[is_inside])
            assert batch["parts_mask"][0] == 1
            for plane, numbers in zip(batch["parts"][0], tree.classes.values(), strict=True):
                assert np.array_equal(plane, np.isin(labels, numbers) & is_inside)
    assert sorted(seen) == sorted(made)


def test_masks_of_a_subject_are_regions_under_their_names(case: PackCase) -> None:
    tree = make_totalsegmentator(case.folder)
    summary = case.pack(*tree.settings)
    assert summary.reasons == {"LAYOUT_FILE": 1}
    dataset = case.open()
    for study, made in tree.cases.items():
        packed = Packed(dataset, case.sample_key(study))
        (facts,) = packed.series
        path, _ = made.images[None]
        image = _load(path)
        stored = in_file(packed.voxels(0), facts["affine_lps"], image.shape, image.affine)
        assert np.array_equal(stored, np.asanyarray(image.dataobj))
        assert (facts["modality"], facts["unit"]) == ("CT", "HU")
        for file, label in (
            ("kidney_left", "kidney_left"),
            ("vertebrae_L5", "vertebrae_L5"),
            ("of_mr_miller", None),
        ):
            mask = _load(path.parent / "segmentations" / f"{file}.nii.gz")
            found = in_file(packed.mask(0, label), facts["affine_lps"], mask.shape, mask.affine)
            assert np.array_equal(found, np.asanyarray(mask.dataobj))
            wanted = sitk.GetArrayFromImage(
                sitk.ReadImage(str(path.parent / "segmentations" / f"{file}.nii.gz"))
            )
            assert found.sum() == wanted.sum() > 0
    rows = dataset.splits["val"]
    assert [*rows] == [dataset.samples.find(case.sample_key("s0002"))]
    written = b"".join(path.read_bytes() for path in case.output.rglob("*") if path.is_file())
    assert not [secret for secret in tree.secrets if secret.encode() in written]


def test_a_subject_without_its_image_or_masks_is_missed(case: PackCase) -> None:
    tree = make_totalsegmentator(case.folder)
    (tree.images / "s0000" / "ct.nii.gz").unlink()
    shutil.rmtree(tree.images / "s0001" / "segmentations")
    summary = case.pack(*tree.settings, EVERYTHING)
    assert summary.reasons["MISSING_FILE"] == 2
    assert summary.studies["packed"] == 2


def test_pairs_need_no_description_and_miss_what_is_not_there(case: PackCase) -> None:
    tree = make_pairs(case.folder)
    (tree.images / "dataset.json").unlink()
    (tree.images / "labels" / "pair1_seg.nii.gz").unlink()
    summary = case.pack(*tree.settings, EVERYTHING)
    assert summary.reasons == {"MISSING_FILE": 1, "STUDY_QUARANTINED": 1}
    packed = Packed(case.open(), case.sample_key("pairs/pair2"))
    labels = _load(tree.cases["pairs/pair2"].label)
    for value in (1, 2, 3):
        mask = in_file(
            packed.mask(0, None, value), packed.series[0]["affine_lps"], labels.shape, labels.affine
        )
        assert np.array_equal(mask, np.asanyarray(labels.dataobj) == value)


def test_a_table_of_subjects_of_another_form_is_named(case: PackCase) -> None:
    tree = make_totalsegmentator(case.folder)
    (tree.images / "meta.csv").write_text("image_id,split\ns0000,train\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="separated by semicolons"):
        case.pack(*tree.settings)


# ---- BIDS ------------------------------------------------------------------------------------------


def test_subjects_and_sessions_are_patients_and_studies(case: PackCase) -> None:
    tree = make_bids(case.folder)
    summary = case.pack(*tree.settings)
    # Six of them are labels of a template and images of a derivative.
    assert summary.reasons == {"LAYOUT_FILE": 18}
    dataset = case.open()
    people = []
    for number, (study, made) in enumerate(tree.cases.items()):
        row = dataset.samples.find(case.sample_key(study))
        packed = Packed(dataset, case.sample_key(study))
        people.append(json.loads(packed.fields["study.json"])["patient"]["patient_key"])
        # Two images, a time series of two, and of one study diffusion of three.
        assert len(packed.series) == (7 if number == 2 else 4)
        weighted = [one["diffusion"]["b_value_s_mm2"] for one in packed.series if "diffusion" in one]
        assert sorted(weighted) == ([0, 1000, 1000] if number == 2 else [])
        for channel, (path, _) in made.images.items():
            series = packed.number_of(channel)
            image, facts = _load(path), packed.series[series]
            stored = in_file(packed.voxels(series), facts["affine_lps"], image.shape, image.affine)
            assert np.array_equal(stored, np.asanyarray(image.dataobj))
            assert facts["modality"] == "MR"
            assert facts["unit"] == "raw"
        technical = packed.series[packed.number_of("T1w")]["technical"]
        assert technical["magnetic_field_strength"] == 3  # of the dataset
        assert technical["repetition_time"] == 2300
        assert technical["echo_time"] == pytest.approx(3 + number)  # its own
        assert technical["manufacturer"] == "SIEMENS"
        assert "echo_time" not in packed.series[packed.number_of("FLAIR")]["technical"]
        times = [one for one in packed.series if one.get("channel") is None and "diffusion" not in one]
        assert [one["technical"]["repetition_time"] for one in times] == [2000, 2000]
        assert made.label is not None
        label = _load(made.label)
        for name, numbers in {**tree.classes, "brain": (1, 2, 3)}.items():
            facts = packed.series[packed.number_of("T1w")]
            mask = packed.mask(packed.number_of("T1w"), name)
            found = in_file(mask, facts["affine_lps"], label.shape, label.affine)
            assert np.array_equal(found, np.isin(np.asanyarray(label.dataobj), numbers)), name
        columns = open_columns(dataset)
        assert not [name for name in columns if "name" in name]
        score = columns.gather("participants.score", np.array([row]))
        wanted = (1.5, 2.5, None)[number]
        assert bool(score.is_missing is not None and score.is_missing[0]) == (wanted is None)
        assert wanted is None or score.values[0] == wanted
        group = columns.gather("participants.group", np.array([row]))
        assert columns["participants.group"].names[int(group.values[0])] == (
            "control" if number == 2 else "patient"
        )
        age = columns.gather("facts.age_years", np.array([row]))
        assert number == 2 or age.values[0] == 34
    assert people[0] == people[1] != people[2]
    written = b"".join(path.read_bytes() for path in case.output.rglob("*") if path.is_file())
    assert not [secret for secret in tree.secrets if secret.encode() in written]


def test_mistakes_in_a_bids_dataset_are_named_or_are_one_images(case: PackCase) -> None:
    tree = make_bids(case.folder)
    (tree.images / "participants.tsv").write_text("subject,age\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="a column participant_id, with tabs"):
        case.pack(*tree.settings)
    (tree.images / "participants.tsv").unlink()
    (tree.images / "sub-k2" / "anat" / "sub-k2_acq-secretname_T1w.json").write_text("{", encoding="utf-8")
    summary = case.pack(*tree.settings, EVERYTHING)
    assert summary.reasons["INVALID_IMAGE_DESCRIPTION"] == 1
    (tree.images / "dataset_description.json").unlink()
    with pytest.raises(ConfigError, match=r"needs a dataset_description\.json in every input folder"):
        case.pack(*tree.settings)


def test_bids_tables_may_leave_out_the_prefix_of_names(case: PackCase) -> None:
    tree = make_bids(case.folder)
    participants, sessions = tree.images / "participants.tsv", tree.images / "sub-k1" / "sub-k1_sessions.tsv"
    for path, prefix in ((participants, "sub-"), (sessions, "ses-")):
        path.write_text(path.read_text(encoding="utf-8").replace(f"\n{prefix}", "\n"), encoding="utf-8")
    sidecar = tree.images / "T1w.json"
    sidecar.write_text('{"RepetitionTime": 1e999, "FlipAngle": 1' + "0" * 400 + "}", encoding="utf-8")
    case.pack(*tree.settings)
    dataset = case.open()
    columns = open_columns(dataset)
    row = np.array([dataset.samples.find(case.sample_key("sub-k1/ses-b"))])
    assert columns.gather("participants.score", row).values[0] == 2.5
    assert columns.gather("facts.age_years", row).values[0] == 34


def test_bids_datasets_of_one_name_are_refused(case: PackCase) -> None:
    roots = [str(make_bids(case.folder / name).images) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="input folders of different names"):
        case.pack("inputs.layout.kind=bids", f"inputs.dicom={json.dumps(roots)}", "splits={train = 1}")


def test_a_second_bids_dataset_is_added_without_packing_the_first_again(case: PackCase) -> None:
    # Equal images would make their subjects one person.
    trees = [make_bids(case.folder / name, first_case=first) for name, first in (("a", 40), ("b", 60))]
    roots = [str(tree.images.rename(tree.images.parent / f"ds{at}")) for at, tree in enumerate(trees)]
    given = ("inputs.layout.kind=bids", "splits={train = 1, test = 0}")
    case.pack(*given, f"inputs.dicom={json.dumps(roots[:1])}")
    summary = case.pack(*given, f"inputs.dicom={json.dumps(roots)}", mode="append")
    assert summary.studies["packed"] == 6
    dataset = case.open()
    people = set()
    for folder in ("", "ds1/"):
        for name in ("sub-k1/ses-a", "sub-k1/ses-b", "sub-k2"):
            row = dataset.samples.find(case.sample_key(folder + name))
            people.add(json.loads(dataset.read_fields(row)["study.json"])["patient"]["patient_key"])
    assert len(people) == 4
