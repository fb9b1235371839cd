"""Write the members of one study: report, slices, ``study.json``; and settle what becomes of bad files.

Slices stream: one is decoded, measured, encoded and written before the next is read, so a study of any size
takes the memory of one slice, and that of what its attachments become. What the whole series is needed for
(display range, clipped count) goes into ``study.json``, which comes behind all slices by its name.

Pack one study into a fragment, unless a former run did; runs in a packing process.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardflow.errors import ShardflowError, SourceError
from shardflow.format.codecs import codec_for, encode_array
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, slice_field
from shardflow.format.reasons import HELD_BACK, Outcome, Reason, outcome_of
from shardflow.format.samples import SampleFacts
from shardflow.packing.deid.allowlist import KEYWORDS, allow_patient
from shardflow.packing.deid.known_values import IDENTIFYING_KEYWORDS
from shardflow.packing.header_rows import read_rows
from shardflow.packing.linking import read_people, read_report
from shardflow.packing.sources.dicom.attributes import AttributeValue
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.pixels import (
    DecodedSlice,
    DisplayRange,
    SliceForm,
    check_copies,
    form_of,
    iter_slices,
)
from shardflow.packing.sources.dicom.stacks import Stack, Study, build_studies
from shardflow.packing.sources.images import iter_stored_image, read_image_attributes, read_image_people
from shardflow.packing.studies.fragment import (
    AttachmentMark,
    FragmentWriter,
    InOrder,
    StudyOutcome,
    fragment_path,
    read_fragment,
)
from shardflow.packing.studies.privacy import StudyPrivacy
from shardflow.packing.studies.records import (
    STUDY_JSON_VERSION,
    AttachedFields,
    AttachmentEntry,
    ContextMaker,
    attach,
    describe_series,
    encode_json,
    stored_series,
)
from shardflow.packing.studies.tasks import StudyDone
from shardflow.packing.studies.variants import SeriesVariants, draw_variants, speaks_of_sides

if TYPE_CHECKING:
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.header_rows import HeaderRow, RowPlace
    from shardflow.packing.settings import BadInstancePolicy, VariantsConfig
    from shardflow.packing.sources.placement import Placement
    from shardflow.packing.studies.fragment import Fragment
    from shardflow.packing.studies.privacy import PrivacyRules
    from shardflow.packing.studies.report_content import ReportParser
    from shardflow.packing.studies.tasks import StudyAttachment, StudyTask


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRules:
    """What holds for all studies of a job."""

    key: SecretKey
    limits: HeaderLimits
    codec: str
    variants: VariantsConfig
    privacy: PrivacyRules
    on_bad_instance: BadInstancePolicy
    reading: ReportParser | None = None
    """Reads what reports say; None where that is not wanted."""
    records: str = ""
    """Settings of clinical records, as text."""


class _BadInstanceError(Exception):
    """Instances cannot be packed, by position in the study; stays inside this module."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(len(reasons))
        self.reasons = reasons


