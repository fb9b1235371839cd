"""Clinical records: facts of FHIR, C-CDA, HL7v2 and mapped files, by lists of what may be published."""
