"""Blosc2: the C library inside its Python package, and the package itself for what the library cannot do.

Importing the package imports tables, charts and an HTTP client, and takes more than twice as long as
importing NumPy, which no process that encodes or decodes arrays needs to pay. The library produces the same
bytes. Where it is missing, or its structures differ from those here, the package encodes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Constants of blosc2.h.
_LZ4, _ZSTD = 1, 5
_SHUFFLE, _BITSHUFFLE, _BYTEDELTA = 1, 2, 35
_AUTO_SPLIT: Final = 3
_MAX_FILTERS: Final = 6
_MAX_OVERHEAD: Final = 32
_MAX_NUM_BYTES: Final = (1 << 31) - 1 - _MAX_OVERHEAD
_NUMPY_FORMAT: Final = 0


class DecodingParameters(ctypes.Structure):
    """``blosc2_dparams`` of version 3, and zeros where a later one may have more: it is passed by value."""

    _fields_ = (
        ("num_threads", ctypes.c_int16),
        ("super_chunk", ctypes.c_void_p),
        ("postfilter", ctypes.c_void_p),
        ("postfilter_parameters", ctypes.c_void_p),
        ("itemsize", ctypes.c_int32),
        ("later", ctypes.c_int64 * 4),
    )


class EncodingParameters(ctypes.Structure):
    """``blosc2_cparams`` of version 3, and zeros where a later one may have more: it is passed by value."""

    _fields_ = (
        ("codec", ctypes.c_uint8),
        ("codec_meta", ctypes.c_uint8),
        ("level", ctypes.c_uint8),
        ("use_dictionary", ctypes.c_int),
        ("itemsize", ctypes.c_int32),
        ("num_threads", ctypes.c_int16),
        ("block_num_bytes", ctypes.c_int32),
        ("split_mode", ctypes.c_int32),
        ("super_chunk", ctypes.c_void_p),
        ("filters", ctypes.c_uint8 * _MAX_FILTERS),
        ("filters_meta", ctypes.c_uint8 * _MAX_FILTERS),
        ("prefilter", ctypes.c_void_p),
        ("prefilter_parameters", ctypes.c_void_p),
        ("tuner_parameters", ctypes.c_void_p),
        ("tuner", ctypes.c_int),
        ("has_instruments", ctypes.c_bool),
        ("codec_parameters", ctypes.c_void_p),
        ("filter_parameters", ctypes.c_void_p * _MAX_FILTERS),
        ("later", ctypes.c_int64 * 8),
    )


# What ``blosc2_get_blosc2_cparams_defaults`` returns if the structure is the one above.
_DEFAULTS: Final = EncodingParameters(
    level=5, itemsize=8, num_threads=1, split_mode=4, filters=(0, 0, 0, 0, 0, _SHUFFLE)
)


class _Storage(ctypes.Structure):
    _fields_ = (
        ("is_contiguous", ctypes.c_bool),
        ("path", ctypes.c_char_p),
        ("encoding", ctypes.POINTER(EncodingParameters)),
        ("decoding", ctypes.POINTER(DecodingParameters)),
        ("io", ctypes.c_void_p),
    )


@functools.cache
def package() -> Any:
    """Import Blosc2's Python package, which reads and writes everything."""
    import blosc2

    # By default Blosc2 holds the GIL while it decodes, and threads that decode would wait for each other. The
    # switch is one per process and Blosc2's own.
    blosc2.set_releasegil(True)
    return blosc2


@functools.cache
def library() -> Any:
    """Load the C library inside the package; None where it is missing, or of another version."""
    found = find_spec("blosc2")  # imports nothing
    if found is None or found.origin is None:
        return None
    place = Path(found.origin).parent / "lib" / "libblosc2.so"
    try:
        loaded = ctypes.CDLL(str(place))
        if not _declare(loaded):
            return None
    except (OSError, AttributeError):  # it is missing, made for another system, or without a function
        return None
    # Under the GIL, because two threads may be here at once, and it fills tables that are read without locks.
    ctypes.PyDLL(str(place)).blosc2_init()
    return loaded


