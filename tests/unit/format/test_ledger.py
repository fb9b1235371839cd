from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shardflow.errors import FormatError
from shardflow.format.keys import canonical_json
from shardflow.format.ledger import FIRST_PREV, LedgerRow, verify_ledger
from shardflow.format.reasons import OutcomeCounts
from tests.factories import encode_ledger

pytestmark = pytest.mark.fast

ROWS = [
    LedgerRow(input="aaaa", kind="dicom", outcome="packed", reason=None, sample_key="k1"),
    LedgerRow(input="bbbb", kind="dicom", outcome="skipped", reason="DUPLICATE_INSTANCE", sample_key="k1"),
    LedgerRow(input="cccc", kind="dicom", outcome="quarantined", reason="DECODE_FAILED", sample_key=None),
    LedgerRow(input="dddd", kind="report", outcome="packed", reason=None, sample_key="k1"),
]


def test_a_whole_ledger_has_no_problem() -> None:
    data, head = encode_ledger(ROWS)
    report = verify_ledger(data, head=head)
    assert report.problems == ()
    assert report.counts == OutcomeCounts(packed=2, skipped=1, quarantined=1)


def test_each_line_holds_the_hash_of_the_one_before() -> None:
    """As docs/format.md, section 9 says it: sha256 of the canonical line without its own hash."""
    data, head = encode_ledger(ROWS)
    *lines, closing = [json.loads(line) for line in data.splitlines()]
    previous = FIRST_PREV
    for line in lines:
        assert line["prev"] == previous
        previous = line.pop("hash")
        text = json.dumps(line, sort_keys=True, separators=(",", ":"))
        assert previous == hashlib.sha256(text.encode()).hexdigest()
    assert closing == {
        "counts": {"packed": 2, "skipped": 1, "quarantined": 1},
        "head": previous,
        "num_inputs": 4,
    }
    assert head == previous


def test_an_empty_ledger_is_a_closing_line() -> None:
    data, head = encode_ledger([])
    assert head == FIRST_PREV
    assert verify_ledger(data, head=head).problems == ()


def test_every_cut_is_found() -> None:
    data, head = encode_ledger(ROWS)
    for stop in range(len(data)):
        assert verify_ledger(data[:stop], head=head).problems


@pytest.mark.parametrize("num_bytes", [1, 7, 300])
def test_pieces_of_any_length_are_the_same_ledger(num_bytes: int) -> None:
    data, head = encode_ledger(ROWS)
    for one in (data, data[:-20], data.replace(b"skipped", b"dropped"), data + data):
        pieces = [one[start : start + num_bytes] for start in range(0, len(one), num_bytes)]
        assert verify_ledger(pieces, head=head) == verify_ledger(one, head=head)


def test_a_file_without_ends_of_lines_is_not_held() -> None:
    """A ledger of 10^8 inputs has 30 GB; what follows a line that no ledger has is not read."""

    def pieces() -> Iterator[bytes]:
        for _ in range(3):
            yield b"x" * 50_000
        pytest.fail("all of it was read")

    problems = verify_ledger(pieces()).problems
    assert [(one.line, one.problem) for one in problems] == [
        (1, "a line without an end"),
        (2, "no closing line"),
    ]


def test_of_a_ledger_that_is_wrong_everywhere_the_first_problems_are_told() -> None:
    data, head = encode_ledger(ROWS * 300)
    problems = verify_ledger(data.replace(b"\n", b"\r\n"), head=head).problems
    assert [one.line for one in problems] == [*range(1, 1001), 1202]  # and that no line closes it


def _lines() -> list[bytes]:
    return encode_ledger(ROWS)[0].splitlines(keepends=True)


@pytest.mark.parametrize(
    ("lines", "line", "problem"),
    [
        pytest.param([0, 1, 3, 4], 3, "hash or link", id="a line taken out"),
        pytest.param([0, 2, 1, 3, 4], 2, "hash or link", id="two lines swapped"),
        pytest.param([0, 1, 1, 2, 3, 4], 3, "hash or link", id="a line doubled"),
        pytest.param([1, 2, 3, 4], 1, "hash or link", id="the first line taken out"),
        pytest.param([0, 1, 2, 3], 5, "no closing line", id="the closing line taken out"),
        pytest.param([0, 1, 2, 3, 4, 4], 6, "after the closing line", id="a second closing line"),
        pytest.param([0, 1, 2, 4], 4, "other counts", id="the last line taken out"),
    ],
)
def test_lines_cannot_be_moved(lines: list[int], line: int, problem: str) -> None:
    every = _lines()
    first = verify_ledger(b"".join(every[number] for number in lines)).problems[0]
    assert first.line == line
    assert problem in first.problem


def test_another_ledger_that_is_whole_has_another_head() -> None:
    data, _ = encode_ledger(ROWS[:2])
    _, head = encode_ledger(ROWS)
    assert verify_ledger(data).problems == ()
    assert "another head" in verify_ledger(data, head=head).problems[0].problem


def test_one_damaged_line_does_not_make_the_rest_suspect() -> None:
    lines = _lines()
    lines[1] = lines[1].replace(b"DUPLICATE_INSTANCE", b"SOMETHING_ELSE")
    assert [problem.line for problem in verify_ledger(b"".join(lines)).problems] == [2]


@pytest.mark.parametrize(
    "change", [{"outcome": "lost"}, {"input": "1.2.840.1"}, {"reason": "free text"}, {"sample_key": 3}]
)
def test_a_line_outside_the_grammar_is_a_problem_even_if_its_hash_fits(change: dict[str, Any]) -> None:
    body: dict[str, Any] = {**json.loads(_lines()[0]), **change}
    del body["hash"]
    body["hash"] = hashlib.sha256(canonical_json(body)).hexdigest()
    problems = verify_ledger(canonical_json(body) + b"\n" + b"".join(_lines()[1:])).problems
    assert "outside its grammar" in problems[0].problem


@pytest.mark.parametrize(
    "change",
    [
        {"input": "/data/patient"},
        {"input": "1.2.840.113"},
        {"kind": "DICOM"},
        {"outcome": "lost"},
        {"reason": "X"},
        {"sample_key": None},
        {"outcome": "skipped"},
        {"outcome": "skipped", "reason": "Name of a patient"},
        {"outcome": "quarantined", "reason": "X", "sample_key": "1.2"},
    ],
)
def test_a_row_outside_the_grammar_is_refused_and_not_repeated(change: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "input": "aaaa",
        "kind": "dicom",
        "outcome": "packed",
        "reason": None,
        "sample_key": "k1",
    }
    with pytest.raises(FormatError, match="a ledger row must hold") as caught:
        LedgerRow(**{**values, **change})
    assert "patient" not in str(caught.value)
