"""Bounded access to DICOM objects that are not images, and to the tree of a structured report.

pydicom parses the file; its warnings and errors, which may quote values, are suppressed. Sequences stay
unparsed until they are used, and long lists of numbers are taken as bytes. The tree is walked without
recursion. Only direct content items are nodes; a relationship by reference, which could make the tree a
cycle, is followed one step, from a coordinate to its image.

Source: DICOM PS3.3, C.17.3 (SR Document Content).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardflow.errors import SourceError, os_reason
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Floats
from shardflow.packing.attachments.codes import Code
from shardflow.packing.sources.attachments import AttachmentItem
from shardflow.packing.sources.dicom.values import is_whole, third_party_silence

_DEFLATED: Final = "1.2.840.10008.1.2.1.99"
_MAX_REFERENCES: Final = 64
"""Instances that are named to find the study of an object."""


@contextmanager
def parsing() -> Iterator[None]:
    """Turn whatever a parser raises over the bytes of a file into an outcome of the file.

    Raises:
        SourceError: HEADER_UNREADABLE, with the class of the error and nothing of its text.
    """
    with third_party_silence():
        try:
            yield
        except (SourceError, MemoryError):
            raise
        except OSError as error:
            raise source_error(Reason.FILE_UNREADABLE, os_reason(error)) from None
        except Exception as error:  # noqa: BLE001 - whatever the bytes break is the file's fault
            raise source_error(Reason.HEADER_UNREADABLE, type(error).__name__) from None


def open_object(path: Path, limits: AnnotationLimits, *, with_pixels: bool = True) -> Any:
    """Parse a DICOM object; call inside `parsing`.

    Args:
        path: The file.
        limits: Bounds on its size, and on the size it inflates to.
        with_pixels: Whether the file is taken whole; else the parser ends at the pixels.

    Raises:
        SourceError: LIMIT_EXCEEDED, or HEADER_UNREADABLE if the file is truncated: half of an outline, or of
            a report, must not be taken for all of it.
    """
    import pydicom

    if with_pixels:
        limits.check_file(path)
    check_inflated(path, limits)
    dataset = pydicom.dcmread(path, stop_before_pixels=not with_pixels)
    is_read_to_its_end = with_pixels and str(dataset.file_meta.get("TransferSyntaxUID", "")) != _DEFLATED
    if not is_whole(dataset, path.stat().st_size if is_read_to_its_end else None):
        raise source_error(Reason.HEADER_UNREADABLE, "the file was cut")
    return dataset


def check_inflated(path: Path, limits: AnnotationLimits) -> None:
    """Refuse a deflated file that inflates to too much, before anything inflates it whole.

    Raises:
        SourceError: LIMIT_EXCEEDED.
    """
    from pydicom.filereader import read_file_meta_info

    meta = read_file_meta_info(path)
    if str(meta.get("TransferSyntaxUID", "")) != _DEFLATED:
        return
    inflater, total = zlib.decompressobj(-zlib.MAX_WBITS), 0
    with path.open("rb") as file:
        # The preamble, "DICM", the group length element (12 bytes), and as many bytes as it says.
        file.seek(128 + 4 + 12 + int(meta.get("FileMetaInformationGroupLength", 0)))
        while block := file.read(1 << 16):
            while block:
                total += len(inflater.decompress(block, 1 << 20))
                block = inflater.unconsumed_tail
                if total > limits.max_inflated_bytes:
                    raise source_error(Reason.LIMIT_EXCEEDED, "the deflated object inflates to too much")


def object_item(dataset: Any, series: Sequence[Any], *keywords: str) -> AttachmentItem:
    """Identify the patient and study of an object: by its study first, then by what it refers to.

    Args:
        dataset: The object.
        series: Items of the series that it refers to.
        keywords: Sequences of image references in them.
    """
    study = text_of(dataset, "StudyInstanceUID")
    images = [
        uid for one in series for keyword in keywords for uid, _ in references_of(items_of(one, keyword))
    ]
    return AttachmentItem(
        study_uids=(study,) if study else (),
        series_uids=tuple(text_of(one, "SeriesInstanceUID") for one in series),
        sop_uids=tuple(dict.fromkeys(images))[:_MAX_REFERENCES],
        accession=text_of(dataset, "AccessionNumber"),
        patient_id=text_of(dataset, "PatientID"),
    )


def items_of(dataset: Any, keyword: str) -> Sequence[Any]:
    """Return the items of a sequence; none if it is missing or is no sequence."""
    value = None if dataset is None else dataset.get(keyword)
    return value if value is not None and not isinstance(value, str | bytes | int | float) else ()


def text_of(dataset: Any, keyword: str) -> str:
    """Return a value as one text without padding; empty if it is missing."""
    value = None if dataset is None else dataset.get(keyword)
    return "" if value is None else str(value).strip(" \0")


def number_of(dataset: Any, keyword: str) -> float | None:
    """Return the first value as a finite number, or None."""
    found = numbers_of(dataset, keyword)
    return float(found[0]) if found is not None and len(found) else None


def numbers_of(dataset: Any, keyword: str, length: int | None = None) -> Floats | None:
    """Return the values of an element as numbers.

    Args:
        dataset: The dataset or item.
        keyword: Of the element; decimal strings are never made objects of.
        length: How many they must be, None for any number.

    Returns:
        ``(n,)``; None where the element is missing, of another length, or holds anything that is no finite
        number.
    """
    from pydicom.datadict import tag_for_keyword
    from pydicom.dataelem import RawDataElement

    tag = tag_for_keyword(keyword)
    if dataset is None or tag is None or tag not in dataset:
        return None
    element = dataset.get_item(tag)
    try:
        if isinstance(element, RawDataElement) and element.VR == "DS" and element.value:
            values = np.array(element.value.strip(b" \0").split(b"\\"), dtype=np.float64)
        else:
            value = dataset[tag].value
            values = np.atleast_1d(np.asarray([] if value is None else value, dtype=np.float64))
    except (TypeError, ValueError):
        return None
    if (length is not None and len(values) != length) or not np.isfinite(values).all():
        return None
    return values


def code_of(dataset: Any, keyword: str) -> Code | None:
    """Return the code in the first item of a sequence of codes."""
    for item in items_of(dataset, keyword):
        value = text_of(item, "CodeValue") or text_of(item, "LongCodeValue")
        return Code(text_of(item, "CodingSchemeDesignator"), value, text_of(item, "CodeMeaning"))
    return None


def references_of(items: Sequence[Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the instances that items of references name, each with its frames from 1 (none for all)."""
    found = []
    for item in items:
        uid = text_of(item, "ReferencedSOPInstanceUID")
        frames = numbers_of(item, "ReferencedFrameNumber")
        if uid:
            found.append((uid, () if frames is None else tuple(int(frame) for frame in frames)))
    return found


