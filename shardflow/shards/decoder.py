"""Decode fields by name, for readers that bring their own loop, such as plain webdataset."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.shards.codecs import CODECS, Payload, decode_array

__all__ = ["decode_field", "webdataset_decoder"]


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
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a .{kind} field must decode, got {type(error).__name__}.") from None
    raise FormatError(f"a field must end with a known kind, got .{kind!a}; read its bytes instead.")


def _decode_picture(data: bytes) -> NDArray[np.uint8]:
    """Decode a thumbnail, JPEG or WebP: ``(rows, columns)`` grey or ``(rows, columns, 3)`` RGB."""
    # Its 0.2 s are for those who have pictures.
    import cv2

    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise ValueError
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
