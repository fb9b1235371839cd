"""Packing of one study: its report, slices and ``study.json`` become a fragment; runs in a packing process.

Slices stream: a few are decoded, measured, encoded and written before the next are read, so that a study of
any size takes the memory of these, and of its attachments. Facts that need the whole series (display range,
number of clipped values) go into ``study.json``, which sorts behind all slices.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ShardflowError, SourceError
from shardflow.format.codecs import FAST, codec_for, encode_array, stored_codec
from shardflow.format.facts.sampling import BodyFinder, ClassVoxels
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, encode_json, slice_field, volume_field
from shardflow.format.reasons import HELD_BACK, Outcome, Reason, outcome_of
from shardflow.format.samples import SampleFacts
from shardflow.format.volumes.bricks import BRICKS_CODEC
from shardflow.format.volumes.encoder import VolumeWriter, suits_bricks
from shardflow.packing.deid.allowlist import (
    ANGLE_KEYWORDS,
    KEYWORDS,
    VIEW_KEYWORDS,
    allow_patient,
    allow_technical,
)
from shardflow.packing.deid.heads import MIN_SLICES, MODALITIES, HeadFinder
from shardflow.packing.engines.base import step
from shardflow.packing.header_rows import read_rows
from shardflow.packing.linking import read_people, read_report
from shardflow.packing.sources.dicom.attributes import AttributeValue
from shardflow.packing.sources.dicom.dictionary import PARAMETRIC_MAP
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import InstanceHeader, SliceRef
from shardflow.packing.sources.dicom.pixels import (
    DecodedSlice,
    DisplayRange,
    SliceForm,
    check_copies,
    form_of,
    iter_slices,
)
from shardflow.packing.sources.dicom.stacks import Stack, Study, build_studies
from shardflow.packing.sources.images import (
    iter_stored_image,
    read_frame_facts,
    read_image_attributes,
    read_image_people,
    read_stack_facts,
)
from shardflow.packing.studies.assembly import AttachmentMark, FragmentWriter, fragment_path, read_fragment
from shardflow.packing.studies.privacy import StudyPrivacy
from shardflow.packing.studies.records import (
    STUDY_JSON_VERSION,
    TIMED_PARTS,
    AttachedFields,
    AttachmentEntry,
    ContextMaker,
    attach,
    describe_series,
    place_masks,
    series_axis,
    series_times,
    stored_series,
    study_origin,
)
from shardflow.packing.studies.report_content import rules_of
from shardflow.packing.studies.slides import check_copy, open_slide, write_slide
from shardflow.packing.studies.tasks import StudyDone, StudyOutcome
from shardflow.packing.studies.variants import SeriesVariants, draw_variants, study_names_a_side

if TYPE_CHECKING:
    from shardflow.packing.deid.identity import PublishedPerson
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.header_rows import HeaderRow, RowPlace
    from shardflow.packing.settings import PolicyConfig, SlidesConfig, VariantsConfig, VolumesConfig
    from shardflow.packing.sources.dicom.acquisition import AcquisitionFacts
    from shardflow.packing.sources.placement import Placement
    from shardflow.packing.studies.assembly import Fragment
    from shardflow.packing.studies.privacy import PrivacyRules
    from shardflow.packing.studies.report_content import ReportParser
    from shardflow.packing.studies.tasks import StudyAttachment, StudyTask
    from shardflow.packing.workspace import Workspace

_BATCH_BYTES: Final = 4 << 20
"""Bytes of the slices that are decoded at once: as many as fit, and at least one."""
_ANGIOGRAMS: Final = frozenset({"RF", "XA"})


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRules:
    """Settings that all studies of a job share."""

    key: SecretKey
    limits: HeaderLimits
    codec: str
    variants: VariantsConfig
    volumes: VolumesConfig
    slides: SlidesConfig
    privacy: PrivacyRules
    policy: PolicyConfig
    reading: ReportParser | None = None
    """Reader of reports; None if they are not to be read."""
    records: str = ""
    """Settings of clinical records, as text."""


class _BadInstanceError(Exception):
    """Instances cannot be packed, by position in the study; never leaves this module."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(len(reasons))
        self.reasons = reasons


@contextmanager
def _bad_instance(header: InstanceHeader) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except SourceError as error:
        raise _BadInstanceError({header.file_index: error.reason}) from None


