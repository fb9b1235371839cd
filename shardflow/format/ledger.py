"""Ledger: the outcome of every input in hash-chained lines, and the outcome table of text corpora.

The ledger has one line per input in planned order and a closing line. Each line contains the hash of the
line before it, so no line can be changed or removed without changing all that follow; the manifest keeps the
last hash. The layout is in docs/format.md, section 9.

A corpus of 200 million lines would need 50 GB of such JSON and a chain that one process must walk. Its
outcomes are a table of one byte per line instead, a number into a short list of reasons, protected by the
table's digest in the manifest (docs/format.md, section 15).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.keys import SAMPLE_KEY_PATTERN, Json, canonical_json, parse_json, sha256_hex
from shardflow.format.reasons import OUTCOMES, OutcomeCounts
from shardflow.format.table import StreamedColumn, Table, stream_table

FIRST_PREV = "0" * 64
_KIND = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)
_REASON = re.compile(r"[A-Z0-9_]{1,64}", re.ASCII)
_ROW_KEYS = {"hash", "input", "kind", "outcome", "prev", "reason", "sample_key"}
KIND: Final = "line-outcomes"
FORMAT_VERSION: Final = 1
_PIECE_ROWS: Final = 1 << 20
_MAX_LINE_BYTES: Final = 1 << 16
"""Far more than the grammar of a row allows; bounds what is held of a file without ends of lines."""
_MAX_PROBLEMS: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow:
    """How one input ended.

    Raises:
        FormatError: A value is outside its grammar, a packed input has a reason, or another one has none.
    """

    input: str
    """Surrogate of the input, ``[a-z0-9]{1,64}``; never its path."""
    kind: str
    """What the input is, such as ``"dicom"`` or ``"report"``."""
    outcome: str
    """One of `OUTCOMES`."""
    reason: str | None
    """Reason code ``[A-Z0-9_]``; None exactly for packed inputs."""
    sample_key: str | None
    """The sample that holds the input, or would have; None where it never got as far."""

    def __post_init__(self) -> None:
        has_reason = bool(_REASON.fullmatch(self.reason or ""))
        has_key = bool(SAMPLE_KEY_PATTERN.fullmatch(self.sample_key or ""))
        is_packed = self.outcome == "packed"
        if not (
            SAMPLE_KEY_PATTERN.fullmatch(self.input)
            and _KIND.fullmatch(self.kind)
            and self.outcome in OUTCOMES
            and (self.reason is None if is_packed else has_reason)
            and (has_key or (self.sample_key is None and not is_packed))
        ):
            # The values are not repeated: what should be a surrogate may be a path or a UID.
            raise FormatError(
                "a ledger row must hold surrogates, a known outcome, a reason unless packed, and a sample "
                "key if packed, got other values; see docs/format.md, section 9."
            )


class LedgerChain:
    """Encode a ledger line by line; holds one hash and three counts, however many inputs there are."""

    def __init__(self) -> None:
        self.head = FIRST_PREV
        self.counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)

    def append(self, row: LedgerRow) -> bytes:
        """Return the line of a row, and move the head to it."""
        body: dict[str, Json] = {
            "input": row.input,
            "kind": row.kind,
            "outcome": row.outcome,
            "reason": row.reason,
            "sample_key": row.sample_key,
            "prev": self.head,
        }
        text = canonical_json(body)
        self.head = sha256_hex(text)
        self.counts[row.outcome] += 1
        # Keys are sorted, and "hash" comes before all others: the line is not encoded a second time.
        return b'{"hash":"%s",%s\n' % (self.head.encode("ascii"), text[1:])

    def close(self) -> bytes:
        """Return the closing line: counts and head."""
        return (
            canonical_json(
                {"counts": dict(self.counts), "head": self.head, "num_inputs": sum(self.counts.values())}
            )
            + b"\n"
        )


@dataclass(frozen=True, slots=True)
class LedgerProblem:
    """What is wrong in a ledger: the line from 1, its offset in bytes, and the problem."""

    line: int
    offset: int
    problem: str


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """What `verify_ledger` found, in file order, at most one problem a line; and the inputs it counted.

    Of the problems of lines the first 1,000: a ledger of 10^8 lines may be wrong in each of them.

    After a broken link the chain goes on from the hash that the broken line states, so that one damaged
    line does not make all that follow suspect.
    """

    problems: tuple[LedgerProblem, ...]
    counts: OutcomeCounts


def verify_ledger(
    pieces: bytes | Iterable[bytes | NDArray[np.uint8]], *, head: str | None = None
) -> LedgerReport:
    """Check every line, the chain, the counts and the head.

    Args:
        pieces: The ledger, whole or in pieces of any length; one piece is held at a time.
        head: The head that the manifest names; not compared if not given.
    """
    problems: list[LedgerProblem] = []
    chain = LedgerChain()
    is_closed = False
    number = end = 0
    for number, offset, line in _lines([pieces] if isinstance(pieces, bytes) else pieces):
        end = offset + len(line)
        problem: str | None = None
        if is_closed:
            problem = "a line after the closing line"
        else:
            try:
                body = _parse_line(line)
            except FormatError as error:
                problem = error.message
            else:
                is_closed = "num_inputs" in body
                problem = _check_line(chain, body, line)
        if problem and len(problems) < _MAX_PROBLEMS:
            problems.append(LedgerProblem(number, offset, problem))
    if not is_closed:
        problems.append(LedgerProblem(number + 1, end, "no closing line"))
    elif head is not None and chain.head != head and not problems:
        problems.append(LedgerProblem(number, end, "another head than the manifest's"))
    return LedgerReport(tuple(problems), OutcomeCounts(**chain.counts))


def _lines(pieces: Iterable[bytes | NDArray[np.uint8]]) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and bytes of each line; nothing follows one that is longer than any can be."""
    number = offset = 0
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + bytes(piece)).split(b"\n")
        for line in lines:
            number += 1
            yield number, offset, line + b"\n"
            offset += len(line) + 1
        if len(rest) > _MAX_LINE_BYTES:
            break
    if rest:
        yield number + 1, offset, rest


def _parse_line(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise FormatError("a line without an end")
    body = parse_json(line[:-1], what="a ledger line")
    if not isinstance(body, dict):
        raise FormatError("a line that is no JSON object")
    return body


def _check_line(chain: LedgerChain, body: dict[str, Any], line: bytes) -> str | None:
    """Compare a line with the one that its content must have; return what is wrong."""
    if "num_inputs" in body:
        return None if chain.close() == line else "a closing line with other counts or another head"
    stated = body.get("hash")
    if set(body) != _ROW_KEYS:
        return "a line with other keys than a ledger row's"
    try:
        row = LedgerRow(**{key: body[key] for key in _ROW_KEYS - {"hash", "prev"}})
        expected = chain.append(row)
    except (FormatError, TypeError):
        return "a line with a value outside its grammar"
    if expected == line:
        return None
    chain.head = stated if isinstance(stated, str) else chain.head
    return "a line whose hash or link to the line before is another"


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
    columns = [
        StreamedColumn(name="file", dtype=keys.dtype, shape=keys.shape, pieces=(keys,)),
        StreamedColumn(
            name="first_line", dtype=first_line.dtype, shape=first_line.shape, pieces=(first_line,)
        ),
        StreamedColumn(name="outcome", dtype=np.dtype("u1"), shape=(int(first_line[-1]),), pieces=outcomes),
    ]
    yield from stream_table(columns, meta)


def _is_reason(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and value[1] in OUTCOMES
