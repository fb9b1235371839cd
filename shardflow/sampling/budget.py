"""Token budgets: the declared cost of a sample, and how many samples of a window make a micro-batch.

Cost is a rule over facts, in integers, so every machine computes the same number. The index stores facts,
never cost, because cost depends on tokenizer, view and model. Text tokens are estimated from the bytes of
the report unless the rule names a tokenizer whose counts are stored beside the dataset.

Samples are taken from longest to shortest, so the samples of a micro-batch have nearly equal lengths and
little is padded. Where a micro-batch ends follows from the lengths of the window alone. A first pass counts
the micro-batches of a window; a second one, with a smaller budget, fills them equally, so that no rank waits
because its micro-batch is the last and smallest of a window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardflow.errors import ConfigError, PlanError
from shardflow.sampling.image_sizes import MAX_BUCKETS, BucketDraw, ImageBucket, TileRule
from shardflow.sampling.permutation import Int64Array, check_ints, checked_object

LengthArray = npt.NDArray[np.uint16 | np.uint32 | np.int64]

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
# Left out of the JSON if unused, so that rules from before they existed keep their identity.
_OPTIONAL = ("tokenizer", "buckets", "tiles", "counts_delivered", "delivered", "counted")
_ESTIMATED_RATE = 250
PREVIOUS_PREFIX: Final = "previous_"
"""Begins the facts of the earlier study of a sample, where `CostRule.counts_delivered` needs them."""
DELIVERED_PICTURES: Final = "num_pictures"
"""Fact of `CostRule.counts_delivered`: pictures, tiles and regions that the fields deliver of a sample."""
COUNTED_TOKENS: Final = "counted_tokens"
"""Fact of `CostRule.counted`: the tokens of a sample."""
MAX_PICTURES: Final = 2**17
"""Largest number of them, which keeps a length below 2**36; more count as that many."""
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_WORD = 2**32
SumArray = npt.NDArray[np.uint32]
OverBudget = Literal["alone", "skip", "truncate"]
OVER_BUDGET: Final[tuple[OverBudget, ...]] = get_args(OverBudget)
Fit = Literal["neighbors", "best"]
FITS: Final[tuple[Fit, ...]] = get_args(Fit)
_BOUNDS = {"max_tokens": (1, 2**31 - 2), "max_samples": (1, 2**24)}
# Smaller budgets that are tried, between the smallest possible one and the full one.
_TRIES = 4
_WORD_BITS = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRule:
    """Length of a sample in tokens, and cost of a length.

    ``length = tokens_per_sample + text + image``, where ``text`` is ``ceil(text_bytes *
    text_tokens_per_1000_bytes / 1000)``, at most ``max_text_tokens``, and ``image`` is ``min(num_slices,
    max_slices) * image_tokens_per_slice``, times the tiles of a slice. The length counts toward a token
    budget. The cost of a length, by which micro-batches are balanced, is ``length + length * length //
    quadratic_tokens``.

    Raises:
        ConfigError: A number is out of range.
    """

    text_tokens_per_1000_bytes: int = _ESTIMATED_RATE
    """Estimated rate: four bytes per token, as for byte-pair encodings of English."""
    max_text_tokens: int = 0
    """Length at which the consumer truncates the text; 0 for no limit."""
    image_tokens_per_slice: int = 0
    max_slices: int = 0
    """Most slices that the view takes from a sample; 0 for a run without images."""
    tokens_per_sample: int = 2
    """Further tokens of every sample, such as its begin and end markers; at least 1, so that every sample has
    a cost."""
    quadratic_tokens: int = 0
    """Length at which attention costs as much as everything linear in the length; 0 ignores attention."""
    tokenizer: str = ""
    """SHA-256 of the ``tokenizer.json`` whose counts (column ``text_tokens``) are the text tokens; empty for
    an estimate from bytes, and then left out of the JSON."""
    buckets: tuple[ImageBucket, ...] = ()
    """Image sizes, of which each sample gets one by a keyed choice in each epoch, in place of ``max_slices``
    and ``image_tokens_per_slice``; empty, and then left out of the JSON, if all samples get the same."""
    counts_delivered: bool = False
    """Whether to charge for what the fields of a loader deliver, from tables: ``image_tokens_per_slice`` for
    each picture, tile or region of a volume, and the text of reports, also of an earlier study
    (``study="previous"``), each cut at ``max_text_tokens``. Then ``max_slices``, ``tiles`` and ``buckets``
    are left out. False, and then left out of the JSON, charges for what is stored."""
    delivered: str = ""
    """SHA-256 of what is delivered of each sample, which the loader fills in: it decides the steps. Empty
    before, and then left out of the JSON."""
    tiles: TileRule | None = None
    """Cuts each slice into tiles that cost ``image_tokens_per_slice`` each; None, and then left out of the
    JSON, if a slice is one image."""
    counted: str = ""
    """SHA-256 of the exact tokens of each sample, which the loader fills in where a field knows them
    (`shardflow.Conversation`): they are the length, and of the other settings only ``quadratic_tokens``
    counts. Empty before, and then left out of the JSON."""

    def __post_init__(self) -> None:
        self._check_images()
        if self.delivered != "" and not (self.counts_delivered and _DIGEST.fullmatch(str(self.delivered))):
            raise ConfigError("delivered is filled in by a loader; leave it out (cost rule).")
        if self.counted != "":
            if not _DIGEST.fullmatch(str(self.counted)):
                raise ConfigError("counted is filled in by a loader; leave it out (cost rule).")
            others = {one.name: one.default for one in fields(self)}
            del others["counted"], others["quadratic_tokens"]
            if any(getattr(self, name) != default for name, default in others.items()):
                raise ConfigError("counted leaves no other setting than quadratic_tokens (cost rule).")
        if self.tokenizer != "" and not _DIGEST.fullmatch(str(self.tokenizer)):
            raise ConfigError("tokenizer must be 64 hexadecimal digits or empty, got other text (cost rule).")
        if self.tokenizer:  # the rate is unused, so a rule has one identity
            object.__setattr__(self, "text_tokens_per_1000_bytes", _ESTIMATED_RATE)
        check_ints(self, _RULE_BOUNDS, where="cost rule", error=ConfigError)

    def _check_images(self) -> None:
        if self.counts_delivered and (self.max_slices or self.buckets or self.tiles):
            raise ConfigError(
                "counts_delivered must come without max_slices, tiles and buckets, got one of them (cost "
                "rule); the fields of the loader say what is delivered."
            )
        if len(self.buckets) > MAX_BUCKETS:
            raise ConfigError(f"buckets must be at most {MAX_BUCKETS}, got {len(self.buckets)} (cost rule).")
        if self.buckets and (self.max_slices or self.image_tokens_per_slice or self.tiles):
            raise ConfigError(
                "buckets must come without max_slices, image_tokens_per_slice and tiles, got one of them "
                "(cost rule); set them in each bucket."
            )
        if self._most_image_tokens > _MOST_IMAGE_TOKENS:
            raise ConfigError(
                f"image tokens of a sample must be at most {_MOST_IMAGE_TOKENS}, got up to "
                f"{self._most_image_tokens} (cost rule); lower one of their factors."
            )

    def lengths(self, facts: Mapping[str, npt.NDArray[Any]], draw: BucketDraw | None = None) -> Int64Array:
        """Return the length of each sample in tokens, int64, at least 1.

        Args:
            facts: Columns ``text_bytes`` or ``text_tokens``, ``num_slices``, and ``row``, ``rows`` and
                ``columns`` for buckets and tiles, integers of equal shape; only those that the rule uses.
            draw: The choice of buckets in the epoch; None counts each sample with the mean of the buckets.

        Raises:
            PlanError: A column is missing.
        """
        return self.short_lengths(facts, draw).astype(np.int64, copy=False)

    def short_lengths(
        self, facts: Mapping[str, npt.NDArray[Any]], draw: BucketDraw | None = None
    ) -> LengthArray:
        """Return the lengths in 32 bits if they fit, which is several times as fast; see :meth:`lengths`."""
        columns = {name: _column(facts, name) for name in self._named_facts()}
        if self.counted:
            return columns[COUNTED_TOKENS]
        if not columns:
            shape = next(iter(facts.values())).shape if facts else ()
            return np.full(shape, self.tokens_per_sample, np.int64)
        word = np.uint32 if self._fits_32_bits(columns) else np.int64
        parts: list[npt.NDArray[Any]] = []
        for source in self._text_facts():
            if source not in columns:
                continue
            text: npt.NDArray[Any] = columns[source].astype(word)
            if not self.tokenizer:
                text *= word(self.text_tokens_per_1000_bytes)
                text += word(999)
                text //= word(1000)
            if self.max_text_tokens:
                np.minimum(text, word(self.max_text_tokens), out=text)
            parts.append(text)
        if DELIVERED_PICTURES in columns:
            pictures: npt.NDArray[Any] = columns[DELIVERED_PICTURES].astype(word)
            pictures *= word(self.image_tokens_per_slice)
            parts.append(pictures)
        if "num_slices" in columns:
            parts.append(self._image_tokens(columns, draw, word))
        found = parts[0]
        for part in parts[1:]:
            found += part
        found += word(self.tokens_per_sample)
        return found

    def _fits_32_bits(self, columns: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Return whether every intermediate value of a length fits 32 bits."""
        text, images = 0, self._most_image_tokens
        if DELIVERED_PICTURES in columns:
            images = int(columns[DELIVERED_PICTURES].max(initial=0)) * self.image_tokens_per_slice
        for column in (columns[name] for name in self._text_facts() if name in columns):
            if column.dtype.kind != "u":
                return False
            rate = 1000 if self.tokenizer else self.text_tokens_per_1000_bytes
            text += int(column.max(initial=0)) * rate + 999
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
        """Return the columns that :meth:`lengths` needs; at least one, for the shape."""
        return self._named_facts() or ("text_bytes",)

    def of_delivered(self) -> CostRule:
        """Return the rule that charges as much for a text, a slice and a tile, for those that are delivered.

        Raises:
            ConfigError: It has ``buckets``, by which a size is drawn for each sample.
        """
        if self.buckets:
            raise ConfigError(
                "A token budget cannot charge for sizes that are drawn and for earlier studies at once; "
                "leave out sizes= of the field, or the fields with study='previous'."
            )
        tokens = self.image_tokens_per_slice if self.max_slices else 0
        return replace(self, max_slices=0, tiles=None, image_tokens_per_slice=tokens, counts_delivered=True)

    def _text_facts(self) -> tuple[str, ...]:
        own = "text_tokens" if self.tokenizer else "text_bytes"
        return (own, PREVIOUS_PREFIX + own) if self.counts_delivered else (own,)

    def _named_facts(self) -> tuple[str, ...]:
        names: list[str] = []
        if self.counted:
            return (COUNTED_TOKENS,)
        if self.text_tokens_per_1000_bytes:
            names += self._text_facts()
        if self.counts_delivered and self.image_tokens_per_slice:
            names.append(DELIVERED_PICTURES)
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
        for name in _OPTIONAL:
            if not rule[name]:
                del rule[name]
        if self.buckets:  # compact, because it is part of every loader state
            rule["buckets"] = [[each.weight, each.max_slices, each.tokens_per_slice] for each in self.buckets]
        return rule

    @classmethod
    def from_json(cls, value: object) -> CostRule:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: A missing or unknown key, or a value that the constructor refuses.
        """
        used = {name for name in _OPTIONAL if isinstance(value, Mapping) and value.get(name)}
        names = {entry.name for entry in fields(cls)} - set(_OPTIONAL) | used
        parts = dict(checked_object(value, names, what="cost rule", error=ConfigError))
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
                "the buckets and tiles of a cost rule are not in the form in which it writes them."
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """Limits on the contents of a micro-batch.

    Raises:
        ConfigError: A number is out of range or the policy is unknown.
    """

    max_tokens: int
    """Tokens of a micro-batch, including padding if ``padded``, otherwise the sum of the lengths."""
    max_samples: int
    """Samples of a micro-batch, whatever their length."""
    padded: bool = True
    """A micro-batch is a rectangle of its longest sample; False for packed sequences."""
    over_budget: OverBudget = "alone"
    """Handling of a sample longer than ``max_tokens``: it is ``alone`` in a micro-batch, over the budget; it
    is left out of every epoch (``skip``); or it counts as ``max_tokens``, and the consumer truncates it
    (``truncate``). The plan reports how many there are."""
    cost: CostRule = field(default_factory=CostRule)
    """Defines the length of a sample, and the cost of a length."""
    fit: Fit = "neighbors"
    """Which samples share a packed sequence: ``neighbors`` in length, ``max_tokens`` of them at most and the
    sequences of a window equally full; or ``best``, as full as best-fit decreasing makes them, see
    `shardflow.sampling.budget_batches`. Conversations are packed by ``best``. Left out of the JSON for
    ``neighbors``."""

    def __post_init__(self) -> None:
        check_ints(self, _BOUNDS, where="token budget", error=ConfigError)
        if self.fit not in FITS or (self.fit == "best" and self.padded):
            raise ConfigError(
                f"fit must be one of {', '.join(FITS)}, and best needs padded=False, got {self.fit!r} (token "
                "budget)."
            )
        if not isinstance(self.padded, bool):
            raise ConfigError(f"padded must be true or false, got {self.padded!r} (token budget).")
        if self.over_budget not in OVER_BUDGET:
            raise ConfigError(
                f"over_budget must be one of {', '.join(OVER_BUDGET)}, got {self.over_budget!r} (token "
                f"budget)."
            )

    def to_json(self) -> dict[str, object]:
        """Return the budget as a JSON object; it is part of the plan's identity."""
        budget = {**asdict(self), "cost": self.cost.to_json()}
        if self.fit == "neighbors":  # so that budgets from before it existed keep their identity
            del budget["fit"]
        return budget

    @classmethod
    def from_json(cls, value: object) -> TokenBudget:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: A missing or unknown key, or a value that the constructor refuses.
        """
        is_fitted = isinstance(value, Mapping) and "fit" in value
        names = {entry.name for entry in fields(cls)} - (set() if is_fitted else {"fit"})
        parts = checked_object(value, names, what="token budget", error=ConfigError)
        return cls(**{**parts, "cost": CostRule.from_json(parts["cost"])})


def cut_micro_batches(lengths: Int64Array, *, max_tokens: int, max_samples: int, padded: bool) -> Int64Array:
    """Cut samples into micro-batches, each as full as the budget allows.

    Args:
        lengths: ``(n,)`` int64, descending, each at least 1.
        max_tokens: Budget; a longer sample is alone.
        max_samples: Budget.
        padded: Whether padding counts.

    Returns:
        ``(m + 1,)`` int64, where each micro-batch begins, and ``n``.
    """
    cuts = [0]
    num_samples = len(lengths)
    if padded:
        values = lengths.tolist()
        while cuts[-1] < num_samples:
            size = max(1, min(max_samples, max_tokens // values[cuts[-1]]))
            cuts.append(min(num_samples, cuts[-1] + size))
    else:
        before = np.concatenate(([0], np.cumsum(lengths)))
        while cuts[-1] < num_samples:
            start = cuts[-1]
            stop = int(np.searchsorted(before, int(before[start]) + max_tokens, side="right")) - 1
            cuts.append(min(num_samples, max(start + 1, min(stop, start + max_samples))))
    return np.array(cuts, np.int64)


def count_micro_batches(
    lengths: LengthArray, starts: Int64Array, stops: Int64Array, budget: TokenBudget
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Count the micro-batches of many windows at once, and find the budget that fills them equally.

    Args:
        lengths: Lengths of the samples of all windows, one window after the other, descending in each.
        starts: ``(w,)`` int64, where each window begins in ``lengths``.
        stops: ``(w,)`` int64, where it ends; an empty window has no micro-batch.
        budget: The budget.

    Returns:
        ``(w,)`` int64 each: the micro-batches of each window, and the ``max_tokens`` and ``max_samples`` with
        which :func:`cut_micro_batches` makes just as many, equally full.
    """
    before = None if budget.padded else _sums(lengths)
    tokens = np.full(len(starts), budget.max_tokens, np.int64)
    samples = np.full(len(starts), budget.max_samples, np.int64)
    counts, last_fill, last_room = _fill(lengths, before, starts, stops, tokens, samples)
    # Fractions of `whole` between the average fill and the full budget; all are tried side by side, and the
    # smallest that makes just as many micro-batches is taken.
    whole = np.maximum(1, counts * last_room)
    part = np.maximum(1, (counts - 1) * last_room + last_fill)
    tries = [part + (whole - part) * number // _TRIES for number in range(_TRIES)]
    try_tokens = [np.maximum(1, _scaled(budget.max_tokens, at, whole)) for at in tries]
    try_samples = [np.maximum(1, _scaled(budget.max_samples, at, whole)) for at in tries]
    found, _, _ = _fill(
        lengths,
        before,
        np.tile(starts, _TRIES),
        np.tile(stops, _TRIES),
        np.concatenate(try_tokens),
        np.concatenate(try_samples),
    )
    for number in reversed(range(_TRIES)):
        fits = found[number * len(starts) : (number + 1) * len(starts)] == counts
        tokens = np.where(fits, try_tokens[number], tokens)
        samples = np.where(fits, try_samples[number], samples)
    return counts, tokens, samples


def _sums(lengths: LengthArray) -> SumArray:
    """Return the tokens before each sample, modulo 2**32: only smaller differences are used."""
    before = np.zeros(len(lengths) + 1, np.uint32)
    # NumPy sums twice as fast in place as from one type to another.
    np.copyto(before[1:], lengths, casting="unsafe")
    np.cumsum(before[1:], out=before[1:])
    return before


def _scaled(number: int, part: Int64Array, whole: Int64Array) -> Int64Array:
    """Return ``ceil(number * part / whole)``, with ``part <= whole``."""
    if number.bit_length() + int(whole.max(initial=1)).bit_length() < _WORD_BITS:
        scaled: Int64Array = -(-(number * part) // whole)
        return scaled
    # Budgets of millions of tokens overflow 64 bits.
    pairs = zip(part.tolist(), whole.tolist(), strict=True)
    return np.array([-(-number * one // other) for one, other in pairs], np.int64)


def _fill(
    lengths: LengthArray,
    before: SumArray | None,
    starts: Int64Array,
    stops: Int64Array,
    max_tokens: Int64Array,
    max_samples: Int64Array,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Fill the micro-batches of all windows side by side: the first of each, the second of each, ...

    Returns:
        The number of micro-batches of each window, and of its last one the fill and the capacity.
    """
    counts = np.zeros(len(starts), np.int64)
    last_fill = np.zeros(len(starts), np.int64)
    last_room = np.ones(len(starts), np.int64)
    window = np.flatnonzero(starts < stops)
    at, end, tokens, samples = starts[window], stops[window], max_tokens[window], max_samples[window]
    number = 0
    while window.size:
        number += 1
        if before is None:
            room = tokens // lengths[at]
        else:
            room = _packed_room(before, at, np.minimum(end - at, samples), tokens, tokens // lengths[at])
        np.minimum(room, samples, out=room)
        np.maximum(room, 1, out=room)
        following = at + room
        is_last = following >= end
        if is_last.any():
            done = window[is_last]
            counts[done] = number
            fill, full = (end - at)[is_last], room[is_last]
            if before is not None:
                fill, full = _packed_fill(
                    before, at[is_last], end[is_last], tokens[is_last], samples[is_last]
                )
            last_fill[done], last_room[done] = fill, full
            going = ~is_last
            window, end, following = window[going], end[going], following[going]
            tokens, samples = tokens[going], samples[going]
        at = following
    return counts, last_fill, last_room


def _packed_room(
    before: SumArray, at: Int64Array, most: Int64Array, tokens: Int64Array, least: Int64Array
) -> Int64Array:
    """Return how many samples from ``at``, up to ``most``, have at most ``tokens`` tokens together.

    The following samples are no longer than the first, so at least ``least`` of them fit, and hardly more:
    counting up from there takes two or three passes, a binary search takes seven.
    """
    room = np.minimum(least, most)
    limit = tokens.astype(np.uint32)
    start = before[at]
    growing = np.flatnonzero(room < most)
    while growing.size:
        here = at[growing]
        fits = before[here + room[growing] + 1] - start[growing] <= limit[growing]
        growing = growing[fits]
        room[growing] += 1
        growing = growing[room[growing] < most[growing]]
    return room


def _packed_fill(
    before: SumArray, at: Int64Array, end: Int64Array, tokens: Int64Array, samples: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return fill and capacity of the last micro-batches, in tokens or samples, whichever limits more."""
    held, num_held = (before[end] - before[at]).astype(np.int64), end - at
    # A sample over the budget is alone, and full.
    held = np.minimum(held, tokens)
    by_samples = num_held * tokens >= held * samples
    return np.where(by_samples, num_held, held), np.where(by_samples, samples, tokens)
