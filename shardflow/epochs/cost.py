"""What a sample costs: a declared rule over facts, in integers, so that every machine finds the same number.

The index stores facts, never cost, because cost depends on the tokenizer, the view and the model. Text tokens
are estimated from the bytes of the report, unless the rule names a tokenizer whose counts lie beside the
dataset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.epochs.buckets import MAX_BUCKETS, BucketDraw, ImageBucket
from shardflow.epochs.integers import check_ints
from shardflow.epochs.tiles import TileRule
from shardflow.errors import ConfigError, PlanError

__all__ = ["CostRule"]

Int64Array = npt.NDArray[np.int64]
LengthArray = npt.NDArray[np.uint32 | np.int64]

# Bounds that keep a length below 2**36, so that no product leaves 64 bits.
_RULE_BOUNDS = {
    "text_tokens_per_1000_bytes": (0, 2**13),
    "max_text_tokens": (0, 2**31 - 1),
    "image_tokens_per_slice": (0, 2**17),
    "max_slices": (0, 2**17),
    "tokens_per_sample": (1, 2**17),
    "quadratic_tokens": (0, 2**31 - 1),
}
_LONGEST = 2**31 - 1
_MOST_IMAGE_TOKENS = 2**34
# Not keys of the JSON where they are not used, so that rules which never knew them keep their identity.
_LATER = ("tokenizer", "buckets", "tiles")
_ESTIMATED_RATE = 250
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_WORD = 2**32


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRule:
    """The length of a sample in tokens, and the cost of a length.

    ``length = tokens_per_sample + text + image``, where ``text`` is ``ceil(text_bytes *
    text_tokens_per_1000_bytes / 1000)``, at most ``max_text_tokens``, and ``image`` is ``min(num_slices,
    max_slices) * image_tokens_per_slice``, times the tiles of a slice. The length counts towards a token
    budget. The cost of a length,
    by which micro-batches are balanced, is ``length + length * length // quadratic_tokens``.

    Raises:
        ConfigError: A number is out of range.
    """

    text_tokens_per_1000_bytes: int = _ESTIMATED_RATE
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
    tokenizer: str = ""
    """SHA-256 of the ``tokenizer.json`` whose counts (column ``text_tokens``) are the text tokens, instead of
    an estimate from bytes; empty estimates, and then is no key of the JSON."""
    buckets: tuple[ImageBucket, ...] = ()
    """Sizes of image that samples get by a keyed choice, other ones in each epoch, in place of ``max_slices``
    and ``image_tokens_per_slice``; none, and then no key of the JSON, where all get one."""
    tiles: TileRule | None = None
    """Each slice is cut into tiles, and each of those costs ``image_tokens_per_slice``; None, and then no key
    of the JSON, where a slice is one image."""

    def __post_init__(self) -> None:
        self._check_images()
        if self.tokenizer != "" and not _DIGEST.fullmatch(str(self.tokenizer)):
            raise ConfigError("tokenizer must be 64 hexadecimal digits or empty, got another (cost rule).")
        if self.tokenizer:  # no part of the rule, so that one rule has one identity
            object.__setattr__(self, "text_tokens_per_1000_bytes", _ESTIMATED_RATE)
        check_ints(self, _RULE_BOUNDS, where="cost rule", error=ConfigError)

    def _check_images(self) -> None:
        if len(self.buckets) > MAX_BUCKETS:
            raise ConfigError(f"buckets must be at most {MAX_BUCKETS}, got {len(self.buckets)} (cost rule).")
        if self.buckets and (self.max_slices or self.image_tokens_per_slice or self.tiles):
            raise ConfigError(
                "buckets must come without max_slices, image_tokens_per_slice and tiles, got one of them "
                "(cost rule); say them for each bucket."
            )
        if self._most_image_tokens > _MOST_IMAGE_TOKENS:
            raise ConfigError(
                f"image tokens of a sample must be at most {_MOST_IMAGE_TOKENS}, got up to "
                f"{self._most_image_tokens} (cost rule); lower one of their factors."
            )

    def lengths(self, facts: Mapping[str, npt.NDArray[Any]], draw: BucketDraw | None = None) -> Int64Array:
        """Return the length of samples in tokens, int64, at least 1.

        Args:
            facts: Columns ``text_bytes`` or ``text_tokens``, ``num_slices``, and ``row``, ``rows`` and
                ``columns`` for buckets and tiles, integers of equal shape; only those that the rule uses.
            draw: The choices of the epoch, where there are buckets; None counts a sample with their mean.

        Raises:
            PlanError: A column is missing.
        """
        return self.short_lengths(facts, draw).astype(np.int64, copy=False)

    def short_lengths(
        self, facts: Mapping[str, npt.NDArray[Any]], draw: BucketDraw | None = None
    ) -> LengthArray:
        """Return what :meth:`lengths` returns, in 32 bits where they do: that is several times as fast."""
        columns = {name: _column(facts, name) for name in self._named_facts()}
        if not columns:
            shape = next(iter(facts.values())).shape if facts else ()
            return np.full(shape, self.tokens_per_sample, np.int64)
        word = np.uint32 if self._fits_32_bits(columns) else np.int64
        parts: list[npt.NDArray[Any]] = []
        source = self._text_fact()
        if source in columns:
            text: npt.NDArray[Any] = columns[source].astype(word)
            if not self.tokenizer:
                text *= word(self.text_tokens_per_1000_bytes)
                text += word(999)
                text //= word(1000)
            if self.max_text_tokens:
                np.minimum(text, word(self.max_text_tokens), out=text)
            parts.append(text)
        if "num_slices" in columns:
            parts.append(self._image_tokens(columns, draw, word))
        found = parts[0]
        for part in parts[1:]:
            found += part
        found += word(self.tokens_per_sample)
        return found

    def _fits_32_bits(self, columns: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Whether no number on the way to a length leaves 32 bits."""
        text, images = 0, self._most_image_tokens
        column = columns.get(self._text_fact())
        if column is not None:
            if column.dtype.kind != "u":
                return False
            rate = 1000 if self.tokenizer else self.text_tokens_per_1000_bytes
            text = int(column.max(initial=0)) * rate + 999
        return max(text, text // 1000 + images + self.tokens_per_sample) < _WORD

    def _image_tokens(
        self,
        columns: Mapping[str, npt.NDArray[Any]],
        draw: BucketDraw | None,
        word: type[np.uint32 | np.int64],
    ) -> npt.NDArray[Any]:
        num_slices = columns["num_slices"]
        if not self.buckets:
            image: npt.NDArray[Any] = np.minimum(num_slices, self.max_slices).astype(word)
            image *= word(self.image_tokens_per_slice)
            if self.tiles is not None:
                image *= self.tiles.num_places(columns["rows"], columns["columns"]).astype(word)
            return image
        weights = [bucket.weight for bucket in self.buckets]
        if draw is None:
            total = np.zeros(num_slices.shape, np.int64)
            for bucket in self.buckets:
                taken = np.minimum(num_slices, bucket.max_slices).astype(np.int64)
                total += bucket.weight * bucket.tokens_per_slice * taken
            return (total // sum(weights)).astype(word)
        chosen = draw.choose(columns["row"], weights)
        most = np.array([bucket.max_slices for bucket in self.buckets], word)[chosen]
        each: npt.NDArray[Any] = np.array([bucket.tokens_per_slice for bucket in self.buckets], word)[chosen]
        each *= np.minimum(num_slices, most).astype(word)
        return each

    @property
    def _most_image_tokens(self) -> int:
        places = self.tiles.most_places if self.tiles is not None else 1
        of_buckets = [bucket.max_slices * bucket.tokens_per_slice for bucket in self.buckets]
        return max(self.max_slices * self.image_tokens_per_slice * places, *of_buckets, 0)

    def used_facts(self) -> tuple[str, ...]:
        """Return the columns that :meth:`lengths` needs; one at least, for the shape."""
        return self._named_facts() or ("text_bytes",)

    def _text_fact(self) -> str:
        return "text_tokens" if self.tokenizer else "text_bytes"

    def _named_facts(self) -> tuple[str, ...]:
        names = []
        if self.text_tokens_per_1000_bytes:
            names.append(self._text_fact())
        if self._most_image_tokens:
            names.append("num_slices")
            names += ["row"] if self.buckets else []
            names += ["rows", "columns"] if self.tiles is not None else []
        return tuple(names)

    def costs(self, lengths: Int64Array) -> Int64Array:
        """Return the cost of lengths, int64."""
        if not self.quadratic_tokens:
            return lengths
        squared = np.minimum(lengths, _LONGEST)
        squared *= squared
        costs: Int64Array = lengths + squared // self.quadratic_tokens
        return costs

    def to_json(self) -> dict[str, Any]:
        """Return the rule as a JSON object; it is part of the plan's identity."""
        rule = asdict(self)
        for name in _LATER:
            if not rule[name]:
                del rule[name]
        if self.buckets:  # short, because it is in every state
            rule["buckets"] = [[each.weight, each.max_slices, each.tokens_per_slice] for each in self.buckets]
        return rule

    @classmethod
    def from_json(cls, value: object) -> CostRule:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: A missing or unknown key, or a value that the constructor refuses.
        """
        names = {entry.name for entry in fields(cls)}
        is_object = isinstance(value, Mapping) and {*value, *_LATER} == names
        if not isinstance(value, Mapping) or not is_object or not all(value.get(name, 1) for name in _LATER):
            raise ConfigError(f"cost rule must have the keys {', '.join(sorted(names))}, got others.")
        parts = dict(value)
        try:
            if "buckets" in parts:
                parts["buckets"] = tuple(
                    ImageBucket(weight=weight, max_slices=most, tokens_per_slice=tokens)
                    for weight, most, tokens in parts["buckets"]
                )
            if "tiles" in parts:
                parts["tiles"] = TileRule(**parts["tiles"])
        except (TypeError, ValueError):
            raise ConfigError(
                "cost rule must have buckets and tiles as it writes them, got others."
            ) from None
        return cls(**parts)


def _column(facts: Mapping[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
    column = facts.get(name)
    if column is None:
        raise PlanError(
            f"the cost rule must be given the column {name!r}, got {sorted(facts)} (sample layout); hand it "
            f"in as a fact, or choose a rule without it."
        )
    return column
