"""Mixtures and blends: epochs that draw a given number of samples from each of several components.

Component c is drawn from ``count`` times per epoch, and draws are counted over all epochs: draw k of epoch e
is number ``e * count + k``. Draws go through the component's samples pass after pass, each pass in another
order, so a repeat that ends within a pass continues there in the next epoch, and over any number of epochs
all samples of a component are drawn equally often, within one. Shares are exact fractions, so every machine
computes the same counts.

Three numberings: a *draw* of an epoch, 0 to ``num_draws - 1``; the *number* of a sample among the chosen
samples of all components, used by the layout; and the *blended row*, which counts the rows of all
components' samples tables one after another and is what the plan returns.

A component with weights is drawn class by class (see `shardflow.sampling.weights`): each class of rows is a
*stratum* with draws of its own, a component without weights is one stratum. A `Mixture` of one component is a
dataset with weights; a `Blend` has an identity and states of its own.

`ComponentState` is what a loader state keeps of a component: enough to reopen it, and to name one that
changed.

`BlendLanes` cuts the draws of all components, in one sequence, into equal lanes. The sequence holds one
component after the other, each as long as its draws of an epoch, so a lane covers part of one component, or
the end of one and the start of the next. The samples of a lane are the same in every epoch. Lanes with
neighboring numbers are far apart in the sequence: any few of them contain all components in about their
shares, and since steps take from lanes in turn, so does every step.

A part reads its own samples pass after pass, in chunks, like the lane of a single dataset. In an epoch it
gives its share of the component's draws, whole chunks except for the first and last. So a node reads the
same shards in every epoch, and only 0.3 of the shards of a component that is repeated 0.3 times.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.errors import PlanError, StateError
from shardflow.sampling.lanes import LaneMap, LaneWalk, Recent, Weigh, weight_of
from shardflow.sampling.layout import ChosenColumn, EvenOffsets, Rows, SampleLayout, nth_rows
from shardflow.sampling.permutation import Int64Array, Permutation, golden_words, shuffled, sums
from shardflow.sampling.weights import Apportionment, WeightClasses
from shardflow.seeds import derive

MAX_COMPONENTS = 1000
"""Most components of a blend."""
MAX_COMPONENT_STATES = 10
"""Most components that a loader state lists; those of a larger blend are in ``loader.lock.json`` alone, so
that the state stays below 1 KB."""

DIGEST_LENGTH = 8
"""Hexadecimal digits of a component's digest in a state, which name the component that changed; whether one
changed is decided by the full digest of the blend."""

_TEXT = re.compile(rf"(\d{{1,18}}):([0-9a-f]{{{DIGEST_LENGTH}}})")
_TIME_BITS = 31
BLEND_SPLIT = "blend"
"""Split name in the state of a blend, whose components have splits of their own."""
_BLEND_VERSION = 1
_KEPT_PASSES = 256


@dataclass(frozen=True, slots=True)
class ComponentState:
    """Version and digest of one component, at its position in the blend."""

    manifest_version: int
    """A resume opens this version of the component's dataset, not the newest."""
    digest: str
    """First digits of the digest of dataset, split, subset and draws."""

    def to_json(self) -> str:
        """Return the component as text such as ``"3:01234567"``."""
        return f"{self.manifest_version}:{self.digest}"


def components_from_json(value: object) -> tuple[ComponentState, ...]:
    """Read the components of a state.

    Raises:
        StateError: The value is no list of such texts, or holds more than `MAX_COMPONENTS`.
    """
    texts = value if isinstance(value, list) else [None]
    found = [_TEXT.fullmatch(text) if isinstance(text, str) else None for text in texts]
    if len(found) > MAX_COMPONENT_STATES or not all(found):
        raise StateError(
            f"components must be a list of at most {MAX_COMPONENT_STATES} texts of version and digest "
            f"(state); pass what state_dict() returned, unchanged."
        )
    return tuple(ComponentState(int(match[1]), match[2]) for match in found if match)


