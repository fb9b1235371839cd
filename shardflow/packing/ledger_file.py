"""Writes a dataset's ledger: the inputs that a job decided, and those that it took over."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from shardflow.packing.inventory import CARRIED, INPUT_KINDS, NO_STUDY, REPORT_KIND, reason_name
from shardflow.shards.ledger import LedgerChain, LedgerRow
from shardflow.shards.manifest import LedgerEntry
from shardflow.sources.reasons import Outcome, outcome_of
from shardflow.storage.atomic import write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardflow.packing.base import Base
    from shardflow.packing.intake import Intake
    from shardflow.packing.known import KnownInputs

__all__ = ["LedgerColumns", "columns_of_intake", "columns_of_known", "is_unchanged", "write_ledger"]

_ROWS_AT_ONCE: Final = 1024
"""Rows that are written together."""


class LedgerColumns:
    """The rows of a ledger, in any order.

    Args:
        surrogate: ``(n,)`` S26.
        kind: ``(n,)`` uint8 into `shardflow.packing.inventory.INPUT_KINDS`.
        reason: ``(n,)`` uint8, decided.
        study: ``(n,)`` int32 into ``keys``, or `NO_STUDY`.
        keys: Sample keys.
    """

    def __init__(
        self,
        surrogate: NDArray[np.bytes_],
        kind: NDArray[np.uint8],
        reason: NDArray[np.uint8],
        study: NDArray[np.int32],
        keys: Sequence[str],
    ) -> None:
        self.surrogate, self.kind, self.reason, self.study = surrogate, kind, reason, study
        self.keys = keys

    def rows(self) -> Iterator[LedgerRow]:
        """Yield the rows sorted by surrogate."""
        for at in np.argsort(self.surrogate, kind="stable").tolist():
            reason = reason_name(int(self.reason[at]))
            study = int(self.study[at])
            outcome = Outcome.PACKED if reason is None else outcome_of(reason)
            yield LedgerRow(
                input=self.surrogate[at].decode("ascii"),
                kind=INPUT_KINDS[int(self.kind[at])],
                outcome=outcome.value,
                reason=reason,
                sample_key=None if study == NO_STUDY else self.keys[study],
            )


def columns_of_known(known: KnownInputs, reason: NDArray[np.uint8]) -> LedgerColumns:
    """Take over all inputs of a version, with other reasons for some."""
    return LedgerColumns(known.surrogate, known.kind, reason, known.study, known.keys)


def columns_of_intake(intake: Intake, base: Base | None) -> LedgerColumns:
    """Put together what a job decided and what it left as it was.

    The studies of ``base`` have the same numbers in both.
    """
    report_kind = np.full(len(intake.reports), REPORT_KIND, np.uint8)
    parts = [
        (
            table.surrogate[chosen],
            kind[chosen],
            table.reason[chosen],
            table.study[chosen],
        )
        for table, kind in ((intake.files, intake.files.kind), (intake.reports, report_kind))
        for chosen in [table.reason != CARRIED]
    ]
    if base is not None and intake.scope is not None:
        kept, known = ~intake.scope.is_decided, base.known
        parts.append((known.surrogate[kept], known.kind[kept], known.reason[kept], known.study[kept]))
    surrogate, kind_, reason, study = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return LedgerColumns(surrogate, kind_, reason, study, intake.files.studies.keys)


def is_unchanged(base: Base, intake: Intake) -> bool:
    """Tell whether every input ended as the version before says."""
    now, before = columns_of_intake(intake, base), base.known
    order, former = np.argsort(now.surrogate, kind="stable"), np.argsort(before.surrogate, kind="stable")
    return np.array_equal(now.surrogate[order], before.surrogate[former]) and np.array_equal(
        now.reason[order], before.reason[former]
    )


def write_ledger(output: Path, path: str, columns: LedgerColumns) -> LedgerEntry:
    """Write a ledger, some lines at a time: its size never shows in memory.

    Raises:
        StorageError: It cannot be written.
    """
    chain, sha256, num_bytes = LedgerChain(), hashlib.sha256(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal num_bytes
        rows = columns.rows()
        while lines := [chain.append(row) for row in itertools.islice(rows, _ROWS_AT_ONCE)]:
            piece = b"".join(lines)
            num_bytes += len(piece)
            sha256.update(piece)
            yield piece
        line = chain.close()
        num_bytes += len(line)
        sha256.update(line)
        yield line

    write_atomic(output / path, pieces(), replace=True)
    return LedgerEntry(path=path, num_bytes=num_bytes, sha256=sha256.hexdigest(), head=chain.head)
