"""What became of every line of a text corpus: one byte a line, in a table (docs/format.md, section 15).

The ledger of studies has a line of JSON for each input; of 200 million lines of text that would be 50 GB, and
a chain that one process must walk. Here a line is a number into a short list of reasons, and the table's
digest in the manifest vouches for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.shards.canonical import Json
from shardflow.shards.outcomes import OUTCOMES, OutcomeCounts
from shardflow.shards.table import Table
from shardflow.shards.table_stream import StreamedColumn, stream_table

__all__ = ["LineOutcomes", "stream_outcomes"]

KIND: Final = "line-outcomes"
FORMAT_VERSION: Final = 1
_PIECE_ROWS: Final = 1 << 20


class LineOutcomes:
    """The outcomes of all lines, open for reading; memory-mapped, checked block by block.

    Attributes:
        names: Outcome or reason by its number; the first is ``packed``.
        outcomes: Outcome class of each: ``packed``, ``skipped`` or ``quarantined``.
        files: Surrogates of the input files, in planned order.
        first_line: ``(files + 1,)``: the lines of file ``i`` are ``first_line[i]`` up to ``[i + 1]``.

    Raises:
        FormatError: The table is another one, or does not agree with itself.
        ChecksumError: Its header is damaged.
    """

    def __init__(self, table: Table) -> None:
        table.expect_kind(KIND, FORMAT_VERSION)
        self._table = table
        reasons = table.meta.get("reasons")
        if not (isinstance(reasons, list) and reasons and all(_is_reason(reason) for reason in reasons)):
            raise FormatError(f"{table.name} must name its reasons, got other meta data.")
        self.names: tuple[str, ...] = tuple(name for name, _ in reasons)
        self.outcomes: tuple[str, ...] = tuple(outcome for _, outcome in reasons)
        self.files: tuple[str, ...] = tuple(
            bytes(key).decode("ascii", "replace") for key in table.column("file")
        )
        self.first_line: NDArray[np.uint64] = table.column("first_line")
        first = self.first_line.astype(np.int64)
        is_consistent = (
            len(first) == len(self.files) + 1
            and first[0] == 0
            and (np.diff(first) >= 0).all()
            and int(first[-1]) == table.num_rows("outcome")
        )
        if not is_consistent:
            raise FormatError(f"{table.name} must agree with itself, got columns that do not.")

    @property
    def num_lines(self) -> int:
        """Number of lines of all files."""
        return self._table.num_rows("outcome")

    def of_file(self, file: str) -> NDArray[np.uint8]:
        """Return the outcome of each line of a file, ``(lines,)`` uint8, numbers into `names`.

        Raises:
            FormatError: There is no such file.
        """
        if file not in self.files:
            raise FormatError("a file must be one of the corpus, got another surrogate.")
        number = self.files.index(file)
        start, stop = int(self.first_line[number]), int(self.first_line[number + 1])
        lines: NDArray[np.uint8] = self._table.spans("outcome", np.array([start]), np.array([stop]))[
            start:stop
        ]
        return lines

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the outcomes of all lines, checked, some at a time."""
        for start in range(0, self.num_lines, _PIECE_ROWS):
            stop = min(start + _PIECE_ROWS, self.num_lines)
            yield self._table.spans("outcome", np.array([start]), np.array([stop]))[start:stop]

    def reasons(self) -> dict[str, int]:
        """Count the lines by name, packed ones too; names of no line are left out.

        Raises:
            FormatError: A line has a number that stands for nothing.
        """
        counts = np.zeros(256, np.int64)
        for piece in self.pieces():
            counts += np.bincount(piece, minlength=256)
        if counts[len(self.names) :].any():
            raise FormatError(f"{self._table.name} must hold numbers of its reasons, got others.")
        return {name: int(count) for name, count in zip(self.names, counts, strict=False) if count}

    def counts(self) -> OutcomeCounts:
        """Count the lines by outcome."""
        totals: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        classes = dict(zip(self.names, self.outcomes, strict=True))
        for name, count in self.reasons().items():
            totals[classes[name]] += count
        return OutcomeCounts(**totals)


def stream_outcomes(
    files: Sequence[tuple[str, int]],
    outcomes: Iterable[NDArray[np.uint8]],
    reasons: Sequence[tuple[str, str]],
) -> Iterator[bytes]:
    """Yield the table in pieces.

    Args:
        files: Surrogate and number of lines of each file, in planned order.
        outcomes: The lines of all files, in pieces of any length.
        reasons: Name and outcome class by number; the first one is of packed lines.

    Raises:
        FormatError: The pieces have another number of lines than the files.
    """
    first_line = np.cumsum([0, *(num_lines for _, num_lines in files)]).astype("<u8")
    keys = np.array([file.encode("ascii") for file, _ in files], "S") if files else np.zeros(0, "S1")
    meta: Mapping[str, Json] = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "reasons": [[name, outcome] for name, outcome in reasons],
    }
    yield from stream_table(
        [
            StreamedColumn(name="file", dtype=keys.dtype, num_rows=len(keys), pieces=lambda: [keys]),
            StreamedColumn(
                name="first_line",
                dtype=first_line.dtype,
                num_rows=len(first_line),
                pieces=lambda: [first_line],
            ),
            StreamedColumn(
                name="outcome",
                dtype=np.dtype("u1"),
                num_rows=int(first_line[-1]),
                pieces=lambda: outcomes,
            ),
        ],
        meta,
    )


def _is_reason(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and value[1] in OUTCOMES
