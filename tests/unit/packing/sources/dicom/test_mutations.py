"""Damaged files: whatever the bytes are, a file ends in an outcome, in bounded time."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import BrokenInstance, read_header
from shardflow.packing.sources.dicom.pixels import iter_slices
from shardflow.packing.sources.dicom.stacks import build_studies
from tests.unit.packing.sources.dicom.corpus import BUNDLED

LIMITS = HeaderLimits(max_pixel_bytes=1 << 26, max_inflated_bytes=1 << 24)
NAMES = (
    *("CT_small.dcm", "MR_small_RLE.dcm", "MR_small_jp2klossless.dcm", "MR_small_jpeg_ls_lossless.dcm"),
    *("MR_small_bigendian.dcm", "MR_small_implicit.dcm", "SC_rgb_jpeg_gdcm.dcm", "SC_rgb_rle_2frame.dcm"),
    *(
        "SC_rgb_small_odd_jpeg.dcm",
        "examples_palette.dcm",
        "image_dfl.dcm",
        "JPGExtended.dcm",
        "SC_rgb_dcmtk_+eb+cy+np.dcm",
    ),
)


def _mutate(data: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(data)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(mutated[: rng.randrange(len(mutated))])
    if kind == 1:
        start = rng.randrange(len(mutated))
        del mutated[start : start + rng.randrange(1, 64)]
        return bytes(mutated)
    area = len(mutated) if kind == 2 else min(3000, len(mutated))
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        mutated[rng.randrange(area)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
    return bytes(mutated)


def _outcome(path: Path) -> str:
    try:
        header = read_header(path, limits=LIMITS)
        if isinstance(header, BrokenInstance):
            return header.reason.value
        build_studies([header])
        for decoded in iter_slices(path, header, limits=LIMITS):
            assert decoded.pixels.shape[:2] == (header.image.rows, header.image.columns)
    except SourceError as error:
        return error.reason
    return "PACKED"


def _run(folder: Path, count: int, seed: int) -> Counter[str]:
    sources = [(BUNDLED / name).read_bytes() for name in NAMES]
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    path = folder / "mutated.dcm"
    for _ in range(count):
        path.write_bytes(_mutate(rng.choice(sources), rng))
        started = time.monotonic()
        outcomes[_outcome(path)] += 1
        assert time.monotonic() - started < 20
    return outcomes


def test_mutated_files_end_in_an_outcome(tmp_path: Path) -> None:
    outcomes = _run(tmp_path, 500, seed=1)
    assert outcomes.total() == 500
    assert outcomes["PACKED"] > 20
    assert len(outcomes) >= 6


@pytest.mark.slow
def test_ten_thousand_mutated_files_end_in_an_outcome(tmp_path: Path) -> None:
    assert _run(tmp_path, 10_000, seed=2).total() == 10_000
