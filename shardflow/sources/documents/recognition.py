"""Which form a document has, by what it begins with."""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias

__all__ = ["HEAD_BYTES", "DocumentForm", "recognise_document"]

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
