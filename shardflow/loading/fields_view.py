"""Fields by name, as they are stored: the view of shards that others wrote.

Sizes are fixed before reading, as in every view: a slot has room for its whole sample, and for the pixels of
its images as their headers told when they were indexed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.loading.view import ArraySpec
from shardflow.loading.view import SliceFacts

__all__ = ["FieldsView", "is_image_field", "readable_fields"]

_COLOURS: Final = 3
_IMAGE_KINDS: Final = frozenset({"jpg", "jpeg", "png"})
# What webdataset would unpickle: code of a stranger.
_PICKLES: Final = frozenset({"pth", "pt", "pkl", "pickle", "pyd", "dill"})


def is_image_field(name: str) -> bool:
    """Tell whether a field holds a picture that can be decoded."""
    return name.rpartition(".")[2] in _IMAGE_KINDS


def readable_fields(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of fields that a view may hold: all but pickles."""
    return tuple(name for name in names if name.rpartition(".")[2] not in _PICKLES)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldsView:
    """Some fields of each sample; `Batch.field` gives them decoded by the last part of their name.

    No field is ever unpickled: ``.pth``, ``.pkl`` and the like are refused, ``.npy`` with objects as well.

    Raises:
        ConfigError: No field is named, one twice, or one that holds a pickle.
    """

    fields: tuple[str, ...]
    """Their names as the index has them: lower case, such as ``"jpg"`` or ``"seg.png"``."""
    missing: Literal["allow", "mask"] = "allow"
    """A sample without one of the fields: that field is None, or the sample is bad and masked."""
    images: Literal["pixels", "bytes"] = "pixels"
    """``pixels``: JPEG and PNG become RGB uint8 in the loader's threads. ``bytes``: left as they are."""

    def __post_init__(self) -> None:
        if not self.fields or len({*self.fields}) < len(self.fields):
            raise ConfigError("fields must name at least one field, each once, got none or one twice.")
        for name in self.fields:
            if name.rpartition(".")[2] in _PICKLES:
                raise ConfigError(f"a field must not be a pickle, got {name!a}; store arrays as .npy.")

    def is_decoded(self, name: str) -> bool:
        """Tell whether a field comes as pixels."""
        return self.images == "pixels" and is_image_field(name)

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots, num_fields = len(facts.rows), len(self.fields)
        return [
            ArraySpec.of("field_data", np.uint8, int(self._room(facts).sum())),
            ArraySpec.of("field_start", np.int64, num_slots, num_fields),
            ArraySpec.of("field_shape", np.int64, num_slots, num_fields, 3),
        ]

    def prepare(self, arrays: Mapping[str, NDArray[Any]], facts: SliceFacts) -> None:
        """Fill what does not depend on any field: each slot begins where its room does, empty."""
        room = self._room(facts)
        arrays["field_start"][:] = (np.cumsum(room) - room)[:, None]
        arrays["field_shape"][:] = (-1, 0, 0)

    def blank(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> None:
        """Make a slot look like one without fields; its data are out of reach then."""
        arrays["field_shape"][slot] = (-1, 0, 0)

    def _room(self, facts: SliceFacts) -> NDArray[np.int64]:
        """Bytes that each slot may need, ``(B,)``."""
        num_images = sum(map(self.is_decoded, self.fields))
        return facts.num_bytes + num_images * facts.rows * facts.columns * _COLOURS
