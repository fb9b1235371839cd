"""Slice codec ``b2nd``: one array as a contiguous Blosc2 NDArray frame (docs/format.md, section 4).

Any Blosc2 reads such a frame (``blosc2.ndarray_from_cframe(payload)[...]``), with 95 microseconds of set-up
per slice. The reader here avoids that: a frame of ours has one chunk in C order, which is decoded straight
into the caller's buffer.

Frames are compressed in one of two ways, which any reader of the format decodes: by Zstandard behind a byte
delta, or, where ``is_fast``, by LZ4 behind a bit shuffle.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import struct
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.slice_codecs.blosc2_library import (
    DecodingParameters,
    compress,
    library,
    make_frame,
    package,
)

# A block is the unit of compression; larger ones compress 1 % better and decode as fast until they leave the
# second-level cache.
_MAX_BLOCK_NUM_BYTES = 256 * 1024
_MIN_BLOCK_NUM_BYTES = 16 * 1024

# Of the frame's header (Blosc2 frame format, README_CFRAME_FORMAT.rst): magic, i32 header length, u64 frame
# length, i64 uncompressed and compressed size, all big-endian after their MessagePack marks.
_FRAME_MAGIC = b"\x9e\xa8b2frame\0\xd2"
_HEADER_NUM_BYTES = struct.Struct(">i")
_FRAME_NUM_BYTES = struct.Struct(">Q")
_FRAME_HEAD = struct.Struct(">11sixQ6x8xxq")
_FRAME_NUM_BYTES_AT, _COMPRESSED_NUM_BYTES_AT = 16, 39
_AFTER_LENGTHS = _COMPRESSED_NUM_BYTES_AT + 8
_NUM_BYTES = struct.Struct(">q")
_CHUNK_HEADER = struct.Struct("<4xiii")
# Of a chunk's header (README_CHUNK_FORMAT.rst): bits 4 to 6 of the second flags say "one special value".
_CHUNK_SPECIAL, _SPECIAL_MASK, _SPECIAL_ZEROS, _SPECIAL_NO_VALUES = 31, 0x70, 0x10, 0x40
# Bit 3 says that the blocks are in the frame's file, which the library would open.
_IN_FILE = 0x08
_CHUNK_FILTERS = slice(16, 31)  # with their settings, and those of the codec
ZEROS_OFFSET = -(1 << 63) + (1 << 56)
"""Offset of a chunk of zeros, which has no bytes in a frame."""
_METALAYER_MARK = b"\xa4b2nd\xd2"
# Of frames of other writers, whose blocks have some 10 KB and more.
_MIN_PARTS, _PART_NUM_BYTES = 1024, 1024
_MIN_CHUNK_NUM_BYTES, _MAX_PADDING = 1 << 22, 8
# A frame around fewer slices takes more of the processor than it saves: around a small one 9 times as much.
_MIN_TOGETHER: Final = 16
HEAD_NUM_BYTES: Final = 256
"""Room before the chunks of a frame for its header, which has under 200 bytes."""
DTYPE = re.compile(rb"<[iuf][248]|\|[iu]1")


class _Frame(NamedTuple):
    """What a frame says of its array, before anything is decoded."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_start: int
    chunk_num_bytes: int


def encode(array: NDArray[Any], *, is_fast: bool = False) -> bytes:
    """Encode a C-contiguous, little-endian array of at least one element.

    The frame is the one that ``blosc2.asarray(...).to_cframe()`` makes, byte for byte, put together from the
    library's own pieces: a header made once for each shape, the compressed chunk, an ending. ``asarray``
    copies the array block by block first, and its frame twice after.
    """
    # Of one-byte values compress2 and asarray make different chunks.
    if array.itemsize > 1:
        block_num_bytes, empty_header, ending = _around(array.shape, array.dtype, is_fast)
        chunk = compress(array, block_num_bytes, is_fast=is_fast)
        # One special value (all zeros, mostly) is told by the frame and has no chunk in it.
        if not chunk[_CHUNK_SPECIAL] & _SPECIAL_MASK:
            header = bytearray(empty_header)
            _FRAME_NUM_BYTES.pack_into(header, _FRAME_NUM_BYTES_AT, len(header) + len(chunk) + len(ending))
            _NUM_BYTES.pack_into(header, _COMPRESSED_NUM_BYTES_AT, len(chunk))
            return b"".join((header, chunk, ending))
    return _encode_plainly(array, is_fast)


