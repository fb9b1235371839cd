"""WebDataset tars as others write them, for tests: by webdataset, by GNU tar, by Python's tarfile."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Members",
    "gnu_tar",
    "make_members",
    "picture",
    "python_tar",
    "webdataset_groups",
    "write_samples",
]

Members = Sequence[tuple[str, bytes]]


def picture(number: int, kind: str = "png") -> tuple[NDArray[np.uint8], bytes]:
    """Return an RGB image and its file; sizes differ by number, and every third file is grey.

    A JPEG's pixels are those after coding.
    """
    rows, columns = 8 + number % 5, 10 + number % 3
    pixels = np.random.default_rng(number).integers(0, 255, (rows, columns, 3), dtype=np.uint8)
    stored = pixels[:, :, 0] if number % 3 == 0 else pixels[:, :, ::-1]
    data: bytes = cv2.imencode(f".{kind}", stored)[1].tobytes()
    decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    return decoded[:, :, ::-1].astype(np.uint8), data


def make_members(numbers: Iterable[int], *, folder: str = "") -> list[tuple[str, bytes]]:
    """Make samples of text, JSON, image and array; every fourth has no text, every fifth no image."""
    members = []
    for number in numbers:
        key = f"{folder}Case_{number:04d}"
        if number % 4:
            members.append((f"{key}.txt", f"caption {number} \u00e4".encode()))
        members.append((f"{key}.meta.json", json.dumps({"number": number}).encode()))
        if number % 5:
            kind = "jpg" if number % 2 else "png"
            members.append((f"{key}.{kind}", picture(number, kind)[1]))
        array = io.BytesIO()
        np.save(array, np.arange(number % 7))
        members.append((f"{key}.npy", array.getvalue()))
    return members


def python_tar(path: Path, members: Members, format: int = tarfile.USTAR_FORMAT) -> Path:  # noqa: A002
    """Write a tar with Python's tarfile."""
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uname = len(data), 1_700_000_000.5, "someone"
            tar.addfile(info, io.BytesIO(data))
    return path


def gnu_tar(path: Path, members: Members, folder: Path, *options: str) -> Path:
    """Write a tar with GNU tar, from files, folders and all."""
    for name, data in members:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    subprocess.run(["tar", "--sort=name", *options, "-cf", path, "."], cwd=folder, check=True)
    return path


def write_samples(pattern: str, samples: Iterable[dict[str, Any]], maxcount: int) -> None:
    """Write shards with webdataset's own writer."""
    import webdataset

    with webdataset.ShardWriter(pattern, maxcount=maxcount, verbose=0) as writer:
        for sample in samples:
            writer.write(sample)


def webdataset_groups(paths: Iterable[Path]) -> list[tuple[str, dict[str, bytes]]]:
    """What webdataset makes of tars: key and fields of each sample, in order, undecoded."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    groups = []
    for path in paths:
        with path.open("rb") as stream:
            members = tar_file_expander([{"url": path.name, "stream": stream}])
            groups += [
                (
                    sample["__key__"],
                    {name: data for name, data in sample.items() if not name.startswith("__")},
                )
                for sample in group_by_keys(members)
            ]
    return groups
