"""A micro-batch in memory: one flat buffer and a description of what lies where in it.

The buffer and the description are all there is, so a batch crosses a process boundary as bytes and a JSON
text, and its arrays are rebuilt there without copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardflow.loading.quarantine import QuarantineRow

__all__ = ["ArraySpec", "Batch", "BatchLayout"]

_ALIGNMENT = 64  # a cache line, and what vector instructions like


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Name, dtype and shape of an array of a batch."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: DTypeLike, *shape: int) -> ArraySpec:
        """Make a spec from anything that NumPy takes for a dtype."""
        return cls(name, np.dtype(dtype), shape)

    @property
    def num_bytes(self) -> int:
        """Size of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where each array of a batch begins in its buffer."""

    arrays: tuple[ArraySpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, arrays: Sequence[ArraySpec]) -> BatchLayout:
        """Put arrays one after another, each on a cache line."""
        offsets: list[int] = []
        end = 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(arrays), tuple(offsets), end)

    def views(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return the arrays in a buffer, by name."""
        return {entry["name"]: _view(buffer, entry) for entry in self.to_json()}

    def to_json(self) -> list[dict[str, Any]]:
        """Describe the arrays as JSON objects."""
        return [
            {"name": spec.name, "dtype": spec.dtype.str, "shape": list(spec.shape), "offset": offset}
            for spec, offset in zip(self.arrays, self.offsets, strict=True)
        ]


class Batch:
    """One micro-batch of one rank.

    Memory is recycled: it returns to the loader when the batch, its arrays and everything made from them
    without a copy (slices, ``torch.from_numpy``) are gone, never before.

    Args:
        buffer: ``(num_bytes,)`` uint8, what all arrays are views of.
        descriptor: JSON-able; see `descriptor`.

    Attributes:
        buffer: The flat buffer.
        descriptor: ``version``, ``epoch``, ``step``, ``micro``, ``slot``, ``arrays`` (``name``, ``dtype``,
            ``shape``, ``offset`` each), ``keys`` and ``quarantined``.
    """

    __slots__ = ("_arrays", "buffer", "descriptor")

    def __init__(self, buffer: NDArray[np.uint8], descriptor: dict[str, Any]) -> None:
        self.buffer = buffer
        self.descriptor = descriptor
        self._arrays = {entry["name"]: _view(buffer, entry) for entry in descriptor["arrays"]}

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, writable views of `buffer`; B slots, K slices.

        - ``row``: ``(B,)`` int64, row of the samples table; -1 in a padding slot.
        - ``weight``: ``(B,)`` float32, 1 for a sample, 0 for padding and for a masked sample.
        - with an `ImageView`: ``image`` ``(B, K, rows, columns)`` int16 or float32 in stored units (CT: HU),
          ``slice_mask`` ``(B, K)`` uint8 (1 where there is a slice), ``display_range`` ``(B, 2)`` float32.
        - with a `NativeView`: ``pixels`` flat, ``pixel_start`` ``(B,)`` int64 and ``image_shape`` ``(B, 3)``
          int64 (slices, rows, columns), ``display_range``; `image` puts them together.
        - with text: ``text_bytes`` flat uint8, ``text_offsets`` ``(B + 1,)`` int64; `text` puts them
          together.
        """
        return self._arrays

    @property
    def epoch(self) -> int:
        """Epoch of the step."""
        return int(self.descriptor["epoch"])

    @property
    def step(self) -> int:
        """Step that the micro-batch belongs to."""
        return int(self.descriptor["step"])

    @property
    def micro(self) -> int:
        """Number of the micro-batch in its step; from ``micro_batches_per_step`` on it is a filler."""
        return int(self.descriptor["micro"])

    @property
    def slot(self) -> int:
        """Which of this rank's micro-batches of the step it is, from 0."""
        return int(self.descriptor["slot"])

    @property
    def keys(self) -> list[str | None]:
        """Sample key per slot, as planned: None in a padding slot; a masked sample keeps its key."""
        return list(self.descriptor["keys"])

    @property
    def quarantined(self) -> list[QuarantineRow]:
        """The slots that were masked because their sample is bad."""
        return [QuarantineRow.from_json(row) for row in self.descriptor["quarantined"]]

    def text(self, slot: int) -> str:
        """Return the report of a slot; empty where there is none.

        Raises:
            KeyError: The loader was configured without text.
        """
        start, stop = self._arrays["text_offsets"][slot : slot + 2].tolist()
        return self._arrays["text_bytes"][start:stop].tobytes().decode()

    def image(self, slot: int) -> NDArray[Any]:
        """Return the slices of a slot that exist, ``(slices, rows, columns)``, without a copy.

        Raises:
            KeyError: The loader was configured without images.
        """
        if "image" in self._arrays:
            slices: NDArray[Any] = self._arrays["image"][slot]
            return slices[: int(self._arrays["slice_mask"][slot].sum())]
        start = int(self._arrays["pixel_start"][slot])
        shape = self._arrays["image_shape"][slot].tolist()
        return self._arrays["pixels"][start : start + int(np.prod(shape))].reshape(shape)

    def __len__(self) -> int:
        """Number of slots, padding included."""
        return len(self.descriptor["keys"])

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {list(array.shape)} {array.dtype}" for name, array in self._arrays.items())
        return f"Batch(epoch {self.epoch}, step {self.step}, micro {self.micro}: {names})"


def _view(buffer: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(entry["dtype"])
    num_bytes = int(np.prod(entry["shape"], dtype=np.int64)) * dtype.itemsize
    flat: NDArray[Any] = buffer[entry["offset"] : entry["offset"] + num_bytes].view(dtype)
    return flat.reshape(entry["shape"])
