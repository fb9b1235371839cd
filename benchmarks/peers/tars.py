"""The samples as plain tars, for the peers that read them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from benchmarks.peers.task import SHARDS

__all__ = ["write_tars"]


def write_tars(folder: Path) -> None:
    """Write each shard as a tar with one text member a sample, which holds its key."""
    folder.mkdir(parents=True)
    for number, keys in enumerate(SHARDS):
        with tarfile.open(folder / f"shard-{number:06d}.tar", "w") as tar:
            for key in keys:
                member = tarfile.TarInfo(f"{key}.txt")
                member.size = len(key)
                tar.addfile(member, io.BytesIO(key.encode()))
