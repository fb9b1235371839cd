"""DICOM in gzip: read as what it holds, bounded, damage named."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import InstanceHeader, read_header
from shardflow.packing.sources.dicom.pixels import iter_slices
from tests.dicom_factory import make_study

pytestmark = pytest.mark.fast


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    (plain,) = make_study(tmp_path, num_slices=1).files
    packed = tmp_path / "a.dcm.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    return packed


def test_it_is_the_same_image(tmp_path: Path, packed: Path) -> None:
    plain = next(tmp_path.glob("*.dcm"))
    headers = [read_header(path) for path in (plain, packed)]
    assert headers[0] == headers[1]
    assert isinstance(headers[0], InstanceHeader)
    slices = [next(iter(iter_slices(path, headers[0]))).pixels for path in (plain, packed)]
    assert np.array_equal(slices[0], slices[1])


def test_what_it_inflates_to_is_bounded(packed: Path) -> None:
    packed.write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(SourceError) as caught:
        read_header(packed, limits=replace(HeaderLimits(), max_inflated_bytes=1 << 20))
    assert caught.value.reason == "LIMIT_EXCEEDED"


def test_damage_is_named(packed: Path) -> None:
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(SourceError) as caught:
        read_header(packed)
    assert caught.value.reason == "HEADER_UNREADABLE"
