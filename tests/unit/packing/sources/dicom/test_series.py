"""From headers to studies."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.format.reasons import Reason
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.stacks import build_studies
from tests.unit.packing.sources.dicom.factory import UID_ROOT, make_header

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> list[InstanceHeader]:
    """Two patients, three studies, four series."""
    template = make_header(tmp_path_factory.mktemp("template"), 1)
    made: list[InstanceHeader] = []
    for patient, study, series, number in (("b", 1, 2, 9), ("b", 1, 1, 3), ("a", 2, 3, 1), ("a", 3, 4, None)):
        for k in range(3):
            plane = replace(template.planes[0], position=(0.0, 0.0, float(k)))
            made.append(
                replace(
                    template,
                    file_index=len(made),
                    patient_id=patient,
                    study_instance_uid=f"{UID_ROOT}1.{study}",
                    series_instance_uid=f"{UID_ROOT}2.{series}",
                    sop_instance_uid=f"{UID_ROOT}3.{series}.{k}",
                    series_number=number,
                    instance_number=3 - k,
                    planes=(plane,),
                )
            )
    return made


def test_patients_studies_and_series_are_sorted(headers: list[InstanceHeader]) -> None:
    grouping = build_studies(headers)
    assert [(study.patient_id, study.study_instance_uid[-1]) for study in grouping.studies] == [
        *(("a", "2"), ("a", "3")),
        ("b", "1"),
    ]
    assert [stack.series_number for stack in grouping.studies[2].stacks] == [3, 9]
    assert grouping.rejections == ()
    assert sum(len(study.instances) for study in grouping.studies) == len(headers)


def test_the_grouping_does_not_depend_on_order(headers: list[InstanceHeader]) -> None:
    expected = build_studies(headers)
    for seed in range(5):
        shuffled = list(headers)
        random.Random(seed).shuffle(shuffled)
        assert build_studies(shuffled) == expected


def test_the_slices_do_not_depend_on_file_names(headers: list[InstanceHeader]) -> None:
    renamed = [replace(header, file_index=100 - header.file_index) for header in headers]
    assert [
        [[one.instance.sop_instance_uid for one in stack.slices] for stack in study.stacks]
        for study in build_studies(renamed).studies
    ] == [
        [[one.instance.sop_instance_uid for one in stack.slices] for stack in study.stacks]
        for study in build_studies(headers).studies
    ]


def test_a_study_of_two_patients_is_rejected_whole(headers: list[InstanceHeader]) -> None:
    mixed = [replace(headers[0], patient_id="c"), *headers[1:]]
    grouping = build_studies(mixed)
    assert {rejection.reason for rejection in grouping.rejections} == {Reason.CONFLICTING_IDENTIFIER}
    assert len(grouping.rejections) == 6
    assert [study.patient_id for study in grouping.studies] == ["a", "a"]


def test_of_copies_the_uncompressed_one_is_kept(headers: list[InstanceHeader]) -> None:
    packed = replace(headers[0], file_index=50, transfer_syntax_uid="1.2.840.10008.1.2.5", num_bytes=10**9)
    later = replace(headers[0], file_index=51)
    (*_, study) = build_studies([packed, later, *headers]).studies
    assert [(pair.kept.file_index, pair.copy.file_index) for pair in study.copies] == [(0, 51), (0, 50)]
    assert len(study.instances) == 6


def test_no_identifier_in_a_representation(tmp_path: Path) -> None:
    header = make_header(
        tmp_path, 1, PatientID="SENTINEL", StudyInstanceUID="1.2.777", SeriesInstanceUID="1.2.777"
    )
    grouping = build_studies([header, replace(header, file_index=2)])
    study = grouping.studies[0]
    shown = f"{grouping} {study} {study.stacks} {study.copies} {study.instances} {study.stacks[0].slices}"
    assert "SENTINEL" not in shown
    assert "777" not in shown
