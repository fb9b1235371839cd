"""Interface of attachment kinds: input files that belong to a study and are not images of it.

Segmentations, contours, structured reports, clinical documents and waveforms are attachments. This module
defines what a kind must implement; `shardflow.packing` finds the files, links them with studies, calls the
kinds and writes the results. The facts that link an attachment identify people: they stay in the packing
process and in the private folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from shardflow.format.reasons import Reason
from shardflow.packing.sources.placement import ClassNames

DAY_S: Final = 86_400
LABEL_VOLUMES: Final = "nifti"
"""Name of the kind that reads the volumes of labels that a layout names."""
HEAD_BYTES: Final = 4096
"""Bytes of a file's beginning that a kind is shown to recognise it."""

Affine: TypeAlias = tuple[tuple[float, float, float, float], ...]
"""Four rows: (column, row, slice, 1) to millimeters, LPS."""


def published_interval(exact_s: float | None, resolution_s: int) -> float | None:
    """Return the seconds between two moments that may leave, rounded up; None if none may.

    Example:
        >>> published_interval(61.5, 60), published_interval(61.5, 1), published_interval(61.5, DAY_S)
        (120.0, 61.5, None)
    """
    if exact_s is None or resolution_s >= DAY_S:
        return None
    return exact_s if resolution_s == 1 else float(math.ceil(exact_s / resolution_s) * resolution_s)


@dataclass(frozen=True, slots=True)
class PatientNumber:
    """One number of a patient, and who issued it. Identifies a person: never leaves as it is."""

    number: str
    issuer: str = ""

    def __repr__(self) -> str:
        return "PatientNumber()"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachmentItem:
    """One record of an attachment, and what tells whose it is. Identifies people: never leaves as it is.

    Evidence is used in this order, and the first that names studies of the inputs decides: study, series,
    referenced instances, accession number, the place of the file in a layout, then patient and time. Leave
    out what must not decide: a segmentation without a time is not linked because it was made on the same
    day.
    """

    item: int = 0
    """Number of the record in its file."""
    study_uids: tuple[str, ...] = ()
    """Study Instance UIDs, or what the layout calls studies."""
    series_uids: tuple[str, ...] = ()
    sop_uids: tuple[str, ...] = ()
    """SOP Instance UIDs of images; a few are enough."""
    accession: str = ""
    """Counts only where one study of the inputs has it."""
    patient_id: str = ""
    """As the headers of images write it; an accession number of another patient's study does not count."""
    patient_numbers: tuple[PatientNumber, ...] = ()
    """Numbers that the record lists for its patient, ``patient_id`` among them: they are one person's."""
    time: datetime | None = None
    """Of the record, on the original clock and without a zone; links by patient and time window."""
    content: str = ""
    """Digest of what belongs to the record and lies in other files, so that a change of them is seen."""

    def __repr__(self) -> str:
        return f"AttachmentItem({self.item})"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSeries:
    """One series of the study as it is stored, with what its images were called."""

    number: int
    """SSS of its fields."""
    facts: Mapping[str, Any]
    """Its object of ``study.json``, without what only the pixels tell (display range, counts of values)."""
    series_uid: str
    frame_of_reference_uid: str
    sop_uids: tuple[str, ...]
    """Of the image that each stored slice came from, in stored order."""
    frames: tuple[int, ...]
    """Frame of that image, from 0."""
    rows: int
    columns: int
    affine_lps: Affine | None
    """Of the stored volume, as in ``study.json``; None where it has none."""

    def __repr__(self) -> str:
        return f"StoredSeries({self.number}, {len(self.sop_uids)} x {self.rows} x {self.columns})"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyContext:
    """The study that an attachment is packed with, and the only ways in which identifiers may leave."""

    sample_key: str
    study_uid: str
    patient_id: str
    series: Sequence[StoredSeries]
    """By number."""
    surrogate: Callable[[str, str], str]
    """``surrogate(kind, value)``: the surrogate of an identifier, such as a tracking UID."""
    scrub: Callable[[str, Mapping[str, Sequence[str]]], str]
    """``scrub(text, people)``: the de-identified text. It removes what the study's headers say about
    people, and ``people``: what the attachment says, by DICOM keyword (``{"PatientName": ("A^B",)}``)."""
    when: Callable[[datetime], Mapping[str, Any]]
    """Publishable form of a day, by the settings: ``{"day_offset": days since the study}``, and with
    ``{"date": "2018-03-01"}`` moved by the patient's own shift, or nothing."""
    seconds_from_study: Callable[[datetime], float | None]
    """Exact seconds since the first image was acquired, or, where that is not known, since the study began;
    None where neither is known or dates are to be removed. `published_seconds` is what may leave."""
    resolution_s: int = 1
    """Resolution of the seconds that may leave; a day: none leave."""
    utc_offset: tzinfo | None = None
    """Zone of the images' clock, where their headers state one."""
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Entries that former attachments of the study have put into each list of each part: the first free
    number of ``("annotations", "rois")``, ``("waveforms", "records")``, ..."""
    classes: ClassNames | None = None
    """Classes of a volume of labels whose image and classes a layout names; None for all else."""

    def published_seconds(self, moment: datetime) -> float | None:
        """Return the seconds between study and ``moment`` that may leave; None if none may.

        They are rounded up to the resolution, so that what came after the images never seems to come before.
        """
        return published_interval(self.seconds_from_study(moment), self.resolution_s)

    def num(self, part: str, name: str) -> int:
        """Return the number of entries in a list before this attachment, which is its first own number."""
        return self.counts.get((part, name), 0)

    def __repr__(self) -> str:
        return f"StudyContext({len(self.series)} series)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """Content of an attachment as it is stored in a sample."""

    fields: Mapping[str, bytes] = field(default_factory=dict)
    """Fields of their own, by name (docs/format.md, section 4); no other attachment may have one of them."""
    parts: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    """Lists that go into a JSON field with those of the study's other attachments:
    ``{"annotations": {"rois": [...]}}`` becomes ``annotations.json``. Entries of a list that is called
    ``dangling`` have a ``reason`` and a ``count``, which are added up by reason."""
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """Reasons of records (by `AttachmentItem.item`) that are not packed; the others are."""


class AttachmentKind(Protocol):
    """One kind of attachments. Stateless; heavy packages are imported inside `describe` and `convert`."""

    @property
    def name(self) -> str:
        """Such as ``"dicom-seg"`` or ``"edf"``; ``[a-z0-9-]``."""

    @property
    def version(self) -> int:
        """Raised when the same file produces other bytes."""

    @property
    def sop_classes(self) -> frozenset[str]:
        """SOP Class UIDs of the DICOM objects that are of this kind; empty for files that are not DICOM."""

    def recognise(self, path: Path, head: bytes) -> bool:
        """Tell whether a file that is not DICOM is of this kind, by its first `HEAD_BYTES`; cheaply."""

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        """Say whose the records of a file are.

        Returns:
            One item a record; none at all for a file that is read together with another one (the samples
            beside a header).

        Raises:
            SourceError: The file cannot be used; ``reason`` is a `Reason`.
        """

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:
        """Turn records of a file into fields of their study; the same bytes for the same file and study.

        Args:
            path: The file.
            items: Records that belong to the study, ascending.
            study: The study; its slices are those that are stored.

        Raises:
            SourceError: None of the records can be packed; ``reason`` is a `Reason`.
        """
