"""What was odd about a stack and did not keep it from being packed: one closed list of codes.

A flag says what happened and what was done; it never holds a value of a file. Codes are never renamed.
"""

from __future__ import annotations

__all__ = ["FLAGS", "PHASE_NAMES"]

PHASE_NAMES = (
    "stack_id",
    "acquisition_number",
    "echo_number",
    "echo_time",
    "temporal_position",
    "trigger_time",
    "diffusion_b_value",
    "diffusion_direction",
    "sequence_name",
    "image_type",
    "convolution_kernel",
    "contrast",
)
"""What tells slices at one position apart, in the order in which it is asked."""

FLAGS: dict[str, str] = {
    "derived": "At least one image says DERIVED: it was computed from others.",
    "detector_plane_spacing": "The pixel spacing is the one on the detector, not in the patient.",
    "encoding_contradicts_syntax": "The bytes have another encoding than the transfer syntax says; they won.",
    "excess_pixel_bytes": "The pixel data is longer than the image; the rest was left out.",
    "functional_groups_mismatch": "The per-frame groups do not fit the frames; the shared ones stand.",
    "gantry_tilt": "The stack is sheared by more than 0.5 degrees; the affine keeps the shear.",
    "high_bit_corrected": "The high bit contradicted the bits stored; the lowest possible one was taken.",
    "irregular_spacing": "Gaps differ from the median gap by more than 1 % and are no multiples of it.",
    "missing_slices": "Gaps are multiples of the median gap: slices of a regular grid are not there.",
    "mosaic": "Many slices are tiled into one image; it is kept as it is.",
    "no_position": "Position or orientation is missing; there is no affine.",
    "no_preamble": "The file has no DICOM preamble; its bytes looked like DICOM.",
    "no_transfer_syntax": "The file names no transfer syntax; the encoding was found from its bytes.",
    "ordered_by_identifier": "Neither positions nor numbers order the slices; their identifiers did.",
    "ordered_by_instance_number": "No positions: the slices are ordered by Instance Number.",
    "ordered_by_slice_location": "No positions: the slices are ordered by Slice Location.",
    "single_slice": "One slice; the spacing is its stated thickness, if any.",
    "slices_not_aligned": "A slice lies more than half a pixel beside the line from first to last.",
    **{
        f"split_by_{name}": f"Positions repeat in the series; the stacks differ in {name.replace('_', ' ')}."
        for name in PHASE_NAMES
    },
    "split_by_order": "Positions repeat and nothing tells the repeats apart; numbers did.",
}
"""Code to one plain sentence."""
