"""docs/format.md says what the code does: its examples are run, and a reader is written from it alone."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardflow.format.codecs import decode_array
from shardflow.format.facts.series import ANSWERS, COUNTS, MEASURES, OPTIONAL, STRINGS, open_series
from shardflow.format.facts.studies import open_studies
from shardflow.format.table import encode_table
from tests.factories import make_dataset, make_sample
from tests.field_cases import make_case_dataset

# Plain webdataset, which leaves its files to the garbage collector, imports torch: not one of the fast tests.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "format.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def _dump(name: str) -> bytes:
    """Read a hex dump of the page."""
    match = re.search(rf'^```hex title="{name}"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
    if match is None:
        pytest.fail(f"docs/format.md has no hex dump {name}")
    data = bytearray()
    for line in match[1].splitlines():
        if line == "*":
            continue
        offset, _, rest = line.partition("  ")
        while len(data) < int(offset, 16):
            data += data[-16:]
        data += bytes.fromhex(rest[:35])
    return bytes(data)


def test_the_dump_is_the_bytes_of_the_code() -> None:
    assert _dump("table") == encode_table({"n": np.array([3, 1, 2], "<u2")}, {"kind": "example"})


def _listed(number: int) -> dict[str, str]:
    """Return the columns that a section lists, and their dtypes."""
    section = PAGE[PAGE.index(f"## {number}.") :].split("\n## ")[0]
    return {
        name: dtype
        for names, dtype in re.findall(r"^\| (`.+?`) \| `(.?.?.?)` \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }


def test_section_17_lists_every_column_of_the_series_table(tmp_path: Path) -> None:
    table, _ = open_series(make_case_dataset(tmp_path / "a"))
    facts = (*STRINGS, *COUNTS, *MEASURES, *ANSWERS, "affine_lps", "flags")
    stored = ("first_series", *facts, "first_image", "image_role")
    assert _listed(17) == {name: table.array(name).dtype.str for name in (*stored, *OPTIONAL)}


def test_section_19_lists_every_column_of_the_study_facts_table(tmp_path: Path) -> None:
    table, _ = open_studies(make_case_dataset(tmp_path / "a"))
    stored = {name: table.array(name).dtype.str for name in table.column_names}
    assert stored.pop("patient_key").startswith("|S")
    assert _listed(19) == {**stored, "patient_key": "|Sn"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_dataset(
        tmp_path / "dataset", splits={"train": 3, "val": 1}, samples_per_shard=2, size=(8, 6), slices=2
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "dataset"


@pytest.mark.usefixtures("folder")
def test_the_readers_of_the_page_read(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in PYTHON:
        exec(compile(block, "docs/format.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    made = make_sample(0, slices=2, size=(8, 6))
    assert lines[0] == f"report.txt {made.fields['report.txt'][:40]!r}"
    assert lines[1:3] == ["s000.i0000.b2nd (8, 6)", "s000.i0001.b2nd (8, 6)"]
    assert lines[4].startswith(made.key)
    for row in range(4):
        assert dict(names["fields"](row)) == make_sample(row, slices=2, size=(8, 6)).fields


def test_the_small_reader_has_twenty_lines() -> None:
    reader = PYTHON[1]
    code = [line for line in reader.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 20


# ---- a second reader, with every check, from the page alone --------------------------------------


def _crc32c_of_the_page() -> Any:
    names: dict[str, Any] = {}
    exec(compile(PYTHON[0], "docs/format.md", "exec"), names)
    return names["crc32c"]


CRC32C = _crc32c_of_the_page()


def _check_table(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Section 5."""
    assert data[:8] == b"SFTABLE1"
    assert data[-8:] == b"SFTABEND"
    header_num_bytes, header_crc = np.frombuffer(data[8:16], "<u4").tolist()
    start = 16 + header_num_bytes
    assert start % 64 == 0
    assert CRC32C(data[16:start]) == header_crc
    header = json.loads(data[16:start])
    assert set(header) == {"meta", "columns", "block_num_bytes", "data_num_bytes"}
    assert data[16:start].rstrip(b" ") == _canonical(header)
    region = data[start : start + header["data_num_bytes"]]
    checksums: list[int] = []
    arrays: dict[str, NDArray[Any]] = {}
    offset = 0
    for column in header["columns"]:
        padded = -(-column["num_bytes"] // 64) * 64
        assert column["offset"] == offset
        raw = region[offset : offset + column["num_bytes"]]
        array = np.frombuffer(raw, column["dtype"]).reshape(column["shape"])
        assert array.nbytes == column["num_bytes"]
        assert not any(region[offset + column["num_bytes"] : offset + padded])
        whole = region[offset : offset + padded]
        checksums += [CRC32C(whole[at : at + 65536]) for at in range(0, len(whole), 65536)]
        arrays[column["name"]] = array
        offset += padded
    assert offset == header["data_num_bytes"]
    end = data[start + offset :]
    packed = np.array(checksums, "<u4").tobytes()
    assert end == packed + np.array([CRC32C(packed)], "<u4").tobytes() + b"SFTABEND"
    return header["meta"], arrays


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _header(name: str, size: int) -> bytes:
    """Section 3, row by row of its table."""
    before = (
        name.encode().ljust(100, b"\0")
        + b"0000644\0"
        + b"0000000\0" * 2
        + b"%011o\0" % size
        + b"00000000000\0"
    )
    after = b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
    return before + b"%06o\0 " % (sum(before) + 8 * 32 + sum(after)) + after


def test_a_reader_written_from_the_page_agrees_with_every_byte(folder: Path) -> None:
    data = (folder / "manifest-000001.json").read_bytes()
    manifest = json.loads(data)
    assert data == _canonical(manifest) + b"\n"
    digest = manifest["digest"]
    assert hashlib.sha256(data[:-1].replace(f'"digest":"{digest}",'.encode(), b"")).hexdigest() == digest
    assert set(manifest) == set(re.findall(r"`(\w+)`", _first_column(PAGE, "## 8.")))

    meta, samples = _check_table((folder / manifest["samples"]["path"]).read_bytes())
    assert list(samples) == re.findall(r"`(\w+)`", _first_column(PAGE, "## 7.").partition("`modalities`")[2])
    row = 0
    for number, shard in sorted(enumerate(manifest["shards"]), key=lambda item: (item[1]["split"], item[0])):
        tar = (folder / shard["path"]).read_bytes()
        assert (len(tar), hashlib.sha256(tar).hexdigest()) == (shard["num_bytes"], shard["sha256"])
        raw = (folder / shard["index"]["path"]).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == shard["index"]["sha256"]
        names, index = _check_table(raw)
        assert list(index) == re.findall(
            r"`(\w+)`", _first_column(PAGE, "## 6.").partition("`field_names`")[2]
        )
        position = 0
        for sample, key in enumerate(index["sample_key"].tolist()):
            begin = position
            first, stop = index["sample_first_field"][sample : sample + 2].tolist()
            for field in range(first, stop):
                name = f"{key.decode()}.{names['field_names'][index['field_name'][field]]}"
                size = int(index["field_num_bytes"][field])
                assert tar[position : position + 512] == _header(name, size)
                assert index["field_offset"][field] == position + 512
                payload = tar[position + 512 : position + 512 + size]
                assert CRC32C(payload) == index["field_crc32c"][field]
                position += 512 + -(-size // 512) * 512
                assert not any(tar[int(index["field_offset"][field]) + size : position])
            expected = (key, number, sample, begin, position - begin)
            columns = ("sample_key", "shard", "row_in_shard", "offset_bytes", "num_bytes")
            assert tuple(samples[column][row].item() for column in columns) == expected
            row += 1
        assert tar[position:] == bytes(1024)
    assert meta["splits"] == {"train": [0, 3], "val": [3, 4]}

    *lines, closing = (folder / manifest["ledger"]["path"]).read_bytes().splitlines()
    previous = "0" * 64
    for line in map(json.loads, lines):
        stated = line.pop("hash")
        assert line["prev"] == previous
        previous = hashlib.sha256(_canonical(line)).hexdigest()
        assert stated == previous
    assert json.loads(closing)["head"] == manifest["ledger"]["head"] == previous


def _first_column(page: str, section: str) -> str:
    """The first cells of the tables of a section."""
    text = page[page.index(section) :].partition("\n## ")[0]
    return "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))


def test_the_chunk_of_a_slice_lies_where_the_page_says() -> None:
    import blosc2

    payload = make_sample(0, slices=1, size=(64, 32)).fields["s000.i0000.b2nd"]
    start = int.from_bytes(payload[11:15], "big")
    size = int.from_bytes(payload[39:47], "big")
    pixels = np.frombuffer(blosc2.decompress2(payload[start : start + size]), "<i2").reshape(64, 32)
    assert np.array_equal(pixels, decode_array("b2nd", payload))
    zeros = blosc2.asarray(np.zeros((64, 32), "<i2"), chunks=(64, 32), blocks=(64, 32)).to_cframe()
    assert int.from_bytes(zeros[39:47], "big") == 0
