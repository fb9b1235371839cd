"""DICOM images: headers, grouping into stacks, and decoding.

Data flow: `headers` reads the facts, `stacks` groups and orders them with `geometry`, `pixels` decodes
slices in modality units, `attributes` reads the technical attributes of a stack. pydicom and imagecodecs
are imported only below this package, by the attachments and by the generator.
"""
