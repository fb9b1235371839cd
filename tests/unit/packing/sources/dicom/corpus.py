"""Every file at hand, run through the whole source: header, grouping, decoding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import data_store
import numpy as np
import pydicom
from pydicom.pixels import pixel_array

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.headers import BrokenInstance, InstanceHeader, read_header
from shardflow.packing.sources.placement import discover

BUNDLED = Path(pydicom.__file__).parent / "data" / "test_files"
"""The data that comes inside pydicom's wheel."""
MORE = Path(data_store.__file__).parent / "data"
"""The data of the package pydicom-data: ultrasound with cines and segmented palettes, radiographs, MR."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All headers of some folders, and what became of the other files."""

    roots: list[Path]
    headers: list[InstanceHeader]
    outcomes: dict[str, str]
    """Relative path to reason, for files with no header."""

    def locate(self, header: InstanceHeader) -> Path:
        """File of a header."""
        return self.files[header.file_index]

    @cached_property
    def files(self) -> list[Path]:
        """All files, in the order of discovery."""
        return [one.path(self.roots) for one in discover(self.roots)]

    def name(self, header: InstanceHeader) -> str:
        """Relative path of a header's file."""
        return self.locate(header).relative_to(self.roots[0]).as_posix()


def read_corpus(root: Path) -> Corpus:
    """Read every header below a folder."""
    headers: list[InstanceHeader] = []
    outcomes: dict[str, str] = {}
    for index, file in enumerate(discover([root])):
        try:
            found = read_header(file.path([root]), file_index=index)
        except SourceError as error:
            outcomes[file.relative_path] = error.reason
            continue
        if isinstance(found, BrokenInstance):
            outcomes[file.relative_path] = found.reason.value
        else:
            headers.append(found)
    return Corpus(roots=[root], headers=headers, outcomes=outcomes)


def without_zeros(path: Path, folder: Path) -> Path:
    """Return a file; one with zeros behind its elements, which takes ITK seconds, as a copy without them."""
    dataset = pydicom.dcmread(path)
    if (0, 0) not in dataset:
        return path
    del dataset[0, 0]
    dataset.save_as(folder / path.name)
    return folder / path.name


def reference_frames(path: Path) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    """Frames as pydicom alone decodes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = pydicom.dcmread(path)
        pixels = pixel_array(dataset)
        num_frames = int(dataset.get("NumberOfFrames") or 1)
    yield from pixels if num_frames > 1 else pixels[None]
