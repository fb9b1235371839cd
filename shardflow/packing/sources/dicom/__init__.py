"""DICOM images: headers, grouping into stacks, and decoding.

Data flow: `discover` lists files, `headers` reads the facts, `stacks` groups and orders them with `geometry`,
`pixels` decodes slices in modality units, `attributes` reads the technical attributes of a stack. pydicom and
imagecodecs are imported only below this package, by the attachments and by the generator.
"""

from __future__ import annotations

from shardflow.format.reasons import FLAGS
from shardflow.packing.sources.dicom.attributes import AttributeValue, read_attributes, read_everywhere
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.discover import DiscoveredFile, discover
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.geometry import StackGeometry
from shardflow.packing.sources.dicom.headers import (
    BrokenInstance,
    Identify,
    InstanceHeader,
    header_from_json,
    header_to_json,
    read_header,
    sop_class_of,
)
from shardflow.packing.sources.dicom.pixels import (
    DecodedSlice,
    DisplayRange,
    SliceForm,
    StoredReader,
    check_copies,
    form_of,
    iter_slices,
    iter_stack,
)
from shardflow.packing.sources.dicom.planes import PlaneHeader
from shardflow.packing.sources.dicom.stacks import (
    Copy,
    Grouping,
    Rejection,
    SliceRef,
    Stack,
    StackKind,
    Study,
    build_studies,
)
from shardflow.packing.sources.dicom.stored import iter_stored

__all__ = [
    "FLAGS",
    "AttributeValue",
    "BrokenInstance",
    "Copy",
    "DecodedSlice",
    "DiscoveredFile",
    "DisplayRange",
    "Grouping",
    "HeaderLimits",
    "Identify",
    "ImageDescription",
    "InstanceHeader",
    "PlaneHeader",
    "Rejection",
    "SliceForm",
    "SliceRef",
    "Stack",
    "StackGeometry",
    "StackKind",
    "StoredReader",
    "Study",
    "build_studies",
    "check_copies",
    "discover",
    "form_of",
    "header_from_json",
    "header_to_json",
    "iter_slices",
    "iter_stack",
    "iter_stored",
    "read_attributes",
    "read_everywhere",
    "read_header",
    "sop_class_of",
]
