"""Pack one study into a fragment; runs in a packing process.

Slices stream: one is decoded, measured, encoded and written before the next is read, so a study of any size
takes the memory of one slice. What the whole series is needed for (display range, clipped count) goes into
``study.json``, which is the last member by its name.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.deid.allowlist import KEYWORDS, allow_patient, allow_technical
from shardflow.errors import SourceError
from shardflow.packing.fragment import Fragment, FragmentWriter, StudyOutcome, fragment_path, read_fragment
from shardflow.packing.header_rows import HeaderRow, read_rows
from shardflow.packing.linking import read_report
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

__all__ = ["StudyPacker"]

STUDY_JSON_VERSION: Final = 1


class _BadInstanceError(Exception):
    """An instance cannot be packed; stays inside this module."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


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
    key: SecretKey
    limits: HeaderLimits
    codec: str
    on_bad_instance: BadInstancePolicy

    def pack(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Pack a study, unless a former run did.

        Args:
            payload: ``sample_key``; ``task_digest``; ``files`` as ``[position, rows file, offset, size]``
                each, the position being that of the file in the study; ``report`` as ``[offset, size]`` or
                None.

        Returns:
            ``outcome`` as in `StudyOutcome`, ``num_bytes`` of the fragment, ``num_slices``.

        Raises:
            StorageError: The fragment cannot be written, or what was stored cannot be read back.
        """
        sample_key, task_digest = str(payload["sample_key"]), str(payload["task_digest"])
        path = fragment_path(self.fragments, sample_key)
        fragment = read_fragment(path, task_digest)
        if fragment is None:
            rows = read_rows(
                self.headers, [(name, offset, size) for _, name, offset, size in payload["files"]]
            )
            positions = [int(entry[0]) for entry in payload["files"]]
            report = None if payload["report"] is None else read_report(self.reports, *payload["report"])
            with FragmentWriter(path, sample_key=sample_key, task_digest=task_digest) as writer:
                work = _StudyWork(self, writer, sample_key, dict(zip(positions, rows, strict=True)), report)
                fragment = work.run()
        return {
            "outcome": dataclasses.asdict(fragment.outcome),
            "num_bytes": fragment.num_bytes,
            "num_slices": 0 if fragment.facts is None else fragment.facts.num_slices,
        }


class _StudyWork:
    """One study on its way into its fragment."""

    def __init__(
        self,
        packer: StudyPacker,
        writer: FragmentWriter,
        sample_key: str,
        rows: Mapping[int, HeaderRow],
        report: bytes | None,
    ) -> None:
        self._packer = packer
        self._writer = writer
        self._sample_key = sample_key
        self._report = report
        self._paths = {
            position: packer.roots[row.root_index] / row.relative_path for position, row in rows.items()
        }
        self._headers = {
            position: dataclasses.replace(row.header, file_index=position)
            for position, row in rows.items()
            if row.header is not None
        }
        self._reasons: dict[int, str] = {}
        """Files that do not share the study's fate."""

    def run(self) -> Fragment:
        """Pack as the policy says, and close the fragment with the outcome."""
        while True:
            outcome = self._settled()
            if outcome is not None:
                return self._writer.commit(outcome, None)
            try:
                facts = self._write()
            except _BadInstanceError as error:
                self._reasons[error.position] = error.reason
                self._find_other_bad_instances()
                self._writer.restart()
            else:
                packed = StudyOutcome(outcome=Outcome.PACKED, instances=self._reasons)
                return self._writer.commit(packed, facts)

    def _settled(self) -> StudyOutcome | None:
        """Return the outcome where there is nothing (more) to pack."""
        bad = sorted(code for code in self._reasons.values() if outcome_of(code) is Outcome.QUARANTINED)
        if bad and self._packer.on_bad_instance == "quarantine_study":
            return StudyOutcome(
                outcome=Outcome.QUARANTINED, reason=Reason.STUDY_QUARANTINED, instances=self._reasons
            )
        if self._headers.keys() <= self._reasons.keys():
            reason = bad[0] if bad else min(self._reasons.values(), default=Reason.NO_PIXEL_DATA)
            return StudyOutcome(outcome=outcome_of(reason), reason=reason, instances=self._reasons)
        return None

    def _usable(self) -> list[InstanceHeader]:
        return [header for position, header in self._headers.items() if position not in self._reasons]

    def _write(self) -> SampleFacts:
        """Write all members of the sample.

        Raises:
            _BadInstanceError: An instance cannot be packed; what was written is to be forgotten.
        """
        study = self._group()
        if self._report is not None:
            self._writer.add(REPORT_FIELD, self._report)
        key = self._packer.key
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
        grouping = build_studies(self._usable())
        for rejection in grouping.rejections:
            position, reason = rejection.instance.file_index, rejection.reason
            if outcome_of(reason) is Outcome.QUARANTINED:
                raise _BadInstanceError(position, reason)
            self._reasons[position] = reason
        if len(grouping.studies) != 1:
            raise _BadInstanceError(self._usable()[0].file_index, Reason.CONFLICTING_IDENTIFIER)
        (study,) = grouping.studies
        for copy in study.copies:
            position = copy.copy.file_index
            try:
                check_copies(
                    dataclasses.replace(study, copies=(copy,)), self._locate, limits=self._packer.limits
                )
            except SourceError as error:
                raise _BadInstanceError(position, error.reason) from None
            self._reasons[position] = Reason.DUPLICATE_INSTANCE
        return study

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
            payload = encode_array(self._packer.codec, decoded.pixels)
            self._writer.add(slice_field(number, index, self._packer.codec), payload)
        technical = allow_technical(self._attributes(stack))
        geometry = stack.geometry
        return {
            "affine_lps": geometry.affine_lps,
            "body_part": technical.get("body_part_examined"),
            "codec": self._packer.codec,
            "columns": stack.columns,
            "decoders": sorted(decoders),
            "display_range": list(display.result()),
            "dtype": form.dtype,
            "flags": list(stack.flags),
            "instance_numbers": [part.number for part in stack.slices],
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
            "series_key": self._packer.key.surrogate("series", stack.series_instance_uid),
            "series_number": stack.series_number,
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
            path, limits = self._locate(instance), self._packer.limits
            slices = iter_slices(path, instance, form=form, frames=frames, limits=limits)
            try:
                yield from slices
            except SourceError as error:
                raise _BadInstanceError(instance.file_index, error.reason) from None

    def _find_other_bad_instances(self) -> None:
        """Decode what is left once, so that every bad file is named and packing starts again only once."""
        for header in self._usable():
            try:
                for _ in iter_slices(self._locate(header), header, limits=self._packer.limits):
                    pass
            except SourceError as error:
                self._reasons[header.file_index] = error.reason

    def _attributes(self, stack: Stack) -> Mapping[str, AttributeValue]:
        """Read the attributes of the first file; they have not passed the allowlist."""
        first = stack.slices[0].instance
        try:
            return read_attributes(self._locate(first), KEYWORDS, limits=self._packer.limits)
        except SourceError as error:
            raise _BadInstanceError(first.file_index, error.reason) from None

    def _locate(self, header: InstanceHeader) -> Path:
        return self._paths[header.file_index]


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()
