"""What a sample costs: a declared rule over facts, in integers, so that every machine finds the same number.

The index stores facts, never cost, because cost depends on the tokenizer, the view and the model. Until token
ids lie beside a dataset, text tokens are approximated from the bytes of the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import checked_int
from shardflow.errors import ConfigError, PlanError

__all__ = ["CostRule"]

Int64Array = npt.NDArray[np.int64]

# Bounds that keep a length below 2**36, so that no product leaves 64 bits.
_BOUNDS = {
    "text_tokens_per_1000_bytes": (0, 2**13),
    "max_text_tokens": (0, 2**31 - 1),
    "image_tokens_per_slice": (0, 2**17),
    "max_slices": (0, 2**17),
    "tokens_per_sample": (1, 2**17),
    "quadratic_tokens": (0, 2**31 - 1),
}
_LONGEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRule:
    """The length of a sample in tokens, and the cost of a length.

    ``length = tokens_per_sample + text + image``, where ``text`` is ``ceil(text_bytes *
    text_tokens_per_1000_bytes / 1000)``, at most ``max_text_tokens``, and ``image`` is ``min(num_slices,
    max_slices) * image_tokens_per_slice``. The length counts towards a token budget. The cost of a length,
    by which micro-batches are balanced, is ``length + length * length // quadratic_tokens``.

    Raises:
        ConfigError: A number is out of range.
    """

    text_tokens_per_1000_bytes: int = 250
    """Four bytes a token, as byte-pair encodings of English have it; a rule of thumb, not a count."""
    max_text_tokens: int = 0
    """Where the consumer cuts the text; 0 for nowhere."""
    image_tokens_per_slice: int = 0
    max_slices: int = 0
    """Slices that the view takes of a sample at most; 0 for a run without images."""
    tokens_per_sample: int = 2
    """What every sample has besides, such as marks at its beginning and end; at least 1, so that no sample
    costs nothing."""
    quadratic_tokens: int = 0
    """Length at which attention costs as much as all that grows with the length only; 0 leaves it out."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            low, high = _BOUNDS[entry.name]
            number = checked_int(
                entry.name,
                getattr(self, entry.name),
                low=low,
                high=high,
                where="cost rule",
                error=ConfigError,
            )
            object.__setattr__(self, entry.name, number)

    def lengths(self, facts: Mapping[str, npt.NDArray[Any]]) -> Int64Array:
        """Return the length of samples in tokens, int64, at least 1.

        Args:
            facts: Columns ``text_bytes`` and ``num_slices``, integers of equal shape; only those that the
                rule uses.

        Raises:
            PlanError: A column is missing.
        """
        found: Int64Array | None = None
        if self.text_tokens_per_1000_bytes:
            found = _column(facts, "text_bytes") * self.text_tokens_per_1000_bytes
            found += 999
            found //= 1000
            if self.max_text_tokens:
                np.minimum(found, self.max_text_tokens, out=found)
            found += self.tokens_per_sample
        if self.image_tokens_per_slice and self.max_slices:
            image = np.minimum(_column(facts, "num_slices"), self.max_slices)
            image *= self.image_tokens_per_slice
            found = image + self.tokens_per_sample if found is None else found + image
        if found is None:
            shape = next(iter(facts.values())).shape if facts else ()
            found = np.full(shape, self.tokens_per_sample, np.int64)
        return found

    def used_facts(self) -> tuple[str, ...]:
        """Return the columns that :meth:`lengths` needs; one at least, for the shape."""
        names = []
        if self.text_tokens_per_1000_bytes:
            names.append("text_bytes")
        if self.image_tokens_per_slice and self.max_slices:
            names.append("num_slices")
        return tuple(names) or ("text_bytes",)

    def costs(self, lengths: Int64Array) -> Int64Array:
        """Return the cost of lengths, int64."""
        if not self.quadratic_tokens:
            return lengths
        squared = np.minimum(lengths, _LONGEST)
        squared *= squared
        costs: Int64Array = lengths + squared // self.quadratic_tokens
        return costs

    def to_json(self) -> dict[str, int]:
        """Return the rule as a JSON object; it is part of the plan's identity."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> CostRule:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: A missing or unknown key, or a value that the constructor refuses.
        """
        names = {entry.name for entry in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise ConfigError(f"cost rule must have the keys {', '.join(sorted(names))}, got others.")
        return cls(**value)


def _column(facts: Mapping[str, npt.NDArray[Any]], name: str) -> Int64Array:
    column = facts.get(name)
    if column is None:
        raise PlanError(
            f"the cost rule must be given the column {name!r}, got {sorted(facts)} (sample layout); hand it "
            f"in as a fact, or choose a rule without it."
        )
    return column.astype(np.int64)
