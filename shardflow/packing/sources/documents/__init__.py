"""Reports and records in the formats of clinical systems: DICOM SR, C-CDA, FHIR, HL7v2.

Owns how such a file is read within bounds, which form it has, whom it names and where its report text lies.
What of it may leave is not decided here (`shardflow.packing.attachments.records`, `shardflow.packing.deid`).
"""

from __future__ import annotations

from shardflow.packing.sources.documents.bounded import (
    DocumentForm,
    DocumentLimits,
    XmlNode,
    iter_json_lines,
    parse_json,
    parse_xml,
    read_bounded,
    recognise_document,
)
from shardflow.packing.sources.documents.facts import DocumentFacts, People

__all__ = [
    "DocumentFacts",
    "DocumentForm",
    "DocumentLimits",
    "People",
    "XmlNode",
    "iter_json_lines",
    "parse_json",
    "parse_xml",
    "read_bounded",
    "recognise_document",
]
