"""The example that reads folders of MDS and LitData, on folders written by hand in these formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.read_folders import read_int, read_litdata, read_mds

PICTURES = [bytes([number] * (20 + number)) for number in range(6)]
LABELS = [-1, 0, 1, 2, 3, 1 << 40]
TEXTS = ["", *(f"Befund {number}: unauffällig." for number in range(5))]


def _offsets(first: int, items: list[bytes]) -> bytes:
    return (first + np.cumsum([0, *map(len, items)])).astype("<u4").tobytes()


@pytest.fixture
def mds(tmp_path: Path) -> str:
    samples = []
    for picture, label, text in zip(PICTURES, LABELS, map(str.encode, TEXTS), strict=True):
        values = struct.pack("<q", label) + picture + text
        samples.append(struct.pack("<2I", len(picture), len(text)) + values)
    info: dict[str, Any] = {
        "version": 2,
        "format": "mds",
        "column_names": ["class", "image", "text"],
        "column_encodings": ["int", "png", "str"],
        "column_sizes": [8, None, None],
        "compression": None,
        "hashes": [],
        "size_limit": 1 << 26,
    }
    shards = []
    for number, part in enumerate((samples[:4], samples[4:])):
        described = json.dumps(info | {"samples": len(part)}, sort_keys=True).encode()
        first = 4 + 4 * (len(part) + 1) + len(described)
        shard = struct.pack("<I", len(part)) + _offsets(first, part) + described + b"".join(part)
        name = f"shard.{number:05d}.mds"
        (tmp_path / name).write_bytes(shard)
        raw = {"basename": name, "bytes": len(shard), "hashes": {}}
        shards.append(info | {"samples": len(part), "raw_data": raw, "zip_data": None})
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return str(tmp_path)


@pytest.fixture
def litdata(tmp_path: Path) -> str:
    items = []
    for picture, label, text in zip(PICTURES, LABELS, TEXTS, strict=True):
        values = [picture, struct.pack("<q", label), text.encode()]
        items.append(struct.pack("<3I", *map(len, values)) + b"".join(values))
    chunks = []
    for number, part in enumerate((items[:3], items[3:])):
        chunk = struct.pack("<I", len(part)) + _offsets(4 + 4 * (len(part) + 1), part) + b"".join(part)
        name = f"chunk-0-{number}.bin"
        (tmp_path / name).write_bytes(chunk)
        chunks.append({"chunk_bytes": len(chunk), "chunk_size": len(part), "filename": name})
    names = json.dumps(["image", "class", "text"])
    spec = [1, {"type": "builtins.dict", "context": names, "children_spec": []}]
    config = {"compression": None, "data_format": ["bytes", "int", "str"], "data_spec": json.dumps(spec)}
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return str(tmp_path)


@pytest.mark.parametrize("layout", ["mds", "litdata"])
def test_every_value_of_every_shard_is_read(layout: str, request: pytest.FixtureRequest) -> None:
    read = {"mds": read_mds, "litdata": read_litdata}[layout]
    samples = list(read(request.getfixturevalue(layout)))
    assert [one["image"] for one in samples] == PICTURES
    assert [read_int(one["class"]) for one in samples] == LABELS
    assert [one["text"].decode() for one in samples] == TEXTS


def _changed(folder: str, change: Callable[[Any], None]) -> str:
    path = Path(folder, "index.json")
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return folder


def test_what_would_be_read_wrong_is_refused(mds: str) -> None:
    def be_json(index: Any) -> None:
        index["shards"][1]["format"] = "json"

    with pytest.raises(ValueError, match="format mds, got json"):
        list(read_mds(_changed(mds, be_json)))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"compression": "zstd"}, "plain chunks, got compression; read it with litdata"),
        ({"encryption": {"algorithm": "fernet"}}, "got encryption"),
        ({"data_format": ["bytes", "int", "str", "str"]}, "nested ones"),
        ({"data_spec": json.dumps([1, {"type": "builtins.list", "context": "null"}])}, "got builtins.list"),
        ({"data_spec": json.dumps([1, {"type": None, "context": None}])}, "got None"),
    ],
)
def test_chunks_that_would_be_read_wrong_are_refused(litdata: str, config: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        list(read_litdata(_changed(litdata, lambda index: index["config"].update(config))))
