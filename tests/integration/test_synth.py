"""``shardflow synth`` from the command line to files that other readers agree on."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import pty
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import highdicom
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - the name its own documentation uses
from pydicom import Dataset, dcmread

from shardflow.cli import synth
from shardflow.errors import ShardflowError, SourceError
from shardflow.packing.sources.dicom.headers import BrokenInstance, InstanceHeader, read_header
from shardflow.packing.sources.dicom.pixels import check_copies, form_of
from shardflow.packing.sources.dicom.stacks import StackKind, Study, build_studies
from shardflow.packing.sources.placement import discover
from shardflow.synthetic import DEFAULT_PATHOLOGIES, MODALITIES, PATHOLOGIES, SynthOptions, generate
from shardflow.synthetic.scene import LESION_CONTRASTS, contrast_index
from tests.forks import REPOSITORY
from tests.forks import run as run_python
from tests.stacks import iter_stack

# Many oddities, so that a few small studies show all of them; damage in few of them.
PERCENTS = dict.fromkeys(PATHOLOGIES, 50) | {"truncated": 15, "same-number": 10}
OPTIONS = SynthOptions(
    num_studies=20,
    seed=41,
    size=64,
    min_slices=8,
    max_slices=14,
    min_lesions=1,
    max_lesions=4,
    pathologies=PERCENTS,
)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "out"
    generate(OPTIONS, folder)
    return folder


@pytest.fixture(scope="module")
def truth(made: Path) -> list[Row]:
    lines = (made / "truth.jsonl").read_text(encoding="ascii").splitlines()
    return [json.loads(line) for line in lines]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "shardflow.cli.main", "synth", *arguments])


def digest(folder: Path) -> str:
    """One digest over the names and bytes of every file."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(f"{path.relative_to(folder).as_posix()}\n".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def stacks(truth: list[Row]) -> Iterator[tuple[Row, Row, Row]]:
    for study in truth[1:]:
        for series in study["series"]:
            for stack in series["stacks"]:
                yield study, series, stack


# ---- determinism, command line -------------------------------------------------------------------


def test_bytes_are_frozen(tmp_path: Path, golden: Callable[[str, object], None]) -> None:
    digests = {}
    for modality in MODALITIES:
        options = SynthOptions(
            num_studies=3,
            seed=17,
            modality=modality,
            size=32,
            min_slices=4,
            max_slices=9,
            pathologies=PERCENTS,
        )
        generate(options, tmp_path / modality)
        digests[modality] = digest(tmp_path / modality)
    golden("synthetic-studies", digests)


def test_the_command_makes_the_same_bytes_with_any_number_of_processes(tmp_path: Path) -> None:
    shared = ("--studies", "3", "--seed", "3", "--size", "32", "--slices", "4:8", "--pathologies", "all")
    one = run(str(tmp_path / "one"), *shared, "--json")
    two = run(str(tmp_path / "two"), *shared, "--processes", "2")
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    # A slow machine gets lines of progress, and nothing else.
    lines = [*one.stderr.splitlines(), *two.stderr.splitlines()]
    assert all(line.startswith("generating studies: ") for line in lines)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    summary = json.loads(one.stdout)
    assert summary["num_studies"] == 3
    paths = [path for path in (tmp_path / "one" / "dicom").rglob("*") if path.is_file()]
    assert summary["num_bytes"] == sum(p.stat().st_size for p in paths if "SYNTHETIC-" not in p.name)
    assert "generated studies" in two.stdout


