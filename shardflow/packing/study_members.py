"""Write the members of one study: report, slices, ``study.json``; and settle what becomes of bad files.

Slices stream: one is decoded, measured, encoded and written before the next is read, so a study of any size
takes the memory of one slice. What the whole series is needed for (display range, clipped count) goes into
``study.json``, which is the last member by its name.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.deid.allowlist import KEYWORDS, allow_ordinal, allow_patient, allow_technical
from shardflow.errors import ShardflowError, SourceError
from shardflow.packing.fragment import StudyOutcome
from shardflow.shards.codecs import encode_array
from shardflow.shards.keys import REPORT_FIELD, STUDY_FIELD, slice_field
from shardflow.shards.samples import SampleFacts
from shardflow.sources.dicom import (
    AttributeValue,
    DecodedSlice,
    DisplayRange,
    HeaderLimits,
    InstanceHeader,
    SliceForm,
    Stack,
    Study,
    build_studies,
    check_copies,
    form_of,
    iter_slices,
    read_attributes,
)
from shardflow.sources.reasons import Outcome, Reason, outcome_of

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.config import BadInstancePolicy
    from shardflow.packing.fragment import Fragment, FragmentWriter

__all__ = ["StudyMembers", "StudyRules"]

STUDY_JSON_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRules:
    """What holds for all studies of a job."""

    key: SecretKey
    limits: HeaderLimits
    codec: str
    on_bad_instance: BadInstancePolicy


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
        report: UTF-8 text, or None.
    """

    def __init__(
        self,
        rules: StudyRules,
        writer: FragmentWriter,
        sample_key: str,
        headers: Sequence[InstanceHeader],
        paths: Mapping[int, Path],
        report: bytes | None,
    ) -> None:
        self._rules = rules
        self._writer = writer
        self._sample_key = sample_key
        self._report = report
        self._paths = paths
        self._headers = headers
        self._bad: dict[int, str] = {}
        """Files that cannot be packed."""
        self._left_out: dict[int, str] = {}
        """Files that need not be packed: copies, and what grouping skips."""

    def write(self) -> Fragment:
        """Pack as the policy says, and close the fragment with the outcome."""
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
                self._writer.restart()
            else:
                packed = StudyOutcome(outcome=Outcome.PACKED, instances={**self._left_out, **self._bad})
                return self._writer.commit(packed, facts)

    def _settled(self) -> StudyOutcome | None:
        """Return the outcome where there is nothing (more) to pack."""
        codes = sorted(self._bad.values())
        is_bad = any(outcome_of(code) is Outcome.QUARANTINED for code in codes)
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
        if self._report is not None:
            self._writer.add(REPORT_FIELD, self._report)
        key = self._rules.key
        stacks = sorted(
            study.stacks,
            key=lambda stack: (
                stack.primary_rank,
                key.surrogate("series", stack.series_instance_uid),
                stack.stack_index,
            ),
        )
        series = [self._write_stack(number, stack) for number, stack in enumerate(stacks)]
        patient = allow_patient(self._attributes(stacks[0]))
        self._writer.add(
            STUDY_FIELD,
            _encode_json(
                {
                    "format_version": STUDY_JSON_VERSION,
                    "has_report": self._report is not None,
                    "patient": patient,
                    "sample_key": self._sample_key,
                    "series": series,
                }
            ),
        )
        return SampleFacts(
            text_bytes=len(self._report or b""),
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
            check_copies(study, self._locate, limits=self._rules.limits)
        except SourceError as error:
            both = [pair.copy.file_index, pair.kept.file_index]
            if error.reason != Reason.CONFLICTING_INSTANCE:
                both = both[:1] if self._problem(pair.copy) else both[1:]
            return dict.fromkeys(both, error.reason)
        return {}

    def _write_stack(self, number: int, stack: Stack) -> dict[str, Any]:
        form = form_of([part.instance for part in stack.slices])
        display = DisplayRange(stack, form)
        num_clipped = num_padding = 0
        decoders: set[str] = set()
        for index, decoded in enumerate(self._decode(stack, form)):
            display.add(decoded)
            num_clipped += decoded.num_clipped
            num_padding += decoded.num_padding
            decoders.add(decoded.decoder)
            payload = encode_array(self._rules.codec, decoded.pixels)
            self._writer.add(slice_field(number, index, self._rules.codec), payload)
        technical = allow_technical(self._attributes(stack))
        geometry = stack.geometry
        return {
            "affine_lps": geometry.affine_lps,
            "body_part": technical.get("body_part_examined"),
            "codec": self._rules.codec,
            "columns": stack.columns,
            "decoders": sorted(decoders),
            "display_range": list(display.result()),
            "dtype": form.dtype,
            "flags": list(stack.flags),
            "instance_numbers": [allow_ordinal(part.number) for part in stack.slices],
            "kind": stack.kind,
            # Not the header's word, which may be anything.
            "modality": technical.get("modality"),
            "num_clipped": num_clipped,
            "num_missing": geometry.num_missing,
            "num_padding": num_padding,
            "num_slices": len(stack.slices),
            "pixel_spacing_mm": geometry.pixel_spacing_mm,
            "rows": stack.rows,
            "samples_per_pixel": stack.samples_per_pixel,
            "series_key": self._rules.key.surrogate("series", stack.series_instance_uid),
            "series_number": allow_ordinal(stack.series_number),
            "slice_offsets_mm": geometry.slice_offsets_mm,
            "slice_spacing_mm": geometry.slice_spacing_mm,
            "stack_index": stack.stack_index,
            "technical": technical,
            "unit": form.unit,
        }

    def _decode(self, stack: Stack, form: SliceForm) -> Iterator[DecodedSlice]:
        """Decode in geometric order, file by file, so that a bad one is known by its place."""
        for _, parts in itertools.groupby(stack.slices, key=lambda part: part.instance.file_index):
            together = list(parts)
            instance, frames = together[0].instance, [part.frame for part in together]
            path, limits = self._locate(instance), self._rules.limits
            slices = iter_slices(path, instance, form=form, frames=frames, limits=limits)
            try:
                yield from slices
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
            for _ in iter_slices(self._locate(header), header, limits=self._rules.limits):
                pass
        except SourceError as error:
            return error.reason
        return None

    def _attributes(self, stack: Stack) -> Mapping[str, AttributeValue]:
        """Read the attributes of the first file; they have not passed the allowlist."""
        first = stack.slices[0].instance
        try:
            return read_attributes(self._locate(first), KEYWORDS, limits=self._rules.limits)
        except SourceError as error:
            raise _BadInstanceError({first.file_index: error.reason}) from None

    def _locate(self, header: InstanceHeader) -> Path:
        return self._paths[header.file_index]


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()
