"""Give every attachment its study, after the header pass and before anything is planned.

A file of one record is an input like an image. A file of several records (a bundle, a table) belongs to as
many studies as they do: what it holds of each is an input of its own, and its own row says what became of
records that belong to none. So a study that comes later finds its part, and no other changes its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardflow.packing.inventory import NO_STUDY, UNDECIDED, Attachment, FileTable, reason_code
from shardflow.packing.links import AMBIGUOUS, CONFLICTING, resolve
from shardflow.sources.reasons import Reason

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.sources.dicom import DiscoveredFile

__all__ = ["link_attachments"]


def link_attachments(
    files: FileTable, discovered: Sequence[DiscoveredFile], key: SecretKey, window_s: int
) -> None:
    """Write the study, or the reason why there is none, into the rows of all attachments.

    Args:
        files: The inventory; parts are put behind its rows.
        discovered: The files.
        key: Makes the surrogates of parts.
        window_s: Largest distance in time between a record and the study of its patient.
    """
    rows = sorted(files.attachments)
    found = resolve(files, [files.attachments[row].links for row in rows], window_s)
    parts: list[tuple[int, int, str, int, Attachment]] = []
    for row, studies in zip(rows, found, strict=True):
        size = discovered[row].num_bytes
        if len(studies) == 1:
            ((item, study),) = studies.items()
            files.reason[row] = _reason(study)
            if study >= 0:
                files.study[row], files.decoded_bytes[row] = study, size
                files.attachments[row] = replace(files.attachments[row], items=(item,))
            continue
        parts += _parts(files, key, row, studies)
        files.reason[row] = _reason_of_rest(studies)
    files.add_parts(parts)
    for row in range(len(files) - len(parts), len(files)):
        attachment, whole = files.attachments[row], int(files.source[row])
        share = len(attachment.items) / len(attachment.links)
        files.decoded_bytes[row] = int(discovered[whole].num_bytes * share)
        files.reason[row] = UNDECIDED
    _leave_out_copies(files)


def _parts(
    files: FileTable, key: SecretKey, row: int, studies: dict[int, int]
) -> list[tuple[int, int, str, int, Attachment]]:
    """Make a part for each study of a file's records."""
    items_of: dict[int, list[int]] = {}
    for item, study in sorted(studies.items()):
        if study >= 0:
            items_of.setdefault(study, []).append(item)
    name, digest = files.surrogate[row].decode("ascii"), int(files.digest[row])
    made = []
    for study, items in items_of.items():
        sample_key = files.studies.keys[study]
        text = f"{digest:016x}/{sample_key}".encode("ascii")
        made.append(
            (
                row,
                study,
                key.surrogate("input-part", f"{name}/{sample_key}"),
                int.from_bytes(hashlib.sha256(text).digest()[:8], "little"),
                replace(files.attachments[row], items=tuple(items)),
            )
        )
    return made


def _reason(study: int) -> int:
    if study == AMBIGUOUS:
        return reason_code(Reason.AMBIGUOUS_LINK)
    if study == CONFLICTING:
        return reason_code(Reason.CONFLICTING_IDENTIFIER)
    return reason_code(Reason.ATTACHMENT_WITHOUT_STUDY) if study == NO_STUDY else UNDECIDED


def _reason_of_rest(studies: dict[int, int]) -> int:
    """Say what became of the records of a file that are in no part."""
    for code in (CONFLICTING, AMBIGUOUS, NO_STUDY):
        if code in studies.values():
            return _reason(code)
    return reason_code(Reason.ATTACHMENT_IN_PARTS)


def _leave_out_copies(files: FileTable) -> None:
    """Keep one of the files of a study that hold the same: the first by surrogate."""
    seen: set[tuple[int, str, int]] = set()
    for row in sorted(files.attachments, key=lambda row: bytes(files.surrogate[row])):
        if files.reason[row] != UNDECIDED:
            continue
        what = (int(files.study[row]), files.attachments[row].kind, int(files.digest[row]))
        if what in seen:
            files.reason[row] = reason_code(Reason.DUPLICATE_INSTANCE)
        seen.add(what)
