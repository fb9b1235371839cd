"""Frames of one file as stored values: native ones straight from the file, others through a decoder.

Owns bytes to arrays, and colour: a colour frame leaves as 8-bit RGB. Monochrome frames leave as the integers
that were stored, without the bits above ``high_bit`` (they may hold an overlay) and with the sign extended;
what the integers mean is the business of `pixels`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardflow.sources.dicom.description import ImageDescription
from shardflow.sources.dicom.dictionary import DEFLATED, EXPLICIT_BIG, RLE
from shardflow.sources.dicom.elements import read_inflated
from shardflow.sources.dicom.fragments import find_frames, read_frame
from shardflow.sources.dicom.gzipped import open_file
from shardflow.sources.dicom.headers import InstanceHeader
from shardflow.sources.dicom.limits import HeaderLimits
from shardflow.sources.dicom.luts import read_palette
from shardflow.sources.dicom.quiet import third_party_silence
from shardflow.sources.reasons import Reason, source_error

__all__ = ["iter_stored"]

Array = np.ndarray[Any, np.dtype[Any]]


def iter_stored(
    path: Path, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Iterator[tuple[Array, str]]:
    """Yield the asked-for frames and the name of what decoded them; one frame in memory at a time.

    Yields:
        ``(rows, columns)`` integers, or ``(rows, columns, 3)`` uint8 RGB; C order; may be read-only. The name
        is ``"native"`` or one of `decoders.DECODER_ORDER`.

    Raises:
        SourceError: FILE_UNREADABLE, PIXEL_DATA_TRUNCATED, DECODE_FAILED, UNSUPPORTED_TRANSFER_SYNTAX,
            LIMIT_EXCEEDED
            or INVALID_IMAGE_DESCRIPTION.
    """
    image = header.image
    palette = None
    if image.photometric_interpretation == "PALETTE COLOR":
        palette = read_palette(path, limits, is_signed=image.is_signed)
    with (
        _open(path, limits) as descriptor,
        contextlib.closing(_raw(path, descriptor, header, frames, limits)) as raw,
    ):
        for array, name in raw:
            if palette is not None:
                yield palette.apply(array), name
            elif image.is_colour:
                yield _to_rgb8(array, image, is_native=header.is_native), name
            else:
                yield array, name


@contextlib.contextmanager
def _open(path: Path, limits: HeaderLimits) -> Iterator[int]:
    try:
        with open_file(path, limits.max_inflated_bytes) as descriptor:
            yield descriptor
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None


def _raw(
    path: Path, descriptor: int, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Generator[tuple[Array, str]]:
    image = header.image
    if not header.is_native:
        from shardflow.sources.dicom.decoders import decode_frame

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
        data = _read(descriptor, inflated, header.pixel_offset, header.pixel_num_bytes or 0)
        for frame in frames:
            yield _unusual_frame(data, header, frame), "pydicom"
        return
    frame_num_bytes = image.frame_num_bits // 8
    for frame in frames:
        offset = header.pixel_offset + frame * frame_num_bytes
        yield _native_frame(_read(descriptor, inflated, offset, frame_num_bytes), header), "native"


def _read(descriptor: int, inflated: bytes | None, offset: int, num_bytes: int) -> bytes:
    if inflated is not None:
        data = inflated[offset : offset + num_bytes]
    else:
        data = os.pread(descriptor, num_bytes, offset)
        while 0 < len(data) < num_bytes:  # a signal, or Linux's 2 GiB bound on one read
            more = os.pread(descriptor, num_bytes - len(data), offset + len(data))
            if not more:
                break
            data += more
    if len(data) != num_bytes:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{len(data)} of {num_bytes} bytes")
    return data


def _is_unusual(header: InstanceHeader) -> bool:
    """Layouts that are not worth a fast path: packed bits, subsampled colour, byte-swapped bytes."""
    image = header.image
    return (
        image.bits_allocated == 1
        or image.photometric_interpretation == "YBR_FULL_422"
        or (header.transfer_syntax_uid == EXPLICIT_BIG and image.bits_allocated == 8)
    )


def _native_frame(data: bytes, header: InstanceHeader) -> Array:
    image = header.image
    order = ">" if header.transfer_syntax_uid == EXPLICIT_BIG else "<"
    array = np.frombuffer(data, f"{order}{'i' if image.is_signed else 'u'}{image.bits_allocated // 8}")
    if order == ">":
        array = array.astype(array.dtype.newbyteorder("="))
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
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, "signed colour samples")
    if image.bits_stored > 8:
        array = np.right_shift(array, image.bits_stored - 8)
    array = array.astype(np.uint8, copy=False)
    if is_native and image.photometric_interpretation in ("YBR_FULL", "YBR_FULL_422"):
        from pydicom.pixels import convert_color_space

        return np.ascontiguousarray(convert_color_space(array, "YBR_FULL", "RGB"))
    return array
