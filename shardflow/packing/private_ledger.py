"""The way back from surrogates to inputs, for the operator: a file of the private folder, mode 0600."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardflow.packing.inventory import NO_STUDY, UNDECIDED, reason_name
from shardflow.storage.atomic import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.packing.inventory import FileTable
    from shardflow.packing.linking import ReportTable
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.workplace import Workplace
    from shardflow.sources.dicom import DiscoveredFile

__all__ = ["write_private_ledger"]


def write_private_ledger(
    place: Workplace,
    plan: PackPlan,
    discovered: Sequence[DiscoveredFile],
    roots: Sequence[Path],
    files: FileTable,
    reports: ReportTable,
) -> None:
    """Write one JSON line for each input: surrogate, path or place, sample key, outcome.

    The file is named after the plan, so that the one of another run is never lost; its reason is
    ``"UNDECIDED"`` for inputs that a stopped job had not come to.

    Raises:
        StorageError: It cannot be written.
    """
    keys = files.studies.keys

    def line(table: FileTable | ReportTable, number: int, kind: str, where: dict[str, Any]) -> bytes:
        study, code = int(table.study[number]), int(table.reason[number])
        fields = {
            "input": table.surrogate[number].decode("ascii"),
            "kind": kind,
            **where,
            "sample_key": None if study == NO_STUDY else keys[study],
            "reason": "UNDECIDED" if code == UNDECIDED else reason_name(code),
        }
        return json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"

    def lines() -> Iterator[bytes]:
        for number, file in enumerate(discovered):
            yield line(files, number, "dicom", {"path": str(file.path(roots))})
        for number in range(len(reports)):
            yield line(reports, number, "report", {"place": int(reports.place[number])})

    write_atomic(place.private_ledger(plan.digest), lines(), replace=True, mode=0o600)
