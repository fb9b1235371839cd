"""The sweep: every file of pydicom's test data and of the shared data has an outcome and right pixels.

The outcomes are golden: a person has looked at each and agrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.pixels import apply_modality_lut

from shardflow.errors import SourceError
from shardflow.format.reasons import FLAGS, Reason
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import InstanceHeader, header_from_json, header_to_json
from shardflow.packing.sources.dicom.pixels import (
    DisplayRange,
    check_copies,
    form_of,
    iter_slices,
)
from shardflow.packing.sources.dicom.stacks import Stack, build_studies
from shardflow.packing.sources.slides import DicomLevel
from tests.stacks import iter_stack
from tests.unit.packing.sources.dicom.corpus import BUNDLED, MORE, Corpus, read_corpus, reference_frames

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module", params=["bundled", "more", "shared"])
def corpus(request: pytest.FixtureRequest) -> Corpus:
    roots = {"bundled": BUNDLED, "more": MORE}
    return read_corpus(roots.get(request.param) or request.getfixturevalue("shared_data"))


def test_every_file_has_the_outcome_that_a_person_agreed_with(
    corpus: Corpus, golden: Callable[[str, object], None]
) -> None:
    files: dict[str, str] = dict(corpus.outcomes)
    copies: dict[str, str] = {}
    stacks: list[dict[str, object]] = []
    for study in build_studies(corpus.headers).studies:
        copies |= {corpus.name(pair.copy): f"copy of {corpus.name(pair.kept)}" for pair in study.copies}
        stacks += [_row(corpus, stack) for stack in study.stacks]
    files |= {corpus.name(header): "header" for header in corpus.headers} | copies
    assert len(files) == len(corpus.files)
    name = {BUNDLED: "bundled", MORE: "more"}.get(corpus.roots[0], "shared")
    golden(f"dicom-outcomes-{name}", files)
    golden(f"dicom-stacks-{name}", sorted(stacks, key=lambda row: (str(row["first"]), str(row["index"]))))


def _row(corpus: Corpus, stack: Stack) -> dict[str, object]:
    form = form_of(one.instance for one in stack.slices)
    spacing = stack.geometry.slice_spacing_mm
    return {
        "first": corpus.name(stack.slices[0].instance),
        "index": stack.stack_index,
        "kind": stack.kind,
        "shape": [len(stack.slices), stack.rows, stack.columns, stack.samples_per_pixel],
        "form": [stack.modality, form.dtype, form.unit, form.mirror is not None],
        "spacing": None if spacing is None else f"{spacing:.4f}",
        "missing": stack.geometry.num_missing,
        "flags": list(stack.flags),
    }


def test_every_reason_and_flag_is_on_its_list(corpus: Corpus) -> None:
    assert set(corpus.outcomes.values()) <= {reason.value for reason in Reason}
    studies = build_studies(corpus.headers).studies
    assert {flag for study in studies for stack in study.stacks for flag in stack.flags} <= set(FLAGS)


def test_headers_survive_json(corpus: Corpus) -> None:
    assert [header_from_json(header_to_json(header)) for header in corpus.headers] == corpus.headers


def test_every_decoded_pixel_equals_pydicoms(corpus: Corpus) -> None:
    """Stored values by pydicom alone, palettes by SimpleITK, units by the plainest formula in float64."""
    failures: Counter[str] = Counter()
    for header in corpus.headers:
        path = corpus.locate(header)
        if header.is_slide:
            with pytest.raises(SourceError, match="tile by tile"):
                next(iter_slices(path, header))
            continue
        try:
            decoded = list(iter_slices(path, header))
        except SourceError as error:
            failures[f"{corpus.name(header)}: {error.reason}"] += 1
            continue
        expected = list(_expected(path, header))
        assert len(decoded) == len(expected) == header.image.num_frames
        for found, wanted in zip(decoded, expected, strict=True):
            assert found.num_clipped == 0
            assert found.pixels.shape == wanted.shape, corpus.name(header)
            np.testing.assert_allclose(found.pixels, wanted, rtol=1e-6, err_msg=corpus.name(header))
    assert dict(failures) == (
        {"JPEG2000-embedded-sequence-delimiter.dcm: DECODE_FAILED": 1} if corpus.roots == [BUNDLED] else {}
    )


def test_every_tile_of_a_slide_equals_pydicoms(corpus: Corpus) -> None:
    slides = [header for header in corpus.headers if header.is_slide]
    assert len(slides) == (0 if corpus.roots[0] in (BUNDLED, MORE) else 6)
    for header in slides:
        path = corpus.locate(header)
        level = DicomLevel(path, header, HeaderLimits())
        places = [(row, column) for row in range(level.grid[0]) for column in range(level.grid[1])]
        tiles = list(level.pixels(places))
        assert np.array_equal(np.array(tiles), np.array(list(reference_frames(path))))


def _expected(path: Path, header: InstanceHeader) -> list[Array]:
    form = form_of([header])
    frames: list[Array] = []
    for number, stored in enumerate(reference_frames(path)):
        plane = header.plane(number)
        if header.image.photometric_interpretation == "PALETTE COLOR":
            frames.append(_palette(path, number))
            continue
        if header.image.is_color:
            frames.append(stored >> (header.image.bits_stored - 8))
            continue
        values = stored.astype(np.float64) * (plane.slope or 1.0) + (plane.intercept or 0.0)
        if header.has_modality_lut:
            values = apply_modality_lut(stored, _read(path)).astype(np.float64)
        if form.mirror is not None:
            values = form.mirror - values
        if header.padding is not None:
            is_padding = (stored >= header.padding[0]) & (stored <= header.padding[1])
            values[is_padding] = form.fill
        frames.append(values)
    return frames


def _palette(path: Path, frame: int) -> Array:
    """Return a frame as SimpleITK colors it: pydicom reads tables of big-endian files the wrong way round."""
    colors: Array = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))[frame]
    return colors >> 8 if colors.dtype == np.uint16 else colors


def _read(path: Path) -> Dataset:
    dataset: Dataset = dcmread(path)
    return dataset


def test_every_stack_decodes_in_one_form(corpus: Corpus) -> None:
    failures: set[str] = set()
    for study in build_studies(header for header in corpus.headers if not header.is_slide).studies:
        try:
            check_copies(study, corpus.locate)
        except SourceError as error:
            failures.add(f"{corpus.name(study.instances[0])}: {error.reason}")
            continue
        for stack in study.stacks:
            form = form_of(one.instance for one in stack.slices)
            display = DisplayRange(stack, form)
            num_slices = 0
            for decoded in iter_stack(stack, corpus.locate, form=form):
                assert decoded.pixels.dtype == np.dtype(form.dtype)
                assert decoded.pixels.flags.c_contiguous
                assert decoded.pixels.shape[:2] == (stack.rows, stack.columns)
                assert (decoded.pixels.ndim == 3) == (stack.samples_per_pixel == 3)
                display.add(decoded)
                num_slices += 1
            assert num_slices == len(stack.slices)
            low, high = display.result()
            assert low < high
    conflicts = {
        BUNDLED: {
            "JPEG2000-embedded-sequence-delimiter.dcm: DECODE_FAILED",  # its size marker is overwritten
            "SC_rgb_small_odd.dcm: CONFLICTING_INSTANCE",  # one identifier, lossy and lossless versions
            "rtdose_expb.dcm: CONFLICTING_INSTANCE",  # one identifier, one frame and fifteen
        },
        MORE: {
            "OBXXXX1A_2frame.dcm: CONFLICTING_INSTANCE",  # one identifier, one frame and two
            "SC_rgb_dcmtk_ebcr_dcmd.dcm: CONFLICTING_INSTANCE",  # lossy versions
        },
    }
    assert failures == conflicts.get(corpus.roots[0], set())
