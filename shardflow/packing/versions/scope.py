"""Scope of an `append` or a `retry`: which found inputs the dataset already knows, and which studies to pack.

A file is recognized by its path, or by its name below the input folders, if size and header are the same; a
report by its study and text, wherever it moved. A known location with other content is another input. It
takes the name of the old one if that was never packed (the file was repaired); otherwise it gets a new
name.

A packed study is never touched. *Append* packs every other study with an input that the dataset does not
know; *retry* packs every quarantined study, and nothing that is new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.format.reasons import Outcome, Reason, outcome_of
from shardflow.packing.inventory import (
    ATTACHMENT_KIND,
    CARRIED,
    NO_STUDY,
    PACKED,
    UNDECIDED,
    of_inputs,
    of_studies,
    reason_code,
    reason_name,
)
from shardflow.packing.versions.base import file_identity, path_digest, ranked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.linking import ReportTable
    from shardflow.packing.sources.placement import DiscoveredFile
    from shardflow.packing.versions.base import Base, KnownInputs

NEW: Final = -1
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True)
class Recognized:
    """Known inputs among the found ones of one kind."""

    row: NDArray[np.int64]
    """``(n,)``: row of `KnownInputs`, or `NEW`."""
    replaced: NDArray[np.int64]
    """``(n,)``: row whose name and location a new input took over, or -1."""


def recognize_files(
    known: KnownInputs,
    key: SecretKey,
    files: FileTable,
    discovered: Sequence[DiscoveredFile],
    roots: Sequence[Path],
) -> Recognized:
    """Recognize files, and give new ones a unique surrogate."""
    sizes = np.fromiter((file.num_bytes for file in discovered), np.int64, len(discovered))
    identity = file_identity(files.digest, sizes[files.source])
    paths = [path_digest(str(file.path(roots).absolute())) for file in discovered]
    path = np.array(paths, np.uint64)[files.source]
    rows = np.flatnonzero(~known.is_report)
    row = _find(known.path[rows] * _MIX + known.identity[rows], rows, path * _MIX + identity)
    named = _find(known.surrogate, np.arange(len(known)), files.surrogate)
    is_matched = np.zeros(len(known), np.bool_)
    is_matched[row[row != NEW]] = True
    same = (row == NEW) & (named != -1)
    same[same] &= (known.identity[named[same]] == identity[same]) & ~is_matched[named[same]]
    row[same] = named[same]
    here = _find(known.path[rows], rows, path)
    named = np.where(here != -1, here, named)
    return _name(known, key, "input", files.surrogate, _Found(row, named, identity, path))


def recognize_reports(known: KnownInputs, key: SecretKey, reports: ReportTable, source: Path) -> Recognized:
    """Recognize reports, and give new ones a unique surrogate."""
    rows = np.flatnonzero(known.is_report)
    identity = ranked(reports.identity)
    row = _find(ranked(known.identity[rows]), rows, identity)
    named = _find(known.surrogate, np.arange(len(known)), reports.surrogate)
    where = str(source.absolute())
    path = np.array([path_digest(f"{where}:{place}") for place in reports.place.tolist()], np.uint64)
    return _name(known, key, "input-report", reports.surrogate, _Found(row, named, identity, path))


@dataclass(frozen=True, slots=True)
class _Found:
    """Found inputs of one kind: known row, row of the same name, content, location."""

    row: NDArray[np.int64]
    named: NDArray[np.int64]
    identity: NDArray[np.uint64]
    path: NDArray[np.uint64]


def _name(
    known: KnownInputs, key: SecretKey, kind: str, surrogate: NDArray[np.bytes_], found: _Found
) -> Recognized:
    """Set the final surrogates; find known inputs whose location has other content now."""
    row, replaced = found.row, np.full(len(found.row), -1, np.int64)
    is_matched = np.zeros(len(known), np.bool_)
    is_matched[row[row != NEW]] = True
    taken: set[bytes] | None = None
    for number in np.flatnonzero((row == NEW) & (found.named != -1)).tolist():
        former = int(found.named[number])
        is_same_place = known.path[former] == found.path[number]
        if is_same_place and not is_matched[former] and known.reason[former] != PACKED:
            replaced[number] = former
            surrogate[number] = known.surrogate[former]
            continue
        if taken is None:
            taken = {*known.surrogate.tolist(), *surrogate.tolist()}
        name = surrogate[number].decode("ascii")
        while name.encode("ascii") in taken:
            name = key.surrogate(kind, f"{name}/{int(found.identity[number]):016x}")
        surrogate[number] = name.encode("ascii")
        taken.add(surrogate[number])
    surrogate[row != NEW] = known.surrogate[row[row != NEW]]
    return Recognized(row, replaced)


def _find(
    keys: NDArray[np.generic], rows: NDArray[np.int64], wanted: NDArray[np.generic]
) -> NDArray[np.int64]:
    """Return the row of each wanted value, or -1."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[at] == wanted, rows[order[at]], -1).astype(np.int64)


