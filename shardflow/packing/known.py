"""What the version before knows of every input, in columns: read from its private ledger.

Some 60 bytes an input and 200 a study. Paths stay in the file; they are read back for the few inputs that are
taken in again. Owns how an input is recognised: by what it holds, not by its name alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.packing.inventory import ATTACHMENT_KIND, INPUT_KINDS, NO_STUDY, REPORT_KIND, known_code
from shardflow.packing.workplace import storage_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["KnownInputs", "file_identity", "path_digest", "ranked"]

# Odd, so that a product keeps all 64 bits apart.
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


def file_identity(digest: NDArray[np.uint64], num_bytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 bits that stand for a file's content, ``(n,)``: its header's digest, and its size."""
    return digest + num_bytes.astype(np.uint64) * _MIX


def path_digest(path: str) -> int:
    """Return 64 bits that stand for a path."""
    encoded = path.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def ranked(identity: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Make equal identities differ by their rank among each other, ``(n,)``: the first, the second, ..."""
    order = np.argsort(identity, kind="stable")
    ordered = identity[order]
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    position = np.arange(len(ordered))
    rank = np.empty(len(ordered), np.uint64)
    rank[order] = position - np.maximum.accumulate(np.where(is_first, position, 0))
    return identity + rank * _MIX


class KnownInputs:
    """The inputs of a published version, in the order of its private ledger.

    Args:
        path: The private ledger.

    Attributes:
        keys: Sample keys of the studies that inputs belong to, packed or not.
        patients: Surrogate of the patient of each of them; ``""`` where it was forgotten.
        surrogate: ``(n,)`` S26.
        kind: ``(n,)`` uint8 into `shardflow.packing.inventory.INPUT_KINDS`.
        reason: ``(n,)`` uint8, as in `shardflow.packing.inventory.FileTable`; never undecided.
        study: ``(n,)`` int32 into ``keys``, or `NO_STUDY`.
        identity: ``(n,)`` uint64: what the input holds.
        path: ``(n,)`` uint64: `path_digest` of where it lies; 0 where that was forgotten.

    Raises:
        ConfigError: There is no such file.
        FormatError: It is damaged.
        StorageError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.keys: list[str] = []
        self.patients: list[str] = []
        numbers: dict[str, int] = {}
        rows: list[tuple[bytes, int, int, int, int, int, int]] = []
        try:
            for offset, fields in self._lines():
                key = fields["sample_key"]
                if key is not None and key not in numbers:
                    numbers[key] = len(self.keys)
                    self.keys.append(key)
                    self.patients.append(fields.get("patient") or "")
                where = fields.get("path")
                rows.append(
                    (
                        fields["input"].encode("ascii"),
                        INPUT_KINDS.index(fields["kind"]),
                        known_code(fields["reason"]),
                        NO_STUDY if key is None else numbers[key],
                        int(fields["identity"], 16),
                        0 if where is None else path_digest(_place(fields)),
                        offset,
                    )
                )
        except FileNotFoundError:
            raise ConfigError(
                "private_dir must hold the private ledger of the dataset's newest version (inputs-*.jsonl), "
                "found none; name the private folder that the dataset was packed with."
            ) from None
        except OSError as error:
            raise storage_error("reading the private ledger", error) from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                f"the private ledger must hold one whole JSON line an input, got {type(error).__name__} "
                "(inputs-*.jsonl); restore it from a copy."
            ) from None
        columns = list(zip(*rows, strict=True)) or [()] * 7
        self.surrogate: NDArray[np.bytes_] = np.array(columns[0], "S26")
        self.kind: NDArray[np.uint8] = np.array(columns[1], np.uint8)
        self.reason: NDArray[np.uint8] = np.array(columns[2], np.uint8)
        self.study: NDArray[np.int32] = np.array(columns[3], np.int32)
        self.identity: NDArray[np.uint64] = np.array(columns[4], np.uint64)
        self.path: NDArray[np.uint64] = np.array(columns[5], np.uint64)
        self._offset: NDArray[np.int64] = np.array(columns[6], np.int64)

    def __len__(self) -> int:
        return len(self.surrogate)

    @property
    def is_report(self) -> NDArray[np.bool_]:
        """Tell which inputs are reports, ``(n,)``."""
        found: NDArray[np.bool_] = self.kind == REPORT_KIND
        return found

    @property
    def is_image(self) -> NDArray[np.bool_]:
        """Tell which inputs are image files, ``(n,)``."""
        found: NDArray[np.bool_] = (self.kind != REPORT_KIND) & (self.kind != ATTACHMENT_KIND)
        return found

    def entries(self, rows: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Read lines of the private ledger again; they hold paths."""
        try:
            with self._path.open("rb") as file:
                for row in rows:
                    file.seek(int(self._offset[row]))
                    yield json.loads(file.readline())
        except OSError as error:
            raise storage_error("reading the private ledger", error) from None

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        offset = 0
        with self._path.open("rb") as file:
            for line in file:
                yield offset, json.loads(line)
                offset += len(line)


def _place(fields: dict[str, Any]) -> str:
    """Where an input lies: a file's path, or the table or folder of a report and the place in it."""
    return f"{fields['path']}:{fields['place']}" if fields["kind"] == "report" else str(fields["path"])
