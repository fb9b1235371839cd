"""Slice codecs by name, and decoding of any field by the last part of its name.

`CODECS` are those that shardflow writes. Readers also know codecs that installed packages offer by entry
points of the group ``shardflow.codecs``; one is imported when a slice of its name is met.

A codec is lossless, its output depends on the array alone, and it can be read without shardflow
(docs/format.md, section 4). No codec detects every flipped bit, so check a field's crc32c before decoding
it. `decode_field` and `webdataset_decoder` serve readers with their own loop, such as plain webdataset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format.contents.pictures import decode_picture, opencv
from shardflow.format.slice_codecs import b2nd, htj2k, npy, png16

Payload = bytes | bytearray | memoryview | NDArray[np.uint8]
ArrayHeader = tuple[tuple[int, ...], "np.dtype[Any]"]

DEFAULT_CODEC = "b2nd"
FAST = "fast"
"""Encoding of slices that are stored as ``b2nd``, and decode 2 to 3 times as fast."""
ROOM_BEFORE: Final = b2nd.HEAD_NUM_BYTES
"""Bytes before payloads in memory, see `decode_arrays`."""
room_behind = b2nd.tail_num_bytes  # of a number of payloads
SLICE_CODEC: Final = "slice_codec"
"""Entry of a manifest's ``extra``: codec of the slices, where their names do not tell it."""


Outs: TypeAlias = Sequence[NDArray[Any]] | NDArray[Any]
"""Where slices are decoded to: an array for each, or one array for all."""
# Takes payloads, where to decode them to, and the memory that holds them.
_DecodeAll: TypeAlias = Callable[
    [Sequence[memoryview], Outs, NDArray[np.uint8] | None], dict[int, FormatError]
]


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to store an array.

    Attributes:
        encode: From a C-contiguous, little-endian array.
        read_header: Shape and dtype, without decoding.
        decode: Into a C-contiguous array of exactly that shape and dtype.
        holds: Whether it can store an array of a shape and dtype.
        decode_all: Several slices as `decode`, where that is faster than one by one, see `decode_arrays`;
            returns what is wrong with some, by their places.
    """

    encode: Callable[[NDArray[Any]], bytes]
    read_header: Callable[[memoryview], ArrayHeader]
    decode: Callable[[memoryview, NDArray[Any]], None]
    holds: Callable[[tuple[int, ...], np.dtype[Any]], bool]
    decode_all: _DecodeAll | None = None


def codec_for(wanted: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Return the codec to encode slices with: the wanted one, or the default where it cannot hold them.

    Args:
        wanted: A name in `CODECS`, or `FAST`.
        shape: Of a slice.
        dtype: Of a slice.

    Raises:
        FormatError: The codec is unknown.
    """
    return wanted if _codec(wanted).holds(shape, dtype.newbyteorder("<")) else DEFAULT_CODEC


def stored_codec(codec: str) -> str:
    """Return the name that slices of an encoding are stored under."""
    return DEFAULT_CODEC if codec == FAST else codec


def encode_array(codec: str, array: NDArray[Any]) -> bytes:
    """Encode a slice.

    Args:
        codec: A name in `CODECS`, or `FAST`.
        array: ``(rows, columns)`` or ``(rows, columns, samples_per_pixel)``, integers or floats; any byte
            order.

    Raises:
        FormatError: The codec is unknown or cannot hold such an array, or the array is empty, of another rank
            or of another kind of dtype.
    """
    if array.ndim not in (2, 3) or array.size == 0 or array.dtype.kind not in "iuf":
        raise FormatError(
            "a slice must be (rows, columns) or (rows, columns, samples_per_pixel) numbers, "
            f"got {array.dtype} {array.shape}."
        )
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    functions = _codec(codec)
    if not functions.holds(plain.shape, plain.dtype):
        raise FormatError(f"a slice must be one that {codec} can hold, got {plain.dtype} {plain.shape}.")
    return functions.encode(plain)


def array_header(codec: str, payload: Payload) -> ArrayHeader:
    """Read a payload's shape and dtype without decoding it.

    Raises:
        FormatError: The codec is unknown, or the payload is not of this codec.
    """
    return _reader(codec).read_header(_view(payload))


