"""Layout of the arrays of a micro-batch in one flat buffer; any process or device rebuilds them from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.field import ArraySpec

_ALIGNMENT = 64  # a cache line, and the widest vector instruction


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Layout of the arrays of a batch in its buffer."""

    arrays: tuple[ArraySpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, arrays: Sequence[ArraySpec]) -> BatchLayout:
        """Place arrays one after another, each aligned to a cache line."""
        offsets: list[int] = []
        end = 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(arrays), tuple(offsets), end)

    def views(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return the arrays in a buffer, by name."""
        return {
            spec.name: view_of(buffer, spec.dtype, spec.shape, offset)
            for spec, offset in zip(self.arrays, self.offsets, strict=True)
        }

    def to_json(self) -> list[dict[str, Any]]:
        """Describe the arrays as JSON objects."""
        return [
            {"name": spec.name, "dtype": spec.dtype.str, "shape": list(spec.shape), "offset": offset}
            for spec, offset in zip(self.arrays, self.offsets, strict=True)
        ]


def view_of(
    buffer: NDArray[np.uint8], dtype: np.dtype[Any], shape: Sequence[int], offset: int
) -> NDArray[Any]:
    """Return the array of a dtype and shape that begins at an offset of a buffer."""
    flat: NDArray[Any] = buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype)
    return flat if len(shape) == 1 else flat.reshape(shape)