def _declare(loaded: ctypes.CDLL) -> bool:
    """State what the functions take and return; False for a library of another version."""
    loaded.blosc2_get_version_string.restype = ctypes.c_char_p
    if loaded.blosc2_get_version_string().partition(b".")[0] != b"3":
        return False
    pointer, num_bytes, num_bytes_32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    loaded.blosc2_create_dctx.argtypes = [DecodingParameters]
    loaded.blosc2_create_dctx.restype = pointer
    loaded.blosc2_decompress_ctx.argtypes = [pointer, pointer, num_bytes_32, pointer, num_bytes_32]
    loaded.blosc2_get_blosc2_cparams_defaults.restype = EncodingParameters
    loaded.blosc2_create_cctx.argtypes = [EncodingParameters]
    loaded.blosc2_create_cctx.restype = pointer
    loaded.blosc2_compress_ctx.argtypes = [pointer, pointer, num_bytes_32, pointer, num_bytes_32]
    loaded.blosc2_free_ctx.argtypes = [pointer]
    loaded.b2nd_create_ctx.argtypes = [
        *(pointer, ctypes.c_int8, pointer, pointer, pointer, ctypes.c_char_p, ctypes.c_int8, pointer),
        num_bytes_32,
    ]
    loaded.b2nd_create_ctx.restype = pointer
    loaded.b2nd_zeros.argtypes = [pointer, pointer]
    loaded.b2nd_from_cbuffer.argtypes = [pointer, pointer, pointer, num_bytes]
    loaded.b2nd_to_cframe.argtypes = [pointer, pointer, pointer, pointer]
    loaded.b2nd_free_ctx.argtypes = [pointer]
    loaded.b2nd_from_cframe.argtypes = [pointer, num_bytes, ctypes.c_bool, pointer]
    loaded.b2nd_get_slice_cbuffer.argtypes = [pointer, pointer, pointer, pointer, pointer, num_bytes]
    loaded.b2nd_free.argtypes = [pointer]
    loaded.blosc2_schunk_from_buffer.argtypes = [pointer, num_bytes, ctypes.c_bool]
    loaded.blosc2_schunk_from_buffer.restype = pointer
    loaded.blosc2_schunk_get_slice_buffer.argtypes = [pointer, num_bytes, num_bytes, pointer]
    loaded.blosc2_schunk_free.argtypes = [pointer]
    return True


@functools.cache
def _encoding_library() -> Any:
    """Return the library if its structures are those of this module; otherwise None."""
    loaded = library()
    if loaded is None or _fields(loaded.blosc2_get_blosc2_cparams_defaults()) != _fields(_DEFAULTS):
        return None
    return loaded


def _fields(parameters: EncodingParameters) -> list[Any]:
    """Return the values of the known fields; what pads and follows them is undefined."""
    values = (getattr(parameters, name) for name, _ in EncodingParameters._fields_ if name != "later")
    return [list(value) if isinstance(value, ctypes.Array) else value for value in values]


def _check(array: NDArray[Any]) -> None:
    # The library gets an address and a size of 32 bits: it would read past the end of a view, and ctypes cuts
    # a larger size.
    if not array.flags.c_contiguous:
        raise ValueError("array must be C-contiguous.")
    if array.nbytes > _MAX_NUM_BYTES:
        raise ValueError(f"array must have at most {_MAX_NUM_BYTES} bytes, got {array.nbytes}.")


class _Encoder:
    """What the C library compresses arrays of one size with in one thread.

    Its scratch memory, and that of the chunks, is taken once: as much as four blocks and an array.
    """

    def __init__(self, loaded: Any, settings: tuple[int, int, int, bool]) -> None:
        num_bytes, itemsize, block_num_bytes, is_fast = settings
        self.settings = settings
        self._free, self._compress = loaded.blosc2_free_ctx, loaded.blosc2_compress_ctx
        self._pointer = loaded.blosc2_create_cctx(
            _parameters(itemsize, is_fast, block_num_bytes=block_num_bytes)
        )
        if not self._pointer:
            raise MemoryError
        chunk = np.empty(num_bytes + _MAX_OVERHEAD, np.uint8)
        self._chunk, self._address, self._num_bytes = chunk.data, chunk.ctypes.data, num_bytes

    def __del__(self) -> None:
        if self._pointer:  # the library would read from address 0
            self._free(self._pointer)

    def compress(self, array: NDArray[Any]) -> memoryview:
        size = self._compress(
            self._pointer, array.ctypes.data, self._num_bytes, self._address, self._chunk.nbytes
        )
        if size <= 0:
            raise RuntimeError(f"a chunk must encode, got error {size} from blosc2.")
        return self._chunk[:size]


_of_thread = threading.local()
_MAX_KEPT_NUM_BYTES: Final = 16 << 20


def compress(array: NDArray[Any], block_num_bytes: int = 0, *, is_fast: bool) -> memoryview:
    """Encode a C-contiguous array as one chunk, without the GIL.

    Args:
        array: Its bytes are encoded, by its itemsize.
        block_num_bytes: Of the blocks, each compressed alone; 0 leaves it to the library.
        is_fast: LZ4 in place of Zstandard: other filters, decoded faster.

    Returns:
        The chunk, until the calling thread encodes the next one.

    Raises:
        ValueError: ``array`` is not C-contiguous, or too large.
        RuntimeError: It cannot be encoded.
        MemoryError: There is no memory for it.
    """
    _check(array)
    loaded = _encoding_library()
    if loaded is None:
        settings = _settings(array.itemsize, is_fast)
        return memoryview(package().compress2(array, **settings, blocksize=block_num_bytes))
    key = (array.nbytes, array.itemsize, block_num_bytes, is_fast)
    encoder: _Encoder | None = getattr(_of_thread, "encoder", None)
    if encoder is None or encoder.settings != key:
        encoder = _of_thread.encoder = None  # its memory is free for the next one
        encoder = _Encoder(loaded, key)
        if array.nbytes <= _MAX_KEPT_NUM_BYTES:
            _of_thread.encoder = encoder
    return encoder.compress(array)


