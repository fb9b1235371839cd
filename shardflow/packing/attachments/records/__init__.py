"""Clinical records: facts of FHIR, C-CDA, HL7v2 and mapped files, by lists of what may be published."""

from __future__ import annotations

from shardflow.packing.attachments.records.mapping import FieldMapping, RecordMapping, RecordsConfig

__all__ = [
    "FieldMapping",
    "RecordMapping",
    "RecordsConfig",
]