def test_another_seed_makes_other_patients(tmp_path: Path, made: Path) -> None:
    options = SynthOptions(num_studies=1, seed=42, size=32, min_slices=4, max_slices=4)
    generate(options, tmp_path / "other")
    mine, other = (
        {row["study_instance_uid"] for row in table(folder / "reports.csv")}
        for folder in (made, tmp_path / "other")
    )
    assert not mine & other


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep", encoding="ascii")
    done = run(str(tmp_path), "--studies", "1", "--seed", "1")
    assert done.returncode == 2
    assert "choose a new or empty folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    done = run(str(tmp_path / "mine.txt"), "--studies", "1", "--seed", "1")
    assert done.returncode == 2
    assert "OUT is a file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--studies", "1"), "--seed"),
        (("--studies", "0", "--seed", "1"), "at least 1"),
        (("--studies", "1", "--seed", "1", "--slices", "9:3"), "MIN at most MAX"),
        (("--studies", "1", "--seed", "1", "--slices", "few"), "MIN:MAX"),
        (("--studies", "1", "--seed", "1", "--modality", "PT"), "'PT'"),
        (("--studies", "1", "--seed", "1", "--pathologies", "ghosts"), "a pathology must be one of"),
        (("--studies", "1", "--seed", "1", "--pathologies", "tilt=often"), "whole percents"),
        (("--studies", "1", "--seed", "1", "--size", "4"), "size must be from 16"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(str(tmp_path / "out"), *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_pathologies_are_read_as_written() -> None:
    names = tuple(PATHOLOGIES)
    read = partial(synth._chances, "--pathologies")
    assert read("default", DEFAULT_PATHOLOGIES, names) == DEFAULT_PATHOLOGIES
    assert not any(read("none", DEFAULT_PATHOLOGIES, names).values())
    everything = read("all", DEFAULT_PATHOLOGIES, names)
    assert {name for name, percent in everything.items() if percent != 100} == {"truncated"}
    assert read("tilt, oblique=50", DEFAULT_PATHOLOGIES, names) == {"tilt": 100, "oblique": 50}
    assert read("all,tilt=5,truncated", DEFAULT_PATHOLOGIES, names) == everything | {
        "tilt": 5,
        "truncated": 100,
    }


def test_the_command_offers_what_the_generator_knows() -> None:
    assert synth.MODALITIES == MODALITIES


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(Exception, match=r"OUT cannot be written \(No space left on device\)") as caught:
        generate(OPTIONS, tmp_path / "out")
    assert str(tmp_path) not in str(caught.value)


# ---- it says that it is generated ----------------------------------------------------------------


def test_everything_says_that_it_is_generated(made: Path, truth: list[Row]) -> None:
    assert "generated" in (made / "README.txt").read_text(encoding="ascii").splitlines()[0]
    assert truth[0]["kind"] == "header"
    assert truth[0]["generated"] is True
    assert truth[0]["options"]["seed"] == OPTIONS.seed
    reports = table(made / "reports.csv")
    assert len(reports) == OPTIONS.num_studies
    assert all(row["text"].startswith("SYNTHETIC, generated by shardflow") for row in reports)
    assert {row["note"] for row in table(made / "annotations.csv")} == {"SYNTHETIC"}
    for _, _, stack in stacks(truth):
        if stack["slices"][0]["is_truncated"]:
            continue
        header = dcmread(made / stack["slices"][0]["file"], stop_before_pixels=True)
        assert str(header.PatientName).startswith("SYNTHETIC")
        assert header.PatientID.startswith("SYNTHETIC-")
        assert header.SeriesDescription.startswith("SYNTHETIC ")
        assert header.StudyDescription.startswith("SYNTHETIC ")
        assert "SYNTHETIC" in header.InstitutionName


def test_images_tell_nothing_of_lesions(made: Path, truth: list[Row]) -> None:
    labels = {lesion["label"] for study in truth[1:] for lesion in study["lesions"]} | {"SYN-L", "lesion"}
    for path in (made / "dicom").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(label.encode() in data for label in labels)


# ---- other readers agree -------------------------------------------------------------------------


def values_of(dataset: Dataset) -> np.ndarray:
    slope, intercept = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
    values: np.ndarray = dataset.pixel_array.astype(np.float64) * slope + intercept
    return values


def test_pydicom_reads_every_file(made: Path, truth: list[Row]) -> None:
    seen = set()
    for study, series, stack in stacks(truth):
        for item in stack["slices"]:
            if item["is_truncated"]:
                continue
            dataset = dcmread(made / item["file"])
            seen.add((series["transfer_syntax"], series["encoding"]["is_signed"]))
            assert dataset.SOPInstanceUID == item["sop_instance_uid"]
            assert dataset.StudyInstanceUID == study["study_instance_uid"]
            assert dataset.InstanceNumber == item["instance_number"]
            assert dataset.SeriesNumber == series["series_number"]
            assert dataset.pixel_array.shape == (series["rows"], series["columns"])
            if item["position_mm"] is not None:
                assert [float(x) for x in dataset.ImagePositionPatient] == item["position_mm"]
                assert [float(x) for x in dataset.ImageOrientationPatient] == stack["orientation"]
                assert [float(x) for x in dataset.PixelSpacing] == series["pixel_spacing_mm"]
    assert {syntax for syntax, _ in seen} == {
        *("explicit-little", "implicit-little", "explicit-big", "deflated", "rle")
    }


def test_a_truncated_file_ends_within_its_pixels(made: Path, truth: list[Row]) -> None:
    cut = [item for _, _, stack in stacks(truth) for item in stack["slices"] if item["is_truncated"]]
    assert cut
    for item in cut:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((ValueError, OSError, EOFError, AttributeError, RuntimeError, zlib.error)):
                _ = dcmread(made / item["file"]).pixel_array


def test_copies_are_equal_byte_for_byte(made: Path, truth: list[Row]) -> None:
    copies = 0
    for study in truth[1:]:
        paths = {
            item["sop_instance_uid"]: item["file"]
            for series in study["series"]
            for stack in series["stacks"]
            for item in stack["slices"]
        }
        for copy in study["copies"]:
            copies += 1
            assert (made / copy["file"]).read_bytes() == (made / paths[copy["sop_instance_uid"]]).read_bytes()
    assert copies


def test_lesions_have_their_density_where_the_truth_says(tmp_path: Path) -> None:
    options = SynthOptions(
        num_studies=12,
        seed=5,
        modality="CT",
        size=128,
        min_slices=16,
        max_slices=24,
        min_lesions=4,
        pathologies={"padding": 50, "high-bits": 50, "oblique": 50, "tilt": 100},
    )
    generate(options, tmp_path / "ct")
    rows = [json.loads(line) for line in (tmp_path / "ct" / "truth.jsonl").read_text().splitlines()[1:]]
    measured = 0
    for study, series, stack in stacks([{}, *rows]):
        files = {item["sop_instance_uid"]: item["file"] for item in stack["slices"]}
        for lesion in study["lesions"]:
            for seen in lesion["appearances"]:
                if (seen["series_instance_uid"], seen["stack"]) != (
                    series["series_instance_uid"],
                    stack["stack"],
                ):
                    continue
                best = max(seen["instances"], key=lambda item: item["num_pixels"])
                if best["num_pixels"] < 36 or min(lesion["semi_axes_mm"]) < series["slice_thickness_mm"]:
                    continue
                left, top, right, bottom = best["box"]
                row, column = (top + bottom - 1) // 2, (left + right - 1) // 2
                middle = values_of(dcmread(tmp_path / "ct" / files[best["sop_instance_uid"]]))[
                    row - 1 : row + 2, column - 1 : column + 2
                ]
                expected = LESION_CONTRASTS[lesion["label"]][contrast_index(stack["contrast"])]
                measured += 1
                assert middle.mean() == pytest.approx(expected, abs=60)
    assert measured >= 6


def test_tissue_is_right_in_hounsfield_units(made: Path, truth: list[Row]) -> None:
    """Air outside the body, and soft tissue in it, in every way of storing them."""
    encodings = set()
    for _, series, stack in stacks(truth):
        if series["modality"] != "CT" or series["kind"] != "volume":
            continue
        item = stack["slices"][len(stack["slices"]) // 2]
        if item["is_truncated"]:
            continue
        dataset = dcmread(made / item["file"])
        values = values_of(dataset)
        encoding = series["encoding"]
        encodings.add((encoding["bits_stored"], encoding["is_signed"], encoding["slope"]))
        # In front of the body, inside any reconstructed circle.
        assert values[0:2, 28:36].mean() < -900
        inside = values[16:48, 12:52]
        assert -200 < np.median(inside[inside > -500]) < 200
    assert len(encodings) >= 3


def test_volumes_of_highdicom_and_simpleitk_have_the_geometry_of_the_truth(
    made: Path, truth: list[Row]
) -> None:
    compared = 0
    for _, series, stack in stacks(truth):
        slices = stack["slices"]
        plain = not {"missing-slices", "tilt", "truncated", "high-bits"} & set(series["pathologies"])
        if series["kind"] not in {"volume", "reformat"} or not plain or len(slices) < 3:
            continue
        compared += 1
        affine = np.array(stack["affine_lps"])
        volume = highdicom.get_volume_from_series([dcmread(made / item["file"]) for item in slices])
        # highdicom indexes (slice, row, column).
        ours = affine[:3, [2, 1, 0]]
        theirs = volume.affine[:3, :3]
        if np.dot(ours[:, 0], theirs[:, 0]) < 0:
            volume = volume[::-1]
            theirs = volume.affine[:3, :3]
        assert np.allclose(ours, theirs, atol=1e-4)
        assert np.allclose(volume.affine[:3, 3], affine[:3, 3], atol=1e-4)
        image = sitk.ReadImage([str(made / item["file"]) for item in slices])
        assert np.allclose(image.GetOrigin(), affine[:3, 3], atol=1e-4)
        spacing = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
        assert np.allclose(image.GetSpacing(), spacing, atol=1e-4)
        directions = np.array(image.GetDirection()).reshape(3, 3)
        assert np.allclose(directions * spacing, affine[:3, :3], atol=1e-3)
    assert compared >= 5


# ---- our own reader agrees -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def read(made: Path) -> tuple[list[Study], list[Path], list[str]]:
    """Studies as packing sees them, the paths by file index, and what was refused."""
    root = made / "dicom"
    paths: list[Path] = []
    headers: list[InstanceHeader] = []
    refused: list[str] = []
    for index, file in enumerate(discover([root])):
        paths.append(file.path([root]))
        try:
            header = read_header(paths[-1], file_index=index)
        except Exception as error:  # noqa: BLE001 - any refusal is counted by its reason
            refused.append(str(getattr(error, "reason", type(error).__name__)))
            continue
        if isinstance(header, BrokenInstance):
            refused.append(str(header.reason))
        else:
            headers.append(header)
    grouping = build_studies(headers)
    assert not grouping.rejections
    return list(grouping.studies), paths, refused


def test_our_reader_refuses_what_was_spoiled_and_nothing_else(
    read: tuple[list[Study], list[Path], list[str]], truth: list[Row]
) -> None:
    _, _, refused = read
    # Only a decoder finds out that a compressed frame is cut short.
    num_cut = sum(
        item["is_truncated"] and series["transfer_syntax"] != "rle"
        for _, series, stack in stacks(truth)
        for item in stack["slices"]
    )
    num_stray = sum(len(study["stray_files"]) for study in truth[1:])
    assert sorted(refused) == ["NOT_DICOM"] * num_stray + ["PIXEL_DATA_TRUNCATED"] * num_cut


def test_our_reader_finds_the_stacks_of_the_truth(
    read: tuple[list[Study], list[Path], list[str]], truth: list[Row]
) -> None:
    studies, paths, _ = read
    found = {
        (
            study.study_instance_uid,
            stack.series_instance_uid,
            frozenset(one.instance.sop_instance_uid for one in stack.slices),
        ): stack
        for study in studies
        for stack in study.stacks
    }
    num_stacks = 0
    for study, series, stack in stacks(truth):
        is_late = series["transfer_syntax"] == "rle"
        slices = [item for item in stack["slices"] if is_late or not item["is_truncated"]]
        names = [item["sop_instance_uid"] for item in slices]
        key = (study["study_instance_uid"], series["series_instance_uid"], frozenset(names))
        if series["kind"] == "projection" and key not in found:
            continue  # two views of one series may share a stack
        num_stacks += 1
        ours = found[key]
        pathologies = set(series["pathologies"])
        assert (ours.kind is StackKind.LOCALIZER) == (series["kind"] == "localizer")
        assert len(ours.slices) == len(names)
        if series["kind"] == "projection":
            continue
        assert [one.instance.sop_instance_uid for one in ours.slices] == names
        assert [one.number for one in ours.slices] == [item["instance_number"] for item in slices]
        if len(names) > 4:
            assert ("gantry_tilt" in ours.flags) == ("tilt" in pathologies)
        if "missing-slices" not in pathologies and "truncated" not in pathologies:
            assert ours.geometry.num_missing == 0
            if len(names) > 1:
                assert np.allclose(np.array(ours.geometry.affine_lps), stack["affine_lps"], atol=1e-4)
        form = form_of([one.instance for one in ours.slices])
        assert form.unit == ("HU" if series["modality"] == "CT" else "raw")
        if any(item["is_truncated"] for item in slices):
            with pytest.raises(SourceError):
                list(iter_stack(ours, lambda header: paths[header.file_index]))
        else:
            _check_pixels(ours.slices[0].instance, ours, paths)
    assert num_stacks >= 0.9 * sum(1 for _ in stacks(truth))
    copies = sum(len(study.copies) for study in studies)
    assert copies == sum(len(study["copies"]) for study in truth[1:])
    for one in studies:
        check_copies(one, lambda header: paths[header.file_index])


def _check_pixels(first: InstanceHeader, stack: Any, paths: list[Path]) -> None:
    """The first decoded slice equals pydicom's, in modality units, but for padding."""
    decoded = next(iter(iter_stack(stack, lambda header: paths[header.file_index])))
    dataset = dcmread(paths[first.file_index])
    expected = values_of(dataset)
    if dataset.Modality == "CT":
        expected = np.rint(expected)
        close = np.abs(decoded.pixels.astype(np.float64) - expected) <= 0.51
        # Marked padding may be replaced; nothing else.
        assert (~close).sum() <= decoded.num_padding
    elif "RescaleSlope" in dataset:
        assert np.allclose(decoded.pixels, expected, rtol=1e-5)
    else:
        assert np.array_equal(decoded.pixels, expected)


def test_our_reader_gets_the_report_rows(made: Path, truth: list[Row]) -> None:
    reports = pytest.importorskip("shardflow.packing.sources.reports")
    found = {row.study_instance_uid: row.text for row in reports.iter_reports(made / "reports.csv", "csv")}
    assert found.keys() == {study["study_instance_uid"] for study in truth[1:]}
    for study in truth[1:]:
        text = found[study["study_instance_uid"]]
        for row in (*study["report"]["mentions"], *study["report"]["entities"]):
            assert text[slice(*row["span"])] == row["text"]


def test_lost_slices_leave_the_gap_that_the_truth_says(truth: list[Row]) -> None:
    gaps = 0
    for _, series, stack in stacks(truth):
        if "missing-slices" not in series["pathologies"]:
            continue
        places = [item["grid_index"] for item in stack["slices"]]
        lost = set(range(places[0], places[-1] + 1)) - set(places)
        assert lost == set(series["lost_grid_indexes"])
        positions = np.array([item["position_mm"] for item in stack["slices"]])
        steps = np.linalg.norm(np.diff(positions, axis=0), axis=1)
        for step, (before, after) in zip(steps, pairwise(places), strict=True):
            assert step == pytest.approx(series["slice_spacing_mm"] * (after - before), abs=1e-4)
        gaps += 1
    assert gaps


# ---- what a person sees --------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shardflow.cli.main", "synth", str(tmp_path / "out")]
    command += ["--studies", "2", "--seed", "1", "--size", "32", "--slices", "4"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        # A terminal that nobody holds open any more ends with an error on Linux.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
        assert process.wait(timeout=300) == 0
    assert b"generating studies" in shown


def test_a_killed_process_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> Iterator[object]:
        raise BrokenProcessPool("pid 1234")

    monkeypatch.setattr("shardflow.synthetic.generation._run", die)
    with pytest.raises(ShardflowError, match="a generating process was killed"):
        generate(OPTIONS, tmp_path / "out")


def test_pixels_do_not_depend_on_the_processor(tmp_path: Path) -> None:
    """The same bytes without the vector instructions that this machine has beyond NumPy's baseline."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    arguments = ["--studies", "4", "--seed", "6", "--size", "48", "--slices", "5:8"]
    for name, disabled in (("all", ""), ("few", " ".join(found))):
        done = subprocess.run(
            [sys.executable, "-m", "shardflow.cli.main", "synth", str(tmp_path / name), *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "all") == digest(tmp_path / "few")
