"""The way back from surrogates to inputs, for the operator: a file of the private folder, mode 0600.

It is also what a later version knows its inputs by (`shardflow.packing.known`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardflow.packing.inventory import CARRIED, INPUT_KINDS, NO_STUDY, UNDECIDED, reason_name
from shardflow.packing.known import file_identity
from shardflow.storage.atomic import write_atomic

if TYPE_CHECKING:
    from shardflow.packing.base import Base
    from shardflow.packing.config import InputsConfig
    from shardflow.packing.intake import Intake
    from shardflow.packing.workplace import Workplace

__all__ = ["encode_entry", "write_private_ledger"]


def write_private_ledger(
    place: Workplace, plan_digest: str, intake: Intake, inputs: InputsConfig, base: Base | None = None
) -> None:
    """Write one JSON line for each input: surrogate, path or place, sample key, outcome, content.

    The file is named after the plan, so that the one of another run is never lost; its reason is
    ``"UNDECIDED"`` for inputs that a stopped job had not come to. Inputs that the job did not decide keep the
    line that they have in the version before.

    Raises:
        StorageError: It cannot be written.
    """
    write_atomic(place.private_ledger(plan_digest), _lines(intake, inputs, base), replace=True, mode=0o600)


def encode_entry(entry: Mapping[str, Any]) -> bytes:
    """Return the line of an input."""
    return json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def _lines(intake: Intake, inputs: InputsConfig, base: Base | None) -> Iterator[bytes]:
    files, reports, studies = intake.files, intake.reports, intake.files.studies
    if base is not None and intake.scope is not None:
        for entry in base.known.entries(np.flatnonzero(~intake.scope.is_decided).tolist()):
            yield encode_entry(entry)

    def line(
        surrogate: bytes, code: int, study: int, kind: str, where: Mapping[str, Any], identity: int
    ) -> bytes:
        return encode_entry(
            {
                "input": surrogate.decode("ascii"),
                "kind": kind,
                **where,
                "sample_key": None if study == NO_STUDY else studies.keys[study],
                "patient": None if study == NO_STUDY else studies.patients[study] or None,
                "reason": "UNDECIDED" if code == UNDECIDED else reason_name(code),
                "identity": f"{identity:016x}",
            }
        )

    sizes = np.fromiter((file.num_bytes for file in intake.discovered), np.int64, len(intake.discovered))
    identities = file_identity(files.digest, sizes[files.source])
    for number, source_file in enumerate(files.source.tolist()):
        if files.reason[number] != CARRIED:
            path = str(intake.discovered[source_file].path(inputs.roots).absolute())
            code, study = int(files.reason[number]), int(files.study[number])
            kind = INPUT_KINDS[int(files.kind[number])]
            yield line(files.surrogate[number], code, study, kind, {"path": path}, int(identities[number]))
    source = str((inputs.reports or Path()).absolute())
    for number in range(len(reports)):
        if reports.reason[number] != CARRIED:
            where = {"path": source, "place": int(reports.place[number])}
            code, study = int(reports.reason[number]), int(reports.study[number])
            identity = int(reports.identity[number])
            yield line(reports.surrogate[number], code, study, "report", where, identity)
