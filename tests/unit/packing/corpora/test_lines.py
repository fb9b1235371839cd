"""Every line of a file comes once, whole and with its place, however the file is cut or compressed."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from shardflow.errors import StorageError
from shardflow.packing.corpora.config import (
    CorpusConfig,
    CorpusInputsConfig,
    CorpusLimitsConfig,
    LineError,
    LineReason,
)
from shardflow.packing.corpora.inputs import Piece, part_lines
from shardflow.packing.corpora.lines import (
    DamagedFileError,
    TarLine,
    gzip_chunks,
    plain_lines,
    split_array,
    split_lines,
    stream_lines,
    tar_samples,
    zstd_chunks,
)

pytestmark = pytest.mark.fast

Line = tuple[int, bytes | None]


def expected_lines(data: bytes, limit: int) -> list[Line]:
    """Cut the slow way."""
    lines: list[Line] = []
    position = 0
    for line in data.split(b"\n"):
        if position < len(data):
            lines.append((position, line if len(line) <= limit else None))
        position += len(line) + 1
    return lines


texts = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n\n", b"\xff", b"0123456789"]), max_size=14).map(
    b"".join
)


@given(data=texts, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8), limit=st.integers(1, 12))
def test_chunks_of_any_length_give_the_same_lines(data: bytes, sizes: list[int], limit: int) -> None:
    chunks = []
    position = number = 0
    while position < len(data):
        size = sizes[number % len(sizes)]
        chunks.append(data[position : position + size])
        position, number = position + size, number + 1
    found = list(split_lines(iter(chunks), offset=0, stop=None, max_line_bytes=limit))
    assert found == expected_lines(data, limit)


@given(data=texts, limit=st.sampled_from([1, 3, 100]))
def test_a_file_that_is_cut_at_any_byte_gives_every_line_once(data: bytes, limit: int) -> None:
    for cut in range(len(data) + 1):
        found: list[Line] = []
        for start, stop in ((0, cut), (cut, len(data))):
            if start < stop:
                first = max(start - 1, 0)
                chunks = (data[at : at + 2] for at in range(first, len(data), 2))
                found += split_lines(
                    chunks, offset=first, stop=stop, max_line_bytes=limit, skips_first=start > 0
                )
        assert found == expected_lines(data, limit)


def test_ranges_of_a_file_give_every_line_once(tmp_path: Path) -> None:
    rng = random.Random(4)
    data = b"".join(b"x" * rng.randrange(90) + b"\n" for _ in range(400))
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    for count in (1, 2, 7, 50):
        bounds = [number * len(data) // count for number in range(count + 1)]
        found = [line for n in range(count) for line in plain_lines(path, bounds[n], bounds[n + 1], 60)]
        assert found == expected_lines(data, 60)


def test_a_range_inside_a_long_line_reads_no_further_than_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 40_000_000)
    tracemalloc.start()
    assert list(plain_lines(path, 10_000_000, 12_000_000, 1 << 24)) == []
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_line_of_a_gigabyte_is_never_held() -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"a":1}\n'
        for _ in range(1024):
            yield bytes([120]) * (1 << 20)  # each a new one: a constant would be held for nothing
        yield b"\nlast"

    tracemalloc.start()
    found = list(split_lines(chunks(), offset=0, stop=None, max_line_bytes=1 << 16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(0, b'{"a":1}'), (8, None), (8 + (1 << 30) + 1, b"last")]
    assert peak < 8 << 20


@given(members=st.lists(st.integers(0, 3000), min_size=1, max_size=4), padding=st.integers(0, 3))
def test_members_of_gzip_are_one_text(members: list[int], padding: int) -> None:
    texts = [b"".join(b"%d\n" % number for number in range(count)) for count in members]
    packed = b"".join(map(gzip.compress, texts)) + bytes(padding)
    assert b"".join(gzip_chunks(io.BytesIO(packed))) == b"".join(texts)


def test_gzip_of_much_more_than_a_chunk_comes_in_chunks() -> None:
    packed = gzip.compress(bytes(9 << 20))
    chunks = list(gzip_chunks(io.BytesIO(packed)))
    assert sum(map(len, chunks)) == 9 << 20
    assert max(map(len, chunks)) <= 1 << 20


def test_frames_of_zstd_are_one_text() -> None:
    codec = pa.Codec("zstd")
    texts = [b"".join(b"%d\n" % number for number in range(count)) for count in (300_000, 0, 1, 5000)]
    packed = b"".join(codec.compress(text).to_pybytes() for text in texts)
    assert b"".join(zstd_chunks(io.BytesIO(packed))) == b"".join(texts)
    assert list(zstd_chunks(io.BytesIO(b""))) == []


# A flipped bit is not among the damages of zst: frames without a checksum decompress to another text.
@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(suffix, damage) for suffix in ("gz", "zst") for damage in ("cut", "tail", "other")] + [("gz", "flip")],
)
def test_damage_is_told_behind_the_lines_before_it(tmp_path: Path, suffix: str, damage: str) -> None:
    rng = random.Random(5)
    text = b"".join(b"%d\n" % rng.getrandbits(200) for _ in range(60_000))
    packed = gzip.compress(text) if suffix == "gz" else pa.Codec("zstd").compress(text).to_pybytes()
    middle = len(packed) * 2 // 3
    damaged = {
        "cut": packed[:-1],
        "flip": packed[:middle] + bytes([packed[middle] ^ 0x40]) + packed[middle + 1 :],
        "tail": packed + b"garbage",
        "other": b"PK no such thing",
    }[damage]
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(damaged)
    lines: list[Line] = []
    with pytest.raises(DamagedFileError):
        lines.extend(stream_lines(path, suffix, 1 << 20))
    if damage in {"cut", "tail"}:
        assert len(lines) > 30_000
    if damage != "flip":
        assert lines == expected_lines(text, 1 << 20)[: len(lines)]


def test_lines_of_every_form_are_counted_without_a_look_at_them(tmp_path: Path) -> None:
    lines = [b'{"text":"a"}', b"", b"{", b'{"text":"b"}', b"x" * 100]
    text = b"".join(line + b"\n" for line in lines)
    files = {
        "jsonl": text,
        "gz": gzip.compress(text)[:-3],
        "zst": pa.Codec("zstd").compress(text).to_pybytes(),
        "json": b"[" + b",".join(b'{"text":"%d"}' % n for n in range(4)) + b"]",
        "other": b"notes",
    }
    for kind, data in files.items():
        (tmp_path / f"a.{kind}").write_bytes(data)
    parquet.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "a.parquet", row_group_size=2)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.json")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"{"))
    pieces = [
        Piece(
            index=number,
            file=kind,
            path=str(tmp_path / f"a.{kind}"),
            format=kind,
            start=0,
            stop=2 if kind == "parquet" else len(files.get(kind, b"")),
            weight_bytes=1,
        )
        for number, kind in enumerate([*files, "parquet", "tar"])
    ]
    limits = CorpusLimitsConfig(max_line_bytes=50)
    inputs = CorpusInputsConfig(files=(tmp_path,))
    config = CorpusConfig(output=tmp_path, private_dir=tmp_path, inputs=inputs, limits=limits)
    whole, count = (list(part_lines(pieces, config, columns)) for columns in (["text"], None))
    assert [line[:2] for line in count] == [line[:2] for line in whole]
    assert {repr(fields) for *_, fields in count} == {
        "{}",
        *map(repr, (LineReason.LINE_TOO_LONG, LineReason.FILE_DAMAGED, LineReason.NOT_A_CORPUS_FILE)),
    }


def test_a_file_that_is_gone_is_a_storage_error_without_its_path(tmp_path: Path) -> None:
    for lines in (
        plain_lines(tmp_path / "patient.jsonl", 0, 1, 9),
        stream_lines(tmp_path / "patient.jsonl.gz", "gz", 9),
    ):
        with pytest.raises(StorageError) as caught:
            next(lines)
        assert "patient" not in str(caught.value)


def test_a_read_that_fails_below_zstd_is_no_damage() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(StorageError, match="Input/output error"):
        list(zstd_chunks(Failing(b"x" * 100)))


VALUES = st.lists(
    st.dictionaries(st.sampled_from(['"', "a]", "\\", "{,"]), st.text('ab"\\[]{},', max_size=6), max_size=3),
    max_size=6,
)


@given(
    values=VALUES,
    indent=st.sampled_from([None, 1]),
    is_array=st.booleans(),
    chunk=st.integers(1, 9),
    limit=st.integers(0, 60),
)
def test_values_of_an_array_come_once_however_chunks_fall(
    values: list[dict[str, str]], indent: int | None, is_array: bool, chunk: int, limit: int
) -> None:
    """The oracle is `json`; the limit is of a value with the white space behind it."""
    parts = [json.dumps(value, indent=indent) for value in values]
    text = f" [{' , '.join(parts)}]\n" if is_array else "\n".join(parts) + "\n"
    data = text.encode()
    chunks = [data[start : start + chunk] for start in range(0, len(data), chunk)]
    found = list(split_array(iter(chunks), 1 << 10))
    assert [json.loads(line or b"") for _, line in found] == values
    assert len({place for place, _ in found}) == len(values)
    for (_, line), (_, short) in zip(found, split_array(iter(chunks), limit), strict=True):
        assert short in (None, line)
        assert short is None or len(short) <= limit
        assert short is not None or len(line or b"") > limit - 4


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b"", []),
        (b"\xef\xbb\xbf[1, 2]", [b"1", b"2"]),
        (b"[]", []),
        (b"[{}, ]", [b"{}"]),
        (b'{"a":1}{"b":2}', [b'{"a":1}', b'{"b":2}']),
    ],
)
def test_arrays_of_other_habits_are_read(text: bytes, values: list[bytes]) -> None:
    assert [line for _, line in split_array(iter([text]), 100)] == values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b'[{"a":1}', []),
        (b'[{"a":1}, {"b', [b'{"a":1}']),
        (b'[{"a":1}] x', [b'{"a":1}']),
        (b'[{"a":1}]]', [b'{"a":1}']),
        (b'{"a":1} x', [b'{"a":1}']),
        (b"x", []),
    ],
)
def test_an_array_that_is_cut_is_damaged_behind_what_came(text: bytes, values: list[bytes]) -> None:
    lines = split_array(iter([text]), 100)
    assert [next(lines)[1] for _ in values] == values
    with pytest.raises(DamagedFileError):
        next(lines)


def make_tar(*members: tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, payload in members:
            member = tarfile.TarInfo(name)
            member.size = len(payload)
            tar.addfile(member, io.BytesIO(payload))
    return stream.getvalue()


def test_samples_of_a_tar_have_a_line_and_its_pictures(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    data = make_tar(
        ("x/1.JSON", b'{"a": 1}'),
        ("x/1.seg.png", b"first"),
        ("x/1.jpg", b"second"),
        ("x/1.txt", b"left out"),
        ("no ending", b"left out"),
        ("x/2.json", b'{"a": "' + b"x" * 100 + b'"}'),
        ("x/3.png", b"x" * 100),
    )
    path.write_bytes(data)
    one, two, three = tar_samples(path, 50, 20)
    line = TarLine.of(one)
    assert (dict(line), list(line.pictures)) == ({"a": 1}, ["seg.png", "jpg"])
    named = ("jpg", "x/1.jpg", "1.SEG.png", "2.jpg", "x/1.gif")
    assert [line.picture(name) for name in named] == [b"second", b"second", b"first", None, None]
    with pytest.raises(LineError, match="LINE_TOO_LONG"):
        TarLine.of(two)
    # No line, and no more of a picture than shows that it is too large.
    assert (dict(TarLine.of(three)), len(three.pictures["png"])) == ({}, 21)
    assert len({sample.place for sample in (one, two, three)}) == 3
    path.write_bytes(data[:6500])  # within the third sample
    samples = tar_samples(path, 50, 20)
    assert next(samples).line == one.line
    with pytest.raises(DamagedFileError):
        list(samples)
