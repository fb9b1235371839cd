"""What is odd in the real files at hand: one test for each fact that their README names.

Facts about single values are in the other modules of this folder; `docs/dicom.md` states the rules.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pydicom
import pytest

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.headers import read_header
from shardflow.packing.sources.dicom.pixels import form_of, iter_slices
from shardflow.packing.sources.dicom.stacks import Stack, build_studies
from tests.unit.packing.sources.dicom.corpus import BUNDLED, read_corpus
from tests.unit.packing.sources.dicom.factory import header_of, make_file


def _stacks(folder: Path) -> list[Stack]:
    return [stack for study in build_studies(read_corpus(folder).headers).studies for stack in study.stacks]


def test_one_volume_is_one_volume_in_every_encoding(shared_data: Path) -> None:
    volumes, syntaxes = [], set()
    generic = shared_data / "dicom2nifti_small" / "generic"
    for name in ("compressed", "compressed_j2k", "compressed_jpeg", "compressed_jpegls", "compressed_rle"):
        paths = sorted((generic / name / "001").glob("*.dcm"))
        volumes.append(np.stack([next(iter_slices(path, header_of(path))).pixels for path in paths]))
        syntaxes.add(header_of(paths[0]).transfer_syntax_uid)
    for volume in volumes[1:]:
        np.testing.assert_array_equal(volume, volumes[0])
    assert len(syntaxes) == 4


@pytest.mark.parametrize(
    ("folder", "num_stacks", "num_slices", "flag"),
    [
        ("ge/dti/001", 2, 4, "split_by_order"),
        ("ge/dti/002", 4, 4, "split_by_order"),
        ("ge/fmri/001", 2, 4, "split_by_order"),
        ("philips_enhanced/dti/001", 4, 8, "split_by_diffusion_b_value"),
        ("philips_enhanced/fmri/001", 4, 8, "split_by_temporal_position"),
    ],
)
def test_repeated_positions_become_stacks_that_each_hold_a_position_once(
    shared_data: Path, folder: str, num_stacks: int, num_slices: int, flag: str
) -> None:
    stacks = _stacks(shared_data / "dicom2nifti_small" / folder)
    assert len(stacks) == num_stacks
    for stack in stacks:
        assert flag in stack.flags
        places = {one.plane.position for one in stack.slices}
        assert len(stack.slices) == len(places) == num_slices
    assert len({frozenset(one.plane.position for one in stack.slices) for stack in stacks}) == 1


def test_the_order_of_file_names_is_seldom_that_of_slices(shared_data: Path) -> None:
    """Slices ascend along the normal in each series, names in none or some."""
    found: Counter[str] = Counter()
    for folder in ("ct_philips_phantom/S21570/S2010", "mr_ge_fruit", "mr_oblique_20/volume"):
        corpus = read_corpus(shared_data / folder)
        (stack,) = (one for study in build_studies(corpus.headers).studies for one in study.stacks)
        names = [corpus.name(one.instance) for one in stack.slices]
        heights = [_height(stack, index) for index in range(len(names))]
        assert heights == sorted(heights)
        found["same" if names == sorted(names) else "other"] += 1
    assert found["other"] >= 1


def _height(stack: Stack, index: int) -> float:
    plane = stack.slices[index].plane
    assert plane.orientation is not None
    assert plane.position is not None
    normal = np.cross(plane.orientation[:3], plane.orientation[3:])
    return float(np.dot(normal, plane.position))


def test_an_mr_without_rescale_keeps_its_stored_values(shared_data: Path) -> None:
    path = shared_data / "mr_ge_fruit" / "00050.dcm"
    dataset = pydicom.dcmread(path)
    assert "RescaleSlope" not in dataset
    (one,) = iter_slices(path, header_of(path))
    np.testing.assert_array_equal(one.pixels, dataset.pixel_array)
    assert form_of([header_of(path)]).unit == "raw"


def test_the_real_monochrome1_radiograph_is_mirrored_once(shared_data: Path) -> None:
    path = shared_data / "highdicom" / "dx_image.dcm"
    (one,) = iter_slices(path, header_of(path))
    np.testing.assert_array_equal(one.pixels, 255 - pydicom.dcmread(path).pixel_array)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("highdicom/seg_image_ct_binary.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("highdicom/seg_image_ct_true_fractional.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("highdicom/seg_image_sm_control_labelmap.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("highdicom/seg_image_sm_dots_tiled_full.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("highdicom/sm_annotations.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("highdicom/sm_image_grayscale.dcm", "UNSUPPORTED_SLIDE"),
        ("highdicom/sr_document.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("dcmqi_ct_seg_sr/segmentations/partial_overlaps.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("dcmqi_ct_seg_sr/sr-example/sr.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("rt_utils/mock_data/rt.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("rt_utils/mock_data/non_existent_reference_rt.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("ct_philips_phantom/S21570/S2010/DIRFILE", "DICOM_DIRECTORY"),
    ],
)
def test_what_is_no_image_is_skipped_by_its_reason(shared_data: Path, file: str, reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        read_header(shared_data / file)
    assert caught.value.reason == reason


@pytest.mark.parametrize("folder", ["wfdb", "edf", "synthea_r4", "ccda", "hl7v2"])
def test_records_of_other_kinds_are_told_from_dicom(shared_data: Path, folder: str) -> None:
    corpus = read_corpus(shared_data / folder)
    assert not corpus.headers
    assert set(corpus.outcomes.values()) == {"NOT_DICOM"}


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("MR_truncated.dcm", "PIXEL_DATA_TRUNCATED"),
        ("image_dfl.dcm", "MISSING_IDENTIFIER"),  # deflated, and read to its identifiers
        ("ExplVR_BigEnd.dcm", "MISSING_IDENTIFIER"),
        ("ExplVR_BigEndNoMeta.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("ExplVR_LitEndNoMeta.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("badVR.dcm", "INVALID_IMAGE_DESCRIPTION"),  # a dose of "1A" frames
        ("liver_1frame.dcm", "UNSUPPORTED_SOP_CLASS"),  # segmentation of 1 bit
        ("waveform_ecg.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("rtstruct.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("test-SR.dcm", "UNSUPPORTED_SOP_CLASS"),
        ("dicomdirtests/DICOMDIR", "DICOM_DIRECTORY"),
        ("dicomdirtests/DICOMDIR-bigEnd", "DICOM_DIRECTORY"),
    ],
)
def test_bundled_oddities_have_their_reasons(file: str, reason: str) -> None:
    corpus = read_corpus(BUNDLED / file)
    assert list(corpus.outcomes.values()) == [reason]


def test_an_accession_number_joins_nothing(tmp_path: Path) -> None:
    """It is empty, or stands for strangers: two studies of one number stay two, one with two numbers one."""
    uids = [("1.2.3.1", "A1", "p1"), ("1.2.3.2", "A1", "p2"), ("1.2.3.3", "", "p3"), ("1.2.3.3", "A2", "p3")]
    headers = [
        header_of(
            make_file(
                tmp_path / f"{number}.dcm",
                number=number + 1,
                StudyInstanceUID=study,
                SeriesInstanceUID=f"{study}.1",
                AccessionNumber=accession,
                PatientID=patient,
            ),
            file_index=number,
        )
        for number, (study, accession, patient) in enumerate(uids)
    ]
    studies = build_studies(headers).studies
    assert sorted(len(study.instances) for study in studies) == [1, 1, 2]


def test_accession_numbers_are_empty_in_real_files(shared_data: Path) -> None:
    paths = itertools.chain(
        (shared_data / "mr_ge_fruit").glob("*.dcm"), (shared_data / "rt_utils").rglob("ct_*")
    )
    numbers = {
        str(pydicom.dcmread(path, stop_before_pixels=True).get("AccessionNumber", "")) for path in paths
    }
    assert "" in numbers
