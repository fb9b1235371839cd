"""The samples that a loader takes: their keys, and a table that changes under a reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import ChecksumError
from shardflow.format import Dataset
from shardflow.loading import select
from tests.factories import make_dataset

pytestmark = pytest.mark.fast


def test_table_that_is_overwritten_while_it_is_mapped_is_named(tmp_path: Path) -> None:
    make_dataset(tmp_path / "dataset", num_samples=4)
    selection = select(Dataset.open(tmp_path / "dataset"), "train")
    rows = np.arange(4)
    key = selection.keys(rows)[0].encode("ascii")
    (table,) = [path for path in (tmp_path / "dataset" / "samples").iterdir() if key in path.read_bytes()]
    with table.open("r+b") as file:  # in place: what is mapped sees it
        file.seek(table.read_bytes().index(key))
        file.write(b"\x8b")
    with pytest.raises(ChecksumError, match="was changed after it had been opened"):
        selection.keys(rows)
