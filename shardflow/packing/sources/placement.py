"""Placement: the patient, study and further facts that a layout gives for one input file.

It crosses from the job to a packing process and is kept in the private folder with the header. It holds
identifiers and goes into no message, log or dataset as it is. For formats that know nothing of patients, a
placement and a few facts make an instance header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.planes import PlaneHeader

ImageForm: TypeAlias = Literal["dicom", "nifti", "raster", "slide"]
"""Format of an image file: DICOM, a NIfTI volume, one PNG or JPEG, or a slide in TIFF."""

ClassNames: TypeAlias = dict[str, tuple[int, ...]]
"""Names of the classes of a volume of labels, each with the numbers that are voxels of it; empty where only
the numbers are known."""

Attributes: TypeAlias = Mapping[str, tuple[str, ...] | tuple[float, ...]]
"""DICOM keyword to values, as `shardflow.packing.sources.dicom.attributes.read_attributes` returns them."""

_OPTIONAL = ("b_values", "channels", "classes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Patient, study and further facts of one file. Empty texts are unknown and left to the DICOM header."""

    form: ImageForm = "dicom"
    patient: str = ""
    study: str = ""
    """Equal for all images of one study, different between studies of all patients."""
    series: str = ""
    instance: str = ""
    """Equal for copies of one image."""
    number: int | None = None
    """Number of the image in reports."""
    split: str = ""
    """Split of the patient where the data set has official ones; else a keyed hash decides."""
    modality: str = ""
    """DICOM term, such as ``CR``; of images that have no header of their own."""
    attributes: Attributes
    """Technical attributes; they pass the allowlist as those of DICOM do."""
    is_patient_study: bool = False
    """Whether a study without a patient is a patient of its own."""
    is_gray: bool = False
    """Whether a picture stored in color is a radiograph, and gray."""
    spacing_mm: tuple[float, float, float] | None = None
    """Between rows, columns and slices, in place of the spacing in a volume's header."""
    other_ids: tuple[str, ...] = ()
    """Further identifiers of the study, such as an accession number, to be removed from its report."""
    rescale: tuple[float, float] | None = None
    """Slope and intercept of a picture, or of a volume whose header has none; applied once."""
    channels: tuple[str, ...] = ()
    """Names of the points of a volume's fourth axis, which become series; one name for a volume of three."""
    b_values: tuple[float, ...] = ()
    """Diffusion weighting of the points of a volume's fourth axis, s/mm2."""
    classes: ClassNames | None = None
    """Classes of a volume of labels, which is an attachment; None for an image."""

    def __repr__(self) -> str:
        return f"Placement({self.form})"

    def to_json(self) -> dict[str, Any]:
        """Return the placement as JSON."""
        row = asdict(self)
        # Left out if there are none: rows decide whether an input is already known.
        return {
            name: value for name, value in row.items() if name not in _OPTIONAL or value not in ((), None)
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Placement:
        """Read what `to_json` wrote."""
        known = {field.name: row[field.name] for field in fields(cls) if field.name not in _OPTIONAL}
        known["channels"] = tuple(row.get("channels", ()))
        known["b_values"] = tuple(row.get("b_values", ()))
        if "classes" in row:
            known["classes"] = {name: tuple(values) for name, values in row["classes"].items()}
        known["other_ids"] = tuple(known["other_ids"])
        for name in ("spacing_mm", "rescale"):
            known[name] = None if known[name] is None else tuple(known[name])
        known["attributes"] = {name: tuple(values) for name, values in known["attributes"].items()}
        return cls(**known)

    def identify(self, said: dict[str, str]) -> dict[str, str]:
        """Return identifiers with those of the placement in place of what the file states."""
        identifiers = {
            "patient_id": self.patient or said["patient_id"],
            "study_instance_uid": self.study or said["study_instance_uid"],
            "series_instance_uid": self.series or said["series_instance_uid"],
            "sop_instance_uid": self.instance or said["sop_instance_uid"],
        }
        if self.is_patient_study and not identifiers["patient_id"]:
            identifiers["patient_id"] = identifiers["study_instance_uid"]
        return identifiers


def make_header(
    placement: Placement,
    image: ImageDescription,
    planes: tuple[PlaneHeader, ...],
    *,
    syntax: str,
    num_bytes: int,
    unit: str = "",
    is_float: bool = False,
    pixel_offset: int = 0,
    pixel_num_bytes: int | None = None,
) -> InstanceHeader:
    """Make the header of an image.

    Args:
        placement: Whose it is; all identifiers must be set.
        image: Shape and sample format.
        planes: One for all frames, or one a frame.
        syntax: Stands for the transfer syntax: who reads the pixels.
        num_bytes: Size of the file.
        unit: ``HU`` or ``""``.
        is_float: Whether samples are floating point numbers.
        pixel_offset: Where they begin.
        pixel_num_bytes: How many bytes they are; None where they are compressed.
    """
    identifiers = placement.identify(
        {"patient_id": "", "study_instance_uid": "", "series_instance_uid": "", "sop_instance_uid": ""}
    )
    wide = "OF" if image.bits_allocated == 32 else "OD"
    return InstanceHeader(
        file_index=0,
        patient_id=identifiers["patient_id"],
        study_instance_uid=identifiers["study_instance_uid"],
        series_instance_uid=identifiers["series_instance_uid"],
        sop_instance_uid=identifiers["sop_instance_uid"],
        sop_class_uid="",
        transfer_syntax_uid=syntax,
        modality=placement.modality,
        image_type=(),
        series_number=None,
        instance_number=placement.number,
        image=image,
        planes=planes,
        frame_of_reference_uid="",
        slice_location=None,
        spacing_between_slices=None,
        detector_spacing=None,
        unit=unit,
        window_function="",
        burned_in="",
        padding=None,
        has_modality_lut=False,
        is_localizer=False,
        pixel_vr=wide if is_float else "OW" if image.bits_allocated > 8 else "OB",
        pixel_offset=pixel_offset,
        pixel_num_bytes=pixel_num_bytes,
        num_bytes=num_bytes,
        flags=(),
        mosaic=0,
    )
