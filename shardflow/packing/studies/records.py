"""JSON fields of a sample: the series objects of ``study.json``, and the fields made from attachments.

Attachments are converted in an order that follows from their content, never from their paths, so that
numbers and bytes do not change when files are moved. A file that cannot be converted is reported, and harms
neither the study nor another file. One that crashes the process leaves a mark, so that the job can pack the
study without it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from shardflow.errors import FormatError, SourceError, StorageError
from shardflow.format.codecs import codec_for, stored_codec
from shardflow.format.facts.sampling import ClassVoxels, voxels_of_study
from shardflow.format.keys import (
    FIELD_PATTERN,
    REPORT_FIELD,
    REPORT_JSON_FIELD,
    STUDY_FIELD,
    encode_json,
    parse_slice_field,
    parse_variant_field,
)
from shardflow.format.reasons import Outcome, Reason, outcome_of
from shardflow.format.volumes.bricks import BRICKS_CODEC
from shardflow.format.volumes.masks import join_masks
from shardflow.format.volumes.tiles import TILES_CODEC
from shardflow.packing.deid.allowlist import allow_ordinal, allow_technical
from shardflow.packing.header_rows import seconds_of_day
from shardflow.packing.registry import attachment_kinds
from shardflow.packing.sources.attachments import DAY_S, StoredSeries, StudyContext, published_interval
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.attributes import AttributeValue
from shardflow.packing.sources.dicom.pixels import form_of
from shardflow.packing.sources.dicom.stacks import Stack
from shardflow.packing.sources.documents.facts import has_time_of_day, parse_moment

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.format.volumes.bricks import EncodedVolume
    from shardflow.packing.header_rows import AttachmentRow
    from shardflow.packing.settings import VolumesConfig
    from shardflow.packing.sources.attachments import Attached, AttachmentKind
    from shardflow.packing.sources.dicom.acquisition import AcquisitionFacts
    from shardflow.packing.sources.dicom.headers import InstanceHeader
    from shardflow.packing.studies.assembly import AttachmentMark
    from shardflow.packing.studies.privacy import StudyPrivacy

STUDY_JSON_VERSION: Final = 1
PART_VERSION: Final = 1
"""``format_version`` of the JSON fields that are made from attachments."""
_OWN_FIELDS: Final = frozenset({"alignment.json", REPORT_FIELD, REPORT_JSON_FIELD, STUDY_FIELD})
_DANGLING: Final = "dangling"
TimeOrigin: TypeAlias = Literal["acquisition", "study"]
TIMED_PARTS: Final = frozenset({"records", "waveforms"})
"""Parts whose seconds count from the study; ``time_origin`` says from what of it."""
_MAX_AFTER_S: Final = 30 * DAY_S
"""Seconds that an image may be away from the first one of its study; more are an error of a clock."""
_ACQUIRED_DAYS: Final = (-1, 7)
"""Days from the study's date between which a stated acquisition is believed."""


def describe_series(
    stack: Stack,
    attributes: Mapping[str, AttributeValue],
    privacy: StudyPrivacy,
    codec: str,
    volumes: VolumesConfig,
) -> dict[str, Any]:
    """Return the ``study.json`` object of a series, as far as it is known before a pixel is read.

    Args:
        stack: The series.
        attributes: Of its first file, not filtered by the allowlist yet.
        privacy: Of the study.
        codec: Codec of the settings.
        volumes: Settings of volumes.
    """
    form = form_of([part.instance for part in stack.slices])
    technical = allow_technical(attributes)
    geometry = stack.geometry
    frame_of_reference = stack.frame_of_reference_uid
    return {
        "affine_lps": geometry.affine_lps,
        "body_part": technical.get("body_part_examined"),
        "codec": TILES_CODEC
        if stack.levels
        else BRICKS_CODEC
        if volumes.has_bricks(
            kind=stack.kind,
            modality=technical.get("modality"),
            num_slices=len(stack.slices),
            num_samples=stack.samples_per_pixel,
        )
        else stored_codec(codec_for(codec, (stack.rows, stack.columns), np.dtype(form.dtype))),
        "columns": stack.columns,
        "dtype": form.dtype,
        "deidentification": privacy.series_facts(stack),
        "flags": list(stack.flags),
        "frame_of_reference_key": privacy.surrogate("frame-of-reference", frame_of_reference)
        if frame_of_reference
        else None,
        "instance_keys": [
            privacy.surrogate("instance", part.instance.sop_instance_uid) for part in stack.slices
        ],
        "instance_numbers": [allow_ordinal(part.number) for part in stack.slices],
        "kind": stack.kind,
        # Filtered by the allowlist: the header may hold anything.
        "modality": technical.get("modality"),
        "num_missing": geometry.num_missing,
        "num_slices": len(stack.slices),
        "pixel_spacing_mm": geometry.pixel_spacing_mm,
        "rows": stack.rows,
        "samples_per_pixel": stack.samples_per_pixel,
        "series_key": privacy.surrogate("series", stack.series_instance_uid),
        "series_number": allow_ordinal(stack.series_number),
        "slice_offsets_mm": geometry.slice_offsets_mm,
        "slice_spacing_mm": geometry.slice_spacing_mm,
        "stack_index": stack.stack_index,
        "technical": technical,
        "unit": form.unit,
    }


