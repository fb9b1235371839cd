"""Header rows: one JSON line for each input file, and the evidence that links attachments with studies.

The job keeps a few numbers per file in memory (`shardflow.packing.inventory`). Everything else about a file
is stored here until its study is packed, so that memory does not grow with the number of attributes. Rows
hold identifiers; they live in the private folder, and only while the job runs.

For linking, packing processes turn identifiers into digests, which the job compares. Evidence is used in one
order (study, series, instances, accession number, place, patient and time), and the first kind that names
studies of the inputs decides. Several studies are no link, and neither is a study of one patient under the
name of another (docs/attachments.md).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from shardflow.errors import ShardflowError, StorageError, naming_os_errors
from shardflow.packing.deid.identity import MAX_SHARED, is_number
from shardflow.packing.deid.pseudonyms import parse_date
from shardflow.packing.engines.base import decode, encode
from shardflow.packing.inventory import ATTACHMENT_KIND, NO_FACTS, NO_STUDY, Attachment, ItemLinks, StudyFacts
from shardflow.packing.sources.attachments import AttachmentItem
from shardflow.packing.sources.dicom.headers import InstanceHeader, header_from_json, header_to_json
from shardflow.packing.sources.placement import ClassNames, Placement
from shardflow.packing.workspace import write_plainly

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.inventory import FileTable

AMBIGUOUS: Final = -2
"""In place of a study: several studies match a record equally well."""
CONFLICTING: Final = -3
"""In place of a study: a record names a study, and another patient of the inputs than the study's."""

_END: Final = b"end\n"
_DAY_S: Final = 86_400
_LINKING: Final = ("accession_number", "study_date", "study_time", "acquired", "utc_offset")
"""Header fields that matter to attachments alone: they link them with the study, and place them in time."""
_IDENTITY: Final = (
    "patient_name",
    "birth_date",
    "sex",
    "patient_age",
    "patient_id_issuer",
    "other_patient_ids",
)
"""Header fields that only tell which patients are one person."""
_BESIDE: Final = ("file_index", *_LINKING, *_IDENTITY)
"""Header fields that are no content of the file (`HeaderRow.digest`)."""
_beside_of: Final = attrgetter(*_BESIDE)
# ASCII: file names that are not UTF-8 contain lone surrogates, which only escapes can express.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))


BATCH_FILES: Final = 128
"""Input files whose rows are read in one task and are in one file; fixed, so that a restart with other
processes finds the same ones."""


def batch_name(file: int) -> str:
    """Return the name of the file of header rows with the row of an input file."""
    return f"batch-{file // BATCH_FILES:07d}.jsonl"


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Location of one header row."""

    name: str
    """File of rows."""
    offset: int
    num_bytes: int

    @classmethod
    def of(cls, files: FileTable, file: int) -> Self:
        """Return the place of the row of a file."""
        name = batch_name(int(files.source[file]))
        return cls(name, int(files.row_offset[file]), int(files.row_num_bytes[file]))


@dataclass(frozen=True, slots=True)
class AttachmentRow:
    """An attachment in a header row."""

    kind: str
    """Name of the `shardflow.packing.sources.attachments.AttachmentKind`."""
    version: int
    content: str
    """Digest of the file's content."""
    items: tuple[AttachmentItem, ...]
    study_beside: str = ""
    """Study of the layout that the file is located with."""
    classes: ClassNames | None = None
    """Of a volume of labels that a layout names."""


