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


def test_table_that_is_overwritten_is_read_as_it_was_and_not_opened_again(tmp_path: Path) -> None:
    make_dataset(tmp_path / "dataset", num_samples=4)
    selection = select(Dataset.open(tmp_path / "dataset"), "train")
    rows = np.arange(4)
    keys = selection.keys(rows)
    key = keys[0].encode("ascii")
    (table,) = [path for path in (tmp_path / "dataset" / "samples").iterdir() if key in path.read_bytes()]
    with table.open("r+b") as file:  # in place: a map of the file would show it
        file.seek(table.read_bytes().index(key))
        file.write(b"\x8b")
    assert selection.keys(rows) == keys
    with pytest.raises(ChecksumError, match="must have the manifest's size and sha256"):
        select(Dataset.open(tmp_path / "dataset"), "train").keys(rows)
