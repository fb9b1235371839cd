"""What a layout says of one input file: whose image it is, and what its own bytes do not tell.

A placement crosses from the job to a packing process and lies in the private folder with the header; it
holds identifiers and goes into no message, log or dataset as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

__all__ = ["Attributes", "ImageForm", "Placement"]

ImageForm: TypeAlias = Literal["dicom", "nifti", "raster"]
"""How an image file is read: DICOM, a NIfTI volume, or one PNG or JPEG."""

Attributes: TypeAlias = Mapping[str, tuple[str, ...] | tuple[float, ...]]
"""DICOM keyword to values, as `shardflow.sources.dicom.read_attributes` returns them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a file belongs. Empty texts are not known: a DICOM header then has the word."""

    form: ImageForm = "dicom"
    patient: str = ""
    study: str = ""
    """Equal for all images of one study, different between studies of all patients."""
    series: str = ""
    instance: str = ""
    """Equal for copies of one image."""
    number: int | None = None
    """What a report calls the image."""
    split: str = ""
    """Split of the patient where the data set has official ones; else a keyed hash decides."""
    modality: str = ""
    """DICOM term, such as ``CR``; of images that have no header of their own."""
    attributes: Attributes
    """Technical attributes; they pass the allowlist as those of DICOM do."""
    is_patient_study: bool = False
    """Whether a study without a patient is a patient of its own."""
    is_gray: bool = False
    """Whether a picture stored in colour is a radiograph, and gray."""
    spacing_mm: tuple[float, float, float] | None = None
    """Between rows, columns and slices, instead of what a volume's header says."""
    other_ids: tuple[str, ...] = ()
    """What else names the study, such as an accession number: looked for in its report, to be taken out."""
    rescale: tuple[float, float] | None = None
    """Slope and intercept of a picture, or of a volume whose header has none; applied once."""

    def __repr__(self) -> str:
        return f"Placement({self.form})"

    def to_json(self) -> dict[str, Any]:
        """Return the placement as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Placement:
        """Read what `to_json` wrote."""
        known = {field.name: row[field.name] for field in fields(cls)}
        known["other_ids"] = tuple(known["other_ids"])
        for name in ("spacing_mm", "rescale"):
            known[name] = None if known[name] is None else tuple(known[name])
        known["attributes"] = {name: tuple(values) for name, values in known["attributes"].items()}
        return cls(**known)

    def identify(self, said: dict[str, str]) -> dict[str, str]:
        """Put right what a file says of its identifiers; see `shardflow.sources.dicom.read_header`."""
        identifiers = {
            "patient_id": self.patient or said["patient_id"],
            "study_instance_uid": self.study or said["study_instance_uid"],
            "series_instance_uid": self.series or said["series_instance_uid"],
            "sop_instance_uid": self.instance or said["sop_instance_uid"],
        }
        if self.is_patient_study and not identifiers["patient_id"]:
            identifiers["patient_id"] = identifiers["study_instance_uid"]
        return identifiers
