"""Give finished shards their numbers: a link under the final name, and the index that says it.

Numbers follow from the order of the parts, so they are known only when all parts are done.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardflow.corpora.shard_files import ROWS_KIND
from shardflow.packing.workplace import storage_error
from shardflow.shards.index import ShardIndex
from shardflow.shards.table import Table
from shardflow.storage import LocalStore, fsync_directory, write_atomic

__all__ = ["number_shard"]


def number_shard(output: Path, folder: Path, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Put a shard of a part into the dataset.

    Args:
        output: Folder of the dataset.
        folder: Where the part lies.
        payload: ``source``, its name there; ``name``, its name in the dataset; ``num_bytes`` of the tar.

    Returns:
        ``num_bytes`` and ``sha256`` of the index.

    Raises:
        StorageError: A file cannot be written.
        ChecksumError: The rows of the part are damaged.
    """
    source, name = str(payload["source"]), str(payload["name"])
    target = output / "shards" / f"{name}.tar"
    tar = folder / f"{source}.tar"
    try:
        target.parent.mkdir(exist_ok=True)
        if not (target.exists() and target.samefile(tar)):
            target.unlink(missing_ok=True)
            os.link(tar, target)
    except OSError as error:
        raise storage_error("putting a shard into its place", error) from None
    fsync_directory(target.parent)
    table = Table(LocalStore(folder).map(f"{source}.rows"), name="the rows of a part")
    table.expect_kind(ROWS_KIND, 1)
    columns = {column: table.column(column) for column in table.column_names}
    index = ShardIndex.encode_columns(name, payload["num_bytes"], table.meta["field_names"], columns)
    write_atomic(output / "shards" / f"{name}.idx", [index], replace=True)
    return {"num_bytes": len(index), "sha256": hashlib.sha256(index).hexdigest()}
