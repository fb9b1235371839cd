"""Header rows: exact, private, and never taken where they are torn or of other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardflow.errors import StorageError
from shardflow.packing.deid.identity import MAX_SHARED
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.header_rows import (
    CONFLICTING,
    AttachmentRow,
    HeaderRow,
    RowPlace,
    link_facts,
    load_rows,
    read_rows,
    resolve,
    store_rows,
)
from shardflow.packing.inventory import NO_STUDY, FileTable, StudyFacts
from shardflow.packing.sources.attachments import AttachmentItem, PatientNumber
from shardflow.packing.sources.dicom.headers import InstanceHeader, read_header
from shardflow.packing.sources.placement import Placement
from tests.dicom_factory import make_study
from tests.unit.packing.sources.dicom.factory import make_header

pytestmark = pytest.mark.fast


@pytest.fixture
def rows(tmp_path: Path) -> list[HeaderRow]:
    study = make_study(tmp_path / "in", num_slices=3)
    found = []
    for number, path in enumerate(study.files):
        header = read_header(path, file_index=number)
        assert isinstance(header, InstanceHeader)
        found.append(HeaderRow(0, path.name, header=header))
    odd_name = b"caf\xe9.dcm".decode("utf-8", "surrogateescape")
    broken = HeaderRow(1, odd_name, reason="PIXEL_DATA_TRUNCATED", patient_id="P", study_instance_uid="1.2")
    return [*found, broken]


def test_rows_read_back_whole_and_one_by_one(tmp_path: Path, rows: list[HeaderRow]) -> None:
    path = tmp_path / "batch"
    places = store_rows(path, "d" * 64, rows)
    assert load_rows(path, "d" * 64) == (rows, places)
    assert read_rows(tmp_path, [RowPlace("batch", *places[3]), RowPlace("batch", *places[0])]) == [
        rows[3],
        rows[0],
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_digests_and_torn_files_are_not_taken(tmp_path: Path, rows: list[HeaderRow]) -> None:
    path = tmp_path / "batch"
    store_rows(path, "d" * 64, rows)
    assert load_rows(path, "e" * 64) is None
    assert load_rows(tmp_path / "none", "d" * 64) is None
    data = path.read_bytes()
    for length in (0, 10, 64, 65, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert load_rows(path, "d" * 64) is None


def test_rows_that_cannot_be_read_back_stop_the_job(tmp_path: Path, rows: list[HeaderRow]) -> None:
    places = store_rows(tmp_path / "batch", "d" * 64, rows)
    with pytest.raises(StorageError, match="header rows cannot be read back"):
        read_rows(tmp_path, [RowPlace("batch", places[1][0] + 3, places[1][1])])
    with pytest.raises(StorageError, match="reading header rows"):
        read_rows(tmp_path, [RowPlace("gone", *places[1])])


def test_the_digest_is_of_the_content(rows: list[HeaderRow]) -> None:
    first = rows[0]
    assert first.header is not None
    moved = replace(
        first, root_index=3, relative_path="elsewhere", header=replace(first.header, file_index=99)
    )
    assert moved.digest() == first.digest()
    assert replace(first, header=replace(first.header, instance_number=77)).digest() != first.digest()
    assert len({row.digest() for row in rows}) == 4


def test_digests_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """By them a later version knows its inputs: another form of the content would pack all files again."""
    header = replace(make_header(tmp_path, 1), pixel_offset=1000, num_bytes=9000)
    placed = Placement(
        patient="P", study="S", split="test", other_ids=("A1",), attributes={"Laterality": ("L",)}
    )
    assert f"{HeaderRow(0, 'a', header=header).digest():016x}" == "9b7d20959ae707fb"
    assert f"{HeaderRow(0, 'a', header=header, placement=placed).digest():016x}" == "9ec2b46e2683f285"
    assert f"{HeaderRow(0, 'a', reason='NOT_DICOM', patient_id='P').digest():016x}" == "a5f7b4abdb91563b"


def test_an_image_that_is_known_by_a_path_of_other_bytes_has_a_digest() -> None:
    named = [
        HeaderRow(0, "a", sop_instance_uid=name.decode("utf-8", "surrogateescape"))
        for name in (b"caf\xe9.png", b"caf\xe8.png", "caf\N{LATIN SMALL LETTER E WITH ACUTE}.png".encode())
    ]
    assert len({row.instance_digest() for row in named}) == 3


def test_a_record_is_of_a_patient_under_any_of_the_listed_numbers() -> None:
    """Of a study of another patient it is not, whichever of its numbers the inputs know."""
    key = SecretKey(bytes(range(32)))
    when = datetime(2026, 3, 1, 12, tzinfo=UTC)
    files = FileTable(0)
    for study, patient in (("1.1", "A1"), ("1.2", "B2")):
        second = int(when.timestamp())
        surrogates = key.surrogate("study", study), key.surrogate("patient", patient)
        files.studies.add(*surrogates, 0, StudyFacts(0, second, second))

    def study_of(numbers: Sequence[str], study: str = "") -> int:
        item = AttachmentItem(
            item=0,
            study_uids=(study,) if study else (),
            patient_id=numbers[0],
            patient_numbers=tuple(map(PatientNumber, numbers)),
            time=when.replace(tzinfo=None),
        )
        links = link_facts(AttachmentRow("toy", 1, "0" * 64, (item,)), key).links
        (found,) = resolve(files, [links], 60)
        return found[0]

    assert study_of(["E5", "B2"]) == 1
    assert study_of(["B2", "E5"], "1.2") == 1
    assert study_of(["E5"], "1.1") == 0
    for numbers in (["B2"], ["E5", "B2"]):
        assert study_of(numbers, "1.1") == CONFLICTING
    # Half a hospital is nobody's list.
    assert study_of(["E5", "B2", *(f"X{number}7" for number in range(MAX_SHARED))]) == NO_STUDY
