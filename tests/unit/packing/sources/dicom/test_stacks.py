"""Splitting a series into stacks, and ordering each: by position, never by name or number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.format.reasons import PHASE_NAMES
from shardflow.packing.sources.dicom.dictionary import WHOLE_SLIDE
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.stacks import Stack, StackKind, split_series
from tests.unit.packing.sources.dicom.factory import AXIAL, UID_ROOT, make_header

pytestmark = pytest.mark.fast

SAGITTAL = (0.0, 1.0, 0.0, 0.0, 0.0, -1.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> InstanceHeader:
    return make_header(tmp_path_factory.mktemp("template"), 1)


def _instance(
    template: InstanceHeader,
    number: int,
    position: tuple[float, float, float] | None,
    *,
    orientation: tuple[float, float, float, float, float, float] | None = AXIAL,
    phases: dict[str, str] | None = None,
    **changes: Any,
) -> InstanceHeader:
    values = [""] * len(PHASE_NAMES)
    for name, value in (phases or {}).items():
        values[PHASE_NAMES.index(name)] = value
    plane = replace(template.planes[0], position=position, orientation=orientation, phase=tuple(values))
    return replace(
        template,
        file_index=number,
        sop_instance_uid=f"{UID_ROOT}3.{number}",
        instance_number=number,
        planes=(plane,),
        **changes,
    )


def _z(stack: Stack) -> list[float]:
    return [one.plane.position[2] for one in stack.slices if one.plane.position is not None]


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_slices_are_ordered_by_position_whatever_their_numbers_and_their_order(
    template: InstanceHeader, numbers: list[int], order: list[int]
) -> None:
    instances = [_instance(template, numbers[k] + 1, (0, 0, 3.0 * k)) for k in range(6)]
    (stack,) = split_series([instances[k] for k in order])
    assert _z(stack) == [0, 3, 6, 9, 12, 15]
    assert [one.number for one in stack.slices] == [numbers[k] + 1 for k in range(6)]
    assert (stack.kind, stack.flags, stack.geometry.slice_spacing_mm) == (StackKind.VOLUME, (), 3.0)
    assert stack.primary_rank == (False, 0, -6)


def test_the_result_does_not_depend_on_the_order_of_the_headers(template: InstanceHeader) -> None:
    instances = [
        *(_instance(template, k, (0, 0, k % 5), phases={"echo_number": str(k // 5)}) for k in range(10)),
        *(_instance(template, 20 + k, (float(k), 0, 0), orientation=SAGITTAL) for k in range(3)),
        *(_instance(template, 30 + k, None, orientation=None) for k in range(3)),
    ]
    expected = split_series(instances)
    assert len(expected) == 4
    for seed in range(5):
        random.Random(seed).shuffle(instances)
        assert split_series(instances) == expected


def test_shapes_and_orientations_make_stacks_of_their_own(template: InstanceHeader) -> None:
    bigger = replace(template.image, rows=99)
    instances = [
        _instance(template, 1, (0, 0, 0)),
        _instance(template, 2, (0, 0, 1)),
        _instance(template, 3, (0, 0, 2), image=bigger),
        _instance(template, 4, (0, 0, 3), orientation=SAGITTAL),
        _instance(template, 6, (0, 0, 5), is_localizer=True),
        _instance(
            template, 7, (0, 0, 6), orientation=(1.0, 0.0005, 0.0, -0.0005, 1.0, 0.0)
        ),  # within the tolerance
    ]
    stacks = split_series(instances)
    assert [[one.number for one in stack.slices] for stack in stacks] == [[1, 2, 7], [3], [4], [6]]
    assert [stack.stack_index for stack in stacks] == [0, 1, 2, 3]
    assert [stack.kind for stack in stacks] == [StackKind.IMAGES] * 3 + [StackKind.LOCALIZER]


def test_frames_of_reference_of_several_slices_make_stacks_of_their_own(template: InstanceHeader) -> None:
    """Positions of two frames of reference cannot be compared."""
    frames = ["1.2", "1.2", "1.3", "1.3", "1.3"]
    instances = [
        _instance(template, k, (0, 0, k), frame_of_reference_uid=frame) for k, frame in enumerate(frames)
    ]
    stacks = split_series(instances)
    assert [[one.number for one in stack.slices] for stack in stacks] == [[0, 1], [2, 3, 4]]
    assert [(stack.frame_of_reference_uid, stack.flags) for stack in stacks] == [("1.2", ()), ("1.3", ())]


@pytest.mark.parametrize("frames", [range(8), [0] * 7 + [1], [0, 0, 0, 0, 1, 1, 2, 3]])
def test_a_frame_of_reference_of_one_slice_does_not_tear_a_series(
    template: InstanceHeader, frames: Sequence[int]
) -> None:
    instances = [
        _instance(template, k, (0, 0, 2.5 * k), frame_of_reference_uid=f"1.{frame}")
        for k, frame in enumerate(frames)
    ]
    (stack,) = split_series(instances)
    assert (stack.kind, stack.flags) == (StackKind.VOLUME, ("frame_of_reference_varies",))
    assert stack.frame_of_reference_uid == ""
    whole = split_series([replace(one, frame_of_reference_uid="1.0") for one in instances])[0]
    assert [one.number for one in stack.slices] == [one.number for one in whole.slices]
    assert stack.geometry == whole.geometry


@pytest.mark.parametrize(
    ("phases", "flags", "stacks"),
    [
        (["echo_number"], ["split_by_echo_number"], [[0, 2, 4], [1, 3, 5]]),
        (["diffusion_b_value"], ["split_by_diffusion_b_value"], [[0, 2, 4], [1, 3, 5]]),
        ([], ["split_by_order"], [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_repeated_positions_are_split_by_what_tells_them_apart(
    template: InstanceHeader, phases: list[str], flags: list[str], stacks: list[list[int]]
) -> None:
    instances = [
        _instance(template, number, (0, 0, number // 2), phases={name: str(number % 2) for name in phases})
        for number in range(6)
    ]
    found = split_series(instances)
    assert [[one.number for one in stack.slices] for stack in found] == stacks
    assert all(list(stack.flags) == flags for stack in found)


def test_two_phases_are_needed_where_one_is_not_enough(template: InstanceHeader) -> None:
    instances = [
        _instance(
            template, k, (0, 0, k // 4), phases={"echo_time": str(k % 2), "image_type": "MP"[k // 2 % 2]}
        )
        for k in range(8)
    ]
    found = split_series(instances)
    assert [[one.number for one in stack.slices] for stack in found] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert {stack.flags for stack in found} == {("split_by_echo_time", "split_by_image_type")}


def test_a_value_that_differs_on_every_slice_does_not_tear_a_stack_apart(template: InstanceHeader) -> None:
    instances = [
        _instance(template, k, (0, 0, k // 2), phases={"trigger_time": str(k), "temporal_position": ""})
        for k in range(8)
    ]
    assert [len(stack.slices) for stack in split_series(instances)] == [4, 4]


def test_a_position_that_repeats_once_makes_a_stack_of_one(template: InstanceHeader) -> None:
    instances = [_instance(template, k, (0, 0, min(k, 4))) for k in range(6)]
    assert [[one.number for one in stack.slices] for stack in split_series(instances)] == [
        [0, 1, 2, 3, 4],
        [5],
    ]


@pytest.mark.parametrize(
    ("locations", "numbers", "flag", "order"),
    [
        ((3.0, 1.0, 2.0), (1, 2, 3), "ordered_by_slice_location", [2, 3, 1]),
        ((3.0, 1.0, 1.0), (3, 1, 2), "ordered_by_instance_number", [2, 3, 1]),
        ((None, 1.0, 2.0), (3, 1, 2), "ordered_by_instance_number", [2, 3, 1]),
        ((None, None, None), (1, 1, 2), "ordered_by_identifier", [1, 2, 3]),
        ((None, None, None), (None, 1, 2), "ordered_by_identifier", [2, 3, 1]),
    ],
)
def test_without_positions_the_order_says_what_it_rests_on(
    template: InstanceHeader,
    locations: tuple[float | None, ...],
    numbers: tuple[int | None, ...],
    flag: str,
    order: list[int],
) -> None:
    instances = [
        replace(_instance(template, k + 1, None), slice_location=locations[k], instance_number=numbers[k])
        for k in range(3)
    ]
    (stack,) = split_series(instances[::-1])
    assert [one.instance.file_index for one in stack.slices] == order
    assert stack.flags == ("no_position", flag)
    assert stack.geometry.affine_lps is None
    assert stack.geometry.pixel_spacing_mm == (0.5, 0.75)
    assert stack.kind is StackKind.IMAGES


def test_projections_fall_back_to_the_spacing_of_their_detector(template: InstanceHeader) -> None:
    one = _instance(template, 1, None, orientation=None, detector_spacing=(0.1, 0.2))
    bare = replace(one, planes=(replace(one.planes[0], pixel_spacing=None),))
    (stack,) = split_series([bare])
    assert stack.geometry.pixel_spacing_mm == (0.1, 0.2)
    assert stack.flags == ("detector_plane_spacing", "no_position")


@pytest.mark.parametrize(
    ("changes", "kind", "flags"),
    [
        ({"is_localizer": True}, StackKind.LOCALIZER, ()),
        ({"sop_class_uid": "1.2.840.10008.5.1.4.1.1.7"}, StackKind.SECONDARY, ()),
        ({"modality": "OT"}, StackKind.SECONDARY, ()),
        ({"image_type": ("ORIGINAL", "PRIMARY", "M", "MOSAIC")}, StackKind.IMAGES, ("mosaic",)),
        ({"image_type": ("DERIVED", "SECONDARY", "REFORMATTED")}, StackKind.VOLUME, ("derived",)),
        ({"flags": ("excess_pixel_bytes",)}, StackKind.VOLUME, ("excess_pixel_bytes",)),
    ],
)
def test_kinds_and_flags(
    template: InstanceHeader, changes: dict[str, Any], kind: StackKind, flags: tuple[str, ...]
) -> None:
    (stack,) = split_series([_instance(template, k, (0, 0, k), **changes) for k in range(4)])
    assert (stack.kind, stack.flags) == (kind, flags)


def test_frames_of_one_file_are_slices(tmp_path: Path) -> None:
    cine = make_header(
        tmp_path, 1, modality="US", pixels=np.zeros((5, 3, 4), np.uint8), position=None, orientation=None
    )
    (stack,) = split_series([cine])
    assert stack.kind is StackKind.FRAMES
    assert [one.frame for one in stack.slices] == [0, 1, 2, 3, 4]
    assert [one.number for one in stack.slices] == [1, 2, 3, 4, 5]


def test_colour_slices_of_a_ct_are_captures(tmp_path: Path) -> None:
    headers = [
        make_header(tmp_path, k, pixels=np.zeros((3, 4, 3), np.uint8), position=(0, 0, k))
        for k in range(1, 5)
    ]
    (stack,) = split_series(headers)
    assert (stack.kind, stack.samples_per_pixel) == (StackKind.SECONDARY, 3)


def test_kinds_are_ranked_for_the_primary_series() -> None:
    assert list(StackKind) == ["volume", "images", "frames", "slide", "secondary", "localizer"]


def test_an_uncalibrated_projection_has_the_spacing_of_its_detector(tmp_path: Path) -> None:
    flat: dict[str, Any] = {"modality": "DX", "position": None, "orientation": None}
    for number, (spacing, flags) in enumerate(
        {(0.1, 0.1): ("detector_plane_spacing", "no_position"), (0.08, 0.08): ("no_position",)}.items()
    ):
        header = make_header(
            tmp_path, number, **flat, PixelSpacing=list(spacing), ImagerPixelSpacing=[0.1, 0.1]
        )
        (stack,) = split_series([header])
        assert (stack.geometry.pixel_spacing_mm, stack.flags) == (spacing, flags)


@pytest.mark.parametrize(("pixel_mm", "num_stacks"), [(0.006, 1), (0.5, 6)])
def test_planes_a_few_micrometres_apart_are_planes_where_pixels_are_as_fine(
    template: InstanceHeader, pixel_mm: float, num_stacks: int
) -> None:
    """Optical coherence tomography: 512 planes on 3 mm. Of a CT the same distance is an error of rounding."""
    headers = [_instance(template, number, (0.0, 0.0, 0.006 * number)) for number in range(6)]
    fine = [
        replace(each, planes=(replace(each.planes[0], pixel_spacing=(pixel_mm, pixel_mm)),))
        for each in headers
    ]
    assert len(split_series(fine)) == num_stacks


@pytest.mark.parametrize(
    ("levels", "slides", "flags"),
    [
        ([(64, "c", "1", "p", "f")] * 1, [[64]], set()),
        # What every file has of its own tells nothing.
        (
            [(64, "c", "1", "", "f"), (32, "c", "1", "", "g"), (16, "c", "1", "", "h")],
            [[64, 32, 16]],
            {"frame"},
        ),
        ([(64, "c", "1", "p", "f"), (32, "c", "1", "q", "f")], [[64, 32]], {"pyramid"}),
        ([(64, "c", "1", "", "f"), (32, "c", "2", "", "f")], [[64, 32]], set()),
        ([(64, "c", "1", "p", "f"), (32, "c", "1", "q", "g")], [[64, 32]], {"frame", "pyramid"}),
        # A pyramid counts more than frames of reference.
        (
            [(64, "c", "1", "p", "f"), (32, "c", "1", "p", "f"), (16, "c", "1", "p", "g")],
            [[64, 32, 16]],
            {"frame"},
        ),
        ([(64, "c", "", "", ""), (32, "d", "", "", "")], [[64], [32]], {"several"}),
        (
            [
                (64, "c", "1", "", "f"),
                (32, "c", "1", "", "f"),
                (60, "d", "1", "", "f"),
                (30, "d", "1", "", "f"),
            ],
            [[64, 32], [60, 30]],
            {"several"},
        ),
        (
            [
                (64, "c", "1", "", "f"),
                (32, "c", "1", "", "f"),
                (64, "c", "2", "", "f"),
                (32, "c", "2", "", "f"),
            ],
            [[64, 32], [64, 32]],
            {"several"},
        ),
        (
            [
                (64, "c", "1", "p", "f"),
                (32, "c", "1", "p", "f"),
                (60, "c", "1", "q", "f"),
                (30, "c", "1", "q", "f"),
            ],
            [[64, 32], [60, 30]],
            {"several"},
        ),
        (
            [
                (64, "c", "1", "", "f"),
                (32, "c", "1", "", "f"),
                (60, "c", "1", "", "g"),
                (30, "c", "1", "", "g"),
            ],
            [[64, 32], [60, 30]],
            {"several"},
        ),
        # Nothing tells these apart, and then the shape does, or nothing at all.
        (
            [(64, "c", "1", "", "f"), (32, "c", "1", "", "f"), (-40, "c", "1", "", "f")],
            [[64, 32], [-40]],
            {"several"},
        ),
        ([(64, "c", "1", "", "f"), (64, "c", "1", "", "f")], [[64], [64]], {"several", "order"}),
    ],
)
def test_levels_are_slides_by_what_does_not_vary_file_by_file(
    template: InstanceHeader,
    levels: list[tuple[int, str, str, str, str]],
    slides: list[list[int]],
    flags: set[str],
) -> None:
    """Side (below 0 it is twice as wide as high), container, optical path, pyramid, frame of reference."""
    headers = [
        replace(
            _instance(template, number, None, frame_of_reference_uid=frame),
            sop_class_uid=WHOLE_SLIDE,
            pyramid=(container, path, pyramid),
            image=replace(template.image, rows=side if side > 0 else -side // 2, columns=abs(side)),
        )
        for number, (side, container, path, pyramid, frame) in enumerate(levels)
    ]
    words = {
        "frame": "frame_of_reference_varies",
        "pyramid": "pyramid_varies",
        "several": "several_slides",
        "order": "split_by_order",
    }
    for order in (headers, headers[::-1]):
        found = split_series(order)
        assert [[each.image.columns for each in stack.levels] for stack in found] == [
            [abs(side) for side in slide] for slide in slides
        ]
        named = [{(each.pyramid[:2], each.frame_of_reference_uid) for each in one.levels} for one in found]
        assert len(found) == 1 or all(len(one) == 1 for one in named)
        assert {flag for stack in found for flag in stack.flags} == {words[flag] for flag in flags}
        assert all(one.frame_of_reference_uid in ("", one.levels[0].frame_of_reference_uid) for one in found)
    assert found == split_series(headers)
