"""Key object selections: images that somebody marked, with the reason as a code.

Source: DICOM PS3.16, TID 2010 and CID 7010.
"""

from __future__ import annotations

from pathlib import Path

from shardflow.annotations.book import RegionBook, RegionFacts
from shardflow.annotations.content_tree import walk
from shardflow.annotations.dicom_objects import code_of, items_of, open_object, parsing, references_of
from shardflow.annotations.targets import Targets

__all__ = ["read_key_objects"]


def read_key_objects(path: Path, targets: Targets, book: RegionBook) -> None:
    """Read a selection into one region, whose slices are the marked images.

    Args:
        path: The file.
        targets: The stored series of its study.
        book: Takes the region.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, book.limits)
        title = code_of(dataset, "ConceptNameCodeSequence")
        region = book.open(RegionFacts(kind="key_image", source="ko", code=title))
        for node in walk(dataset, book.limits):
            if node.value_type != "IMAGE":
                continue
            for uid, frames in references_of(items_of(node.item, "ReferencedSOPSequence")):
                places = targets.find(uid, frames)
                if not places:
                    book.dangling("IMAGE_NOT_PACKED")
                for target, index in places:
                    region.add_slice(target, index)
