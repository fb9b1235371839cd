"""The bytes of format 1, pinned. A difference here is a change of class SHARD FORMAT: old datasets would
not read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardflow.format import Dataset, encode_array
from shardflow.format.keys import sha256_hex
from shardflow.format.tar import encode_member
from shardflow.storage import LocalStore
from tests.factories import make_dataset

pytestmark = pytest.mark.fast


def test_the_bytes_of_a_dataset_stay_the_same(tmp_path: Path, golden: Callable[[str, object], None]) -> None:
    """Tar, index, samples table, ledger and manifest of a tiny dataset, with slices as npy.

    The manifest repeats the digests of the other files, and its own digest is the dataset_id.
    """
    store = LocalStore(
        make_dataset(tmp_path / "data", splits={"train": 3, "val": 1}, samples_per_shard=2, codec="npy")
    )
    files = {
        path: {"num_bytes": store.size(path), "sha256": sha256_hex(store.read(path))}
        for path in store.list("")
    }
    golden("format", {"dataset_id": Dataset.open(store.url).dataset_id, "files": files})


def test_the_bytes_of_a_member_and_of_slices_stay_the_same(golden: Callable[[str, object], None]) -> None:
    """The b2nd bytes depend on the versions of Blosc2 and zstd too, which the constraints pin."""
    smooth = np.add.outer(np.arange(61), 3 * np.arange(48)).astype("<i2")
    noise = np.frombuffer(bytes((7 * i * i + i // 3) % 256 for i in range(61 * 48 * 2)), "<i2").reshape(
        61, 48
    )
    slices = {
        "smooth": smooth,
        "noise": noise,
        "zeros": np.zeros((61, 48), "<i2"),
        "rgb": np.zeros((9, 7, 3), "u1"),
    }
    golden(
        "codecs",
        {
            "member": sha256_hex(encode_member("abc.s000.i0000.b2nd", bytes(range(256)) * 3)),
            **{
                f"{codec} {name}": sha256_hex(encode_array(codec, pixels))
                for codec in ("b2nd", "npy", "fast")
                for name, pixels in slices.items()
            },
        },
    )
