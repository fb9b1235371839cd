"""A patient stays in the split where it was first packed (P6), whatever a layout says of it later.

A keyed hash never moves anybody, but tables of official splits are edited. Where the newer table names no
split for a packed patient, the patient stays; where it names another one, nobody knows which of the two
tables is right, so the patient's new studies are held in quarantine (docs/adr/0092).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardflow.packing.inventory import UNDECIDED, reason_code
from shardflow.packing.scan import NUM_BUCKETS
from shardflow.sources.reasons import Reason

if TYPE_CHECKING:
    from shardflow.packing.inventory import StudyTable

__all__ = ["keep_splits"]


def keep_splits(
    studies: StudyTable, packed: Mapping[str, str], splits: Sequence[str], study_reason: NDArray[np.uint8]
) -> int:
    """Put studies of packed patients into the split of their patient, or into quarantine.

    Args:
        studies: What was found; its buckets become those of the packed splits.
        packed: Split of every packed patient, by the patient's surrogate.
        splits: Names of all splits, in the order of the settings.
        study_reason: ``(num_studies,)``; studies to pack that the layout puts elsewhere get their reason.

    Returns:
        Number of packed patients that the layout puts into another split.
    """
    moved: set[str] = set()
    for study, (patient, bucket) in enumerate(zip(studies.patients, studies.buckets, strict=True)):
        split = packed.get(patient) if patient else None
        if split is None:
            continue
        stays = NUM_BUCKETS + splits.index(split)
        # Below NUM_BUCKETS lie the keyed buckets of patients that the layout gives no split.
        if bucket >= NUM_BUCKETS and bucket != stays:
            moved.add(patient)
            if study_reason[study] == UNDECIDED:
                study_reason[study] = reason_code(Reason.SPLIT_CHANGED)
        studies.buckets[study] = stays
    return len(moved)
