"""Clinical records: facts of FHIR, C-CDA, HL7v2 and mapped files, by lists of what may leave."""

from __future__ import annotations

from shardflow.records.config import RecordsConfig
from shardflow.records.mapping import FieldMapping, RecordMapping

__all__ = ["FieldMapping", "RecordMapping", "RecordsConfig"]