@dataclass(frozen=True)
class HeaderRow:
    """One input file after the header pass."""

    root_index: int
    relative_path: str
    header: InstanceHeader | None = None
    """None if the file cannot be packed; there is a reason then."""
    reason: str | None = None
    patient_id: str = ""
    """Of a file that cannot be packed but names its patient; else empty."""
    study_instance_uid: str = ""
    sop_instance_uid: str = ""
    placement: Placement | None = None
    """Facts that the layout knows about the file."""
    attachment: AttachmentRow | None = None
    """Set for a file of a kind of attachments."""
    pixels: int = 0
    """64 bits of its stored pixels, by which copies under other identifiers are found; 0 for none."""

    @cached_property
    def _content(self) -> bytes:
        """What a later version knows the file by, as JSON.

        Its form is frozen: the digest of another one would not be that of earlier versions. Not included are
        the split, which belongs to the patient and shows in the names of the plan's shards, and further
        identifiers of study and patient, which only link.
        """
        content: dict[str, Any] = {
            "header": None,
            "reason": self.reason,
            "patient_id": self.patient_id,
            "study_instance_uid": self.study_instance_uid,
            "sop_instance_uid": self.sop_instance_uid,
        }
        if self.header is not None:
            header = content["header"] = header_to_json(self.header)
            for name in _BESIDE:
                del header[name]
            if not header["pyramid"]:
                # Of slides alone, so that other files stay known to versions packed before it.
                del header["pyramid"]
        if self.placement is not None:
            placement = content["placement"] = {**self.placement.to_json(), "split": ""}
            del placement["other_ids"]
        return _encode(content)

    def to_json(self) -> bytes:
        """Return the row as JSON: its content, and beside it all else."""
        beside: dict[str, Any] = {
            "root": self.root_index,
            "path": self.relative_path,
            "pixels": self.pixels,
            "header": {} if self.header is None else dict(zip(_BESIDE, _beside_of(self.header), strict=True)),
        }
        if self.placement is not None:
            beside["placement"] = {"split": self.placement.split, "other_ids": self.placement.other_ids}
        if self.attachment is not None:
            beside["attachment"] = encode(self.attachment)
        return b'{"content":%b,"beside":%b}' % (self._content, _encode(beside))

    @classmethod
    def from_json(cls, data: bytes) -> HeaderRow:
        """Read what `to_json` wrote."""
        row = json.loads(data)
        content, beside = row["content"], row["beside"]
        header, placed, found = content["header"], content.get("placement"), beside.get("attachment")
        return cls(
            beside["root"],
            beside["path"],
            None if header is None else header_from_json({"pyramid": (), **header, **beside["header"]}),
            content["reason"],
            content["patient_id"],
            content["study_instance_uid"],
            content["sop_instance_uid"],
            None if placed is None else Placement.from_json({**placed, **beside["placement"]}),
            None if found is None else decode(AttachmentRow, found),
            beside["pixels"],
        )

    def instance_digest(self) -> int:
        """Return 64 bits of the SOP Instance UID, to recognize copies; 0 if it is missing."""
        uid = self.sop_instance_uid if self.header is None else self.header.sop_instance_uid
        return digest64(uid)

    def digest(self) -> int:
        """Return 64 bits of the row's content, equal for a file that was moved or renumbered."""
        if self.attachment is not None:
            # The content itself, so that a later version of a kind still recognizes the file.
            return int(self.attachment.content[:16], 16)
        return digest_bytes(self._content)


def store_rows(path: Path, digest: str, rows: Sequence[HeaderRow]) -> list[tuple[int, int]]:
    """Write the rows of a batch of files.

    Args:
        path: File in the private folder.
        digest: Digest of all that the batch depends on; `load_rows` accepts the file only for the same one.
        rows: One for each input file.

    Returns:
        Offset and number of bytes of each row in the file.
    """
    lines = [row.to_json() + b"\n" for row in rows]
    write_plainly(path, b"".join([digest.encode(), b"\n", *lines, _END]))
    return _places(len(digest) + 1, lines)


def load_rows(path: Path, digest: str) -> tuple[list[HeaderRow], list[tuple[int, int]]] | None:
    """Read back the rows of a batch and their places; None if missing, torn or of another digest."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(digest) + 1
    if data[:start] != digest.encode() + b"\n" or not data.endswith(b"\n" + _END):
        return None
    lines = data[start : -len(_END)].splitlines(keepends=True)
    try:
        return list(map(HeaderRow.from_json, lines)), _places(start, lines)
    except (ValueError, KeyError, TypeError, ShardflowError):
        return None


def _places(start: int, lines: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return offset and number of bytes of each line, the first of which begins at ``start``."""
    sizes = [len(line) for line in lines]
    return list(zip(accumulate(sizes, initial=start), sizes, strict=False))