def encode_fast(array: NDArray[Any]) -> bytes:
    """Encode as `encode` does, to be decoded 2 to 3 times as fast and 0 to 40 % larger."""
    return encode(array, is_fast=True)


def _encode_plainly(array: NDArray[Any], is_fast: bool) -> bytes:
    """Encode by the library's own NDArray; for what `encode` has no short way for."""
    parts = _parts(array.shape, array.itemsize)
    return make_frame(array, array.shape, array.dtype, *parts, is_fast=is_fast)


def _parts(shape: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the only chunk, and of its blocks of full width."""
    return shape, (_block_rows(shape, itemsize), *shape[1:])


def read_header(payload: memoryview) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and dtype without decoding.

    Raises:
        FormatError: The payload is no NDArray frame.
    """
    frame = _parse(payload)
    return frame.shape, frame.dtype


def decode(payload: memoryview, out: NDArray[Any]) -> None:
    """Decode into a C-contiguous array of the frame's shape and dtype, without the GIL.

    Raises:
        FormatError: The payload cannot be decoded, or is of another shape or dtype than ``out``.
    """
    frame = _parse(payload)
    if frame.shape != out.shape or frame.dtype != out.dtype:
        raise FormatError(f"a slice must be {out.dtype} {out.shape}, got {frame.dtype} {frame.shape}.")
    if _is_one_chunk_in_c_order(frame):
        _decompress(_chunk(frame, payload, out.nbytes), out)
        return
    # A frame of another writer, or one special value without a chunk.
    part_num_bytes = _check_parts(frame, out.nbytes)
    try:
        array = package().ndarray_from_cframe(bytes(payload))
        _check_values(array.schunk, frame, part_num_bytes)
        out[...] = array[...]
    except (RuntimeError, ValueError, TypeError, IndexError, struct.error) as error:
        raise FormatError(f"a b2nd payload must decode, got {type(error).__name__} from blosc2.") from None


def decode_all(
    payloads: Sequence[memoryview],
    outs: Sequence[NDArray[Any]] | NDArray[Any],
    memory: NDArray[np.uint8] | None = None,
) -> dict[int, FormatError]:
    """Decode several slices as `decode` does, and return by their places what is wrong with some.

    Many slices of one shape in one memory whose places are adjacent are decoded by one call of the C
    library: each call takes the GIL back, and another thread may hold it. Otherwise all frames are parsed
    before the first is decoded: between two slices the processor's cache holds pixels, and Python's steps
    there would have to be fetched again.
    """
    if memory is not None and isinstance(outs, np.ndarray) and _decode_together(payloads, outs, memory):
        return {}
    chunks: list[tuple[int, memoryview, NDArray[Any]]] = []
    errors: dict[int, FormatError] = {}
    for place, (payload, out) in enumerate(zip(payloads, outs, strict=True)):
        try:
            frame = _parse(payload)
            if (frame.shape, frame.dtype) == (out.shape, out.dtype) and _is_one_chunk_in_c_order(frame):
                chunks.append((place, _chunk(frame, payload, out.nbytes), out))
            else:
                decode(payload, out)
        except FormatError as error:
            errors[place] = error
    for place, chunk, out in chunks:
        try:
            _decompress(chunk, out)
        except FormatError as error:
            errors[place] = error
    return errors


def _decode_together(payloads: Sequence[memoryview], out: NDArray[Any], memory: NDArray[np.uint8]) -> bool:
    """Decode slices by one call; False, with undefined content of ``out``, where that cannot be done."""
    num_slices, flags = len(payloads), out.flags
    is_one_place = flags.c_contiguous and flags.writeable and num_slices == len(out)
    if library() is None or num_slices < _MIN_TOGETHER or not is_one_place:
        return False
    try:
        frame = _parse(payloads[0])
        if (frame.shape, frame.dtype) != (out.shape[1:], out.dtype) or not _is_one_chunk_in_c_order(frame):
            return False
        chunks = _places_of_chunks(payloads, frame, out.nbytes // num_slices, memory)
        stop = memory.nbytes - tail_num_bytes(num_slices)
        if chunks is None or stop < HEAD_NUM_BYTES:
            return False
        parts = (1, *frame.shape), (1, *frame.block_shape)
        places, num_bytes = chunks - HEAD_NUM_BYTES, stop - HEAD_NUM_BYTES
        header, ending = frame_around(out.shape, out.dtype, *parts, places, num_bytes, is_fast=False)
        start = HEAD_NUM_BYTES - len(header)
        if start < 0:
            return False
        memory[start:HEAD_NUM_BYTES] = np.frombuffer(header, np.uint8)
        memory[stop : stop + len(ending)] = np.frombuffer(ending, np.uint8)
        _decompress_chunks(memory[start : stop + len(ending)], out)
    except (FormatError, RuntimeError):  # `decode` says what is wrong with which
        return False
    return True


def _places_of_chunks(
    payloads: Sequence[memoryview], frame: _Frame, num_bytes: int, memory: NDArray[np.uint8]
) -> NDArray[np.int64] | None:
    """Return where the chunks of frames lie in a memory, ``(n,)``.

    Args:
        payloads: The frames.
        frame: The first one.
        num_bytes: Size of each chunk, decoded.
        memory: Holds the frames, between the room that `frame_around` needs.

    Returns:
        None if a frame is not like the first one, does not hold its chunk, or is elsewhere.
    """
    if not _AFTER_LENGTHS < frame.chunk_start <= HEAD_NUM_BYTES:
        return None
    dtype = _heads_dtype(frame.chunk_start)
    joined = b"".join([payload[: dtype.itemsize] for payload in payloads])
    if len(joined) != len(payloads) * dtype.itemsize:
        return None
    heads = np.frombuffer(joined, dtype)
    sizes = np.array([payload.nbytes for payload in payloads])
    try:
        addresses = [ctypes.addressof(ctypes.c_uint8.from_buffer(payload)) for payload in payloads]
    except TypeError:  # read-only
        return None
    starts = np.array(addresses) - memory.ctypes.data
    first_stop = memory.nbytes - tail_num_bytes(len(payloads))
    stored = heads["chunk_num_bytes"]
    is_right = (
        (heads["begin"] == heads["begin"][0])
        & (heads["layout"] == heads["layout"][0])
        & (heads["frame_num_bytes"] == sizes)
        & (heads["told_chunk_num_bytes"] == stored)
        & (stored > _CHUNK_SPECIAL)
        & (stored <= sizes - frame.chunk_start)
        & (heads["num_bytes"] == num_bytes)
        & (heads["block_num_bytes"] > 0)
        & (heads["filters"] == heads["filters"][0])
        & (heads["flags"] == 0)  # no special value, and blocks that are here
        & (starts >= HEAD_NUM_BYTES)
        & (starts <= first_stop - sizes)
    )
    # A frame around a chunk may say what its filters leave open, and alone it is refused.
    is_known = heads["filters"][0].tobytes() in _known_filters(frame.dtype.itemsize)
    return starts + frame.chunk_start if is_known and is_right.all() else None


@functools.lru_cache(maxsize=16)
def _known_filters(itemsize: int) -> frozenset[bytes]:
    """Return what chunks of `encode` and `encode_fast` say of their filters and codecs."""
    values = np.arange(1 << 12).astype(f"<u{itemsize}").reshape(64, 64)
    frames = [memoryview(encode(values, is_fast=is_fast)) for is_fast in (False, True)]
    return frozenset(bytes(frame[_parse(frame).chunk_start :][_CHUNK_FILTERS]) for frame in frames)


@functools.lru_cache(maxsize=64)
def _heads_dtype(chunk_start: int) -> np.dtype[Any]:
    """Return the dtype of what precedes the first block of a frame of one chunk."""
    fields = {
        "begin": (f"V{_FRAME_NUM_BYTES_AT}", 0),
        "frame_num_bytes": (">i8", _FRAME_NUM_BYTES_AT),
        "told_chunk_num_bytes": (">i8", _COMPRESSED_NUM_BYTES_AT),
        "layout": (f"V{chunk_start - _AFTER_LENGTHS}", _AFTER_LENGTHS),
        "num_bytes": ("<i4", chunk_start + 4),
        "block_num_bytes": ("<i4", chunk_start + 8),
        "chunk_num_bytes": ("<i4", chunk_start + 12),
        "filters": (f"V{_CHUNK_FILTERS.stop - _CHUNK_FILTERS.start}", chunk_start + _CHUNK_FILTERS.start),
        "flags": ("u1", chunk_start + _CHUNK_SPECIAL),
    }
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": [*fields], "formats": formats, "offsets": offsets})


def load() -> None:
    """Load what decodes chunks now; otherwise the first chunk waits for it."""
    if library() is None:
        package()


@functools.lru_cache(maxsize=256)
def _empty_header(
    shape: tuple[int, ...], dtype: np.dtype[Any], parts: tuple[tuple[int, ...], ...], is_fast: bool
) -> bytes:
    """Header of a frame of this shape; the two lengths in it are those of a frame without a chunk."""
    frame = make_frame(None, shape, dtype, *parts, is_fast=is_fast)
    return frame[: _HEADER_NUM_BYTES.unpack_from(frame, len(_FRAME_MAGIC))[0]]


@functools.lru_cache(maxsize=256)
def _around(shape: tuple[int, ...], dtype: np.dtype[Any], is_fast: bool) -> tuple[int, bytes, bytes]:
    """Size of the blocks of an array of this shape; what is before and behind its only chunk in a frame."""
    parts = _parts(shape, dtype.itemsize)
    header = _empty_header(shape, dtype, parts, is_fast)
    return math.prod(parts[1]) * dtype.itemsize, header, _frame_ending(is_fast)


def encode_chunk(array: NDArray[Any], block_shape: Sequence[int], *, is_fast: bool) -> bytes:
    """Encode a C-contiguous, little-endian array as one chunk of a frame; empty for zeros.

    Args:
        array: Of the chunk.
        block_shape: Of its blocks, each compressed alone; divides the array's shape.
        is_fast: How it is compressed.
    """
    block_num_bytes = math.prod(block_shape) * array.itemsize
    chunk = compress(np.ascontiguousarray(_by_block(array, block_shape)), block_num_bytes, is_fast=is_fast)
    return b"" if chunk[_CHUNK_SPECIAL] & _SPECIAL_MASK == _SPECIAL_ZEROS else bytes(chunk)


def _by_block(array: NDArray[Any], block_shape: Sequence[int]) -> NDArray[Any]:
    """Return a view of an array block by block: the axes of the blocks' grid, and those of a block."""
    axes = range(array.ndim)
    both = zip(array.shape, block_shape, strict=True)
    parts = [extent for size, part in both for extent in (size // part, part)]
    return array.reshape(parts).transpose([2 * axis for axis in axes] + [2 * axis + 1 for axis in axes])


def block_num_bytes(data: NDArray[np.uint8], place: int) -> int:
    """Return the size of the blocks of a chunk, as it says itself; 0 of what is too short for one."""
    told = data[place : place + _CHUNK_HEADER.size].tobytes()
    return _CHUNK_HEADER.unpack(told)[1] if len(told) == _CHUNK_HEADER.size else 0


def check_chunks(
    data: NDArray[np.uint8],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    num_bytes: int,
    block_num_bytes: int,
) -> None:
    """Check that chunks are of one size and hold values: what decodes them writes as many bytes as they say.

    Args:
        data: Holds the chunks.
        places: ``(n,)`` where each begins.
        sizes: ``(n,)`` sizes of the chunks.
        num_bytes: Size of each chunk, decoded.
        block_num_bytes: Size of each of its blocks, decoded.

    Raises:
        FormatError: One is no such chunk.
    """
    if (sizes > _CHUNK_SPECIAL).all():
        told = data[places[:, None] + np.arange(_CHUNK_HEADER.size)].view("<i4")[:, 1:]
        are_sizes = (told[:, :2] == np.array([num_bytes, block_num_bytes])).all() and (
            told[:, 2] == sizes
        ).all()
        flags = data[places + _CHUNK_SPECIAL]
        are_here = (flags & _SPECIAL_MASK != _SPECIAL_NO_VALUES).all() and not (flags & _IN_FILE).any()
        if are_sizes and are_here:
            return
    raise FormatError(f"a chunk must hold {num_bytes} bytes in blocks of {block_num_bytes}, got another.")


def decode_chunk(chunk: memoryview, out: NDArray[Any], block_shape: Sequence[int]) -> None:
    """Decode a chunk that `check_chunks` accepted into a C-contiguous array of its size, without the GIL.

    Args:
        chunk: As `encode_chunk` has it.
        out: Of the chunk's shape and dtype.
        block_shape: Of the chunk's blocks.

    Raises:
        FormatError: It cannot be decoded.
    """
    target = _by_block(out, block_shape)
    blocks = target if target.flags.c_contiguous else np.empty(target.shape, out.dtype)
    _decompress(chunk, blocks)
    if blocks is not target:
        target[...] = blocks


class _Context:
    """What the C library decodes with in one thread: it keeps its scratch memory from chunk to chunk."""

    def __init__(self, library: Any) -> None:
        self._free = library.blosc2_free_ctx
        self.pointer = library.blosc2_create_dctx(DecodingParameters(num_threads=1, itemsize=8))
        if not self.pointer:
            raise MemoryError

    def __del__(self) -> None:
        if self.pointer:  # the library would read from address 0
            self._free(self.pointer)


_of_thread = threading.local()
# Scratch memory is four blocks, and a block of another writer may be a whole array: that of larger ones is
# freed at once.
_MAX_KEPT_NUM_BYTES = 16 << 20


def _decompress(chunk: memoryview, out: NDArray[Any]) -> None:
    """Decode a chunk, which says itself that it holds ``out.nbytes`` bytes, without the GIL.

    Raises:
        FormatError: It cannot be decoded.
        ValueError: ``out`` is no memory that may be written from its first byte to its last.
    """
    flags = out.flags
    if not (flags.c_contiguous and flags.writeable):
        raise ValueError("out must be C-contiguous and writable.")
    if chunk.nbytes > _CHUNK_SPECIAL and chunk[_CHUNK_SPECIAL] & _SPECIAL_MASK == _SPECIAL_NO_VALUES:
        # ``out`` would keep what was in it, such as pixels of another sample.
        raise FormatError("a chunk must have values, got one that leaves them open.")
    loaded = library()
    if loaded is None:
        try:
            package().decompress2(chunk, dst=out, nthreads=1)
        except (RuntimeError, ValueError, TypeError) as error:
            raise FormatError(f"a chunk must decode, got {type(error).__name__} from blosc2.") from None
        return
    context: _Context | None = getattr(_of_thread, "context", None)
    if context is None:
        context = _of_thread.context = _Context(loaded)
    source = np.frombuffer(chunk, np.uint8)
    found = loaded.blosc2_decompress_ctx(
        context.pointer, source.ctypes.data, source.nbytes, out.ctypes.data, out.nbytes
    )
    if out.nbytes > _MAX_KEPT_NUM_BYTES:
        _of_thread.context = None
    if found != out.nbytes:
        raise FormatError(f"a chunk must decode to {out.nbytes} bytes, got {found} from blosc2.")


def _decompress_chunks(frame: NDArray[np.uint8], out: NDArray[Any]) -> None:
    """Decode all chunks of a frame, one behind another, by one call without the GIL.

    Args:
        frame: As `frame_around` has it, of chunks that `check_chunks` would accept.
        out: C-contiguous, of the frame's shape and dtype.

    Raises:
        FormatError: It is no frame, or a chunk cannot be decoded.
    """
    loaded = library()
    chunks = loaded.blosc2_schunk_from_buffer(frame.ctypes.data, frame.nbytes, False)
    if not chunks:
        raise FormatError("a frame around chunks must open, got an error from blosc2.")
    try:
        # It decodes whole chunks where they belong; `b2nd_get_slice_cbuffer` would copy them.
        code = loaded.blosc2_schunk_get_slice_buffer(chunks, 0, out.size, out.ctypes.data)
    finally:
        loaded.blosc2_schunk_free(chunks)
    if code < 0:
        raise FormatError(f"chunks must decode, got error {code} from blosc2.")


class OpenFrame:
    """A frame in memory whose chunks are decoded many at once, without the GIL.

    The Python package decodes a chunk a call, or many and holds the GIL; threads that decode small chunks
    then spend more time waiting for each other than decoding. The C library, which its wheels hold as well,
    has no such limit.

    Args:
        frame: As `frame_around` has it, of chunks that `check_chunks` accepted. It stays as it is until
            the end.

    Raises:
        FormatError: It is no frame.
    """

    def __init__(self, frame: NDArray[np.uint8]) -> None:
        self._frame, self._library = frame, library()
        self._array = ctypes.c_void_p()
        if self._library is None:
            raise FormatError("this installation of blosc2 must have its C library.")
        self._done(
            self._library.b2nd_from_cframe(frame.ctypes.data, frame.nbytes, False, ctypes.byref(self._array))
        )

    @staticmethod
    def is_possible() -> bool:
        """Whether the installed package has the library."""
        return library() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.b2nd_free(self._array)

    def read(self, start: Sequence[int], out: NDArray[Any]) -> None:
        """Decode a box.

        Args:
            start: Its first place along each axis.
            out: C-contiguous, of the frame's dtype; its shape is that of the box.

        Raises:
            FormatError: A chunk cannot be decoded.
        """
        axes = ctypes.c_int64 * out.ndim
        stop = (low + size for low, size in zip(start, out.shape, strict=True))
        self._done(
            self._library.b2nd_get_slice_cbuffer(
                self._array, axes(*start), axes(*stop), out.ctypes.data, axes(*out.shape), out.nbytes
            )
        )

    def _done(self, code: int) -> None:
        if code < 0:
            raise FormatError(f"a chunk must decode, got error {code} from blosc2.")


def frame_around(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunk_shape: tuple[int, ...],
    block_shape: tuple[int, ...],
    chunk_offsets: NDArray[np.int64],
    chunks_num_bytes: int,
    *,
    is_fast: bool,
) -> tuple[bytes, bytes]:
    """Return what precedes and what follows the chunks of a frame of several chunks.

    Args:
        shape: Of the array.
        dtype: Of the array, little-endian.
        chunk_shape: Of each chunk; those at the edges are whole, too.
        block_shape: Of each block of a chunk; divides that of the chunk.
        chunk_offsets: ``(n,)`` where each chunk begins behind the header, by its position in C order;
            `ZEROS_OFFSET` for one of zeros, which is left out.
        chunks_num_bytes: Size of all chunks.
        is_fast: How the chunks are compressed.
    """
    header = bytearray(_empty_header(shape, dtype, (chunk_shape, block_shape), is_fast))
    offsets = compress(np.ascontiguousarray(chunk_offsets), is_fast=False)
    ending = b"".join((offsets, _frame_trailer(is_fast)))
    _FRAME_NUM_BYTES.pack_into(header, _FRAME_NUM_BYTES_AT, len(header) + chunks_num_bytes + len(ending))
    _NUM_BYTES.pack_into(header, _COMPRESSED_NUM_BYTES_AT, chunks_num_bytes)
    return bytes(header), ending


def tail_num_bytes(num_chunks: int) -> int:
    """Return the room for what follows the chunks of a frame."""
    return 256 + 8 * num_chunks


def read_frame_around(
    header: bytes, ending: bytes
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], np.dtype[Any]], NDArray[np.int64]] | None:
    """Return what `frame_around` was given: shape, chunk shape, block shape and dtype; offsets of the chunks.

    Returns:
        None if this is no frame, or none of a little-endian array of numbers.
    """
    try:
        layout = _array_layout(header[_AFTER_LENGTHS:])
        num_bytes, _, chunk_num_bytes = _CHUNK_HEADER.unpack_from(ending)
        offsets = np.empty(num_bytes // 8, "<i8")
        num_chunks = math.prod(-(-size // part) for size, part in zip(*layout[:2], strict=True))
        if offsets.nbytes != num_bytes or len(offsets) != num_chunks:
            return None
        _decompress(memoryview(ending)[:chunk_num_bytes], offsets)
    except (FormatError, ValueError, TypeError, IndexError, struct.error):
        return None
    return layout, offsets


@functools.cache
def _frame_trailer(is_fast: bool) -> bytes:
    """What follows the offsets of a frame, without metadata of its own; the same for all frames."""
    ending = _frame_ending(is_fast)
    *_, offsets_num_bytes = _CHUNK_HEADER.unpack_from(ending)
    return ending[offsets_num_bytes:]


def _frame_ending(is_fast: bool) -> bytes:
    """Make what follows the only chunk of any frame: where it lies, and the trailer."""
    frame = _encode_plainly(np.arange(64, dtype="<i2").reshape(8, 8), is_fast)
    (start,) = _HEADER_NUM_BYTES.unpack_from(frame, len(_FRAME_MAGIC))
    return frame[start + _NUM_BYTES.unpack_from(frame, _COMPRESSED_NUM_BYTES_AT)[0] :]


def _block_rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Rows of a block: the most that divide the array and fit; full-width rows keep the chunk in C order."""
    num_rows = shape[0]
    row_num_bytes = math.prod(shape[1:]) * itemsize
    for num_blocks in range(1, num_rows + 1):
        block_num_bytes = num_rows // num_blocks * row_num_bytes
        if num_rows % num_blocks == 0 and block_num_bytes <= _MAX_BLOCK_NUM_BYTES:
            return num_rows // num_blocks if block_num_bytes >= _MIN_BLOCK_NUM_BYTES else num_rows
    return num_rows


def _is_one_chunk_in_c_order(frame: _Frame) -> bool:
    return (
        frame.chunk_num_bytes > 0
        and frame.chunk_shape == frame.shape
        and frame.block_shape[1:] == frame.shape[1:]
        and frame.shape[0] % frame.block_shape[0] == 0
    )


def _check_parts(frame: _Frame, out_num_bytes: int) -> int:
    """Refuse a frame of so many or so large parts that decoding a small payload takes minutes or gigabytes.

    Each part is decoded alone, and whole, also where little of it is in the array; one of a single value
    takes no bytes of the payload. Returns the size of a chunk, decoded.
    """
    num_parts = part_num_bytes = 1
    for size, chunk, block in zip(frame.shape, frame.chunk_shape, frame.block_shape, strict=True):
        num_blocks = -(-chunk // block)
        num_parts *= -(-size // chunk) * num_blocks
        part_num_bytes *= num_blocks * block
    part_num_bytes *= frame.dtype.itemsize
    most_parts = _MIN_PARTS + out_num_bytes // _PART_NUM_BYTES
    most_num_bytes = _MIN_CHUNK_NUM_BYTES + _MAX_PADDING * out_num_bytes
    if num_parts > most_parts or part_num_bytes > most_num_bytes:
        raise FormatError(
            f"a slice of {out_num_bytes} bytes must have up to {most_parts} blocks, and chunks of up to "
            f"{most_num_bytes} bytes, got {num_parts} blocks in chunks of {part_num_bytes}."
        )
    return part_num_bytes


def _check_values(chunks: Any, frame: _Frame, part_num_bytes: int) -> None:
    """Refuse chunks that leave values of the array open, which would be what was in memory."""
    both = zip(frame.shape, frame.chunk_shape, strict=True)
    has_values = chunks.nchunks == math.prod(-(-size // chunk) for size, chunk in both)
    for head in map(chunks.get_lazychunk, range(chunks.nchunks if has_values else 0)):
        has_values &= _CHUNK_HEADER.unpack_from(head)[0] == part_num_bytes
        has_values &= head[_CHUNK_SPECIAL] & _SPECIAL_MASK != _SPECIAL_NO_VALUES
    if not has_values:
        raise FormatError(f"a chunk must have {part_num_bytes} bytes of values, got others.")


def _chunk(frame: _Frame, payload: memoryview, out_num_bytes: int) -> memoryview:
    """Return the only chunk of a frame, once it is sure that it fits.

    ``blosc2.decompress2`` writes as many bytes as the chunk says, past the end of a smaller buffer, so the
    chunk is asked first.
    """
    chunk = payload[frame.chunk_start : frame.chunk_start + frame.chunk_num_bytes]
    if chunk.nbytes < max(frame.chunk_num_bytes, _CHUNK_HEADER.size):
        raise FormatError("a b2nd payload must hold its chunk, got the end of the payload.")
    num_bytes, _, chunk_num_bytes = _CHUNK_HEADER.unpack_from(chunk)
    if num_bytes != out_num_bytes or chunk_num_bytes != frame.chunk_num_bytes:
        raise FormatError(f"a b2nd payload's chunk must hold {out_num_bytes} bytes, got {num_bytes}.")
    return chunk


def _parse(payload: memoryview) -> _Frame:
    try:
        return _parse_unguarded(payload)
    except (ValueError, TypeError, IndexError, struct.error):
        raise FormatError("a b2nd payload must be a Blosc2 NDArray frame, got other bytes.") from None


def _parse_unguarded(payload: memoryview) -> _Frame:
    magic, chunk_start, frame_num_bytes, chunk_num_bytes = _FRAME_HEAD.unpack_from(payload)
    if magic != _FRAME_MAGIC or frame_num_bytes != payload.nbytes:
        raise ValueError
    layout = _array_layout(bytes(payload[_AFTER_LENGTHS:chunk_start]))
    return _Frame(*layout, chunk_start, chunk_num_bytes)


@functools.lru_cache(maxsize=256)
def _array_layout(
    header: bytes,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], np.dtype[Any]]:
    """Read shape, chunk shape, block shape and dtype from the part of a header behind its two lengths.

    That part is the same for all slices of a series, and taking it apart costs 10 microseconds.
    """
    mark = header.index(_METALAYER_MARK) + len(_METALAYER_MARK)
    # Offsets in a header count from the frame's begin.
    start = _HEADER_NUM_BYTES.unpack_from(header, mark)[0] - _AFTER_LENGTHS
    # bin32 mark and length; array mark, version 0, number of axes
    if start < 0 or header[start] != 0xC6 or header[start + 6] != 0:
        raise ValueError
    num_axes = header[start + 7]
    shape = struct.unpack_from(">x" + "xq" * num_axes, header, start + 8)
    at = start + 9 + 9 * num_axes
    chunk_shape = struct.unpack_from(">x" + "xi" * num_axes, header, at)
    at += 1 + 5 * num_axes
    block_shape = struct.unpack_from(">x" + "xi" * num_axes, header, at)
    at += 1 + 5 * num_axes
    # dtype format 0 (NumPy), str32 mark and length
    if header[at] != 0 or header[at + 1] != 0xDB or min((*shape, *chunk_shape, *block_shape), default=0) < 1:
        raise ValueError
    (length,) = _HEADER_NUM_BYTES.unpack_from(header, at + 2)
    name = header[at + 6 : at + 6 + length]
    if not DTYPE.fullmatch(name):
        raise ValueError
    return shape, chunk_shape, block_shape, np.dtype(name.decode("ascii"))
