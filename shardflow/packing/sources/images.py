"""Dispatch over image formats: DICOM, NIfTI, PNG, JPEG, and slides in TIFF.

Every format is read as an `InstanceHeader` and decoded to slices in modality units, so the rest of packing
does not depend on the file format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardflow.packing.sources.dicom.acquisition import AcquisitionFacts, read_acquisition
from shardflow.packing.sources.dicom.attributes import (
    read_attributes,
    read_everywhere,
    read_frame_attributes,
)
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import BrokenInstance, InstanceHeader, read_header
from shardflow.packing.sources.dicom.stored import iter_stored
from shardflow.packing.sources.nifti import NIFTI, iter_nifti, read_nifti
from shardflow.packing.sources.raster import JPEG, PNG, iter_raster, read_raster
from shardflow.packing.sources.slides import read_tiff

if TYPE_CHECKING:
    from shardflow.packing.sources.dicom.attributes import AttributeValue
    from shardflow.packing.sources.dicom.headers import SliceRef
    from shardflow.packing.sources.placement import Placement

_READERS = {JPEG: iter_raster, NIFTI: iter_nifti, PNG: iter_raster}


def read_image(
    path: Path, placement: Placement | None, *, limits: HeaderLimits
) -> InstanceHeader | BrokenInstance:
    """Read what packing needs of one file.

    Args:
        path: The file.
        placement: What the layout says of it; None where DICOM headers say everything.
        limits: Bounds on what the file declares.

    Raises:
        SourceError: The file is no image, or damaged; ``reason`` is a `Reason`.
    """
    if placement is None:
        return read_header(path, limits=limits)
    match placement.form:
        case "dicom":
            return read_header(path, limits=limits, identify=placement.identify)
        case "nifti":
            return read_nifti(path, placement, limits=limits)
        case "raster":
            return read_raster(path, placement, limits=limits)
        case "slide":
            return read_tiff(path, placement, limits=limits)


def iter_stored_image(
    path: Path, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Iterator[tuple[np.ndarray[Any, np.dtype[Any]], str]]:
    """Yield stored values of any form; as `shardflow.packing.sources.dicom.stored.iter_stored`."""
    return _READERS.get(header.transfer_syntax_uid, iter_stored)(path, header, frames, limits)


def read_image_attributes(
    path: Path, placement: Placement | None, keywords: Sequence[str], *, limits: HeaderLimits
) -> dict[str, AttributeValue]:
    """Read technical attributes: of the header where there is one, then of the layout for what it lacks.

    Raises:
        SourceError: As `shardflow.packing.sources.dicom.attributes.read_attributes`.
    """
    given = _said(placement, keywords)
    if placement is not None and placement.form != "dicom":
        return given
    return {**given, **read_attributes(path, keywords, limits=limits)}


def _said(placement: Placement | None, keywords: Sequence[str]) -> dict[str, AttributeValue]:
    """Return the attributes that a layout states."""
    if placement is None:
        return {}
    given = {keyword: values for keyword, values in placement.attributes.items() if keyword in keywords}
    # What identifies a patient is asked for where it is looked for in texts, to be taken out.
    modality = placement.modality or ("SM" if placement.form == "slide" else "")
    said = {"Modality": modality, "PatientID": placement.patient, "StudyID": placement.study}
    given.update({keyword: (text,) for keyword, text in said.items() if text and keyword in keywords})
    return given


def read_frame_facts(
    path: Path,
    placement: Placement | None,
    keywords: Sequence[str],
    frames: Sequence[int],
    *,
    limits: HeaderLimits,
) -> list[dict[str, AttributeValue]]:
    """Read technical attributes of frames, as `read_image_attributes`; of an enhanced object those of each.

    Raises:
        SourceError: As `shardflow.packing.sources.dicom.attributes.read_frame_attributes`.
    """
    given = _said(placement, keywords)
    if placement is not None and placement.form != "dicom":
        return [given] * len(frames)
    return [{**given, **one} for one in read_frame_attributes(path, keywords, frames, limits=limits)]


def read_stack_facts(
    path: Path, placement: Placement | None, slices: Sequence[SliceRef], *, limits: HeaderLimits
) -> AcquisitionFacts:
    """Read the facts of a stack that its values need, of its first file; of other formats what points have.

    Raises:
        SourceError: As `shardflow.packing.sources.dicom.acquisition.read_acquisition`.
    """
    if placement is not None and placement.form != "dicom":
        first = slices[0]
        num_frames = first.instance.image.num_frames
        found: dict[str, Any] = {}
        if placement.channels:
            point = first.frame * len(placement.channels) // num_frames
            found["channel"] = placement.channels[point]
        if placement.b_values:
            point = first.frame * len(placement.b_values) // num_frames
            found["diffusion"] = {"b_value_s_mm2": placement.b_values[point]}
        return AcquisitionFacts(published=found)
    return read_acquisition(path, slices, limits=limits)


def read_image_people(
    path: Path, placement: Placement | None, keywords: Sequence[str], *, limits: HeaderLimits
) -> dict[str, tuple[str, ...]]:
    """Read the people named anywhere in a header, and the patient named by the layout.

    Raises:
        SourceError: As `shardflow.packing.sources.dicom.attributes.read_everywhere`.
    """
    if placement is None:
        return read_everywhere(path, keywords, limits=limits)
    found = read_everywhere(path, keywords, limits=limits) if placement.form == "dicom" else {}
    said = {
        "AccessionNumber": placement.other_ids,
        "PatientID": (placement.patient,),
        "StudyID": (placement.study,),
    }
    given = {keyword: texts for keyword, texts in said.items() if any(texts) and keyword in keywords}
    return {**found, **{keyword: (*found.get(keyword, ()), *texts) for keyword, texts in given.items()}}
