"""Headers of images whose format knows nothing of patients: a placement and a few facts make one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardflow.sources.dicom import ImageDescription, InstanceHeader, PlaneHeader

if TYPE_CHECKING:
    from shardflow.sources.layouts.placement import Placement

__all__ = ["make_header"]


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
        **identifiers,
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
    )
