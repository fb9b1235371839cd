"""Stored values of frames: finds the bytes of each frame, reads native ones, and decodes the others.

Every fragment of an encapsulated file is checked against the size of the file, so a truncated file is found
here and not by a codec that returns half an image. A color frame becomes 8-bit RGB. Monochrome frames keep
the integers that were stored, without the bits above ``high_bit`` (they may hold an overlay) and with the
sign extended; `pixels` gives the integers their meaning. Lookup tables (modality LUT, palette) are read only
where the header states one.

Source: DICOM PS3.3, C.11.1.1 (modality LUT), C.7.6.3.1.5 and C.7.6.3.1.6 (palette), C.7.9.2 (segmented
palette), C.7.6.3.1.8 (extended offset table: one fragment a frame, which the one-to-one rule below covers);
PS3.5, A.4 (encapsulation).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.dictionary import DEFLATED, EXPLICIT_BIG, RLE
from shardflow.packing.sources.dicom.elements import (
    Elements,
    HeaderLimits,
    open_file,
    read_at,
    read_elements,
    read_inflated,
)
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.values import third_party_silence

Array = np.ndarray[Any, np.dtype[Any]]

_MODALITY_LUT, _LUT_DESCRIPTOR, _LUT_DATA = 0x00283000, 0x00283002, 0x00283006
_PALETTE_DESCRIPTORS = (0x00281101, 0x00281102, 0x00281103)
_PALETTE_DATA = (0x00281201, 0x00281202, 0x00281203)
_SEGMENTED_DATA = (0x00281221, 0x00281222, 0x00281223)
_MAX_ENTRIES = 1 << 16


class LookupTable:
    """Maps stored values to table entries; values outside take the first or the last entry."""

    def __init__(self, entries: Array, first: int) -> None:
        """Take ``(n,)`` or ``(n, 3)`` entries, the first of which belongs to the stored value ``first``."""
        self.entries = entries
        self._first = first

    def apply(self, stored: Array) -> Array:
        """Look every value up; a palette adds an axis of three samples."""
        index = stored.astype(np.int64) - self._first
        return np.take(self.entries, np.clip(index, 0, len(self.entries) - 1), axis=0)


def read_modality_lut(path: Path, limits: HeaderLimits, *, is_signed: bool) -> LookupTable:
    """Read the table that replaces slope and intercept.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION where the table is damaged; else as `read_elements`.
    """
    item = read_elements(path, {_MODALITY_LUT}, limits).items(_MODALITY_LUT)[0]
    num_entries, first, bits = _descriptor(item, _LUT_DESCRIPTOR, is_signed=is_signed)
    data = item.values.get(_LUT_DATA, b"")
    if bits == 8 and len(data) in (num_entries, num_entries + 1):
        return LookupTable(np.frombuffer(data, np.uint8, num_entries), first)
    if len(data) < 2 * num_entries:
        raise _invalid("the modality LUT is shorter than its descriptor says")
    order = "<" if item.is_little_endian else ">"
    return LookupTable(np.frombuffer(data, f"{order}u2", num_entries).astype(np.uint16), first)


def read_palette(path: Path, limits: HeaderLimits, *, is_signed: bool) -> LookupTable:
    """Read the palette of a PALETTE COLOR image as 8-bit RGB entries.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION where the palette is absent or damaged; else as
            `read_elements`.
    """
    elements = read_elements(path, {*_PALETTE_DESCRIPTORS, *_PALETTE_DATA, *_SEGMENTED_DATA}, limits)
    num_entries, first, bits = _descriptor(elements, _PALETTE_DESCRIPTORS[0], is_signed=is_signed)
    if any(elements.values.get(tag) for tag in _SEGMENTED_DATA):
        tables = [_expand_segments(elements, tag, bits, num_entries) for tag in _SEGMENTED_DATA]
        return _palette_of(np.stack(tables, axis=-1), first)
    from pydicom.dataset import Dataset
    from pydicom.pixels import apply_color_lut

    dataset = Dataset()
    for tag in _PALETTE_DESCRIPTORS:
        dataset.add_new(tag, "US", [num_entries % _MAX_ENTRIES, 0, bits])
    for tag in _PALETTE_DATA:
        if elements.values.get(tag):
            dataset.add_new(tag, "OW", elements.values[tag])
    try:
        with third_party_silence():
            entries = np.asarray(apply_color_lut(np.arange(num_entries, dtype=np.uint16), dataset))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the table is the input's; whatever it breaks is its fault
        raise _invalid(f"the palette cannot be read: {type(error).__name__}") from None
    if entries.shape != (num_entries, 3):
        raise _invalid("the palette does not have three tables of one length")
    return _palette_of(entries, first)


def _palette_of(entries: Array, first: int) -> LookupTable:
    """Return ``(n, 3)`` entries as 8-bit RGB."""
    shift = 8 * (entries.dtype.itemsize - 1)
    # Sixteen-bit entries that hold eight-bit values all lie in the low byte.
    is_wide = shift > 0 and int(entries.max(initial=0)) > 255
    return LookupTable((entries >> shift if is_wide else entries).astype(np.uint8), first)


def _expand_segments(elements: Elements, tag: int, bits: int, num_entries: int) -> Array:
    """Expand one color of a segmented palette: runs of values, lines to a value, and copies of segments.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION where the segments are damaged or do not fill the table.
    """
    kind = np.dtype(np.uint8 if bits == 8 else ("<u2" if elements.is_little_endian else ">u2"))
    raw = elements.values.get(tag, b"")
    words: list[int] = np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], kind).tolist()
    found: list[int] = []
    offset_words = 4 // kind.itemsize

    def expand(place: int, *, is_copy: bool) -> int:
        """Expand the segment at a place; return where the next one begins."""
        code, length = words[place], words[place + 1]
        place += 2
        if code == 0:
            values = words[place : place + length]
            if len(values) < length:
                raise IndexError
            found.extend(values)
            return place + length
        if code == 1 and found:
            start, end = found[-1], words[place]
            found.extend(round(start + (end - start) * (step + 1) / length) for step in range(length))
            return place + 1
        if code != 2 or is_copy:
            raise IndexError
        parts = words[place : place + offset_words]
        source = sum(part << (8 * kind.itemsize * at) for at, part in enumerate(parts)) // kind.itemsize
        for _ in range(length):
            source = expand(source, is_copy=True)
            if len(found) > num_entries:
                raise IndexError
        return place + offset_words

    place = 0
    try:
        while place + 2 <= len(words) and len(found) < num_entries:
            place = expand(place, is_copy=False)
    except IndexError:
        raise _invalid("a segmented palette is damaged") from None
    if len(found) != num_entries:
        raise _invalid(f"a segmented palette has {len(found)} of {num_entries} entries")
    return np.array(found, np.uint8 if bits == 8 else np.uint16)


def _descriptor(elements: Elements, tag: int, *, is_signed: bool) -> tuple[int, int, int]:
    """Number of entries, first stored value that is mapped, bits of an entry."""
    unsigned = values.integers(elements, tag)
    if len(unsigned) != 3 or not 8 <= unsigned[2] <= 16:
        raise _invalid("a lookup table has no proper descriptor")
    first = values.integers(elements, tag, is_signed=is_signed)[1]
    return unsigned[0] or _MAX_ENTRIES, first, unsigned[2]


def _invalid(detail: str) -> Exception:
    return source_error(Reason.INVALID_IMAGE_DESCRIPTION, detail)


MAX_FRAGMENTS = 1 << 18
"""Most fragments that one file may have."""

_ITEM, _SEQUENCE_END = b"\xfe\xff\x00\xe0", b"\xfe\xff\xdd\xe0"
_END_OF_IMAGE = b"\xff\xd9"
_TAIL_BYTES = 10


class Fragment(NamedTuple):
    """Byte range of one fragment in the file."""

    offset: int
    num_bytes: int


def find_frames(descriptor: int, offset: int, file_num_bytes: int, num_frames: int) -> list[list[Fragment]]:
    """Find the fragments of every frame.

    Args:
        descriptor: Open file.
        offset: Where the value of the pixel data begins: at its offset table.
        file_num_bytes: Size of the file.
        num_frames: What the header says.

    Returns:
        ``num_frames`` lists of fragments.

    Raises:
        SourceError: PIXEL_DATA_TRUNCATED, LIMIT_EXCEEDED, or DECODE_FAILED where fragments and frames do not
            fit.
    """
    items = list(_items(descriptor, offset, file_num_bytes))
    if not items:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, "no fragments")
    table, fragments = items[0], items[1:]
    if len(fragments) == num_frames:
        return [[fragment] for fragment in fragments]
    if len(fragments) < num_frames:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{len(fragments)} fragments for {num_frames} frames")
    if num_frames == 1:
        return [fragments]
    return (
        _split_by_table(descriptor, table, fragments, num_frames)
        or _split_by_marker(descriptor, fragments, num_frames)
        or _no_split(len(fragments), num_frames)
    )


def read_frame(descriptor: int, fragments: Sequence[Fragment]) -> bytes:
    """Read one encoded frame.

    Raises:
        SourceError: PIXEL_DATA_TRUNCATED where the file became shorter.
    """
    parts = [os.pread(descriptor, fragment.num_bytes, fragment.offset) for fragment in fragments]
    if sum(map(len, parts)) != sum(fragment.num_bytes for fragment in fragments):
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, "the file became shorter while it was read")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _items(descriptor: int, offset: int, file_num_bytes: int) -> Iterator[Fragment]:
    for _ in range(MAX_FRAGMENTS):
        head = os.pread(descriptor, 8, offset)
        # A file that ends right after its last fragment lacks only the delimiter; nothing is lost.
        if head[:4] == _SEQUENCE_END or len(head) == 0:
            return
        if len(head) < 8 or head[:4] != _ITEM:
            raise source_error(Reason.PIXEL_DATA_TRUNCATED, "a fragment is expected where other bytes stand")
        (num_bytes,) = struct.unpack_from("<I", head, 4)
        offset += 8
        if offset + num_bytes > file_num_bytes:
            missing = offset + num_bytes - file_num_bytes
            raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{missing} bytes of a fragment are missing")
        yield Fragment(offset, num_bytes)
        offset += num_bytes
    raise source_error(Reason.LIMIT_EXCEEDED, f"more than {MAX_FRAGMENTS} fragments")


def _split_by_table(
    descriptor: int, table: Fragment, fragments: Sequence[Fragment], num_frames: int
) -> list[list[Fragment]] | None:
    """Split by the basic offset table, if it has one entry a frame, each at the start of a fragment."""
    if table.num_bytes != 4 * num_frames:
        return None
    offsets = struct.unpack(f"<{num_frames}I", os.pread(descriptor, table.num_bytes, table.offset))
    first = fragments[0].offset
    place = {fragment.offset - first: number for number, fragment in enumerate(fragments)}
    starts = [place.get(offset, -1) for offset in offsets]
    if starts[0] != 0 or any(after <= before for before, after in itertools.pairwise(starts)):
        return None
    return [list(fragments[start:stop]) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def _split_by_marker(
    descriptor: int, fragments: Sequence[Fragment], num_frames: int
) -> list[list[Fragment]] | None:
    """Split after each fragment that ends with the end-of-image marker of JPEG, JPEG-LS and JPEG 2000."""
    frames: list[list[Fragment]] = [[]]
    for fragment in fragments:
        frames[-1].append(fragment)
        tail = min(_TAIL_BYTES, fragment.num_bytes)
        if _END_OF_IMAGE in os.pread(descriptor, tail, fragment.offset + fragment.num_bytes - tail):
            frames.append([])
    if not frames[-1]:
        frames.pop()
    return frames if len(frames) == num_frames else None


def _no_split(num_fragments: int, num_frames: int) -> list[list[Fragment]]:
    raise source_error(
        Reason.DECODE_FAILED, f"{num_fragments} fragments cannot be dealt to {num_frames} frames"
    )


def iter_stored(
    path: Path, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Iterator[tuple[Array, str]]:
    """Yield the asked-for frames and the name of what decoded them; one frame in memory at a time.

    Yields:
        ``(rows, columns)`` integers, or floats of float pixel data, or ``(rows, columns, 3)`` uint8 RGB; C
        order; may be read-only. The name is ``"native"`` or one of `decoders.DECODER_ORDER`.

    Raises:
        SourceError: FILE_UNREADABLE, PIXEL_DATA_TRUNCATED, DECODE_FAILED, UNSUPPORTED_TRANSFER_SYNTAX,
            LIMIT_EXCEEDED
            or INVALID_IMAGE_DESCRIPTION.
    """
    image = header.image
    if header.mosaic:
        yield from _tiles(path, header, frames, limits)
        return
    palette = None
    if image.photometric_interpretation == "PALETTE COLOR":
        palette = read_palette(path, limits, is_signed=image.is_signed)
    with (
        open_file(path, limits.max_inflated_bytes) as descriptor,
        contextlib.closing(_raw(path, descriptor, header, frames, limits)) as raw,
    ):
        for array, name in raw:
            if palette is not None:
                yield palette.apply(array), name
            elif image.is_color:
                yield _to_rgb8(array, image, is_native=header.is_native), name
            else:
                yield array, name


def _tiles(
    path: Path, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Iterator[tuple[Array, str]]:
    """Yield tiles of the one stored image of a mosaic."""
    image, per_row = header.image, header.mosaic
    stored = replace(image, rows=image.rows * per_row, columns=image.columns * per_row, num_frames=1)
    whole = replace(header, image=stored, planes=header.planes[:1], mosaic=0)
    ((mosaic, name),) = iter_stored(path, whole, [0], limits)
    for frame in frames:
        row, column = frame // per_row * image.rows, frame % per_row * image.columns
        yield np.ascontiguousarray(mosaic[row : row + image.rows, column : column + image.columns]), name


def _raw(
    path: Path, descriptor: int, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Generator[tuple[Array, str]]:
    image = header.image
    if not header.is_native:
        from shardflow.packing.sources.dicom.decoders import decode_frame

        found = find_frames(descriptor, header.pixel_offset, header.num_bytes, image.num_frames)
        for frame in frames:
            data = read_frame(descriptor, found[frame])
            array, name = decode_frame(data, image, header.transfer_syntax_uid)
            yield (_used_bits(array, image) if header.transfer_syntax_uid == RLE else array), name
        return
    inflated = (
        read_inflated(path, limits.max_inflated_bytes) if header.transfer_syntax_uid == DEFLATED else None
    )
    if _is_unusual(header):
        data = _read_range(descriptor, inflated, header.pixel_offset, header.pixel_num_bytes or 0)
        for frame in frames:
            yield _unusual_frame(data, header, frame), "pydicom"
        return
    frame_num_bytes = image.frame_num_bits // 8
    for frame in frames:
        offset = header.pixel_offset + frame * frame_num_bytes
        yield _native_frame(_read_range(descriptor, inflated, offset, frame_num_bytes), header), "native"


def _read_range(descriptor: int, inflated: bytes | None, offset: int, num_bytes: int) -> bytes:
    if inflated is not None:
        data = inflated[offset : offset + num_bytes]
    else:
        data = read_at(descriptor, num_bytes, offset)
    if len(data) != num_bytes:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{len(data)} of {num_bytes} bytes")
    return data


def _is_unusual(header: InstanceHeader) -> bool:
    """Layouts that are not worth a fast path: packed bits, subsampled color, byte-swapped bytes."""
    image = header.image
    return (
        image.bits_allocated == 1
        or image.photometric_interpretation == "YBR_FULL_422"
        or (header.transfer_syntax_uid == EXPLICIT_BIG and image.bits_allocated == 8)
    )


def _native_frame(data: bytes, header: InstanceHeader) -> Array:
    image = header.image
    order = ">" if header.transfer_syntax_uid == EXPLICIT_BIG else "<"
    kind = "f" if header.is_float else "i" if image.is_signed else "u"
    array = np.frombuffer(data, f"{order}{kind}{image.bits_allocated // 8}")
    if order == ">":
        array = array.astype(array.dtype.newbyteorder("="))
    if not header.is_float:
        array = _used_bits(array, image)
    if image.samples_per_pixel == 1:
        return array.reshape(image.rows, image.columns)
    if image.planar_configuration == 1:
        planes = array.reshape(image.samples_per_pixel, image.rows, image.columns)
        return np.ascontiguousarray(planes.transpose(1, 2, 0))
    return array.reshape(image.rows, image.columns, image.samples_per_pixel)


def _unusual_frame(data: bytes, header: InstanceHeader, frame: int) -> Array:
    image = header.image
    if image.bits_allocated == 1:
        # Frames follow each other bit by bit; their ends are no ends of bytes.
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        size = image.rows * image.columns
        return bits[frame * size : (frame + 1) * size].reshape(image.rows, image.columns)
    from pydicom.pixels.decoders.base import get_decoder

    try:
        with third_party_silence():
            array, _ = get_decoder(header.transfer_syntax_uid).as_array(
                data,
                index=frame,
                raw=True,
                validate=False,
                pixel_keyword="PixelData",
                pixel_vr=header.pixel_vr or "OW",
                number_of_frames=image.num_frames,
                rows=image.rows,
                columns=image.columns,
                samples_per_pixel=image.samples_per_pixel,
                bits_allocated=image.bits_allocated,
                bits_stored=image.bits_stored,
                pixel_representation=int(image.is_signed),
                planar_configuration=image.planar_configuration,
                photometric_interpretation=image.photometric_interpretation,
            )
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the bytes break is the file's fault
        raise source_error(Reason.DECODE_FAILED, f"pydicom: {type(error).__name__}") from None
    return np.ascontiguousarray(array)


def _used_bits(array: Array, image: ImageDescription) -> Array:
    """Clear the bits above ``high_bit``, move the used ones down, extend the sign."""
    above = image.bits_allocated - 1 - image.high_bit
    unused = image.bits_allocated - image.bits_stored
    if unused == 0 or image.bits_allocated == 1 or (above == unused and _fits(array, image)):
        return array
    shifted = np.left_shift(array, above)
    return np.right_shift(shifted, unused, out=shifted)


def _fits(array: Array, image: ImageDescription) -> bool:
    """Whether the unused high bits say nothing, as is usual: looking is cheaper than shifting."""
    low, high = image.stored_range
    return bool(array.size and array.max() <= high and (not image.is_signed or low <= array.min()))


def _to_rgb8(array: Array, image: ImageDescription, *, is_native: bool) -> Array:
    """RGB in 8 bits: native YCbCr is converted (decoders did it for theirs); wide samples lose low bits."""
    if image.is_signed:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, "signed color samples")
    if image.bits_stored > 8:
        array = np.right_shift(array, image.bits_stored - 8)
    array = array.astype(np.uint8, copy=False)
    if is_native and image.photometric_interpretation in ("YBR_FULL", "YBR_FULL_422"):
        from pydicom.pixels import convert_color_space

        return np.ascontiguousarray(convert_color_space(array, "YBR_FULL", "RGB"))
    return array
