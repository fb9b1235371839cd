"""The FHIR resources of one file, with those that they refer to: its own, and those of a bulk export.

A bulk export has a file a type (``Patient.ndjson``, ``Observation.001.ndjson``). What links an observation
with a study is then in the files of patients, studies and orders beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

from shardflow.errors import SourceError
from shardflow.sources.documents import (
    DocumentFacts,
    DocumentForm,
    iter_json_lines,
    parse_json,
    read_bounded,
    recognise_document,
)
from shardflow.sources.documents.bounded import read_json_line
from shardflow.sources.documents.fhir import FhirIndex, Resource, iter_resources
from shardflow.sources.documents.recognition import HEAD_BYTES
from shardflow.sources.reasons import Reason, source_error

__all__ = ["Resources", "read_resources"]

_LINKING: Final = ("ImagingStudy", "Patient", "ServiceRequest")
_SEPARATORS: Final = str.maketrans("_-", "..")

_Stamp: TypeAlias = "tuple[str, int, int]"
"""Path, size and time of a file: what it holds stays the same while they do."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a file; those of lines are read again by where they begin."""

    path: Path
    form: DocumentForm
    index: FhirIndex = field(repr=False)
    has_others: bool
    """Whether the index knows files beside this one."""

    def resources(self) -> Iterator[tuple[int, Resource]]:
        """Return all resources with their numbers.

        Raises:
            SourceError: The file, or one of its lines, cannot be read.
        """
        if self.form == "fhir":
            for number, (_, resource) in enumerate(iter_resources(parse_json(read_bounded(self.path)))):
                yield number, resource
            return
        for place, value in iter_json_lines(self.path):
            if isinstance(value, SourceError):
                # Most often the transfer was cut: nothing of it is taken for whole.
                raise value
            for _, resource in iter_resources(value):
                yield place, resource

    def at(self, numbers: Iterable[int]) -> Iterator[Resource]:
        """Return some resources by their numbers."""
        if self.form == "fhir":
            wanted = set(numbers)
            yield from (resource for number, resource in self.resources() if number in wanted)
            return
        for place in numbers:
            for _, resource in iter_resources(read_json_line(self.path, place)):
                yield resource

    def digest(self, facts: DocumentFacts) -> str:
        """Return what stands for the facts that other files gave to a resource; ``""`` without such files."""
        if not self.has_others:
            return ""
        said = [facts.study_uids, facts.accessions, facts.patient_ids, facts.people.values()]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode("ascii")).hexdigest()


def read_resources(path: Path) -> Resources:
    """Open a file of FHIR, and learn what its resources refer to.

    Raises:
        SourceError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            form = recognise_document(file.read(HEAD_BYTES))
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None
    is_lines = form == "fhir-lines" or (form == "fhir" and path.suffix.lower() == ".ndjson")
    others = _linking_files(path) if is_lines else []
    index = _index(tuple(_stamp(one) for one in [path, *others]), is_lines)
    return Resources(path, "fhir-lines" if is_lines else "fhir", index, bool(others))


def _linking_files(path: Path) -> list[Path]:
    """Files of the same export that others refer to, by their names."""
    found = []
    for other in path.parent.iterdir():
        parts = other.name.translate(_SEPARATORS).split(".")
        if other.suffix.lower() == ".ndjson" and other != path and set(parts) & set(_LINKING):
            found.append(other)
    return sorted(found)


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None
    return str(path), status.st_size, status.st_mtime_ns


# One export is read by many tasks of a process; two, so that neighbours do not drive each other out.
@lru_cache(maxsize=2)
def _index(files: tuple[_Stamp, ...], is_lines: bool) -> FhirIndex:
    index = FhirIndex()
    for name, _, _ in files:
        path = Path(name)
        lines = (value for _, value in iter_json_lines(path))
        for value in lines if is_lines else [parse_json(read_bounded(path))]:
            if not isinstance(value, SourceError):
                for url, resource in iter_resources(value):
                    index.add(url, resource)
    return index