def decode_array(codec: str, payload: Payload, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Decode a slice. Releases the GIL while it decodes, and copies nothing on the way.

    Args:
        codec: A name in `CODECS`, or that of an installed package's codec.
        payload: The field's bytes, checked against their crc32c.
        out: Where to decode to; C-contiguous, writable, of the payload's shape and dtype. A new array if
            not given.

    Returns:
        ``out``, or the new array.

    Raises:
        FormatError: The codec is unknown, the payload cannot be decoded, or does not fit ``out``.
    """
    functions = _reader(codec)
    view = _view(payload)
    if out is None:
        shape, dtype = functions.read_header(view)
        try:
            out = np.empty(shape, dtype)
        except (ValueError, MemoryError):
            raise FormatError(f"a slice must fit into memory, got {dtype} {shape}.") from None
    elif not (out.flags.c_contiguous and out.flags.writeable):
        raise FormatError(f"an output array must be writable and C-contiguous, got strides {out.strides}.")
    functions.decode(view, out)
    return out


def decode_arrays(
    codec: str,
    payloads: Sequence[Payload],
    outs: Outs,
    memory: NDArray[np.uint8] | None = None,
) -> dict[int, FormatError]:
    """Decode several slices; one that cannot be decoded does not affect the others.

    Args:
        codec: As of `decode_array`.
        payloads: As of `decode_array`, of one codec.
        outs: Where to decode them to; C-contiguous, writable, each of its payload's shape and dtype. Places
            in one array ``(n, ...)`` may be faster.
        memory: What holds the payloads, with `ROOM_BEFORE` bytes before the first and `room_behind` bytes
            behind the last, which a decoder may overwrite; None if there is no room.

    Returns:
        What is wrong with a slice, by its place in ``payloads``.
    """
    functions = _reader(codec)
    if functions.decode_all is not None:
        return functions.decode_all([_view(payload) for payload in payloads], outs, memory)
    errors: dict[int, FormatError] = {}
    for place, (payload, out) in enumerate(zip(payloads, outs, strict=True)):
        try:
            functions.decode(_view(payload), out)
        except FormatError as error:
            errors[place] = error
    return errors


def _view(payload: Payload) -> memoryview:
    if isinstance(payload, np.ndarray):
        return payload.data.cast("B")
    return memoryview(payload).cast("B")


def _codec(name: str) -> Codec:
    try:
        return _FAST_CODEC if name == FAST else CODECS[name]
    except KeyError:
        raise FormatError(f"a codec must be one of {', '.join(sorted(CODECS))}, got {name!a}.") from None


def _holds_all(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:  # noqa: ARG001
    return True


# A reader that finds a slice in several codecs takes the first of them.
CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "b2nd": Codec(b2nd.encode, b2nd.read_header, b2nd.decode, _holds_all, b2nd.decode_all),
        "npy": Codec(npy.encode, npy.read_header, npy.decode, _holds_all),
        "htj2k": Codec(htj2k.encode, htj2k.read_header, htj2k.decode, htj2k.holds),
        "png16": Codec(png16.encode, png16.read_header, png16.decode, png16.holds),
    }
)

_FAST_CODEC: Final = replace(CODECS[DEFAULT_CODEC], encode=b2nd.encode_fast)

CODECS_GROUP: Final = "shardflow.codecs"
_RANKS: Final = {codec: rank for rank, codec in enumerate(CODECS)}


def codec_rank(name: str) -> int | None:
    """Return the rank of a codec among several that store the same slice, 0 is read first; None if unknown.

    Raises:
        ConfigError: An installed package offers the codec, and it cannot be imported.
    """
    rank = _RANKS.get(name)
    return rank if rank is not None or _offered_codec(name) is None else len(_RANKS)


def _reader(name: str) -> Codec:
    """Return a codec to read with: a built-in one, else that of an installed package."""
    return CODECS.get(name) or _offered_codec(name) or _codec(name)


@cache
def _offered_codec(name: str) -> Codec | None:
    """Return the codec that an installed package offers; whatever it raises is damage of the payload."""
    # Slow to import, and only needed for slices that no built-in codec stores.
    from importlib.metadata import entry_points

    for entry in entry_points(group=CODECS_GROUP, name=name):
        try:
            codec = entry.load()
        except Exception as error:
            raise ConfigError(
                f"The codec {name!r} of an installed package (entry points {CODECS_GROUP}) cannot be "
                f"imported ({type(error).__name__}); repair or remove the package."
            ) from error
        if not isinstance(codec, Codec):
            raise ConfigError(
                f"The codec {name!r} of an installed package is {type(codec).__name__}; its entry point must "
                "name a shardflow.format.codecs.Codec."
            )
        return replace(
            codec, read_header=_guarded(codec.read_header), decode=_guarded(codec.decode), decode_all=None
        )
    return None


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of another package whose exceptions are format errors, so that they cost one slot."""

    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except FormatError:
            raise
        except Exception as error:
            raise FormatError(f"a slice could not be decoded ({type(error).__name__}).") from error

    return guarded


def decode_field(field: str, data: Payload) -> Any:
    """Decode one field of a sample by the last part of its name.

    Returns:
        An array for slices and thumbnails, plain data for ``.json``, a string for ``.txt``.

    Raises:
        FormatError: The field's kind is unknown, or its bytes are not what the name says.
    """
    kind = field.rpartition(".")[2]
    if kind in CODECS:
        return decode_array(kind, data)
    try:
        if kind == "json":
            return json.loads(bytes(data))
        if kind == "txt":
            return bytes(data).decode("utf-8")
        if kind in {"jpg", "webp"}:
            return _decode_picture(bytes(data))
    except ConfigError:  # a ValueError as well
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a .{kind} field must decode, got {type(error).__name__}.") from None
    if _offered_codec(kind) is not None:
        return decode_array(kind, data)
    raise FormatError(f"a field must end with a known kind, got .{kind!a}; read its bytes instead.")


def _decode_picture(data: bytes) -> NDArray[np.uint8]:
    """Decode a thumbnail, JPEG or WebP: ``(rows, columns)`` gray or ``(rows, columns, 3)`` RGB."""
    pixels = decode_picture(data, opencv().IMREAD_UNCHANGED)
    return np.ascontiguousarray(pixels[..., ::-1] if pixels.ndim == 3 else pixels, np.uint8)


def webdataset_decoder(key: str, data: bytes) -> Any:
    """Decode a member for ``webdataset``: pixels to arrays, ``.json`` to dicts, ``.txt`` to strings.

    Args:
        key: The member's name after its sample key, as webdataset passes it: with a leading dot.
        data: The member's bytes.

    Returns:
        The decoded field, or None for fields of other kinds, which webdataset then gives to its next
        handler. Its default handlers unpickle some kinds; ``post=[]`` leaves them out.

    Example::

        webdataset.WebDataset(urls, shardshuffle=False).decode(webdataset_decoder, post=[])
    """
    field = key.removeprefix(".")
    is_ours = field.rpartition(".")[2] in {*CODECS, "json", "txt"} or field.endswith(
        (".thumb.jpg", ".thumb.webp")
    )
    if not is_ours:
        return None
    return decode_field(field, data)