def read_rows(folder: Path, places: Sequence[RowPlace]) -> list[HeaderRow]:
    """Read single rows, in the order of ``places``.

    Raises:
        StorageError: A row cannot be read back; the header pass has to run again.
    """
    descriptors: dict[str, int] = {}
    try:
        lines: list[bytes] = []
        with naming_os_errors("reading header rows of the private folder"):
            for place in places:
                if place.name not in descriptors:
                    descriptors[place.name] = os.open(folder / place.name, os.O_RDONLY | os.O_CLOEXEC)
                lines.append(os.pread(descriptors[place.name], place.num_bytes, place.offset))
        return list(map(HeaderRow.from_json, lines))
    except StorageError:
        raise
    except (ValueError, KeyError, TypeError, ShardflowError) as error:
        raise StorageError(
            f"header rows cannot be read back ({type(error).__name__}); remove the headers folder in the "
            "private folder and run the job again."
        ) from None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _encode(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("ascii")


def digest64(text: str) -> int:
    """Return 64 bits of an identifier, which the job keeps in its place; 0 for none."""
    # A layout may name an image by its path, which need not be UTF-8.
    return digest_bytes(text.encode("utf-8", "surrogatepass")) if text else 0


def digest_bytes(data: bytes) -> int:
    """Return the first 64 bits of a SHA-256."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def image_facts(row: HeaderRow) -> StudyFacts:
    """Return the facts of its study that an image names."""
    header = row.header
    if header is None:
        return NO_FACTS
    others = () if row.placement is None else row.placement.other_ids
    accession = header.accession_number or next(iter(others), "")
    return _study_facts(accession.strip(), header.study_date, header.study_time)


@lru_cache(maxsize=1024)
def _study_facts(accession: str, date: str, time: str) -> StudyFacts:
    day = parse_date(date)
    if day is None:
        return StudyFacts(digest64(accession), None, None)
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
    seconds = seconds_of_day(time)
    first = int(midnight.timestamp())
    last = first + (_DAY_S if seconds is None else seconds)
    return StudyFacts(digest64(accession), first + (seconds or 0), last)


def seconds_of_day(value: str) -> int | None:
    """Parse a DICOM time, which may end after its hours or minutes; None if it is invalid.

    Example:
        >>> seconds_of_day("093015.25"), seconds_of_day("09:30"), seconds_of_day("25")
        (34215, 34200, None)
    """
    digits = value.split(".", maxsplit=1)[0].replace(":", "").strip()
    if len(digits) not in {2, 4, 6} or not (digits.isascii() and digits.isdigit()):
        return None
    hours, minutes, seconds = (int(digits[at : at + 2] or "0") for at in (0, 2, 4))
    inside = hours < 24 and minutes < 60 and seconds < 61
    return int(timedelta(hours=hours, minutes=minutes, seconds=seconds).total_seconds()) if inside else None


def link_facts(row: AttachmentRow, key: SecretKey) -> Attachment:
    """Turn what the records of an attachment are linked by into digests and surrogates."""
    items = []
    for item in row.items:
        time = item.time
        seconds = None if time is None else int(time.replace(tzinfo=UTC).timestamp())
        items.append(
            ItemLinks(
                item=item.item,
                studies=tuple(key.surrogate("study", uid.strip()) for uid in item.study_uids if uid.strip()),
                series=tuple(digest64(uid.strip()) for uid in item.series_uids if uid.strip()),
                instances=tuple(digest64(uid.strip()) for uid in item.sop_uids if uid.strip()),
                accession=digest64(item.accession.strip()),
                beside=key.surrogate("study", row.study_beside) if row.study_beside else "",
                patient=key.surrogate("patient", item.patient_id.strip()) if item.patient_id.strip() else "",
                others=_others(item, key),
                time_s=seconds,
            )
        )
    return Attachment(kind=row.kind, version=row.version, links=tuple(items))


def _others(item: AttachmentItem, key: SecretKey) -> tuple[str, ...]:
    """Return the surrogates of the further numbers of a record's patient; none of very many."""
    numbers = {one.number for one in item.patient_numbers if is_number(one.number)}
    if len(numbers) > MAX_SHARED:
        return ()
    return tuple(key.surrogate("patient", one) for one in sorted(numbers - {item.patient_id.strip()}))


def resolve(files: FileTable, links: Iterable[Sequence[ItemLinks]], window_s: int) -> list[dict[int, int]]:
    """Find the study of every record.

    Args:
        files: The inventory after the header pass.
        links: Records of each attachment.
        window_s: Maximum distance in time between a record and the study of its patient.

    Returns:
        For each attachment, the study, `NO_STUDY`, `AMBIGUOUS` or `CONFLICTING` of each item.
    """
    attachments = [list(items) for items in links]
    every = [item for items in attachments for item in items]
    search = _Search(files, every, window_s)
    return [{item.item: search.study_of(item) for item in items} for items in attachments]


class _Search:
    def __init__(self, files: FileTable, items: Sequence[ItemLinks], window_s: int) -> None:
        self._studies = files.studies
        self._window_s = window_s
        is_image = (files.kind != ATTACHMENT_KIND) & (files.study != NO_STUDY)
        wanted = {digest for item in items for digest in item.series}
        self._by_series = _studies_by(files.series, files.study, is_image, wanted)
        wanted = {digest for item in items for digest in item.instances}
        self._by_instance = _studies_by(files.instance, files.study, is_image, wanted)
        self._by_accession: dict[int, set[int]] = {}
        self._by_patient: dict[str, list[int]] = {}
        accessions = {item.accession for item in items if item.accession}
        patients = {patient for item in items if item.time_s is not None for patient in item.patients}
        named = {patient for item in items for patient in item.patients}
        self._patients = named.intersection(map(self._studies.patient_of, range(len(self._studies))))
        for study, (patient, facts) in enumerate(
            zip(self._studies.patients, self._studies.facts, strict=True)
        ):
            if facts.accession in accessions:
                self._by_accession.setdefault(facts.accession, set()).add(study)
            if patient in patients:
                self._by_patient.setdefault(patient, []).append(study)

    def study_of(self, item: ItemLinks) -> int:
        """Return the study of a record by the strongest evidence that names one."""
        known = {self._studies.find(key) for key in item.studies} - {NO_STUDY}
        for found in (
            known,
            set().union(*(self._by_series.get(one, ()) for one in item.series)),
            set().union(*(self._by_instance.get(one, ()) for one in item.instances)),
            self._with_accession(item),
            {self._studies.find(item.beside)} - {NO_STUDY},
            self._near(item),
        ):
            if found:
                return AMBIGUOUS if len(found) > 1 else self._of_one_patient(found.pop(), item)
        return NO_STUDY

    def _of_one_patient(self, study: int, item: ItemLinks) -> int:
        """Reject a study if the record names another patient of the inputs.

        A patient that no image names proves nothing: systems number patients in their own ways.
        """
        patient = self._studies.patient_of(study)
        is_other = patient and patient not in item.patients and not self._patients.isdisjoint(item.patients)
        return CONFLICTING if is_other else study

    def _with_accession(self, item: ItemLinks) -> set[int]:
        """Return the only study with the record's accession number, unless it is another patient's."""
        found = self._by_accession.get(item.accession, set()) if item.accession else set()
        if len(found) != 1:
            return set()
        (study,) = found
        patient = self._studies.patient_of(study)
        return set() if item.patient and patient and patient not in item.patients else {study}

    def _near(self, item: ItemLinks) -> set[int]:
        """Return studies of the record's patient within the window."""
        if item.time_s is None:
            return set()
        near: set[int] = set()
        for study in (study for patient in item.patients for study in self._by_patient.get(patient, ())):
            facts = self._studies.facts[study]
            if facts.first_s is None or facts.last_s is None:
                continue
            distance = max(facts.first_s - item.time_s, item.time_s - facts.last_s, 0)
            if distance <= self._window_s:
                near.add(study)
        return near


def _studies_by(
    column: NDArray[np.uint64], study: NDArray[np.int32], chosen: NDArray[np.bool_], wanted: set[int]
) -> Mapping[int, set[int]]:
    """Return the studies that hold each wanted digest."""
    found: dict[int, set[int]] = {}
    if not wanted:
        return found
    rows = np.flatnonzero(chosen & np.isin(column, np.array(sorted(wanted), np.uint64), kind="sort"))
    for digest, number in zip(column[rows].tolist(), study[rows].tolist(), strict=True):
        found.setdefault(digest, set()).add(number)
    return found
