"""DICOM images: the only part of shardflow that imports pydicom and imagecodecs.

The data's way: `discover` lists files, `headers` reads the facts, `series` groups and orders them with
`geometry`, `pixels` decodes slices in modality units, `attributes` reads the technical attributes of a stack.
"""

from shardflow.sources.dicom.attributes import AttributeValue, read_attributes
from shardflow.sources.dicom.description import ImageDescription
from shardflow.sources.dicom.discover import DiscoveredFile, discover
from shardflow.sources.dicom.display import DisplayRange
from shardflow.sources.dicom.geometry import StackGeometry
from shardflow.sources.dicom.header_json import header_from_json, header_to_json
from shardflow.sources.dicom.headers import (
    BrokenInstance,
    Identify,
    InstanceHeader,
    read_header,
    sop_class_of,
)
from shardflow.sources.dicom.limits import HeaderLimits
from shardflow.sources.dicom.people import read_everywhere
from shardflow.sources.dicom.pixels import DecodedSlice, StoredReader, check_copies, iter_slices, iter_stack
from shardflow.sources.dicom.planes import PlaneHeader
from shardflow.sources.dicom.series import Copy, Grouping, Rejection, Study, build_studies
from shardflow.sources.dicom.stacks import SliceRef, Stack, StackKind
from shardflow.sources.dicom.stored import iter_stored
from shardflow.sources.dicom.units import SliceForm, form_of
from shardflow.sources.flags import FLAGS

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
