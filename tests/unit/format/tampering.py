"""Change datasets on purpose: with or without making the checksums fit again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardflow.format.keys import canonical_json, sha256_hex

__all__ = ["edit_manifest", "flip", "replace_file", "sign"]


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; a second call restores it."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def sign(body: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest with a fitting digest."""
    body = {key: value for key, value in body.items() if key != "digest"}
    return canonical_json({**body, "digest": sha256_hex(canonical_json(body))}) + b"\n"


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None], *, version: int = 1) -> None:
    """Change a manifest and sign it again."""
    path = folder / f"manifest-{version:06d}.json"
    body = json.loads(path.read_bytes())
    edit(body)
    path.write_bytes(sign(body))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replace a file of a dataset and make the manifest fit: a writer's mistake, not a damage of the
    bytes.
    """
    (folder / name).write_bytes(data)

    def edit(body: dict[str, Any]) -> None:
        entries = [
            body["samples"],
            body["ledger"],
            *body["shards"],
            *(shard["index"] for shard in body["shards"]),
        ]
        for entry in entries:
            if entry["path"] == name:
                entry.update(num_bytes=len(data), sha256=sha256_hex(data))

    edit_manifest(folder, edit)
