"""From headers to studies: patient > study > series > stack of slices.

Pure: no file is read here. The result depends on the set of headers alone, not on their order and not on file
    names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardflow.sources.dicom.headers import InstanceHeader
from shardflow.sources.dicom.stacks import Stack, split_series
from shardflow.sources.reasons import Reason

__all__ = ["Copy", "Grouping", "Rejection", "Study", "build_studies"]

_MISSING_NUMBER = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A second file with the SOP Instance UID of a kept one; `check_copies` compares their pixels."""

    kept: InstanceHeader
    copy: InstanceHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One study with all its stacks. Holds identifiers; its ``repr`` shows none."""

    patient_id: str
    study_instance_uid: str
    stacks: tuple[Stack, ...]
    """Sorted by series number, series identifier and stack index."""
    copies: tuple[Copy, ...]

    @property
    def instances(self) -> tuple[InstanceHeader, ...]:
        """Every instance that has a slice in a stack, once, sorted by identifier."""
        found = {one.instance.sop_instance_uid: one.instance for stack in self.stacks for one in stack.slices}
        return tuple(found[uid] for uid in sorted(found))

    def __repr__(self) -> str:
        return f"Study({len(self.stacks)} stacks, {len(self.copies)} copies)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """An instance that grouping cannot place."""

    instance: InstanceHeader
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """All studies, sorted by patient and study identifier, and what was left out."""

    studies: tuple[Study, ...]
    rejections: tuple[Rejection, ...]


def build_studies(headers: Iterable[InstanceHeader]) -> Grouping:
    """Group instances into studies, and order everything.

    A study whose instances name several patients is rejected whole (CONFLICTING_IDENTIFIER): it could be in
    two splits at once. Of several files with one SOP Instance UID one is kept, an uncompressed one if there
    is one; the others are listed as copies.
    """
    by_study: defaultdict[str, list[InstanceHeader]] = defaultdict(list)
    for header in headers:
        by_study[header.study_instance_uid].append(header)
    studies: list[Study] = []
    rejections: list[Rejection] = []
    for uid in sorted(by_study):
        instances = by_study[uid]
        if len({each.patient_id for each in instances}) > 1:
            rejections += [
                Rejection(instance=each, reason=Reason.CONFLICTING_IDENTIFIER)
                for each in sorted(instances, key=_preference)
            ]
        else:
            studies.append(_build_study(instances))
    studies.sort(key=lambda study: (study.patient_id, study.study_instance_uid))
    return Grouping(studies=tuple(studies), rejections=tuple(rejections))


def _build_study(instances: Sequence[InstanceHeader]) -> Study:
    kept: dict[str, InstanceHeader] = {}
    copies: list[Copy] = []
    for header in sorted(instances, key=_preference):
        first = kept.setdefault(header.sop_instance_uid, header)
        if first is not header:
            copies.append(Copy(kept=first, copy=header))
    by_series: defaultdict[str, list[InstanceHeader]] = defaultdict(list)
    for header in kept.values():
        by_series[header.series_instance_uid].append(header)
    stacks = [stack for series in by_series.values() for stack in split_series(series)]
    stacks.sort(key=_stack_order)
    return Study(
        patient_id=instances[0].patient_id,
        study_instance_uid=instances[0].study_instance_uid,
        stacks=tuple(stacks),
        copies=tuple(copies),
    )


def _preference(header: InstanceHeader) -> tuple[str, bool, int, int, str, int]:
    """Which of several files with one identifier is kept: the smallest; its place decides between equals."""
    return (
        header.sop_instance_uid,
        not header.is_native,
        len(header.flags),
        -header.num_bytes,
        header.series_instance_uid,
        header.file_index,
    )


def _stack_order(stack: Stack) -> tuple[int, str, int]:
    number = _MISSING_NUMBER if stack.series_number is None else stack.series_number
    return number, stack.series_instance_uid, stack.stack_index
