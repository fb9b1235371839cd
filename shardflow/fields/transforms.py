"""User transforms: a function that changes each sample in place as a batch is made.

It is given by name, ``"package.module:function"``, so that loader processes can import it without the
trainer's main module, and a configuration file can contain it. It gets the sample's arrays, which are views
of the batch, and a NumPy generator that depends on run seed, epoch and sample alone (in a blend also on step,
micro-batch and slot). So the result is the same on any number of ranks, threads and processes, and after a
resume::

    def jitter(sample: dict[str, NDArray[Any]], rng: np.random.Generator) -> None:
        sample["image"] += rng.integers(-5, 6, dtype=np.int16)

An error in the function ends the run; it does not mask the sample. NumPy keeps the bit stream of its Philox
generator stable across versions, but not the values of its distributions.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.field import Arrays, DrawKey
from shardflow.fields.raw import FieldsView, field_of
from shardflow.fields.text import text_of
from shardflow.fields.views import View, slices_of

Transform: TypeAlias = Callable[[dict[str, NDArray[Any]], np.random.Generator], None]

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_name(name: str) -> None:
    """Refuse a string that cannot name a function; an empty one means no function.

    Raises:
        ConfigError: It is not of the form ``package.module:function``, or names the main module, which no
            other process can import.
    """
    if name and (not _NAME.fullmatch(name) or name.startswith("__main__:")):
        raise ConfigError(
            f"transform must be package.module:function, of a module that can be imported, got {name!a}; "
            "put the function into a module of its own."
        )


def load_transform(name: str) -> Transform:
    """Import a function by its name.

    Raises:
        ConfigError: There is no such module or function.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"transform must name a function that can be imported, got {type(error).__name__} for {name!a}; "
            "is its folder on PYTHONPATH?"
        ) from error
    if not callable(found):
        raise ConfigError(f"transform must name a function, got {type(found).__name__} for {name!a}.")
    transform: Transform = found
    return transform


def sample_generator(key: DrawKey) -> np.random.Generator:
    """Return the random generator of one sample in one epoch."""
    return np.random.Generator(np.random.Philox(key=key.derive("transform")))


def sample_arrays(arrays: Arrays, slot: int, view: View | FieldsView | None) -> dict[str, NDArray[Any]]:
    """Return the arrays of a sample for a transform: writable views of the batch.

    Returns:
        - with slices, or their tiles: ``image`` ``(slices, rows, columns)``, the existing ones, and
          ``display_range`` ``(2,)``;
        - with fields by name: each field that the sample has, ``(num_bytes,)`` uint8, or ``(rows, columns,
          3)`` uint8 where it was decoded;
        - with text: ``text`` ``(num_bytes,)`` uint8.
    """
    sample: dict[str, NDArray[Any]] = {}
    if isinstance(view, FieldsView):
        for place, name in enumerate(view.fields):
            found = field_of(arrays, slot, place)
            if found is not None:
                sample[name] = found
    elif view is not None:
        sample["image"] = slices_of(arrays, slot)
        sample["display_range"] = arrays["display_range"][slot]
    if "text_offsets" in arrays:
        sample["text"] = text_of(arrays, slot)
    return sample
