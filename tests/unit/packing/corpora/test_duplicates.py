"""Of equal lines the first stays, wherever they lie and however small runs and buckets are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.packing.corpora.config import REASON_TABLE, CorpusPolicyConfig, FieldsConfig
from shardflow.packing.corpora.duplicates import (
    DigestScanner,
    ResolveTask,
    dropped_lines,
    num_buckets,
    resolve_bucket,
    write_existing,
)
from shardflow.packing.corpora.inputs import InputFile, PartTask, cut_parts
from tests.unit.packing.corpora.test_mapping import KEY, make_config

pytestmark = pytest.mark.fast

CONFIG = make_config(policy=CorpusPolicyConfig(duplicates="skip"), fields=FieldsConfig(key="id"))


def part_of(path: Path, number: int) -> PartTask:
    file = InputFile(path=str(path), format="jsonl", num_bytes=path.stat().st_size, file="f")
    ((piece,),) = cut_parts([file], 1 << 20)
    return PartTask(number=number, digest="d", pieces=(piece,))


def find(
    folder: Path, parts: list[list[tuple[str, int]]], existing: list[int], *, run_rows: int, count: int
) -> list[list[tuple[int, str]]]:
    """Return the dropped lines of each part."""
    shutil.rmtree(folder, ignore_errors=True)
    scans, resolved = folder / "scans", folder / "resolved"
    scanner = DigestScanner(config=CONFIG, key=KEY, folder=scans, run_rows=run_rows)
    folder.mkdir()
    for number, lines in enumerate(parts, start=1):
        path = folder / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": text, "id": key}) + "\n" for text, key in lines))
        scanner.scan(part_of(path, number))
    numbers = list(range(1, len(parts) + 1))
    if existing:
        keys = [KEY.surrogate("corpus-key", str(key)).encode() for key in existing]
        write_existing(scans, [np.array(keys)], run_rows)
        numbers = [0, *numbers]
    for bucket in range(count):
        resolve_bucket(scans, ResolveTask(parts=tuple(numbers), bucket=bucket, count=count), resolved)
    return [
        [(line, REASON_TABLE[code][0]) for line, code in dropped_lines(scans, resolved, number)]
        for number in range(1, len(parts) + 1)
    ]


lines = st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 12))


@settings(max_examples=30)
@given(
    parts=st.lists(st.lists(lines, max_size=9), min_size=1, max_size=4),
    existing=st.lists(st.integers(0, 12), unique=True, max_size=3),
    run_rows=st.sampled_from([1, 2, 100]),
    count=st.sampled_from([1, 2, 7]),
)
def test_the_first_of_equals_stays(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[list[tuple[str, int]]],
    existing: list[int],
    run_rows: int,
    count: int,
) -> None:
    texts: set[str] = set()
    keys = set(existing)
    expected: list[list[tuple[int, str]]] = []
    for part in parts:
        expected.append([])
        for line, (text, key) in enumerate(part):
            if text in texts:
                expected[-1].append((line, "DUPLICATE_TEXT"))
            elif key in keys:
                expected[-1].append((line, "DUPLICATE_KEY"))
            texts.add(text)
            keys.add(key)
    folder = tmp_path_factory.getbasetemp() / "duplicates"
    assert find(folder, parts, existing, run_rows=run_rows, count=count) == expected


def test_equal_lines_everywhere_do_not_fill_a_bucket(tmp_path: Path) -> None:
    """A run keeps one of them, so a bucket holds at most one a run."""
    found = find(tmp_path / "a", [[("a", n) for n in range(50)]] * 2, [], run_rows=10, count=1)
    assert [len(dropped) for dropped in found] == [49, 50]
    assert num_buckets(5 * 2**20) == 5
    assert num_buckets(0) == 1


def test_lines_that_cannot_be_packed_rule_nothing_out(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text('{"text":"a"}\n{"text":"a","id":1}\n{"text":"a","id":2}\n')
    scans = tmp_path / "scans"
    scanner = DigestScanner(config=CONFIG, key=KEY, folder=scans)
    assert scanner.scan(part_of(path, 1)).num_rows == 2
    resolve_bucket(scans, ResolveTask(parts=(1,), bucket=0, count=1), tmp_path / "resolved")
    assert [line for line, _ in dropped_lines(scans, tmp_path / "resolved", 1)] == [2]