@dataclass(slots=True)
class Node:
    """One content item."""

    item: Any
    concept: Code | None
    value_type: str
    parent: Node | None
    group: Group


@dataclass(slots=True)
class Group:
    """A container, with the items below it that lie in no inner container."""

    concept: Code | None
    nodes: list[Node] = field(default_factory=list)

    def code(self, *values: str) -> Code | None:
        """Return the code of the first item whose concept has one of these values."""
        found = (node for node in self.nodes if node.concept and node.concept.value in values)
        return next((code_of(node.item, "ConceptCodeSequence") for node in found), None)

    def text(self, keyword: str, *values: str) -> str:
        """Return the text of the first item whose concept has one of these values."""
        found = (
            text_of(node.item, keyword)
            for node in self.nodes
            if node.concept and node.concept.value in values
        )
        return next(found, "")


def walk(dataset: Any, limits: AnnotationLimits) -> Iterator[Node]:
    """Walk the content items in the order of the file.

    Raises:
        SourceError: LIMIT_EXCEEDED.
    """
    root = Group(code_of(dataset, "ConceptNameCodeSequence"))
    pending: list[tuple[Any, Node | None, Group, int]] = [
        (item, None, root, 1) for item in reversed(items_of(dataset, "ContentSequence"))
    ]
    num_nodes = 0
    while pending:
        item, parent, group, depth = pending.pop()
        num_nodes += 1
        if num_nodes > limits.max_items or depth > limits.max_depth:
            raise source_error(
                Reason.LIMIT_EXCEEDED,
                f"more than {limits.max_items} content items or {limits.max_depth} levels",
            )
        concept = code_of(item, "ConceptNameCodeSequence")
        value_type = text_of(item, "ValueType")
        if value_type == "CONTAINER":
            group = Group(concept)
        node = Node(item, concept, value_type, parent, group)
        group.nodes.append(node)
        yield node
        children = items_of(item, "ContentSequence")
        pending.extend((child, node, group, depth + 1) for child in reversed(children))


def groups_of(dataset: Any, limits: AnnotationLimits) -> list[Group]:
    """Return the groups of a report, each with all of its nodes.

    Raises:
        SourceError: LIMIT_EXCEEDED.
    """
    groups: dict[int, Group] = {}
    for node in walk(dataset, limits):
        groups.setdefault(id(node.group), node.group)
    return list(groups.values())


def images_under(dataset: Any, node: Node) -> list[Any]:
    """Return the items of the image references directly below an item, here or by reference."""
    found: list[Any] = []
    for child in items_of(node.item, "ContentSequence"):
        path = numbers_of(child, "ReferencedContentItemIdentifier")
        target = child if path is None else _resolve(dataset, [int(step) for step in path])
        if target is not None and text_of(target, "ValueType") == "IMAGE":
            found.extend(items_of(target, "ReferencedSOPSequence"))
    return found


def _resolve(dataset: Any, path: list[int]) -> Any:
    """Find an item by its place: the number of each step in its sequence, the root being 1."""
    item = dataset
    for step in path[1:]:
        children = items_of(item, "ContentSequence")
        if not 1 <= step <= len(children):
            return None
        item = children[step - 1]
    return item