def make_frame(
    array: NDArray[Any] | None,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    chunk_shape: Sequence[int],
    block_shape: Sequence[int],
    *,
    is_fast: bool,
) -> bytes:
    """Encode an array as a frame.

    Args:
        array: C-contiguous, of this shape and dtype; None for zeros.
        shape: Of the array.
        dtype: Of the array, little-endian.
        chunk_shape: Of a chunk.
        block_shape: Of a block of a chunk, each compressed alone.
        is_fast: As of `compress`.

    Raises:
        ValueError: ``array`` is not C-contiguous, or too large.
        RuntimeError: It cannot be encoded.
        MemoryError: There is no memory for it.
    """
    if array is not None:
        _check(array)
    loaded = _encoding_library()
    if loaded is None:
        blosc2 = package()
        layout = {
            "chunks": tuple(chunk_shape),
            "blocks": tuple(block_shape),
            "cparams": blosc2.CParams(**_settings(dtype.itemsize, is_fast)),
            # A header names the threads to decode with; by default as many as the writing machine has.
            "dparams": blosc2.DParams(nthreads=1),
            "contiguous": True,
        }
        made = (
            blosc2.zeros(tuple(shape), dtype=dtype, **layout)
            if array is None
            else blosc2.asarray(array, **layout)
        )
        return bytes(made.to_cframe())
    storage = _Storage(
        is_contiguous=True,
        encoding=ctypes.pointer(_parameters(dtype.itemsize, is_fast, is_of_frame=True)),
        decoding=ctypes.pointer(DecodingParameters(num_threads=1, itemsize=8)),
    )
    num_axes = len(shape)
    context = loaded.b2nd_create_ctx(
        ctypes.byref(storage),
        num_axes,
        (ctypes.c_int64 * num_axes)(*shape),
        (ctypes.c_int32 * num_axes)(*chunk_shape),
        (ctypes.c_int32 * num_axes)(*block_shape),
        dtype.str.encode(),
        _NUMPY_FORMAT,
        None,
        0,
    )
    if not context:
        raise MemoryError
    made = ctypes.c_void_p()
    try:
        if array is None:
            _done(loaded.b2nd_zeros(context, ctypes.byref(made)))
        else:
            _done(loaded.b2nd_from_cbuffer(context, ctypes.byref(made), array.ctypes.data, array.nbytes))
        start, num_bytes, is_ours = ctypes.c_void_p(), ctypes.c_int64(), ctypes.c_bool()
        _done(
            loaded.b2nd_to_cframe(made, ctypes.byref(start), ctypes.byref(num_bytes), ctypes.byref(is_ours))
        )
        frame = ctypes.string_at(start, num_bytes.value)
        if is_ours.value:
            free = ctypes.CDLL(None).free
            free.argtypes, free.restype = [ctypes.c_void_p], None
            free(start)
        return frame
    finally:
        if made.value:
            loaded.b2nd_free(made)
        loaded.b2nd_free_ctx(context)


def _done(code: int) -> None:
    if code < 0:
        raise RuntimeError(f"a frame must encode, got error {code} from blosc2.")


def _settings(itemsize: int, is_fast: bool) -> dict[str, Any]:
    """What decides the compressed bytes, as the package takes it."""
    filters = [_BITSHUFFLE] if is_fast else [_SHUFFLE, _BYTEDELTA]
    return {
        "codec": _LZ4 if is_fast else _ZSTD,
        "clevel": 9 if is_fast else 1,
        "filters": filters,
        "filters_meta": [0] * len(filters),
        "typesize": itemsize,
        # More threads give other bytes from run to run.
        "nthreads": 1,
    }


def _parameters(
    itemsize: int, is_fast: bool, *, block_num_bytes: int = 0, is_of_frame: bool = False
) -> EncodingParameters:
    """What decides the compressed bytes, as the library takes it."""
    settings = _settings(itemsize, is_fast)
    named: list[int] = settings["filters"]
    # A byte delta is for values of several bytes. For others the package leaves the filter out, and still
    # writes its parameter into a frame, but not into a chunk alone.
    filters = [kind if itemsize > 1 or kind != _BYTEDELTA else 0 for kind in named]
    return EncodingParameters(
        codec=settings["codec"],
        level=settings["clevel"],
        itemsize=itemsize,
        num_threads=settings["nthreads"],
        block_num_bytes=block_num_bytes,
        split_mode=_AUTO_SPLIT,
        filters=tuple(filters),
        filters_meta=tuple(
            itemsize if kind == _BYTEDELTA else 0 for kind in (named if is_of_frame else filters)
        ),
    )