@dataclass(eq=False, kw_only=True)
class StudyMembers:
    """One study on its way into its fragment."""

    rules: StudyRules
    writer: FragmentWriter
    sample_key: str
    headers: Sequence[InstanceHeader]
    """Headers of the study's images; ``file_index`` is the position of the file in the study."""
    paths: Mapping[int, Path]
    """Paths of the images, by position."""
    placements: Mapping[int, Placement | None]
    """Facts that the layout knows about the images, by position."""
    report: bytes | None
    """UTF-8 text."""
    report_people: Mapping[str, Sequence[str]]
    """People whom the report's own document names, by DICOM keyword."""
    siblings: Sequence[tuple[Path, Placement | None]]
    """Files of the patient's other studies, whose headers may name people of the report."""
    attachments: Sequence[AttachmentEntry]
    person: PublishedPerson | None
    """How the patient appears, if another identifier stands for the person."""
    mark: AttachmentMark

    def __post_init__(self) -> None:
        self._attached = AttachedFields()
        self._voxels: list[ClassVoxels] = []
        self._languages: tuple[str, ...] = ()
        self._is_unread = False
        self._read_by = ""
        # Whether report or attachments name a side of the body; looked for where images are augmented.
        self._has_sides = False
        self._known_people: list[Mapping[str, AttributeValue]] | None = None
        # By file and frame.
        self._technical: dict[tuple[int, int], Mapping[str, AttributeValue]] = {}
        self._privacy = StudyPrivacy(self.rules.privacy, self.headers, self._read_attributes, self.person)
        # Files that cannot be packed, and files that need not be: copies, and what grouping skips.
        self._bad: dict[int, str] = {}
        self._left_out: dict[int, str] = {}

    def write(self) -> Fragment:
        """Write the fragment, as the policy for bad instances allows, and commit it with the outcome."""
        self._bad.update(self._privacy.held_back())
        self._bad.update(self._privacy.held_back_pages(self._pictures(), self._iter_slices))
        self._bad.update(self._privacy.held_back_texts(self._pictures(), self._iter_slices))
        if self._privacy.looks_for_heads:
            self._bad.update(self._held_back_heads())
        while True:
            outcome = self._settled()
            if outcome is not None:
                return self.writer.commit(outcome, None)
            try:
                facts = self._write_members()
            except _BadInstanceError as error:
                num_known = len(self._bad)
                self._bad.update(error.reasons)
                self._find_other_bad_instances()
                if len(self._bad) == num_known:
                    raise ShardflowError(
                        "a study failed without naming a bad file; this is an internal error."
                    ) from None
                self._left_out.clear()
                self._voxels.clear()
                self._privacy.restart()
                self.writer.restart()
            else:
                packed = StudyOutcome(
                    outcome=Outcome.PACKED,
                    instances={**self._left_out, **self._bad, **self._attached.reasons},
                    tallies=self._privacy.tallies(),
                    languages=self._languages,
                    is_unread=self._is_unread,
                    read_by=self._read_by,
                    rules=self._privacy.rules,
                    blanked=self._privacy.blanked(),
                )
                voxels = sorted(self._voxels, key=lambda one: (one.series, one.name))
                return self.writer.commit(packed, facts, voxels)

    def _held_back_heads(self) -> dict[int, str]:
        """Look for heads in the volumes; return the reasons of images that are held back."""
        reasons: dict[int, str] = {}
        for study in build_studies(self._usable()).studies:
            for stack in study.stacks:
                finder = self._head_finder(stack)
                head = None if finder is None else finder.find(partial(self._slice_of, stack))
                reasons.update(self._privacy.take_head(stack, head))
        return reasons

    def _slice_of(self, stack: Stack, index: int, form: SliceForm | None = None) -> NDArray[Any] | None:
        """Return one slice; None if it cannot be decoded: it is named when it is packed."""
        part = stack.slices[index]
        with suppress(SourceError):
            return next(self._iter_slices(part.instance, [part.frame], form)).pixels
        return None

    def _head_finder(self, stack: Stack) -> HeadFinder | None:
        """Return a finder of the head in a volume; None for series that show no surface."""
        affine = stack.geometry.affine_lps
        is_volume = affine is not None and len(stack.slices) >= MIN_SLICES and stack.samples_per_pixel == 1
        is_map = stack.slices[0].instance.sop_class_uid == PARAMETRIC_MAP
        if affine is None or not is_volume or not (is_map or stack.modality in MODALITIES):
            return None
        return HeadFinder(affine, len(stack.slices), (stack.rows, stack.columns), stack.modality)

    def _settled(self) -> StudyOutcome | None:
        """Return the outcome if there is nothing left to pack."""
        codes = sorted(self._bad.values())
        bad = [code for code in codes if outcome_of(code) is Outcome.QUARANTINED and code not in HELD_BACK]
        if any(map(self.rules.policy.takes_study, bad)):
            return StudyOutcome(
                outcome=Outcome.QUARANTINED,
                reason=Reason.STUDY_QUARANTINED,
                instances=self._bad,
                rules=self._privacy.rules,
            )
        if not self._usable():
            reason = next((code for code in codes if outcome_of(code) is Outcome.QUARANTINED), codes[0])
            return StudyOutcome(
                outcome=outcome_of(reason), reason=reason, instances=self._bad, rules=self._privacy.rules
            )
        return None

    def _usable(self) -> list[InstanceHeader]:
        return [header for header in self.headers if header.file_index not in self._bad]

    def _pictures(self) -> list[InstanceHeader]:
        """Return the usable instances that can be decoded as a whole: all but slides."""
        return [header for header in self._usable() if not header.is_slide]

    def _write_members(self) -> SampleFacts:
        """Write all members of the sample.

        Raises:
            _BadInstanceError: An instance cannot be packed; the fragment has to be restarted.
        """
        study = self._group()
        fields = self.writer
        report, replaced = self.report, dict[str, int]()
        if report is not None:
            report, replaced = self._privacy.scrub_report(report, self._iter_people())
            fields.hold(REPORT_FIELD, report)
        key = self.rules.key
        stacks = sorted(
            study.stacks,
            key=lambda stack: (
                stack.primary_rank,
                key.surrogate("series", stack.series_instance_uid),
                stack.stack_index,
            ),
        )
        self._read_technical(stacks)
        origin = study_origin(self._usable(), self._privacy)
        numbers = {(one.series_instance_uid, one.stack_index): place for place, one in enumerate(stacks)}
        described = [
            {
                **describe_series(
                    stack, self._attributes(stack), self._privacy, self.rules.codec, self.rules.volumes
                ),
                **series_axis(stack, numbers),
                **series_times(
                    stack, self._facts(stack), None if origin is None else origin[1], self._privacy
                ),
                **self._views(stack),
            }
            for stack in stacks
        ]
        self._write_contents(stacks, described, report)
        series = [
            {**facts, **self._write_stack(number, stack, facts)}
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
                    "sample_key": self.sample_key,
                    "series": series,
                }
            ),
        )
        return SampleFacts(
            text_bytes=len(report or b""),
            num_series=len(stacks),
            num_slices=sum(len(stack.slices) for stack in stacks),
            rows=stacks[0].rows,
            columns=stacks[0].columns,
            modality=series[0]["modality"] or "",
        )

    def _group(self) -> Study:
        """Group and order the usable instances; instances that do not fit are rejected."""
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
            bad.update(self._check_copy(replace(study, copies=(pair,))))
            self._left_out[pair.copy.file_index] = Reason.DUPLICATE_INSTANCE.value
        if bad:
            raise _BadInstanceError(bad)
        return study

    def _check_copy(self, study: Study) -> dict[int, str]:
        """Compare a copy with its original; if they differ, neither can be trusted."""
        (pair,) = study.copies
        try:
            if pair.kept.is_slide:
                check_copy(self._locate(pair.kept), self._locate(pair.copy))
            else:
                check_copies(study, self._locate, limits=self.rules.limits, read=iter_stored_image)
        except SourceError as error:
            both = [pair.copy.file_index, pair.kept.file_index]
            if error.reason != Reason.CONFLICTING_INSTANCE:
                both = both[:1] if self._problem(pair.copy) else both[1:]
            return dict.fromkeys(both, error.reason)
        return {}

    def _write_contents(
        self, stacks: Sequence[Stack], described: list[dict[str, Any]], report: bytes | None
    ) -> None:
        """Write the contents beside the pixels: attachments, and the findings of the report."""
        contents: dict[str, dict[str, Any]] = {}
        if self.attachments:
            series = [
                stored_series(number, stack, facts)
                for number, (stack, facts) in enumerate(zip(stacks, described, strict=True))
            ]
            maker = ContextMaker(self.sample_key, self._usable(), series, self._privacy, self._people)
            self._attached = attach(self.attachments, maker, self.mark, records=self.rules.records)
            contents.update(self._attached.json_fields())
            fields, voxels = place_masks(
                self._attached.fields, contents, described, self.sample_key, self.rules.volumes.brick_shape
            )
            self._voxels += voxels
            for name, payload in fields.items():
                self.writer.hold(name, payload)
            if maker.origin is not None:
                for part in TIMED_PARTS & contents.keys():
                    contents[part]["time_origin"] = maker.origin[0]
        reading = self.rules.reading
        if report is not None and reading is not None:
            text = report.decode("utf-8")
            content = contents["report"] = reading.read(text)
            self._languages, self._is_unread = tuple(content["languages"]), bool(content["unread"])
            aligned = reading.align(described, content, contents.get("annotations"), text)
            if aligned is not None:
                contents["alignment"] = aligned
            self._read_by = rules_of(content, aligned)
        if self.rules.variants.augment.num_variants:
            texts = [text for name, text in self._attached.fields.items() if name.endswith(".txt")]
            self._has_sides = study_names_a_side([report or b"", *texts], contents)
        for name, content in contents.items():
            self.writer.hold(f"{name}.json", encode_json(content))

    def _write_stack(self, number: int, stack: Stack, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write the slices of a series, its volume or its levels; return the facts that they determine."""
        if stack.levels:
            return self._write_slide(number, stack)
        form = form_of([part.instance for part in stack.slices])
        display = DisplayRange(stack, form)
        num_clipped = num_padding = 0
        decoders: set[str] = set()
        codec = codec_for(self.rules.codec, (stack.rows, stack.columns), np.dtype(form.dtype))
        draws = draw_variants(
            self.rules.variants.augment,
            modality=facts["modality"],
            sample_key=self.sample_key,
            has_sides=self._has_sides,
        )
        bricks = None
        if facts["codec"] == BRICKS_CODEC:
            bricks = VolumeWriter(
                (len(stack.slices), stack.rows, stack.columns),
                np.dtype(form.dtype),
                folder=self.writer.folder,
                brick_shape=self.rules.volumes.brick_shape,
                is_fast=self.rules.codec == FAST,
            )
        # A series that its header calls a head needs no search.
        is_settled = self._privacy.looks_for_heads or facts["deidentification"]["face_risk"]
        finder = None if is_settled else self._head_finder(stack)
        wanted = frozenset() if finder is None else finder.first
        body = self._body_finder(stack, facts)
        names = [slice_field(number, index, stored_codec(codec)) for index in range(len(stack.slices))]
        with (
            SeriesVariants(self.rules.variants, self.writer, number, stack, form, codec, draws) as variants,
            bricks or nullcontext(),
        ):
            for batch in self._decode_batches(stack, form):
                for index, decoded in batch:
                    display.add(decoded)
                    if finder is not None and index in wanted:
                        finder.add(index, decoded.pixels)
                    if body is not None:
                        body.add(index, decoded.pixels)
                    num_clipped += decoded.num_clipped
                    num_padding += decoded.num_padding
                    decoders.add(decoded.decoder)
                payloads = [
                    b"" if bricks and not draws else encode_array(codec, decoded.pixels)
                    for _, decoded in batch
                ]
                for (index, decoded), payload in zip(batch, payloads, strict=True):
                    variants.add(index, decoded, payload)
                    if bricks is None:
                        self.writer.add(names[index], payload)
                    else:
                        bricks.add(decoded.pixels)
            display_range = display.result()
            made = variants.finish(display_range)
            if bricks is not None:
                self.writer.add_volume(volume_field(number), bricks.finish())
        if finder is not None and finder.find(partial(self._slice_of, stack, form=form)) is not None:
            self._privacy.flag_head(facts["deidentification"])
        found = None if body is None else body.entry(number, self.sample_key)
        self._voxels += [] if found is None else [found]
        return {
            "decoders": sorted(decoders),
            "display_range": list(display_range),
            "num_clipped": num_clipped,
            "num_padding": num_padding,
            **({"variants": made} if made else {}),
        }

    def _write_slide(self, number: int, stack: Stack) -> dict[str, Any]:
        try:
            with open_slide(stack.levels, self.paths, self.rules.limits) as levels:
                return write_slide(number, levels, self.writer, self.rules.slides)
        except SourceError as error:
            raise _BadInstanceError({one.file_index: error.reason for one in stack.levels}) from None

    def _body_finder(self, stack: Stack, facts: Mapping[str, Any]) -> BodyFinder | None:
        num_slices, num_samples = len(stack.slices), stack.samples_per_pixel
        if not suits_bricks(kind=stack.kind, num_slices=num_slices, num_samples=num_samples):
            return None
        return BodyFinder((num_slices, stack.rows, stack.columns), facts["unit"])

    def _decode_batches(self, stack: Stack, form: SliceForm) -> Iterator[list[tuple[int, DecodedSlice]]]:
        """Decode a few slices at a time, numbered.

        A codec fills the processor's caches with pixels, and after it the interpreter finds nothing there.
        """
        samples = stack.rows * stack.columns * stack.samples_per_pixel
        most = max(1, _BATCH_BYTES // (samples * np.dtype(form.dtype).itemsize))
        slices = enumerate(self._decode(stack, form))
        while batch := list(itertools.islice(slices, most)):
            yield batch

    def _decode(self, stack: Stack, form: SliceForm) -> Iterator[DecodedSlice]:
        """Decode in geometric order, file by file, so that a bad file can be named."""
        index = itertools.count()
        for _, parts in itertools.groupby(stack.slices, key=lambda part: part.instance.file_index):
            together = list(parts)
            instance, frames = together[0].instance, [part.frame for part in together]
            try:
                for decoded in self._iter_slices(instance, frames, form):
                    cleaned = self._privacy.clean(instance, decoded)
                    yield self._privacy.deface(stack, next(index), cleaned)
            except SourceError as error:
                raise _BadInstanceError({instance.file_index: error.reason}) from None

    def _iter_slices(
        self, header: InstanceHeader, frames: Sequence[int] | None = None, form: SliceForm | None = None
    ) -> Iterator[DecodedSlice]:
        step()
        return iter_slices(
            self._locate(header),
            header,
            form=form,
            frames=frames,
            limits=self.rules.limits,
            read=iter_stored_image,
        )

    def _find_other_bad_instances(self) -> None:
        """Decode the remaining files, so that all bad ones are known and packing restarts only once."""
        for header in self._pictures():
            reason = self._problem(header)
            if reason is not None:
                self._bad[header.file_index] = reason

    def _problem(self, header: InstanceHeader) -> str | None:
        """Decode an instance only to find the reason why it cannot be decoded."""
        try:
            for _ in self._iter_slices(header):
                pass
        except SourceError as error:
            return error.reason
        return None

    def _read_technical(self, stacks: Sequence[Stack]) -> None:
        """Read the attributes of the first slice of each stack, of each file at once."""
        wanted: defaultdict[int, dict[int, InstanceHeader]] = defaultdict(dict)
        for stack in stacks:
            first = stack.slices[0]
            wanted[first.instance.file_index][first.frame] = first.instance
        for file_index, frames in wanted.items():
            header = frames[min(frames)]
            with _bad_instance(header):
                found = read_frame_facts(
                    self._locate(header),
                    self.placements[file_index],
                    KEYWORDS,
                    sorted(frames),
                    limits=self.rules.limits,
                )
            self._technical.update(zip(((file_index, frame) for frame in sorted(frames)), found, strict=True))

    def _attributes(self, stack: Stack) -> Mapping[str, AttributeValue]:
        """Return the attributes of the first slice; they are not filtered by the allowlist yet."""
        first = stack.slices[0]
        return self._technical[first.instance.file_index, first.frame]

    def _facts(self, stack: Stack) -> AcquisitionFacts:
        """Read what the values of a stack need beside its attributes."""
        header = stack.slices[0].instance
        with _bad_instance(header):
            return read_stack_facts(
                self._locate(header),
                self.placements[header.file_index],
                stack.slices,
                limits=self.rules.limits,
            )

    def _views(self, stack: Stack) -> dict[str, Any]:
        """Return the views of a series whose images differ in view, side or angle; nothing for others."""
        is_angiogram = stack.modality in _ANGIOGRAMS
        is_run = is_angiogram and stack.kind == "frames"
        frames: defaultdict[int, list[SliceRef]] = defaultdict(list)
        for part in stack.slices:
            frames[part.instance.file_index].append(part)
        if not is_run and (stack.kind != "images" or len(frames) == 1):
            return {}
        keywords = VIEW_KEYWORDS + (ANGLE_KEYWORDS if is_angiogram else ())
        views: dict[tuple[int, int], dict[str, Any]] = {}
        for at, parts in frames.items():
            header, numbers = parts[0].instance, [part.frame for part in parts]
            with _bad_instance(header):
                found = read_frame_facts(
                    self._locate(header), self.placements[at], keywords, numbers, limits=self.rules.limits
                )
            views.update(
                ((at, frame), allow_technical(one)) for frame, one in zip(numbers, found, strict=True)
            )
        images = [views[part.instance.file_index, part.frame] for part in stack.slices]
        return {"images": images} if any(image != images[0] for image in images) else {}

    def _read_attributes(
        self, header: InstanceHeader, keywords: Sequence[str]
    ) -> Mapping[str, AttributeValue]:
        placement = self.placements[header.file_index]
        return read_image_attributes(self._locate(header), placement, keywords, limits=self.rules.limits)

    def _iter_people(self) -> Iterator[Mapping[str, AttributeValue]]:
        """Iterate over people lazily: headers are read only if a text is searched for them."""
        yield {keyword: tuple(values) for keyword, values in self.report_people.items()}
        yield from self._people()

    def _people(self) -> list[Mapping[str, AttributeValue]]:
        """Read the people named in headers of this study and of the patient's other studies."""
        if self._known_people is None:
            from shardflow.packing.deid.known_values import IDENTIFYING_KEYWORDS  # as `StudyPrivacy` does

            own = [(self._locate(one), self.placements[one.file_index]) for one in self._privacy.examples()]
            self._known_people = []
            for path, placement in (*own, *self.siblings):
                # A file that cannot be read names nobody here; its own study reports it.
                with suppress(SourceError):
                    people = read_image_people(
                        path, placement, IDENTIFYING_KEYWORDS, limits=self.rules.limits
                    )
                    self._known_people.append(people)
        return self._known_people

    def _locate(self, header: InstanceHeader) -> Path:
        return self.paths[header.file_index]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPacker:
    """Packs studies, one task at a time."""

    workspace: Workspace
    roots: tuple[Path, ...]
    """Input folders."""
    rules: StudyRules

    def pack(self, task: StudyTask) -> StudyDone:
        """Pack a study, unless an earlier run did.

        Raises:
            StorageError: The fragment cannot be written, or an intermediate file not be read back.
        """
        fragments, reports = self.workspace.fragments, self.workspace.reports
        path = fragment_path(fragments, task.sample_key)
        mark = AttachmentMark(fragments, task.sample_key, task.task_digest)
        mark.clear()
        fragment = read_fragment(path, task.task_digest)
        if fragment is None:
            rows = self._read_rows([file.row for file in task.files])
            images = [
                (file.position, row, row.header)
                for file, row in zip(task.files, rows, strict=True)
                if row.header is not None
            ]
            with FragmentWriter(path, sample_key=task.sample_key, task_digest=task.task_digest) as writer:
                members = StudyMembers(
                    rules=self.rules,
                    writer=writer,
                    sample_key=task.sample_key,
                    headers=[replace(header, file_index=position) for position, _, header in images],
                    paths={position: self._path(row) for position, row, _ in images},
                    placements={position: row.placement for position, row, _ in images},
                    report=None if task.report is None else read_report(reports, task.report),
                    report_people={} if task.report is None else read_people(reports, task.report),
                    siblings=[
                        (self._path(row), row.placement)
                        for row in self._read_rows(task.siblings)
                        if row.header
                    ],
                    attachments=self._attachments(task.attachments),
                    person=task.person,
                    mark=mark,
                )
                fragment = members.write()
        return StudyDone(outcome=fragment.outcome)

    def _read_rows(self, places: Sequence[RowPlace]) -> list[HeaderRow]:
        return read_rows(self.workspace.headers, places)

    def _path(self, row: HeaderRow) -> Path:
        return self.roots[row.root_index] / row.relative_path

    def _attachments(self, attachments: Sequence[StudyAttachment]) -> list[AttachmentEntry]:
        rows = self._read_rows([one.row for one in attachments])
        return [
            AttachmentEntry(position=one.position, path=self._path(row), row=row.attachment, items=one.items)
            for one, row in zip(attachments, rows, strict=True)
            if row.attachment is not None
        ]
