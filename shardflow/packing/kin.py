"""The other studies of a patient, of which a few headers are read with each report.

A report of today may name the physician, the order number or the maiden name that only the header of another
study has. What is read there decides bytes of this study, so which files it is must not depend on what lies
beside them by chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shardflow.packing.inventory import NO_STUDY, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardflow.packing.inventory import FileTable, StudyTable
    from shardflow.packing.known import KnownInputs
    from shardflow.packing.scope import Scope

__all__ = ["Kin", "representatives", "unfound_kin"]

_FILES_OF_STUDY: Final = 4
_MAX_STUDIES: Final = 32
"""Other studies of one patient that are looked into: the first ones by sample key."""


def representatives(surrogates: NDArray[np.bytes_]) -> NDArray[np.int64]:
    """Choose the files of a study that are read for others, by their position: a few, by a keyed hash."""
    return np.argsort(surrogates, kind="stable")[:_FILES_OF_STUDY].astype(np.int64)


def unfound_kin(
    known: KnownInputs, studies: StudyTable, scope: Scope, is_found: NDArray[np.bool_]
) -> list[int]:
    """Return known files, of patients with a study to pack, that are read with it and were not found.

    A next version knows packed studies by its private ledger, so that its bytes are the same whether their
    files lie among the inputs or not.

    Args:
        known: Inputs of the version before.
        studies: Those of ``known``, and the new ones behind them.
        scope: What is to be packed.
        is_found: ``(num_known,)``.
    """
    open_studies = np.flatnonzero(scope.study_reason == UNDECIDED).tolist()
    patients = {studies.patients[study] for study in open_studies} - {""}
    opened = set(open_studies)
    files = np.flatnonzero(known.is_image & (known.path != 0) & (known.study != NO_STUDY))
    files = files[np.argsort(known.study[files], kind="stable")]
    starts = np.searchsorted(known.study[files], np.arange(len(known.keys) + 1))
    chosen: list[int] = []
    for study, patient in enumerate(known.patients):
        if patient in patients and study not in opened:
            rows = files[starts[study] : starts[study + 1]]
            chosen += rows[representatives(known.surrogate[rows])].tolist()
    return [row for row in chosen if not is_found[row]]


class Kin:
    """Knows which files to read with a study besides its own.

    Args:
        files: The inventory.
    """

    def __init__(self, files: FileTable) -> None:
        self._files = files
        self._studies_of: dict[str, list[int]] = {}
        for study, patient in enumerate(files.studies.patients):
            if patient:
                self._studies_of.setdefault(patient, []).append(study)

    def files_with(self, study: int) -> list[int]:
        """Return the files of the patient's other studies that are read with a study."""
        studies = self._files.studies
        others = [one for one in self._studies_of.get(studies.patients[study], ()) if one != study]
        others.sort(key=lambda one: studies.keys[one])
        chosen: list[int] = []
        for other in others[:_MAX_STUDIES]:
            files = self._files.images_of(other)
            chosen += files[representatives(self._files.surrogate[files])].tolist()
        return chosen

    def facts(self, files: Sequence[int]) -> list[list[int]]:
        """Return what tells whether files are still those that were read: header digests, and times."""
        return [self._files.digest[files].tolist(), self._files.modified_ns[files].tolist()]