def check_components(own: Sequence[ComponentState], expected: Sequence[ComponentState]) -> None:
    """Compare the components of a state with the run's; the error names the first that differs.

    Raises:
        StateError: They differ.
    """
    if len(own) != len(expected):
        raise StateError(
            f"components of the loader state must be this run's {len(expected)}, got {len(own)} (0 is one "
            f"dataset without a blend); resume with the blend file that it was saved with."
        )
    for number, (saved, wanted) in enumerate(zip(own, expected, strict=True), start=1):
        if saved != wanted:
            raise StateError(
                f"component {number} of the blend must be this run's {wanted.to_json()} (manifest version, "
                f"digest), got {saved.to_json()} in the loader state; its dataset, split, subset or draws "
                f"were changed: set them back, or start a new run."
            )


def draws_by_repeat(num_samples: int, repeat: float) -> int:
    """Return the draws of a component in an epoch: ``num_samples * repeat``, rounded half up."""
    return int(num_samples * Fraction(repr(repeat)) + Fraction(1, 2))


def draws_by_weight(weights: Sequence[float], num_draws: int) -> list[int]:
    """Apportion ``num_draws`` to weights by the largest remainder; of equal remainders, the earlier wins."""
    exact = [Fraction(repr(weight)) for weight in weights]
    quotas = [weight * num_draws / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    left = num_draws - sum(counts)
    by_remainder = sorted(range(len(quotas)), key=lambda number: (counts[number] - quotas[number], number))
    for number in by_remainder[:left]:
        counts[number] += 1
    return counts


def split_draws(sizes: Int64Array, num_draws: int) -> Int64Array:
    """Split the first draws of a pass among the parts of a component, ``(K,)`` int64.

    Sample j of a part of n samples is due at time ``((2 j + 1) << 31) // n``; a pass draws in the order of
    time, equal times in the order of the parts. So no part is ever far ahead of its share, the draws of a
    part never shrink as draws are added, and a whole pass draws every sample once.

    Args:
        sizes: ``(K,)`` int64, samples of each part, below 2**29.
        num_draws: 0 to ``sizes.sum()``.
    """
    low, high = 0, 1 << (_TIME_BITS + 1)  # invariant: at most num_draws are due before `low`
    while high - low > 1:
        middle = (low + high) // 2
        if int(_due_before(sizes, middle).sum()) <= num_draws:
            low = middle
        else:
            high = middle
    counts = _due_before(sizes, low)
    at_once = _due_before(sizes, low + 1) - counts
    left = num_draws - int(counts.sum())
    taken = np.minimum(at_once, np.maximum(left - (np.cumsum(at_once) - at_once), 0))
    found: Int64Array = counts + taken
    return found


def _due_before(sizes: Int64Array, time: int) -> Int64Array:
    """Return the samples of each part that are due before a time."""
    ends = -((-time * sizes) >> _TIME_BITS)
    found: Int64Array = np.minimum(ends >> 1, sizes)
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlendComponent:
    """Samples of a dataset, and the number of draws from them in an epoch."""

    dataset_id: str
    manifest_version: int
    split: str
    rows: Rows
    """Rows of the dataset's samples table."""
    subset: str | None
    """Digest of the rows where they are not all of the split."""
    count: int
    """Draws of an epoch, at least 1; with `changes`, of the first epochs, and maybe 0."""
    num_table_rows: int
    """Rows of the whole samples table."""
    changes: tuple[tuple[int, int], ...] = ()
    """First epochs, ascending from 1, and the draws of an epoch from there on."""
    classes: WeightClasses | None = None
    """Rows by weight; None where all are drawn equally often."""

    def given(self, epoch: int) -> int:
        """Return the draws before an epoch."""
        found, start, count = 0, 0, self.count
        for at, following in self.changes:
            if at >= epoch:
                break
            found, start, count = found + (at - start) * count, at, following
        return found + (epoch - start) * count

    @property
    def strata(self) -> tuple[int, ...]:
        """Classes that are ever drawn; without weights 0, which stands for all rows."""
        if self.classes is None:
            return (0,)
        return tuple(np.flatnonzero(self.classes.totals.any(axis=0)).tolist())

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides the component's samples and draws."""
        return json_digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the digest."""
        return {
            "dataset_id": self.dataset_id,
            "split": self.split,
            "subset": self.subset,
            "count": self.count,
            **({"changes": [list(change) for change in self.changes]} if self.changes else {}),
            **({} if self.classes is None else {"weights": self.classes.digest}),
        }


class Mixture:
    """Components that are drawn given numbers of times an epoch.

    Args:
        components: 1 to `MAX_COMPONENTS`.

    Attributes:
        components: The components.
        num_draws: Samples of an epoch.
        num_samples: Distinct samples of each component, added up; of a component with weights, those whose
            weight is not always 0.
        digest: Identity of the mixture: datasets, rows, weights and draws, without paths.

    Raises:
        PlanError: There are too many components, one has no samples or no draws, or epochs differ in size.
    """

    def __init__(self, components: Sequence[BlendComponent]) -> None:
        if not 1 <= len(components) <= MAX_COMPONENTS:
            raise PlanError(
                f"a blend must have 1 to {MAX_COMPONENTS} components, got {len(components)}; pack small ones "
                f"into one dataset."
            )
        for number, component in enumerate(components, start=1):
            most = max([component.count, *(count for _, count in component.changes)])
            if not component.rows or most < 1:
                raise PlanError(
                    f"component {number} of a blend must have samples and draws, got {len(component.rows)} "
                    f"and {component.count}; remove it, or raise its repeat, its weight or epoch_samples."
                )
        self.components = tuple(components)
        self._strata = [
            (number, code) for number, component in enumerate(components) for code in component.strata
        ]
        self._starts = sums([self._size(*stratum) for stratum in self._strata])
        self._bases = sums([component.num_table_rows for component in components])
        self._component = np.array([number for number, _ in self._strata], np.int64)
        self.num_samples = int(self._starts[-1])
        self.num_draws = sum(component.given(1) for component in components)
        last = max([0, *(at for component in components for at, _ in component.changes)])
        if sum(component.given(last + 1) for component in components) != (last + 1) * self.num_draws:
            raise PlanError("the epochs of a blend must all have as many samples; correct the weights.")
        parts = [component.to_json() for component in components]
        self.digest = json_digest({"blend_version": _BLEND_VERSION, "components": parts})
        self._apportionments = {
            number: Apportionment(component.classes.totals, component.classes.starts, component.given)
            for number, component in enumerate(components)
            if component.classes is not None
        }
        self._before: Recent[Int64Array] = Recent(4)

    def _size(self, number: int, code: int) -> int:
        classes = self.components[number].classes
        return len(self.components[number].rows) if classes is None else int(classes.sizes[code])

    def __iter__(self) -> Iterator[int]:
        """Iterate over the blended rows of all components."""
        for base, component in zip(self._bases.tolist(), self.components, strict=False):
            yield from (row + base for row in component.rows)

    @property
    def strata(self) -> list[tuple[int, int]]:
        """Component and class of each stratum, in order; the class is 0 for a component without weights."""
        return list(self._strata)

    @property
    def bases(self) -> Int64Array:
        """The first blended row of each component, ``(C,)`` int64."""
        return self._bases[:-1]

    def starts(self) -> list[int]:
        """Return the number of the first sample of each stratum, and the end."""
        return [int(start) for start in self._starts]

    def sizes(self) -> Int64Array:
        """Return the samples of each stratum, ``(S,)`` int64."""
        return np.diff(self._starts)

    def before(self, epoch: int) -> Int64Array:
        """Return the draws of each stratum before an epoch, ``(S,)`` int64."""
        return self._before.get(epoch, lambda: self._count_before(epoch))

    def _count_before(self, epoch: int) -> Int64Array:
        parts = []
        for number, component in enumerate(self.components):
            if component.classes is None:
                parts.append(np.array([component.given(epoch)], np.int64))
            else:
                parts.append(self._apportionments[number].before(epoch)[list(component.strata)])
        return np.concatenate(parts)

    def counts(self, epoch: int) -> Int64Array:
        """Return the draws of each stratum in an epoch, ``(S,)`` int64."""
        found: Int64Array = self.before(epoch + 1) - self.before(epoch)
        return found

    def key(self, seed: int, stratum: int, number: int) -> int:
        """Return the key of a pass through a stratum."""
        component, code = self._strata[stratum]
        if self.components[component].classes is None:
            return derive(seed, "blend", component, number)
        return derive(seed, "weights", component, code, number)

    def strata_of(self, numbers: Int64Array) -> Int64Array:
        """Return the stratum that each sample belongs to, from 0."""
        return np.searchsorted(self._starts, numbers, side="right") - 1

    def components_of(self, numbers: Int64Array) -> Int64Array:
        """Return the component that each sample belongs to, from 0."""
        found: Int64Array = self._component[self.strata_of(numbers)]
        return found

    def rows(self, numbers: Int64Array) -> Int64Array:
        """Return the blended rows of samples."""
        found = self.strata_of(numbers)
        rows = np.empty_like(numbers)
        for stratum in np.unique(found).tolist():
            here = found == stratum
            number, code = self._strata[stratum]
            component, inside = self.components[number], numbers[here] - self._starts[stratum]
            if component.classes is None:
                table_rows = nth_rows(component.rows, inside)
            else:
                table_rows = component.classes.take(code, inside)
            rows[here] = table_rows + self._bases[number]
        return rows

    def shares(self, epoch: int = 0) -> npt.NDArray[np.float64]:
        """Return the share of each component in an epoch, ``(C,)``."""
        draws = np.bincount(self._component, self.counts(epoch), len(self.components))
        shares: npt.NDArray[np.float64] = draws / self.num_draws
        return shares


class Blend(Mixture):
    """The components of a blend, in the order of its file; see `Mixture`."""

    def states(self) -> tuple[ComponentState, ...]:
        """Return the components for a loader state; none if they are too many for it."""
        if len(self.components) > MAX_COMPONENT_STATES:
            return ()
        return self.all_states()

    def all_states(self) -> tuple[ComponentState, ...]:
        """Return all components, for a lock."""
        return tuple(
            ComponentState(component.manifest_version, component.digest[:DIGEST_LENGTH])
            for component in self.components
        )


class BlendOrder:
    """A full shuffle of an epoch's draws.

    Args:
        mixture: The components.
        seed: Run-level seed.
        epoch: Number of the epoch, from 0.
    """

    def __init__(self, mixture: Mixture, *, seed: int, epoch: int) -> None:
        self._mixture, self._seed = mixture, seed
        self._permutation = Permutation(mixture.num_draws, derive(seed, "epoch-order", epoch))
        self._starts, self._sizes = mixture.starts(), mixture.sizes().tolist()
        self._before = mixture.before(epoch).tolist()
        self._draws = sums(mixture.counts(epoch))
        self._passes: Recent[Permutation] = Recent(max(_KEPT_PASSES, 2 * len(self._sizes)))

    def rows(self, positions: Int64Array) -> Int64Array:
        """Return the numbers of the samples at ``positions`` in ``[0, num_draws)``."""
        draws = self._permutation(positions)
        strata = np.searchsorted(self._draws, draws, side="right") - 1
        places = draws - self._draws[strata]
        numbers = np.empty_like(places)
        for stratum in np.unique(strata).tolist():
            here = strata == stratum
            numbers[here] = self._draw(stratum, places[here]) + self._starts[stratum]
        return numbers

    def _draw(self, stratum: int, places: Int64Array) -> Int64Array:
        size = self._sizes[stratum]
        first_pass, offset = divmod(self._before[stratum], size)
        passes, at = np.divmod(places + offset, size)
        found = np.empty_like(places)
        for number in np.unique(passes).tolist():
            here = passes == number
            found[here] = self._pass(stratum, first_pass + number, size)(at[here])
        return found

    def _pass(self, stratum: int, number: int, size: int) -> Permutation:
        key = self._mixture.key(self._seed, stratum, number)
        return self._passes.get((stratum, number), lambda: Permutation(size, key))


def json_digest(value: object) -> str:
    """Return the SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlendLayout(SampleLayout):
    """Layout of the samples of a mixture, by their numbers."""

    parts: tuple[SampleLayout, ...]
    """The layout of each stratum by itself."""
    mixture: Mixture

    @property
    def num_drawn(self) -> int:
        """Samples of an epoch."""
        return self.mixture.num_draws


def blend_layout(blend: Mixture, parts: Sequence[SampleLayout]) -> BlendLayout:
    """Join the layouts of strata.

    Args:
        blend: The components.
        parts: The layout of each stratum, of each component where none has weights; all have the same facts.
    """
    starts = blend.starts()
    rows = [
        part.shard_rows - part.population.start + start for part, start in zip(parts, starts, strict=False)
    ]
    shard_rows = np.concatenate([*(found[:-1] for found in rows), rows[-1][-1:]])
    shard_bytes = np.concatenate(
        [part.shard_end_bytes - part.offset_bytes[part.shard_rows[:-1]].astype(np.int64) for part in parts]
    )
    return BlendLayout(
        dataset_id=blend.digest,
        population=range(blend.num_samples),
        shard_rows=shard_rows,
        shard_end_bytes=shard_bytes,
        offset_bytes=EvenOffsets(shard_rows, shard_bytes),
        facts={name: _JoinedColumn(starts, parts, name) for name in parts[0].facts},
        parts=tuple(parts),
        mixture=blend,
    )


class _JoinedColumn:
    """A fact of all components, indexed by the number of a sample."""

    __slots__ = ("_columns", "_starts", "dtype", "ndim", "shape")

    def __init__(self, starts: list[int], parts: Sequence[SampleLayout], name: str) -> None:
        # The layout of a split is indexed by rows of the table, that of a subset by numbers from 0.
        self._columns = [ChosenColumn(part.facts[name], part.population) for part in parts]
        self._starts = np.array(starts, np.int64)
        self.dtype = np.result_type(*(column.dtype for column in self._columns))
        self.ndim, self.shape = 1, (starts[-1],)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            first = int(np.searchsorted(self._starts, start, side="right")) - 1
            if stop <= self._starts[min(first + 1, len(self._starts) - 1)]:
                base = int(self._starts[first])
                return self._columns[first][start - base : stop - base]
            key = np.arange(start, stop)
        numbers = np.asarray(key, np.int64)
        found = np.searchsorted(self._starts, numbers, side="right") - 1
        values = np.empty(numbers.shape, self.dtype)
        for component in np.unique(found).tolist():
            here = found == component
            values[here] = self._columns[component][numbers[here] - self._starts[component]]
        return values


@dataclass(frozen=True, slots=True, eq=False)
class _Spread:
    """A stratum over the lanes of the sequence."""

    first_lane: int
    """First lane of the sequence that holds some of it; the others follow."""
    start: int
    """Number of its first sample."""
    lanes: LaneMap
    """Its part in each of these lanes, by its own numbers."""
    sizes: Int64Array
    """``(K,)`` int64, samples of each part."""


class BlendLanes:
    """The lanes of a blend; which samples belong to a lane is the same in every epoch.

    Args:
        layout: The blend's layout.
        num_lanes: L, at least 1.
        seed: Run-level seed.
        weigh: Returns, for a component's layout, the weights to share equally among lanes; by default every
            sample weighs the same.

    Attributes:
        num_lanes: L.
        num_chunks: Chunks of all lanes.
    """

    def __init__(
        self,
        layout: BlendLayout,
        num_lanes: int,
        *,
        seed: int,
        weigh: Callable[[SampleLayout], Weigh] | None = None,
    ) -> None:
        self._layout, self.num_lanes = layout, num_lanes
        mixture = layout.mixture
        weighs = [None if weigh is None else weigh(part) for part in layout.parts]
        totals = [weight_of(part, found) for part, found in zip(layout.parts, weighs, strict=True)]
        sizes, draws = mixture.sizes().tolist(), _mean_draws(mixture)
        drawn = [total * count // size for total, count, size in zip(totals, draws, sizes, strict=True)]
        bounds = [lane * sum(drawn) // num_lanes for lane in range(1, num_lanes)]
        spreads: list[_Spread] = []
        before = 0
        for component in range(len(mixture.components)):
            strata = [number for number, (of, _) in enumerate(mixture.strata) if of == component]
            weight = sum(drawn[number] for number in strata)
            inside = [bound - before for bound in bounds if before < bound < before + weight]
            first_lane = sum(bound <= before for bound in bounds)
            for number in strata:
                part = layout.parts[number]
                if len(strata) == 1:
                    targets = [int(bound * sizes[number] // draws[number]) for bound in inside]
                else:  # each of its lanes gets an equal part of every class, mostly from the same shards
                    targets = [bound * totals[number] // weight for bound in inside]
                lanes = LaneMap.of(part, len(targets) + 1, seed=seed, weigh=weighs[number], targets=targets)
                start = int(mixture.starts()[number]) - part.population.start
                spreads.append(_Spread(first_lane, start, lanes, lanes.lane_samples()))
            before += weight
        self._spreads = tuple(spreads)
        self._draws_before: Recent[list[int]] = Recent(4 * len(spreads))
        self.num_chunks = sum(len(spread.lanes.first_row) for spread in spreads)
        # By multiples of the golden ratio: any few consecutive lanes are spread over the sequence.
        order = np.argsort(golden_words(num_lanes), kind="stable")
        self._sequence_lane = np.argsort(order, kind="stable")

    def walk(self, lane: int, *, seed: int, epoch: int) -> LaneWalk:
        """Return the contents of a lane in an epoch, see `LaneMap.walk`."""
        sequence_lane = int(self._sequence_lane[lane])
        rows: list[Int64Array] = []
        sizes: list[Int64Array] = []
        for number, spread in enumerate(self._spreads):
            part = sequence_lane - spread.first_lane
            if not 0 <= part < spread.lanes.num_lanes or not spread.sizes[part]:
                continue
            start, stop = (self._given(number, at)[part] for at in (epoch, epoch + 1))
            if start == stop:  # drawn in another epoch
                continue
            found = _pieces(spread.lanes, part, start, stop, key=(seed, number, lane))
            rows += [first + spread.start for first, _ in found]
            sizes += [size for _, size in found]
        if not rows:
            return LaneWalk(*(np.zeros(0, np.int64) for _ in range(3)))
        first_row, num_samples = np.concatenate(rows), np.concatenate(sizes)
        order = shuffled(len(first_row), derive(seed, "blend-order", epoch, lane))
        first_row, num_samples = first_row[order], num_samples[order]
        shards = self._layout.shards_of(first_row)
        ends = self._layout.ends_of(first_row + num_samples, shards)
        return LaneWalk(first_row, num_samples, ends - self._layout.offset_bytes[first_row])

    def _given(self, number: int, epoch: int) -> list[int]:
        """Return the draws of each part of a component before an epoch, over all passes."""

        def compute() -> list[int]:
            spread = self._spreads[number]
            before = int(self._layout.mixture.before(epoch)[number])
            passes, rest = divmod(before, int(spread.sizes.sum()))
            left = split_draws(spread.sizes, rest).tolist()
            return [passes * size + more for size, more in zip(spread.sizes.tolist(), left, strict=True)]

        return self._draws_before.get((number, epoch), compute)


def _mean_draws(mixture: Mixture) -> list[int]:
    """Return the draws of each stratum in an epoch, by which lanes are cut.

    Where epochs differ it is about their mean, in thousandths: a class may be drawn less than once an epoch.
    """
    if all(part.classes is None and not part.changes for part in mixture.components):
        found: list[int] = mixture.counts(0).tolist()
        return found
    draws = []
    for number, code in mixture.strata:
        component = mixture.components[number]
        counts = [component.count, *(count for _, count in component.changes)]
        mean = Fraction(sum(counts), len(counts))
        if component.classes is not None:
            totals = component.classes.totals
            shares = (Fraction(int(each[code]), int(each.sum())) for each in totals)
            mean *= sum(shares, Fraction(0)) / len(totals)
        draws.append(max(1, round(mean * 1000)))
    return draws


def _pieces(
    lanes: LaneMap, part: int, start: int, stop: int, *, key: tuple[int, int, int]
) -> list[tuple[Int64Array, Int64Array]]:
    """Return the draws ``[start, stop)`` of a part as first rows and sizes, a pair per pass."""
    chunks = lanes.chunks(part)
    first_row, sizes = lanes.first_row[chunks], lanes.num_samples[chunks]
    total = int(sizes.sum())
    seed, component, lane = key
    found = []
    for number in range(start // total, -(-stop // total)):
        order = shuffled(len(sizes), derive(seed, "blend-chunks", component, lane, number))
        stops = np.cumsum(sizes[order])
        begins = stops - sizes[order]
        low, high = max(start - number * total, 0), min(stop - number * total, total)
        cut_begins, cut_stops = np.maximum(begins, low), np.minimum(stops, high)
        is_drawn = cut_stops > cut_begins
        found.append(((first_row[order] + cut_begins - begins)[is_drawn], (cut_stops - cut_begins)[is_drawn]))
    return found
