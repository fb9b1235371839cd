"""Reports and records in the formats of clinical systems: DICOM SR, C-CDA, FHIR and HL7v2.

The readers recognize the format within bounds and extract the identifiers, the people named and the report
text. What may be published is decided by `shardflow.packing.attachments.records` and
`shardflow.packing.deid`.
"""
