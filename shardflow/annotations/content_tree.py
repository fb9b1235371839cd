"""The tree of a structured report, walked without recursion and within bounds.

Only what stands directly in the file is a node. A relationship by reference, which could make a circle of the
tree, is followed one step, from a coordinate to its image.

Source: DICOM PS3.3, C.17.3 (SR Document Content).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardflow.annotations.dicom_objects import code_of, items_of, numbers_of, text_of
from shardflow.annotations.limits import AnnotationLimits
from shardflow.annotations.vocabulary import Code
from shardflow.sources.reasons import Reason, source_error

__all__ = ["Group", "Node", "groups_of", "images_under", "walk"]


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
        """Code of the first item whose concept has one of these values."""
        found = (node for node in self.nodes if node.concept and node.concept.value in values)
        return next((code_of(node.item, "ConceptCodeSequence") for node in found), None)

    def text(self, keyword: str, *values: str) -> str:
        """Text of the first item whose concept has one of these values."""
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
    """Items of the image references right below an item, here or by reference."""
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
