"""Two runs' committed steps side by side: which samples differ, and where.

A run is compared by its ledger, or by the lines that ``shardflow ledger show --json`` made of one. Lines
without their samples (``--compact``) hold a digest of each step, in some 150 bytes whatever the step's size:
enough to say that two runs on machines that do not see each other trained on the same samples, and from which
step on they did not. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from shardflow.errors import CheckpointError
from shardflow.logs import read_events
from shardflow.training.ledger import LedgerStep, read_ledger

__all__ = ["DifferenceKind", "LedgerDifference", "StepRecord", "compare_ledgers", "read_records"]

DifferenceKind = Literal["missing", "place", "order", "samples", "doubled", "weights"]
"""``missing``: only one run has the step. ``place``: another epoch or step of the epoch. ``order``: the same
samples in another order or dealt to other micro-batches. ``samples``: other samples. ``doubled``: other
samples, of which one came earlier in the same epoch. ``weights``: the same samples, masked or weighted in
another way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One committed step."""

    global_step: int
    epoch: int
    step: int
    num_samples: int
    """Weighted samples; masked ones and padding slots count nothing."""
    digest: str
    """Of epoch, step and samples in order: 32 hexadecimal digits."""
    micros: tuple[Any, ...] | None
    """Number, keys, weights and components of each micro-batch; None in compact records."""

    @classmethod
    def of(cls, step: LedgerStep) -> Self:
        """Make the record of a step."""
        micros = tuple(
            [m.micro, list(m.keys), list(m.weights), list(m.components)] for m in step.micro_batches
        )
        content = json.dumps([step.epoch, step.step, micros], separators=(",", ":")).encode()
        return cls(
            global_step=step.global_step,
            epoch=step.epoch,
            step=step.step,
            num_samples=sum(weight > 0 for m in step.micro_batches for weight in m.weights),
            digest=hashlib.sha256(content).hexdigest()[:32],
            micros=micros,
        )

    def to_json(self, *, compact: bool) -> dict[str, Any]:
        """Return the record as a JSON object, with or without its samples."""
        value: dict[str, Any] = {
            "global_step": self.global_step,
            "epoch": self.epoch,
            "step": self.step,
            "num_samples": self.num_samples,
            "digest": self.digest,
        }
        return value if compact or self.micros is None else {**value, "micros": list(self.micros)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote."""
        micros = value.get("micros")
        return cls(**{**value, "micros": None if micros is None else tuple(micros)})

    @property
    def keys(self) -> tuple[str, ...]:
        """Sample keys in order, padding left out."""
        return tuple(key for _, keys, *_ in self.micros or () for key in keys if key is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerDifference:
    """How one step differs."""

    kind: DifferenceKind
    global_step: int
    text: str
    """What A has and what B has."""


def read_records(path: Path) -> list[StepRecord]:
    """Read the committed steps of a run folder, or of a file of records.

    Raises:
        CheckpointError: the folder's ledger has gaps, the file holds no records, or there is neither.
    """
    if path.is_dir():
        return [StepRecord.of(step) for step in read_ledger(path)]
    try:
        return [StepRecord.from_json(line) for line in read_events(path)]
    except (OSError, TypeError) as error:
        raise CheckpointError(
            f"a ledger must be a run folder, or a file that `shardflow ledger show --json` wrote, got "
            f"{type(error).__name__} ({path.name}); correct the path."
        ) from None


def compare_ledgers(first: Sequence[StepRecord], second: Sequence[StepRecord]) -> Iterator[LedgerDifference]:
    """Compare two lineages step by step.

    Yields:
        The differences in the order of the steps; none where both runs trained on the same.
    """
    mine = {record.global_step: record for record in first}
    other = {record.global_step: record for record in second}
    seen = _Seen(first), _Seen(second)
    for number in sorted(mine.keys() | other.keys()):
        a, b = mine.get(number), other.get(number)
        if a is None or b is None:
            holder = "A" if b is None else "B"
            yield LedgerDifference(kind="missing", global_step=number, text=f"only {holder} has it")
        elif a.digest != b.digest:
            yield _compare(a, b, seen)


class _Seen:
    """Where samples came first in an epoch."""

    def __init__(self, records: Iterable[StepRecord]) -> None:
        self._records = records
        self._counts: dict[int, Counter[str]] | None = None

    def is_doubled(self, epoch: int, key: str) -> bool:
        """Whether the sample comes more than once in the epoch."""
        if self._counts is None:  # only runs that differ pay for this
            self._counts = {}
            for record in self._records:
                self._counts.setdefault(record.epoch, Counter()).update(record.keys)
        return self._counts[epoch][key] > 1


def _compare(a: StepRecord, b: StepRecord, seen: tuple[_Seen, _Seen]) -> LedgerDifference:
    def differs(kind: DifferenceKind, text: str) -> LedgerDifference:
        return LedgerDifference(kind=kind, global_step=a.global_step, text=text)

    if (a.epoch, a.step) != (b.epoch, b.step):
        return differs(
            "place", f"A runs it as epoch {a.epoch}, step {a.step}, B as epoch {b.epoch}, step {b.step}"
        )
    if a.micros is None or b.micros is None:
        return differs("samples", f"A has digest {a.digest}, B {b.digest}")
    only_a, only_b = Counter(a.keys) - Counter(b.keys), Counter(b.keys) - Counter(a.keys)
    if only_a or only_b:
        doubled = [k for k in only_a if seen[0].is_doubled(a.epoch, k)]
        doubled += [k for k in only_b if seen[1].is_doubled(b.epoch, k)]
        text = f"only A has {_some(only_a)}, only B {_some(only_b)}"
        if doubled:
            return differs("doubled", f"{text}; more than once in the epoch: {_some(doubled)}")
        return differs("samples", text)
    places = [i for i, (x, y) in enumerate(zip(a.keys, b.keys, strict=True)) if x != y]
    if places:
        i = places[0]
        return differs("order", f"the same samples, from place {i} on A has {a.keys[i]}, B {b.keys[i]}")
    if [m[:2] for m in a.micros] != [m[:2] for m in b.micros]:
        return differs("order", "the same samples in order, dealt to other micro-batches")
    return differs("weights", "the same samples in order, with other weights or components")


def _some(keys: Iterable[str]) -> str:
    listed = sorted(keys)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") or "nothing"
