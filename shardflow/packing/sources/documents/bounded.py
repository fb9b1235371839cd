"""Bounded parsing of untrusted XML and JSON, and recognition of document formats.

Limits hold for size, depth and number of nodes. XML with a document type is refused by the parser itself
rather than by searching for its letters, so that no encoding hides it; without one there are no entities but
the five of XML, and nothing is ever fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from xml.parsers import expat

from shardflow.errors import SourceError
from shardflow.format.reasons import Reason, reading_source, source_error

_BOM: Final = b"\xef\xbb\xbf"
_OPENING, _CLOSING = (b"[", b"{"), (b"]", b"}")
_STRUCTURE: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{}]', re.DOTALL)
"""A string as a whole, or a bracket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLimits:
    """Counts above which a document is not read."""

    max_bytes: int = 64 << 20
    """Of a file that is read as a whole."""
    max_line_bytes: int = 16 << 20
    """Of one line of NDJSON."""
    max_depth: int = 64
    """Of elements, objects and lists inside each other."""
    max_nodes: int = 1 << 20
    """Elements of one XML document."""


_DEFAULT: Final = DocumentLimits()


@dataclass(slots=True)
class XmlNode:
    """One element; names are without their namespace."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict, repr=False)
    """By local name; of the attribute ``xsi:type`` it is ``type``."""
    children: list[XmlNode | str] = field(default_factory=list, repr=False)
    """Elements and the text between them, in order."""

    def elements(self, *names: str) -> Iterator[XmlNode]:
        """Yield the child elements with one of these names, or all."""
        for child in self.children:
            if isinstance(child, XmlNode) and (not names or child.name in names):
                yield child

    def find(self, path: str) -> XmlNode | None:
        """Return the first element below a path of names joined by ``/``."""
        return next(self.find_all(path), None)

    def find_all(self, path: str) -> Iterator[XmlNode]:
        """Yield the elements below a path of names joined by ``/``, in order."""
        name, _, rest = path.partition("/")
        for child in self.elements(name):
            if rest:
                yield from child.find_all(rest)
            else:
                yield child

    def walk(self) -> Iterator[XmlNode]:
        """Yield this element and all below it, in order."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += [child for child in reversed(node.children) if isinstance(child, XmlNode)]

    def get(self, attribute: str) -> str:
        """Return the value of an attribute without the space around it; ``""`` where absent."""
        return self.attributes.get(attribute, "").strip()

    def text(self) -> str:
        """Return all text below this element, unchanged."""
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)


def read_bounded(path: Path, limits: DocumentLimits = _DEFAULT) -> bytes:
    """Read a file as a whole.

    Raises:
        SourceError: FILE_UNREADABLE or LIMIT_EXCEEDED.
    """
    with reading_source(), path.open("rb") as file:
        data = file.read(limits.max_bytes + 1)
    if len(data) > limits.max_bytes:
        raise source_error(Reason.LIMIT_EXCEEDED, f"more than {limits.max_bytes} bytes")
    return data


def parse_xml(data: bytes, limits: DocumentLimits = _DEFAULT) -> XmlNode:
    """Parse an XML document.

    Raises:
        SourceError: REPORT_UNREADABLE where it is not well-formed or has a document type; LIMIT_EXCEEDED.
    """
    builder = _Builder(limits)
    parser = expat.ParserCreate(namespace_separator="\n")
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.characters
    parser.StartDoctypeDeclHandler = builder.doctype
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, UnicodeError, LookupError, ValueError) as error:
        raise source_error(Reason.REPORT_UNREADABLE, f"no XML: {type(error).__name__}") from None
    return builder.root


class _Builder:
    """Makes the tree."""

    def __init__(self, limits: DocumentLimits) -> None:
        self._limits = limits
        self._open: list[XmlNode] = [XmlNode("")]
        self._num_nodes = 0

    @property
    def root(self) -> XmlNode:
        return next(self._open[0].elements())

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._num_nodes += 1
        if len(self._open) > self._limits.max_depth or self._num_nodes > self._limits.max_nodes:
            raise source_error(Reason.LIMIT_EXCEEDED, "elements too deep or too many")
        local = name.rpartition("\n")[2]
        if attributes:
            attributes = {key.rpartition("\n")[2]: value for key, value in attributes.items()}
        node = XmlNode(local, attributes)
        self._open[-1].children.append(node)
        self._open.append(node)

    def end(self, name: str) -> None:  # noqa: ARG002 - expat checks that it fits
        self._open.pop()

    def characters(self, text: str) -> None:
        self._open[-1].children.append(text)

    def doctype(self, *_: object) -> None:
        raise source_error(Reason.REPORT_UNREADABLE, "a document type, which is never read")