def series_times(
    stack: Stack, facts: AcquisitionFacts, origin: datetime | None, privacy: StudyPrivacy
) -> dict[str, Any]:
    """Return the ``study.json`` objects of a series that make its values usable.

    Moments become seconds: from the first image of the study to the first one and to the content of the
    series, and from an injection to the scan, as far and as fine as the settings let them leave.

    Args:
        stack: The series.
        facts: Of its first file.
        origin: Zero of the study's seconds; None where none leave.
        privacy: Of the study.
    """
    found = dict(facts.published)
    if origin is not None:
        zero = values.seconds(origin.strftime("%Y%m%d%H%M%S")) or 0.0
        acquired = [values.seconds(part.instance.acquired) for part in stack.slices]
        first = min((moment for moment in acquired if moment is not None), default=None)
        timing = {
            f"{name}_after_s": published_interval(math.ceil(moment - zero), privacy.resolution_s)
            for name, moment in (("acquired", first), ("content", facts.content))
            if moment is not None and abs(moment - zero) <= _MAX_AFTER_S
        }
        if known := {name: seconds for name, seconds in timing.items() if seconds is not None}:
            found["timing"] = known
        interval = published_interval(facts.injection_to_scan_s, privacy.resolution_s)
        if interval is not None:
            found["pet"] = {**found.get("pet", {}), "injection_to_scan_s": interval}
    return found


