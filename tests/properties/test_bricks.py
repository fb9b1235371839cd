"""Any region of a volume in bricks equals that of the array as blosc2 itself reads it; damage is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import blosc2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, FormatError
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.slice_codecs.b2nd import OpenFrame
from shardflow.format.table import Table, crc32c
from shardflow.format.volumes import bricks
from shardflow.format.volumes.bricks import BrickVolume, RegionPlan, StoredVolume
from shardflow.storage import ByteRange
from tests.volume_cases import encode_volume

pytestmark = pytest.mark.fast

DTYPES = st.sampled_from(["|u1", "|i1", "<i2", "<u2", "<i4", "<u8", "<f2", "<f4", "<f8"])
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 10), st.integers(1, 10))
BRICK_SHAPES = st.tuples(st.integers(1, 5), st.integers(2, 7), st.integers(2, 7))
HEAD = b"h" * 512


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Draw a volume with values of every kind, and boxes of one value."""
    dtype, shape = np.dtype(draw(DTYPES)), draw(SHAPES)
    values = npst.from_dtype(dtype)
    array = np.resize(np.array(draw(st.lists(values, min_size=1, max_size=12)), dtype), shape)
    array[: shape[0] // 2, : draw(st.integers(0, shape[1]))] = draw(values)
    return array


def index_of(stored: StoredVolume, num_bytes: int) -> bytes:
    """Return the index of a shard whose only field is a volume."""
    fields = [FieldLocation("s000.volume.b2nd", len(HEAD), num_bytes, 0)]
    return ShardIndex.encode("t-0", len(HEAD) + num_bytes + 2048, [("k", fields)], [(0, stored)])


def opened(
    array: NDArray[Any], brick_shape: tuple[int, int, int] = (16, 64, 64)
) -> tuple[BrickVolume, bytes]:
    """Return the bricks of a volume that is the only field of a shard, and the bytes of the shard."""
    encoded = encode_volume(array, brick_shape=brick_shape)
    frame = encoded.read_frame()
    assert len(frame) == encoded.num_bytes
    index = ShardIndex.decode(Table(memoryview(index_of(encoded.stored, len(frame))), name="i"))
    return index.volume(0), HEAD + frame


def read(plan: RegionPlan, shard: bytes) -> NDArray[np.uint8]:
    """Return the buffer of a region of a shard in memory."""

    class Memory:
        def read_ranges(self, _: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
            for span, into in zip(ranges, buffers, strict=True):
                into[:] = shard[span.offset : span.offset + span.num_bytes]

    return plan.read(Memory(), "")  # type: ignore[arg-type]


def regions(draw: Any, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    start = [draw(st.integers(0, size - 1)) for size in shape]
    return start, [draw(st.integers(low + 1, size)) for low, size in zip(start, shape, strict=True)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_region_equals_that_of_blosc2(data: st.DataObject) -> None:
    array, brick_shape = data.draw(arrays()), data.draw(BRICK_SHAPES)
    # Bricks so small are in one block otherwise.
    with patch.object(bricks, "_MIN_BLOCK_NUM_BYTES", data.draw(st.sampled_from([1, 1 << 20]))):
        volume, shard = opened(array, brick_shape)
        check_a_region(data, array, volume, shard)


def check_a_region(data: st.DataObject, array: NDArray[Any], volume: BrickVolume, shard: bytes) -> None:
    start, stop = regions(data.draw, array.shape)
    box = tuple(slice(low, high) for low, high in zip(start, stop, strict=True))
    whole = blosc2.ndarray_from_cframe(shard[len(HEAD) :])[...]
    with patch.object(bricks, "_MAX_GAP_NUM_BYTES", data.draw(st.sampled_from([0, 40, 4096]))):
        plan = volume.plan(start, stop)

    buffer = read(plan, shard)
    extents = [high - low for low, high in zip(start, stop, strict=True)]
    out = np.zeros(extents[::-1], array.dtype).T  # any strides
    plan.decode(buffer, out)
    alike = np.zeros(extents, array.dtype)
    with patch.object(OpenFrame, "is_possible", lambda: False):
        plan.decode(buffer, alike)

    assert whole.tobytes() == array.tobytes()
    assert (
        np.ascontiguousarray(out).tobytes() == np.ascontiguousarray(array[box]).tobytes() == alike.tobytes()
    )
    assert (np.diff(plan.offsets) > 0).all()
    assert plan.read_num_bytes == plan.num_bytes.sum()


@pytest.mark.parametrize("shape", [(256, 512, 512), (205, 500, 400)])
def test_a_crop_reads_and_decodes_a_few_times_its_voxels(shape: tuple[int, int, int]) -> None:
    """At most 3.5 times on average over uniform positions and 5.4 times at worst, see docs/packing.md."""
    random = np.random.default_rng(0)
    tile = random.integers(-900, 900, (shape[0], 100, 100)).astype("<i2")
    volume, shard = opened(
        np.tile(tile, (1, -(-shape[1] // 100), -(-shape[2] // 100)))[:, : shape[1], : shape[2]]
    )
    crop, brick = 96, np.array(volume.brick_shape)
    brick_num_bytes = int(brick.prod()) * 2
    # Where a crop begins with the last voxel of a brick along each axis it touches the most of them.
    worst = [brick - 1, *(np.array(at) for at in np.ndindex(2, 2, 2))]
    uniform = [random.integers(0, np.array(shape) - crop + 1) for _ in range(200)]
    in_bricks, decoded = [], []
    for number, start in enumerate([*worst, *uniform]):
        plan = volume.plan(start.tolist(), (start + crop).tolist())
        in_bricks.append(len(plan.bricks) * brick_num_bytes / (2 * crop**3))
        if number < 30:
            decoded.append(plan.decoded_num_bytes(read(plan, shard)) / (2 * crop**3))
        touched = sum(span.num_bytes for span in plan.brick_ranges())
        assert touched <= plan.read_num_bytes <= 1.5 * touched
    assert np.mean(in_bricks[len(worst) :]) <= 3.5
    assert max(in_bricks) <= 5.4
    assert max(decoded) <= 2.5  # a quarter of a brick is decoded alone


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_bounds_and_occupancy_hold(data: st.DataObject) -> None:
    array = data.draw(arrays())
    volume, _ = opened(array, data.draw(BRICK_SHAPES))
    lowest = np.fmin.reduce(array, axis=None)
    for place in np.ndindex(volume.grid):
        box = tuple(
            slice(at * size, (at + 1) * size) for at, size in zip(place, volume.brick_shape, strict=True)
        )
        brick = array[box]
        low, high = volume.low[place].item(), volume.high[place].item()
        if low == high or (np.isnan(low) and np.isnan(high)):
            assert len({value.tobytes() for value in brick.ravel()}) == 1
            assert np.float32(low).astype(array.dtype).tobytes() == brick.flat[0].tobytes()
        else:
            assert all(low <= value <= high for value in brick.ravel().tolist() if value == value)
        if np.isfinite(brick.astype(float)).all():
            assert (volume.occupancy[place] == 0) <= bool((brick == lowest).all())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_flipped_bit_of_a_brick_is_found(data: st.DataObject) -> None:
    array = np.random.default_rng(0).normal(size=(6, 9, 10)).astype("<f4")
    volume, shard = opened(array, (3, 4, 5))
    plan = volume.plan((0, 0, 0), array.shape)
    buffer = read(plan, shard)
    first = int(plan.places[0])
    bit = data.draw(st.integers(first * 8, (first + plan.read_num_bytes) * 8 - 1))
    buffer[bit // 8] ^= 1 << bit % 8

    with pytest.raises(ChecksumError, match=r"a brick must have crc32c .* \(t-0, s000.volume.b2nd"):
        plan.decode(buffer, np.empty(array.shape, array.dtype))


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize(
    ("at", "what"),
    [(4, "hold 49152 bytes"), (8, "hold 49152 bytes in blocks"), (33, "decode"), (44, "decode")],
)
@pytest.mark.parametrize("least", [1, 1 << 20])
def test_a_brick_of_other_bytes_with_the_right_checksum_is_refused(
    at: int, what: str, is_native: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bricks, "_MIN_BLOCK_NUM_BYTES", least)  # in four blocks, or in one
    array = np.arange(6 * 64 * 64, dtype="<i4").reshape(6, 64, 64) % 100
    volume, shard = opened(array, (3, 64, 64))
    plan = volume.plan((0, 0, 0), array.shape)
    buffer = read(plan, shard)
    first, size = int(plan.places[0]), int(volume.columns["num_bytes"][plan.bricks[0]])
    # Where a quarter begins is told before its bytes.
    at += 12 * (at > 32 and least == 1)
    buffer[first + at : first + at + 3] = 255
    checksums = volume.columns["crc32c"].copy()
    checksums[plan.bricks[0]] = crc32c(buffer[first : first + size].tobytes())
    volume.columns["crc32c"] = checksums  # type: ignore[index]

    with (
        patch.object(OpenFrame, "is_possible", lambda: is_native),
        pytest.raises(FormatError, match=f"a chunk must {what}.*t-0, s000.volume.b2nd"),
    ):
        plan.decode(buffer, np.empty(array.shape, array.dtype))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_flipped_bit_of_the_table_is_found(data: st.DataObject) -> None:
    encoded = encode_volume(np.arange(24.0).reshape(2, 3, 4))
    table = bytearray(index_of(encoded.stored, encoded.num_bytes))
    bit = data.draw(st.integers(0, len(table) * 8 - 1))
    table[bit // 8] ^= 1 << bit % 8

    with pytest.raises(ChecksumError):
        ShardIndex.decode(Table(memoryview(bytes(table)), name="i"))


@settings(deadline=None, max_examples=60)
@given(array=arrays(), brick_shape=BRICK_SHAPES)
def test_bytes_depend_on_the_values_alone(array: NDArray[Any], brick_shape: tuple[int, int, int]) -> None:
    swapped = np.asfortranarray(array).astype(array.dtype.newbyteorder(">"))

    assert (
        encode_volume(swapped, brick_shape=brick_shape).read_frame()
        == encode_volume(array, brick_shape=brick_shape).read_frame()
    )


def test_what_is_no_volume_is_refused() -> None:
    with pytest.raises(FormatError, match="a volume must be"):
        encode_volume(np.zeros((3, 4)))
    volume, _ = opened(np.arange(24, dtype="<i2").reshape(2, 3, 4))
    with pytest.raises(IndexError, match="a region must lie in"):
        volume.plan((0, 0, 0), (2, 3, 5))
    plan = volume.plan((0, 0, 0), (2, 3, 4))
    with pytest.raises(FormatError, match="an array for a region"):
        plan.decode(np.zeros(0, np.uint8), np.empty((2, 3, 4), "<i1"))
    with pytest.raises(FormatError, match="the buffer of a region"):
        plan.decode(np.zeros(0, np.uint8), np.empty((2, 3, 4), "<f4"))
