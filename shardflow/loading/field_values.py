"""A field's bytes as a value, by the last part of its name. Nothing is unpickled."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError

__all__ = ["decode_value"]

_TEXTS = frozenset({"txt", "text", "transcript", "caption"})


def decode_value(name: str, data: NDArray[np.uint8]) -> Any:
    """Decode a field: text to a string, ``json`` to plain data, ``npy`` to an array, ``cls`` to an integer.

    Returns:
        The value; the bytes of every other kind.

    Raises:
        FormatError: The bytes are not what the name says, or an array holds objects.
    """
    kind = name.rpartition(".")[2]
    try:
        if kind in _TEXTS:
            return str(data.data, "utf-8")
        if kind == "json":
            return json.loads(data.tobytes())
        if kind == "npy":
            return np.load(io.BytesIO(data.tobytes()), allow_pickle=False)
        if kind in {"cls", "index"}:
            return int(data.tobytes())
    except (ValueError, EOFError, RecursionError) as error:
        raise FormatError(f"a .{kind} field must decode, got {type(error).__name__} ({name!a}).") from None
    return data.tobytes()