def series_axis(stack: Stack, numbers: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    """Return the ``axis`` of a series for ``study.json``; nothing for a series in no 4-D object.

    Args:
        stack: The series.
        numbers: Number of each series in the sample, by source series and stack index.
    """
    if stack.axis is None:
        return {}
    axis = asdict(stack.axis)
    return {"axis": {**axis, "group": numbers[stack.series_instance_uid, axis.pop("first")]}}


def stored_series(number: int, stack: Stack, facts: Mapping[str, Any]) -> StoredSeries:
    """Describe a series as it is stored, for attachments.

    Args:
        number: Of the series in the sample.
        stack: Its slices.
        facts: Its ``study.json`` object.
    """
    affine = stack.geometry.affine_lps
    return StoredSeries(
        number=number,
        facts=facts,
        series_uid=stack.series_instance_uid,
        frame_of_reference_uid=stack.frame_of_reference_uid,
        sop_uids=tuple(part.instance.sop_instance_uid for part in stack.slices),
        frames=tuple(part.frame for part in stack.slices),
        rows=stack.rows,
        columns=stack.columns,
        affine_lps=None if affine is None else tuple((row[0], row[1], row[2], row[3]) for row in affine),
    )


@dataclass(slots=True)
class ContextMaker:
    """Factory of the context in which an attachment of a study is converted."""

    sample_key: str
    headers: Sequence[InstanceHeader]
    """Headers of the study's images, not empty."""
    series: Sequence[StoredSeries]
    privacy: StudyPrivacy
    people: Callable[[], Sequence[Mapping[str, AttributeValue]]]
    """Reads the people that headers name; called for the first text."""
    origin: tuple[TimeOrigin, datetime] | None = field(init=False)
    """Zero of the seconds that attachments state; None where they state none."""

    def __post_init__(self) -> None:
        self.origin = study_origin(self.headers, self.privacy)

    def __call__(self, counts: Mapping[tuple[str, str], int]) -> StudyContext:
        """Return the context of the next attachment."""
        first = self.headers[0]
        return StudyContext(
            sample_key=self.sample_key,
            study_uid=first.study_instance_uid,
            patient_id=first.patient_id,
            series=tuple(self.series),
            surrogate=self.privacy.surrogate,
            scrub=self._scrub,
            when=lambda moment: self.privacy.when(moment.date()),
            seconds_from_study=self._seconds,
            resolution_s=self.privacy.resolution_s,
            utc_offset=self._utc_offset(),
            counts=dict(counts),
        )

    def _scrub(self, text: str, people: Mapping[str, Sequence[str]]) -> str:
        return self.privacy.scrub_text(text, [*self.people(), people])

    def _seconds(self, moment: datetime) -> float | None:
        if self.origin is None:
            return None
        return (moment.replace(tzinfo=None) - self.origin[1]).total_seconds()

    def _utc_offset(self) -> tzinfo | None:
        """Return the zone that all headers state that state one."""
        stated = {header.utc_offset for header in self.headers if header.utc_offset}
        return datetime.strptime(stated.pop(), "%z").tzinfo if len(stated) == 1 else None


def study_origin(
    headers: Sequence[InstanceHeader], privacy: StudyPrivacy
) -> tuple[TimeOrigin, datetime] | None:
    """Return the first acquisition, so that no image precedes it; else the earliest time of the study.

    None where neither is known, or dates are removed.
    """
    day = privacy.study_date
    if day is None or privacy.removes_dates:
        return None
    stated = {header.acquired for header in headers if has_time_of_day(header.acquired)}
    moments = [moment.replace(tzinfo=None) for moment in map(parse_moment, stated) if moment is not None]
    # A device whose clock was not set, or a film that was scanned years later, says nothing of the study.
    first, last = _ACQUIRED_DAYS
    near = [one for one in moments if first <= (one.date() - day).days <= last]
    if near:
        return "acquisition", min(near)
    text = day.strftime("%Y%m%d")
    times = [
        seconds_of_day(one.study_time)
        for one in headers
        if one.study_date.replace(".", "").replace("-", "") == text
    ]
    seconds = min((one for one in times if one is not None), default=None)
    midnight = datetime(day.year, day.month, day.day)  # noqa: DTZ001 - the clock of the hospital
    return None if seconds is None else ("study", midnight + timedelta(seconds=seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachmentEntry:
    """An attachment of a study, or the part of one that belongs to the study."""

    position: int
    """In the study's list of files."""
    path: Path
    row: AttachmentRow
    items: tuple[int, ...]


@dataclass(slots=True)
class AttachedFields:
    """Fields made from the attachments of a study."""

    fields: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    """Reasons of attachments that are not packed, by position."""

    def json_fields(self) -> dict[str, dict[str, Any]]:
        """Return the objects of the JSON fields, by name."""
        return {
            name: {"format_version": PART_VERSION, **{key: _summed(key, lists[key]) for key in sorted(lists)}}
            for name, lists in sorted(self.parts.items())
        }

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the length of every list."""
        return {(part, name): len(one) for part, lists in self.parts.items() for name, one in lists.items()}

    def take(self, position: int, attached: Attached, items: Sequence[int]) -> None:
        """Add a converted attachment."""
        if not self._may_have(attached):
            self.reasons[position] = Reason.WORKER_FAILED.value
            return
        self.fields.update(attached.fields)
        for part, lists in attached.parts.items():
            own = self.parts.setdefault(part, {})
            for name, entries in lists.items():
                own.setdefault(name, []).extend(entries)
        missing = [attached.reasons[item] for item in items if item in attached.reasons]
        if len(missing) == len(items):
            bad = [reason for reason in missing if outcome_of(reason) is Outcome.QUARANTINED]
            self.reasons[position] = str((bad or missing)[0].value)

    def _may_have(self, attached: Attached) -> bool:
        """Return whether all names are free: of fields, and of lists of JSON fields."""
        is_taken = any(
            name in self.fields
            or name in _OWN_FIELDS
            or not FIELD_PATTERN.fullmatch(name)
            or parse_slice_field(name)
            or parse_variant_field(name)
            for name in attached.fields
        )
        return not is_taken and not any(f"{part}.json" in _OWN_FIELDS for part in attached.parts)


def attach(
    entries: Sequence[AttachmentEntry],
    context: Callable[[Mapping[tuple[str, str], int]], StudyContext],
    mark: AttachmentMark,
    *,
    records: str = "",
) -> AttachedFields:
    """Convert the attachments of a study.

    Args:
        entries: In any order.
        context: Makes the context of the study from the lengths of the lists so far.
        mark: Notes which attachment is being converted; kept if a conversion raises.
        records: Settings of clinical records, as text.

    Raises:
        MemoryError: One needs more memory than the process may take.
        StorageError: The mark cannot be written, or a disk fails.
    """
    kinds = {kind.name: kind for kind in attachment_kinds(records)}
    order = {name: number for number, name in enumerate(kinds)}
    made = AttachedFields()
    for entry in sorted(entries, key=lambda one: (order[one.row.kind], one.row.content, one.items)):
        mark.write(entry.position)
        study = replace(context(made.counts()), classes=entry.row.classes)
        found = _convert(kinds[entry.row.kind], entry, study)
        if isinstance(found, str):
            made.reasons[entry.position] = found
        else:
            made.take(entry.position, found, entry.items)
    mark.clear()
    return made


def place_masks(
    fields: Mapping[str, bytes],
    contents: dict[str, dict[str, Any]],
    described: Sequence[Mapping[str, Any]],
    sample_key: str,
    brick_shape: Sequence[int],
) -> tuple[Mapping[str, bytes | EncodedVolume], list[ClassVoxels]]:
    """Bring the masks of regions into the storage of their series, and sample the voxels of each class.

    Args:
        fields: Made from the attachments.
        contents: Objects of the JSON fields; that of the annotations changes with its masks.
        described: ``study.json`` objects of the series.
        sample_key: Key of the sample.
        brick_shape: Largest size of a brick.

    Returns:
        The fields as they are stored, and the voxels. Annotations of another package's kind that are none of
        the format stay as they are, without voxels.
    """
    if "annotations" not in contents:
        return fields, []
    annotations = encode_json(contents["annotations"])
    shapes = {
        number: (int(facts["num_slices"]), int(facts["rows"]), int(facts["columns"]))
        for number, facts in enumerate(described)
    }
    in_bricks = {
        number: shape for number, shape in shapes.items() if described[number]["codec"] == BRICKS_CODEC
    }

    def read(names: Sequence[str]) -> Mapping[str, bytes]:
        return {name: fields[name] for name in names}

    try:
        voxels = voxels_of_study(annotations, fields, shapes, key=sample_key)
        masks = join_masks(annotations, fields, read, in_bricks, brick_shape=brick_shape)
    except FormatError:
        return fields, []
    if masks is None:
        return fields, voxels
    contents["annotations"] = json.loads(masks.annotations)
    kept = {name: payload for name, payload in fields.items() if name not in masks.former}
    return {**kept, **masks.fields}, voxels


def _convert(kind: AttachmentKind, entry: AttachmentEntry, study: StudyContext) -> Attached | str:
    try:
        attached = kind.convert(entry.path, entry.items, study)
        # Values that JSON lacks (NaN, infinity) have to fail here: later they would fail the whole study.
        encode_json(attached.parts)
        _check(attached)
    except SourceError as error:
        return str(error.reason)
    except (MemoryError, StorageError):
        raise
    except Exception:  # noqa: BLE001 - the parsers of all formats, over whatever a file holds
        return Reason.ATTACHMENT_UNREADABLE.value
    else:
        return attached


def _check(attached: Attached) -> None:
    """Raise what would otherwise fail the whole study later.

    Raises:
        TypeError: A field is not bytes, or a dangling entry has no count.
        KeyError: A dangling entry lacks a key.
        ValueError: A count is not a number.
    """
    if not all(isinstance(payload, bytes) for payload in attached.fields.values()):
        raise TypeError("fields must be bytes")
    for lists in attached.parts.values():
        for name, entries in lists.items():
            _summed(name, list(entries))


def _summed(name: str, entries: list[Any]) -> list[Any]:
    if name != _DANGLING:
        return entries
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[str(entry["reason"])] += int(entry["count"])
    return [{"reason": reason, "count": count} for reason, count in sorted(counts.items())]
