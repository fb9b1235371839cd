"""Input files, and the placement of each: the patient, study and further facts that a layout gives for it.

`discover` walks the input folders and does not look into the files. Nothing is skipped silently: an entry
that cannot be read as a file is returned with the reason in ``problem``, so that inputs = packed + skipped
+ quarantined holds from the beginning. The list is sorted by root and relative path, so every process that
walks the same tree gets the same list.

A placement crosses from the job to a packing process and is kept in the private folder with the header. It
holds identifiers and goes into no message, log or dataset as it is. For formats that know nothing of
patients, a placement and a few facts make an instance header.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shardflow.errors import ConfigError, os_reason
from shardflow.format.reasons import Reason
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.planes import PlaneHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveredFile:
    """One entry below an input folder. Holds a path, so it never goes into a message, log or dataset."""

    root_index: int
    """Position of the input folder in the list that was given."""
    relative_path: str
    """POSIX path below that folder; ``"."`` where the root itself is a file."""
    num_bytes: int
    """Size; 0 where there is a problem."""
    problem: Reason | None = None
    """Why there is no file to read, such as ``NOT_REGULAR_FILE`` or ``FILE_UNREADABLE``."""
    study_instance_uid: str = ""
    """Of an input without a file that is known to be of a study; else the file or its layout says it."""
    sop_instance_uid: str = ""
    """Likewise."""

    def __repr__(self) -> str:
        return f"DiscoveredFile({self.num_bytes} bytes, problem={self.problem})"

    def path(self, roots: Sequence[Path]) -> Path:
        """Return the full path, given the same list of roots."""
        return roots[self.root_index] / self.relative_path


def discover(roots: Sequence[Path]) -> list[DiscoveredFile]:
    """List all entries below the roots, sorted by root and by the bytes of the relative path.

    Links to files are followed (data sets are often trees of links); links to folders are not, because they
    can form circles, and come back as ``NOT_REGULAR_FILE``. Folders that cannot be listed come back as
    ``FILE_UNREADABLE``.

    Raises:
        ConfigError: There is no root, a root does not exist, or one root lies inside another (its files would
            be read twice).
    """
    if not roots:
        raise ConfigError("the inputs must name at least one folder, got none; set it in the configuration.")
    _check_roots(roots)
    found: list[DiscoveredFile] = []
    for index, root in enumerate(roots):
        entries = list(_walk(index, root))
        entries.sort(key=lambda entry: os.fsencode(entry.relative_path))
        found.extend(entries)
    return found


def _check_roots(roots: Sequence[Path]) -> None:
    resolved: list[Path] = []
    for number, root in enumerate(roots, start=1):
        try:
            resolved.append(root.resolve(strict=True))
        except OSError as error:
            raise ConfigError(
                f"input folder {number} of {len(roots)} must exist and be readable, got "
                f"{os_reason(error)}; correct its path in the configuration.",
                path=str(root),
            ) from None
    for number, root in enumerate(resolved, start=1):
        for other_number, other in enumerate(resolved, start=1):
            if number != other_number and root.is_relative_to(other):
                raise ConfigError(
                    f"input folders must not lie inside one another, got number {number} inside number "
                    f"{other_number}; remove one of them."
                )


def _walk(root_index: int, root: Path) -> Iterator[DiscoveredFile]:
    if not root.is_dir():
        yield _describe(root_index, root, ".")
        return
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(root / folder) as entries:
                listed = list(entries)
        except OSError:
            yield DiscoveredFile(
                root_index=root_index,
                relative_path=folder or ".",
                num_bytes=0,
                problem=Reason.FILE_UNREADABLE,
            )
            continue
        for entry in listed:
            relative = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                pending.append(relative)
            else:
                yield _describe(root_index, Path(entry.path), relative)


def _describe(root_index: int, path: Path, relative: str) -> DiscoveredFile:
    num_bytes, problem = 0, None
    try:
        status = path.stat()
    except OSError:
        problem = Reason.FILE_UNREADABLE
    else:
        if stat.S_ISREG(status.st_mode):
            num_bytes = status.st_size
        else:
            problem = Reason.NOT_REGULAR_FILE
    return DiscoveredFile(root_index=root_index, relative_path=relative, num_bytes=num_bytes, problem=problem)


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
