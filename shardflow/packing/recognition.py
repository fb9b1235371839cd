"""Which of the found inputs the dataset knows already, and what the others are called.

A file is known by its path, or by its place below the input folders, if size and header are the same; a
report by its study and text, whatever line it moved to. What lies at a known place and holds something else
is another input. It takes the name of the old one if that was never packed (the file was repaired); else it
gets a name of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.packing.inventory import PACKED
from shardflow.packing.known import file_identity, path_digest, ranked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.known import KnownInputs
    from shardflow.packing.linking import ReportTable
    from shardflow.sources.dicom import DiscoveredFile

__all__ = ["NEW", "Recognised", "recognise_files", "recognise_reports"]

NEW: Final = -1
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True)
class Recognised:
    """What is known of the found inputs of one kind."""

    row: NDArray[np.int64]
    """``(n,)``: row of `KnownInputs`, or `NEW`."""
    replaced: NDArray[np.int64]
    """``(n,)``: row whose name and place a new input took, or -1."""


def recognise_files(
    known: KnownInputs,
    key: SecretKey,
    files: FileTable,
    discovered: Sequence[DiscoveredFile],
    roots: Sequence[Path],
) -> Recognised:
    """Recognise files, and give new ones a surrogate that no other input has."""
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


def recognise_reports(known: KnownInputs, key: SecretKey, reports: ReportTable, source: Path) -> Recognised:
    """Recognise reports, and give new ones a surrogate that no other input has."""
    rows = np.flatnonzero(known.is_report)
    identity = ranked(reports.identity)
    row = _find(ranked(known.identity[rows]), rows, identity)
    named = _find(known.surrogate, np.arange(len(known)), reports.surrogate)
    where = str(source.absolute())
    path = np.array([path_digest(f"{where}:{place}") for place in reports.place.tolist()], np.uint64)
    return _name(known, key, "input-report", reports.surrogate, _Found(row, named, identity, path))


@dataclass(frozen=True, slots=True)
class _Found:
    """Found inputs of one kind: known row, row of the same name, content, place."""

    row: NDArray[np.int64]
    named: NDArray[np.int64]
    identity: NDArray[np.uint64]
    path: NDArray[np.uint64]


def _name(
    known: KnownInputs, key: SecretKey, kind: str, surrogate: NDArray[np.bytes_], found: _Found
) -> Recognised:
    """Write the final surrogates; find the known inputs whose place holds something else now."""
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
    return Recognised(row, replaced)


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