GrowMode: TypeAlias = Literal["append", "retry"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Inputs and studies that a job decides."""

    study_reason: NDArray[np.uint8]
    """``(num_studies,)``: `UNDECIDED` for studies to pack, `CARRIED` for those left alone, or a reason."""
    is_decided: NDArray[np.bool_]
    """``(num_known,)``: known inputs that get a new outcome, or whose location another input took over."""
    missing: NDArray[np.int64]
    """Known files of studies to pack that were not found."""
    num_known: int
    """Found inputs that are taken over unchanged."""
    num_new: int
    """Found inputs that the dataset does not know."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.num_new and not self.is_decided.any()


def quarantined_rows(known: KnownInputs) -> NDArray[np.bool_]:
    """Return the mask of quarantined known inputs, ``(num_known,)``."""
    codes = [
        code
        for code in np.unique(known.reason).tolist()
        if (name := reason_name(code)) is not None and outcome_of(name) is Outcome.QUARANTINED
    ]
    return np.isin(known.reason, codes)


class ScopeMaker:
    """Computes the scope of a job, and marks everything else in its tables as `CARRIED`.

    Args:
        mode: What the job makes.
        base: The previous version; its studies are the first ones of ``files.studies``.
        files: The found files.
        reports: The found reports.
        found_files: Known inputs among the files.
        found_reports: Known inputs among the reports.
    """

    def __init__(
        self,
        mode: GrowMode,
        base: Base,
        files: FileTable,
        reports: ReportTable,
        found_files: Recognized,
        found_reports: Recognized,
    ) -> None:
        self._is_append = mode == "append"
        self._known = base.known
        self._files, self._reports = files, reports
        self._found_files, self._found_reports = found_files, found_reports
        studies = files.studies
        packed, removed, patients = base.packed_keys(), base.removed_studies, base.removed_patients
        self._is_packed = np.array([key in packed for key in studies.keys], np.bool_)
        self._is_removed = np.array(
            [
                key in removed or patient in patients
                for key, patient in zip(studies.keys, studies.patients, strict=True)
            ],
            np.bool_,
        )
        self._is_open = np.zeros(len(studies), np.bool_)

    def make(self) -> Scope:
        """Return the scope."""
        self._keep_studies()
        self._open_studies()
        self._mark_files()
        self._mark_reports()
        is_decided = np.zeros(len(self._known), np.bool_)
        is_found = np.zeros(len(self._known), np.bool_)
        num_new = num_carried = 0
        for table, found in ((self._files, self._found_files), (self._reports, self._found_reports)):
            is_found[found.row[found.row != NEW]] = True
            decided = table.reason != CARRIED
            num_carried += int((~decided & (found.row != NEW)).sum())
            num_new += int((decided & (found.row == NEW)).sum())
            for rows in (found.row[decided], found.replaced[decided]):
                is_decided[rows[rows != -1]] = True
        of_open = of_inputs(self._is_open, self._known.study)
        is_missing = of_open & ~self._known.is_report & ~is_found & ~is_decided
        return Scope(
            study_reason=self._study_reasons(of_open & self._known.is_report),
            is_decided=is_decided,
            missing=np.flatnonzero(is_missing),
            num_known=num_carried,
            num_new=num_new,
        )

    def _keep_studies(self) -> None:
        """Assign files that have become unreadable to their former study."""
        row, replaced = self._found_files.row, self._found_files.replaced
        former = np.where(row != NEW, row, replaced)
        lost = (self._files.study == NO_STUDY) & (former != -1)
        self._files.study[lost] = self._known.study[former[lost]]

    def _open_studies(self) -> None:
        """Find the studies to pack."""
        if self._is_append:
            pairs = ((self._files, self._found_files), (self._reports, self._found_reports))
            touched = [table.study[found.row == NEW] for table, found in pairs]
        else:
            touched = [
                self._known.study[quarantined_rows(self._known)],
                self._files.study[self._unplaced()],
            ]
        is_touched = of_studies(np.concatenate(touched), len(self._is_open))
        self._is_open = is_touched & ~self._is_packed & ~self._is_removed

    def _unplaced(self) -> NDArray[np.bool_]:
        """Return the mask of files whose study the dataset does not know: new and unreadable ones."""
        row = self._found_files.row
        unplaced: NDArray[np.bool_] = row == NEW
        unplaced[~unplaced] = self._known.study[row[~unplaced]] == NO_STUDY
        return unplaced

    def _mark_files(self) -> None:
        reason, study = self._files.reason, self._files.study
        fresh = self._found_files.row == NEW if self._is_append else self._unplaced()
        is_open, is_packed, is_removed = self._of_studies(study)
        reason[~fresh & ~is_open] = CARRIED
        reason[self._left_alone(is_packed)] = CARRIED
        reason[fresh & is_packed & (reason == UNDECIDED)] = reason_code(Reason.STUDY_ALREADY_PACKED)
        reason[fresh & is_removed] = reason_code(Reason.CONSENT_WITHDRAWN)

    def _left_alone(self, is_packed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask of attachments that are not decided.

        These are attachments without a study, which `retry` reads without the files that could link them, and
        files of packed studies that the previous version did not recognize as attachments.
        """
        is_attachment = self._files.kind == ATTACHMENT_KIND
        found = self._found_files
        chosen: NDArray[np.bool_] = is_attachment & is_packed & (found.row == NEW) & (found.replaced != NEW)
        if not self._is_append:
            chosen |= is_attachment & (self._files.study == NO_STUDY)
        return chosen

    def _mark_reports(self) -> None:
        reason, study, row = self._reports.reason, self._reports.study, self._found_reports.row
        is_new = row == NEW
        is_open, is_packed, is_removed = self._of_studies(study)
        carried = ~is_open & ~(is_new & self._is_append)
        reason[carried] = CARRIED
        linked = np.isin(
            reason,
            [UNDECIDED, *map(reason_code, (Reason.AMBIGUOUS_REPORT, Reason.DUPLICATE_REPORT))],
        )
        fresh = is_new & ~carried & is_packed & linked
        is_copy = np.isin(self._reports.identity, self._known.identity[self._known.is_report])
        reason[fresh & is_copy] = reason_code(Reason.DUPLICATE_REPORT)
        reason[fresh & ~is_copy] = reason_code(Reason.STUDY_ALREADY_PACKED)
        reason[is_new & ~carried & is_removed] = reason_code(Reason.CONSENT_WITHDRAWN)

    def _of_studies(
        self, study: NDArray[np.int32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks of inputs whose study is to be packed, is packed, and was removed."""
        return (
            of_inputs(self._is_open, study),
            of_inputs(self._is_packed, study),
            of_inputs(self._is_removed, study),
        )

    def _study_reasons(self, knows_report: NDArray[np.bool_]) -> NDArray[np.uint8]:
        reasons = np.where(self._is_open, UNDECIDED, CARRIED).astype(np.uint8)
        has_report = of_studies(self._reports.study, len(reasons))
        lost = of_studies(self._known.study[knows_report], len(reasons))
        reasons[self._is_open & lost & ~has_report] = reason_code(Reason.STUDY_INCOMPLETE)
        return reasons
