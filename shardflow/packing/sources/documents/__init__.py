"""Reports and records in the formats of clinical systems: DICOM SR, C-CDA, FHIR and HL7v2.

The readers recognize the format within bounds and extract the identifiers, the people named and the report
text. What may be published is decided by `shardflow.packing.attachments.records` and
`shardflow.packing.deid`.
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