class StudyMembers:
    """One study on its way into its fragment.

    Args:
        rules: What holds for all studies.
        writer: Of the study's fragment.
        sample_key: Key of the sample.
        headers: Of the study's files; ``file_index`` is the position of the file in the study.
        paths: The files, by position.
        placements: What the layout says of them, by position.
        report: UTF-8 text, or None.
        kin: Files of the patient's other studies, whose people the report may name.
        attachments: Of the study.
        mark: Says which of them is under way.
        report_people: What the report's own document says of people, by DICOM keyword.
    """

    def __init__(
        self,
        rules: StudyRules,
        writer: FragmentWriter,
        sample_key: str,
        headers: Sequence[InstanceHeader],
        paths: Mapping[int, Path],
        placements: Mapping[int, Placement | None],
        report: bytes | None,
        siblings: Sequence[tuple[Path, Placement | None]] = (),
        attachments: Sequence[AttachmentEntry] = (),
        mark: AttachmentMark | None = None,
        report_people: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._rules = rules
        self._writer = writer
        self._sample_key = sample_key
        self._report = report
        self._siblings = siblings
        self._attachments = attachments
        self._mark = mark
        self._report_people = report_people or {}
        self._attached = AttachedFields()
        self._has_sides = False
        """Whether report or attachments speak of left and right."""
        self._known_people: list[Mapping[str, AttributeValue]] | None = None
        self._paths = paths
        self._placements = placements
        self._technical: dict[int, Mapping[str, AttributeValue]] = {}
        self._headers = headers
        self._privacy = StudyPrivacy(rules.privacy, headers, self._read_attributes)
        self._bad: dict[int, str] = {}
        """Files that cannot be packed."""
        self._left_out: dict[int, str] = {}
        """Files that need not be packed: copies, and what grouping skips."""

    def write(self) -> Fragment:
        """Pack as the policy says, and close the fragment with the outcome."""
        self._bad.update(self._privacy.held_back())
        while True:
            outcome = self._settled()
            if outcome is not None:
                return self._writer.commit(outcome, None)
            try:
                facts = self._write_members()
            except _BadInstanceError as error:
                num_known = len(self._bad)
                self._bad.update(error.reasons)
                self._find_other_bad_instances()
                if len(self._bad) == num_known:
                    raise ShardflowError(
                        "a study must name what cannot be packed; an internal error."
                    ) from None
                self._left_out.clear()
                self._privacy.restart()
                self._writer.restart()
            else:
                packed = StudyOutcome(
                    outcome=Outcome.PACKED,
                    instances={**self._left_out, **self._bad, **self._attached.reasons},
                    tallies=self._privacy.tallies(),
                )
                return self._writer.commit(packed, facts)

    def _settled(self) -> StudyOutcome | None:
        """Return the outcome where there is nothing (more) to pack."""
        codes = sorted(self._bad.values())
        is_bad = any(outcome_of(code) is Outcome.QUARANTINED and code not in HELD_BACK for code in codes)
        if is_bad and self._rules.on_bad_instance == "quarantine_study":
            return StudyOutcome(
                outcome=Outcome.QUARANTINED, reason=Reason.STUDY_QUARANTINED, instances=self._bad
            )
        if not self._usable():
            reason = next((code for code in codes if outcome_of(code) is Outcome.QUARANTINED), codes[0])
            return StudyOutcome(outcome=outcome_of(reason), reason=reason, instances=self._bad)
        return None

    def _usable(self) -> list[InstanceHeader]:
        return [header for header in self._headers if header.file_index not in self._bad]

    def _write_members(self) -> SampleFacts:
        """Write all members of the sample.

        Raises:
            _BadInstanceError: An instance cannot be packed; what was written is to be forgotten.
        """
        study = self._group()
        fields = InOrder(self._writer)
        report, replaced = self._report, dict[str, int]()
        if report is not None:
            report, replaced = self._privacy.scrub_report(report, self._iter_people())
            fields.hold(REPORT_FIELD, report)
        key = self._rules.key
        stacks = sorted(
            study.stacks,
            key=lambda stack: (
                stack.primary_rank,
                key.surrogate("series", stack.series_instance_uid),
                stack.stack_index,
            ),
        )
        described = [
            describe_series(stack, self._attributes(stack), self._privacy, self._rules.codec)
            for stack in stacks
        ]
        self._write_contents(fields, stacks, described, report)
        series = [
            {**facts, **self._write_stack(fields, number, stack, facts["modality"])}
            for number, (stack, facts) in enumerate(zip(stacks, described, strict=True))
        ]
        patient = allow_patient(self._attributes(stacks[0]))
        fields.add(
            STUDY_FIELD,
            encode_json(
                {
                    "dates": self._privacy.timeline(),
                    "deidentification": self._privacy.facts(replaced),
                    "format_version": STUDY_JSON_VERSION,
                    "has_report": report is not None,
                    "patient": {**patient, "patient_key": self._privacy.patient_key()},
                    "sample_key": self._sample_key,
                    "series": series,
                }
            ),
        )
        fields.finish()
        return SampleFacts(
            text_bytes=len(report or b""),
            num_series=len(stacks),
            num_slices=sum(len(stack.slices) for stack in stacks),
            rows=stacks[0].rows,
            columns=stacks[0].columns,
            modality=series[0]["modality"] or "",
        )

    def _group(self) -> Study:
        """Group and order the usable instances; what does not fit is named."""
        usable = self._usable()
        grouping = build_studies(usable)
        rejected = {one.instance.file_index: one.reason.value for one in grouping.rejections}
        bad = {at: code for at, code in rejected.items() if outcome_of(code) is Outcome.QUARANTINED}
        if bad or not grouping.studies:
            raise _BadInstanceError(bad or rejected)
        if len(grouping.studies) != 1:
            raise _BadInstanceError({one.file_index: Reason.CONFLICTING_IDENTIFIER.value for one in usable})
        self._left_out.update(rejected)
        (study,) = grouping.studies
        for pair in study.copies:
            bad.update(self._check_copy(dataclasses.replace(study, copies=(pair,))))
            self._left_out[pair.copy.file_index] = Reason.DUPLICATE_INSTANCE.value
        if bad:
            raise _BadInstanceError(bad)
        return study

    def _check_copy(self, study: Study) -> dict[int, str]:
        """Compare a copy with its original; where they differ, nobody knows which of the two is right."""
        (pair,) = study.copies
        try:
            check_copies(study, self._locate, limits=self._rules.limits, read=iter_stored_image)
        except SourceError as error:
            both = [pair.copy.file_index, pair.kept.file_index]
            if error.reason != Reason.CONFLICTING_INSTANCE:
                both = both[:1] if self._problem(pair.copy) else both[1:]
            return dict.fromkeys(both, error.reason)
        return {}

    def _write_contents(
        self, fields: InOrder, stacks: Sequence[Stack], described: list[dict[str, Any]], report: bytes | None
    ) -> None:
        """Write what is known of the study beside its pixels: its attachments, and what the report says."""
        contents: dict[str, dict[str, Any]] = {}
        if self._attachments:
            series = [
                stored_series(number, stack, facts)
                for number, (stack, facts) in enumerate(zip(stacks, described, strict=True))
            ]
            maker = ContextMaker(self._sample_key, self._usable(), series, self._privacy, self._people)
            self._attached = attach(self._attachments, maker, records=self._rules.records, mark=self._mark)
            for name, payload in self._attached.fields.items():
                fields.hold(name, payload)
            contents.update(self._attached.json_fields())
        reading = self._rules.reading
        if report is not None and reading is not None:
            text = report.decode("utf-8")
            said = contents["report"] = reading.read(text)
            aligned = reading.align(described, said, contents.get("annotations"), text)
            if aligned is not None:
                contents["alignment"] = aligned
        texts = [text for name, text in self._attached.fields.items() if name.endswith(".txt")]
        self._has_sides = speaks_of_sides([report or b"", *texts], contents)
        for name, content in contents.items():
            fields.hold(f"{name}.json", encode_json(content))

    def _write_stack(
        self, fields: InOrder, number: int, stack: Stack, modality: str | None
    ) -> dict[str, Any]:
        """Write the slices of a series; return what they tell of it."""
        form = form_of([part.instance for part in stack.slices])
        display = DisplayRange(stack, form)
        num_clipped = num_padding = 0
        decoders: set[str] = set()
        codec = codec_for(self._rules.codec, (stack.rows, stack.columns), np.dtype(form.dtype))
        draws = draw_variants(
            self._rules.variants.augment,
            modality=modality,
            sample_key=self._sample_key,
            has_sides=self._has_sides,
        )
        with SeriesVariants(self._rules.variants, fields, number, stack, form, codec, draws) as variants:
            for index, decoded in enumerate(self._decode(stack, form)):
                display.add(decoded)
                payload = encode_array(codec, decoded.pixels)
                variants.add(index, decoded, payload)
                num_clipped += decoded.num_clipped
                num_padding += decoded.num_padding
                decoders.add(decoded.decoder)
                fields.add(slice_field(number, index, codec), payload)
            display_range = display.result()
            smaller = variants.finish(display_range)
        return {
            "decoders": sorted(decoders),
            "display_range": list(display_range),
            "num_clipped": num_clipped,
            "num_padding": num_padding,
            **({"variants": smaller} if smaller else {}),
        }

    def _decode(self, stack: Stack, form: SliceForm) -> Iterator[DecodedSlice]:
        """Decode in geometric order, file by file, so that a bad one is known by its place."""
        for _, parts in itertools.groupby(stack.slices, key=lambda part: part.instance.file_index):
            together = list(parts)
            instance, frames = together[0].instance, [part.frame for part in together]
            path, limits = self._locate(instance), self._rules.limits
            slices = iter_slices(
                path, instance, form=form, frames=frames, limits=limits, read=iter_stored_image
            )
            try:
                for decoded in slices:
                    yield self._privacy.clean(instance, decoded)
            except SourceError as error:
                raise _BadInstanceError({instance.file_index: error.reason}) from None

    def _find_other_bad_instances(self) -> None:
        """Decode what is left once, so that every bad file is named and packing starts again only once."""
        for header in self._usable():
            reason = self._problem(header)
            if reason is not None:
                self._bad[header.file_index] = reason

    def _problem(self, header: InstanceHeader) -> str | None:
        """Decode an instance for nothing but the reason why it cannot be."""
        try:
            limits = self._rules.limits
            for _ in iter_slices(self._locate(header), header, limits=limits, read=iter_stored_image):
                pass
        except SourceError as error:
            return error.reason
        return None

    def _attributes(self, stack: Stack) -> Mapping[str, AttributeValue]:
        """Read the attributes of the first file; they have not passed the allowlist."""
        first = stack.slices[0].instance
        if first.file_index not in self._technical:
            try:
                self._technical[first.file_index] = self._read_attributes(first, KEYWORDS)
            except SourceError as error:
                raise _BadInstanceError({first.file_index: error.reason}) from None
        return self._technical[first.file_index]

    def _read_attributes(
        self, header: InstanceHeader, keywords: Sequence[str]
    ) -> Mapping[str, AttributeValue]:
        placement = self._placements[header.file_index]
        return read_image_attributes(self._locate(header), placement, keywords, limits=self._rules.limits)

    def _iter_people(self) -> Iterator[Mapping[str, AttributeValue]]:
        """Read people only where they are looked for."""
        yield {keyword: tuple(values) for keyword, values in self._report_people.items()}
        yield from self._people()

    def _people(self) -> list[Mapping[str, AttributeValue]]:
        """Read what headers say of people, here and in the patient's other studies."""
        if self._known_people is None:
            own = [(self._locate(one), self._placements[one.file_index]) for one in self._privacy.examples()]
            self._known_people = []
            for path, placement in (*own, *self._siblings):
                # What cannot be read says nothing here; the study that it belongs to has its own outcome.
                with suppress(SourceError):
                    people = read_image_people(
                        path, placement, IDENTIFYING_KEYWORDS, limits=self._rules.limits
                    )
                    self._known_people.append(people)
        return self._known_people

    def _locate(self, header: InstanceHeader) -> Path:
        return self._paths[header.file_index]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPacker:
    """Packs studies one after another, with what all of them share."""

    roots: tuple[Path, ...]
    headers: Path
    """Folder of the header rows."""
    reports: Path
    """File of the report texts."""
    fragments: Path
    """Folder of the fragments."""
    rules: StudyRules

    def pack(self, task: StudyTask) -> StudyDone:
        """Pack a study, unless a former run did.

        Raises:
            StorageError: The fragment cannot be written, or what was stored cannot be read back.
        """
        path = fragment_path(self.fragments, task.sample_key)
        mark = AttachmentMark(self.fragments, task.sample_key, task.task_digest)
        mark.clear()
        fragment = read_fragment(path, task.task_digest)
        if fragment is None:
            rows = read_rows(self.headers, [file.row for file in task.files])
            paths, placements, headers = {}, {}, []
            for file, row in zip(task.files, rows, strict=True):
                if row.header is not None:
                    paths[file.position] = self._path(row)
                    placements[file.position] = row.placement
                    headers.append(replace(row.header, file_index=file.position))
            report = task.report
            with FragmentWriter(path, sample_key=task.sample_key, task_digest=task.task_digest) as writer:
                members = StudyMembers(
                    self.rules,
                    writer,
                    task.sample_key,
                    headers,
                    paths,
                    placements,
                    None if report is None else read_report(self.reports, report),
                    self._siblings(task.siblings),
                    self._attachments(task.attachments),
                    mark,
                    {} if report is None else read_people(self.reports, report),
                )
                fragment = members.write()
        return StudyDone(outcome=fragment.outcome)

    def _path(self, row: HeaderRow) -> Path:
        return self.roots[row.root_index] / row.relative_path

    def _attachments(self, attachments: Sequence[StudyAttachment]) -> list[AttachmentEntry]:
        rows = read_rows(self.headers, [one.row for one in attachments])
        return [
            AttachmentEntry(position=one.position, path=self._path(row), row=row.attachment, items=one.items)
            for one, row in zip(attachments, rows, strict=True)
            if row.attachment is not None
        ]

    def _siblings(self, places: Sequence[RowPlace]) -> list[tuple[Path, Placement | None]]:
        rows = read_rows(self.headers, places)
        return [(self._path(row), row.placement) for row in rows if row.header]
