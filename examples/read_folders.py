"""Samples of uncompressed MDS and LitData folders, as bytes by name; their libraries are not needed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np


def read_mds(folder: str) -> Iterator[dict[str, bytes]]:
    """Yield the samples of a folder of MosaicML Streaming; decompress its shards first (``zstd -d``).

    A shard is a table of offsets. The values of a sample follow each other, behind the sizes of those that
    have no fixed one.

    Raises:
        ValueError: The folder holds shards of another kind, such as JSON or CSV.
    """
    for shard in json.loads(Path(folder, "index.json").read_text())["shards"]:
        if shard["format"] != "mds":
            raise ValueError(f"{folder} must hold shards of format mds, got {shard['format']}.")
        data = Path(folder, shard["raw_data"]["basename"]).read_bytes()
        num_open = shard["column_sizes"].count(None)
        for at in np.frombuffer(data, "<u4", shard["samples"], 4).tolist():
            given = iter(struct.unpack_from(f"<{num_open}I", data, at))
            sizes = [next(given) if size is None else size for size in shard["column_sizes"]]
            yield _cut(data, at + 4 * num_open, shard["column_names"], sizes)


def read_litdata(folder: str) -> Iterator[dict[str, bytes]]:
    """Yield the samples of a folder of ``litdata.optimize``, whose items are dictionaries of plain values.

    Raises:
        ValueError: The chunks are compressed or encrypted, or their items are no such dictionaries.
    """
    index = json.loads(Path(folder, "index.json").read_text())
    config = index["config"]
    hidden = [name for name in ("compression", "encryption") if config.get(name)]
    if hidden:
        raise ValueError(
            f"{folder} must hold plain chunks, got {' and '.join(hidden)}; read it with "
            "litdata.StreamingDataset(folder, shuffle=False)."
        )
    spec = json.loads(config["data_spec"])[1]
    names = json.loads(spec["context"] or "null")
    if spec["type"] != "builtins.dict" or len(names) != len(config["data_format"]):
        raise ValueError(
            f"{folder} must hold dictionaries of plain values, got {spec['type']} or nested ones."
        )
    for chunk in index["chunks"]:
        data = Path(folder, chunk["filename"]).read_bytes()
        for at in np.frombuffer(data, "<u4", chunk["chunk_size"], 4).tolist():
            sizes = struct.unpack_from(f"<{len(names)}I", data, at)
            yield _cut(data, at + 4 * len(names), names, sizes)


def read_int(value: bytes) -> int:
    """Return a value of MDS's encoding or LitData's format ``int``."""
    return int.from_bytes(value, "little", signed=True)


def _cut(data: bytes, first: int, names: list[str], sizes: list[int] | tuple[int, ...]) -> dict[str, bytes]:
    edges = pairwise(accumulate(sizes, initial=first))
    return {name: data[start:stop] for name, (start, stop) in zip(names, edges, strict=True)}