def parse_json(data: bytes, limits: DocumentLimits = _DEFAULT) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        SourceError: REPORT_UNREADABLE or LIMIT_EXCEEDED.
    """
    _check_depth(data, limits.max_depth)
    try:
        return json.loads(data.removeprefix(_BOM).decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise source_error(Reason.REPORT_UNREADABLE, f"no JSON: {type(error).__name__}") from None


def iter_json_lines(path: Path, limits: DocumentLimits = _DEFAULT) -> Iterator[tuple[int, Any | SourceError]]:
    """Read NDJSON line by line: where each begins, in bytes, and its value or why there is none.

    Memory is that of one line, whatever the size of the file.

    Raises:
        SourceError: FILE_UNREADABLE.
    """
    with reading_source(), path.open("rb") as file:
        while True:
            place = file.tell()
            line = file.readline(limits.max_line_bytes + 1)
            if not line:
                return
            if len(line) > limits.max_line_bytes:
                while line and not line.endswith(b"\n"):
                    line = file.readline(limits.max_line_bytes)
                yield place, source_error(Reason.LIMIT_EXCEEDED, "a line too long")
                continue
            if not line.strip():
                continue
            try:
                yield place, parse_json(line, limits)
            except SourceError as error:
                yield place, error


def read_json_line(path: Path, place: int, limits: DocumentLimits = _DEFAULT) -> Any:
    """Read one line of NDJSON again.

    Args:
        path: The file.
        place: Where the line begins, as `iter_json_lines` said.
        limits: As there.

    Raises:
        SourceError: FILE_UNREADABLE, REPORT_UNREADABLE or LIMIT_EXCEEDED.
    """
    with reading_source(), path.open("rb") as file:
        file.seek(place)
        line = file.readline(limits.max_line_bytes + 1)
    if len(line) > limits.max_line_bytes:
        raise source_error(Reason.LIMIT_EXCEEDED, "a line too long")
    return parse_json(line, limits)


def _refuse(_: str) -> None:
    raise ValueError


def _check_depth(data: bytes, max_depth: int) -> None:
    """Count brackets outside of strings; Python's parser would go as deep as its stack."""
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return
    depth = 0
    for match in _STRUCTURE.finditer(data):
        byte = match[0][:1]
        if byte in _OPENING:
            depth += 1
            if depth > max_depth:
                raise source_error(Reason.LIMIT_EXCEEDED, f"more than {max_depth} levels")
        elif byte in _CLOSING:
            depth -= 1


DocumentForm: TypeAlias = Literal["cda", "dicom", "fhir", "fhir-lines", "hl7v2", "json", "json-lines", "xml"]
"""``fhir-lines``, ``json-lines``: an object a line. ``json``, ``xml``: of no known kind."""

HEAD_BYTES: Final = 4096
"""Bytes that decide."""

_BATCH: Final = re.compile(rb"\s*(?:FHS|BHS|MSH)([^\w\s])")
_SEGMENT: Final = re.compile(rb"\s*(?:PID|ORC|OBR|OBX)\|")
_CDA: Final = re.compile(r"<(?:\w+:)?ClinicalDocument[\s>/]")
_RESOURCE: Final = re.compile(rb'"resourceType"\s*:')


def recognise_document(head: bytes) -> DocumentForm | None:
    r"""Tell the form of a document.

    Args:
        head: The first `HEAD_BYTES` of the file, or all of a shorter one.

    Example:
        >>> recognise_document(b"MSH|^~\\&|"), recognise_document(b"hello")
        ('hl7v2', None)
    """
    if head[128:132] == b"DICM":
        return "dicom"
    bare = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if _BATCH.match(bare) or _SEGMENT.match(bare):
        return "hl7v2"
    if bare[:1] in {b"{", b"["}:
        return _json_form(bare)
    text = _decode(head).lstrip("\N{ZERO WIDTH NO-BREAK SPACE} \t\r\n")
    if text.startswith("<"):
        # The comments before the root may be long; what has the namespace of HL7 is nothing else.
        is_cda = _CDA.search(text) is not None or "urn:hl7-org:v3" in text
        return "cda" if is_cda else "xml"
    return None


def _json_form(bare: bytes) -> DocumentForm:
    first, newline, rest = bare.partition(b"\n")
    is_fhir = _RESOURCE.search(bare) is not None
    is_line = first.rstrip().endswith(b"}") and bare[:1] == b"{" and _is_whole(first)
    if newline and is_line and rest.lstrip()[:1] == b"{":
        return "fhir-lines" if is_fhir else "json-lines"
    return "fhir" if is_fhir else "json"


def _is_whole(line: bytes) -> bool:
    return line.count(b"{") == line.count(b"}")


def _decode(head: bytes) -> str:
    """Decode enough to look at: UTF-16 by its mark or its zeros, else as ASCII."""
    if head[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        return head.decode("utf-16", errors="replace")
    return head.removeprefix(b"\xef\xbb\xbf").decode("latin-1")
