"""Quarantine of samples that could not be delivered at run time: the reason, the place, and a bound.

A bad sample never changes a step count: its slot stays in the micro-batch with weight 0 and zeroed arrays,
and is recorded in a row (contract S6). A run's checkpoint contains the rows, so that a replay masks the same
slots without reading them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from shardflow.errors import SampleError, StateError

ALWAYS_TOLERATED: Final = 8
"""Masked samples of an epoch that no share refuses: in a tiny dataset one is a large share."""

PREVIOUS_STUDY: Final = "PREVIOUS_STUDY_"
"""Begin of the reason of a row whose shard and field are those of the person's earlier study."""


class BadSampleReason(StrEnum):
    """Reason why a sample was masked; stable codes."""

    #: The field's bytes do not match the crc32c of the index, even when read a second time.
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    #: The shard ends before the field does.
    FIELD_TRUNCATED = "FIELD_TRUNCATED"
    #: The index has no such field for the sample.
    FIELD_MISSING = "FIELD_MISSING"
    #: The shard's index is damaged, so the whole shard is unusable.
    INDEX_DAMAGED = "INDEX_DAMAGED"
    #: The bytes are intact, but cannot be decoded.
    DECODE_FAILED = "DECODE_FAILED"
    #: The size of a slice or text differs from what the samples table or the field allows.
    SIZE_MISMATCH = "SIZE_MISMATCH"
    #: A conversation has more tokens than max_tokens of its field, or more pictures than max_images.
    CONVERSATION_TOO_LONG = "CONVERSATION_TOO_LONG"
    #: The report is not UTF-8, or study.json or annotations.json is not JSON of the right form.
    TEXT_UNREADABLE = "TEXT_UNREADABLE"


_REMEDIES: Final = {
    BadSampleReason.CONVERSATION_TOO_LONG: (
        'raise max_tokens or max_images of the field, set long = "skip" to leave such conversations out, or '
        "split_long = true to split them at their turns; `shardflow tokenize DATASET --processor DIR` counts "
        "the tokens of all"
    ),
    BadSampleReason.FIELD_MISSING: (
        'write missing = "pad" for the field where samples may lack it; else run `shardflow verify` on the '
        "dataset"
    ),
}


def remedy_of(reason: str) -> str:
    """Return what to do about samples that are bad for a reason, as part of a sentence."""
    known = {str(name): remedy for name, remedy in _REMEDIES.items()}
    return known.get(reason.removeprefix(PREVIOUS_STUDY), "run `shardflow verify` on the dataset")


class BadSample(Exception):  # noqa: N818 - a finding on its way to a quarantine row, not an error to the caller
    """Finding that a sample is bad; internal to the loader."""

    def __init__(self, reason: BadSampleReason, shard: str, field: str, detail: str = "") -> None:
        super().__init__(f"{reason} (shard {shard}, field {field or '-'}){': ' if detail else ''}{detail}")
        self.reason = reason
        self.shard = shard
        self.field = field


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineRow:
    """Record of a masked slot. Contains surrogates and positions only, so it may be logged."""

    epoch: int
    step: int
    micro: int
    slot_in_batch: int
    row: int
    key: str
    shard: str
    field: str
    reason: str
    component: int | None = None
    """Component of a blend that key, row and shard belong to, from 0; None for a single dataset."""

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Identity of the slot in a run: epoch, step, micro-batch, slot in the batch."""
        return (self.epoch, self.step, self.micro, self.slot_in_batch)

    def to_json(self) -> dict[str, int | str]:
        """Return the row as a JSON object; without a blend it has no component."""
        row = asdict(self)
        if self.component is None:
            del row["component"]
        return row

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> QuarantineRow:
        """Read what `to_json` wrote.

        Raises:
            StateError: A key is missing, unknown or of the wrong type.
        """
        expected = {
            field.name: str if field.type == "str" else int
            for field in fields(cls)
            if field.name != "component" or "component" in value
        }
        if set(value) != set(expected):
            raise StateError(
                f"a mask must be an object with the keys {', '.join(expected)}, got another one; "
                "pass what masks() returned, unchanged."
            )
        for name, kind in expected.items():
            if type(value[name]) is not kind:
                raise StateError(
                    f"{name} of a mask must be {kind.__name__}, got {type(value[name]).__name__}; "
                    "pass what masks() returned, unchanged."
                )
        return cls(**value)


class Quarantine:
    """Masked slots known to a loader, with a bound on those that it found itself.

    Args:
        max_bad_samples: How many the loader may find before it raises.
        max_bad_share: Share of an epoch's samples that may be masked before it raises; `ALWAYS_TOLERATED`
            may be in any case.
    """

    def __init__(self, max_bad_samples: int, max_bad_share: float = 1.0) -> None:
        self._max_bad_samples, self._max_bad_share = max_bad_samples, max_bad_share
        self._rows: dict[tuple[int, int, int, int], QuarantineRow] = {}
        self._num_found = 0
        self._epoch = -1
        self._of_epoch: set[tuple[int, int, int, int]] = set()
        self._loaded: set[tuple[int, int, int, int]] = set()
        self._loaded_of_epoch: set[tuple[int, int, int, int]] = set()

    @property
    def rows(self) -> list[QuarantineRow]:
        """All masked slots, in the order of the run."""
        return [self._rows[place] for place in sorted(self._rows)]

    def __len__(self) -> int:
        """Number of slots that are known to be masked."""
        return len(self._rows)

    def find(self, place: tuple[int, int, int, int]) -> QuarantineRow | None:
        """Return the row of a slot that is known to be masked."""
        return self._rows.get(place)

    def load(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows of a checkpoint; they do not count towards the bound.

        Raises:
            StateError: A row is malformed; none is added.
        """
        parsed = [QuarantineRow.from_json(row) for row in rows]
        self._rows.update({row.place: row for row in parsed})
        self._loaded |= {row.place for row in parsed}
        self._epoch = -1

    def record(self, rows: Iterable[QuarantineRow], num_samples: int, num_ranks: int = 1) -> None:
        """Add the rows of a micro-batch that is about to be delivered; known ones count once.

        Args:
            rows: Its masked slots.
            num_samples: Samples that this rank has in their epoch.
            num_ranks: Ranks that share the epoch, and what a checkpoint knows to be masked in it.

        Raises:
            SampleError: More were found than a bound allows.
        """
        for row in rows:
            self._check_share(row, num_samples, num_ranks)
            if row.place in self._rows:
                continue
            self._rows[row.place] = row
            self._num_found += 1
            if self._num_found > self._max_bad_samples:
                raise SampleError(
                    f"bad samples must be at most {self._max_bad_samples}, got {self._num_found} (the last: "
                    f"sample {row.key}{_of(row)}, shard {row.shard}, field {row.field or '-'}, "
                    f"{row.reason}); {remedy_of(row.reason)}, or raise max_bad_samples."
                )

    def _check_share(self, row: QuarantineRow, num_samples: int, num_ranks: int) -> None:
        """Refuse an epoch that is masked in large part, which then no longer is the one that was asked for.

        Slots that a checkpoint knows to be masked count as well, those before its position too: a run that
        is started again and again must not get through an epoch that one start would refuse.
        """
        if row.epoch != self._epoch:
            self._epoch, self._of_epoch = row.epoch, set()
            self._loaded_of_epoch = {place for place in self._loaded if place[0] == row.epoch}
        self._of_epoch.add(row.place)
        self._loaded_of_epoch.discard(row.place)
        # Of other ranks and of earlier starts; this rank's part of them.
        num_others = -(-len(self._loaded_of_epoch) // num_ranks)
        num_masked, share = len(self._of_epoch) + num_others, self._max_bad_share
        if num_masked > max(ALWAYS_TOLERATED, int(share * num_samples)):
            raise SampleError(
                f"masked samples must be at most {share:.4g} of the {num_samples:,} of this rank in epoch "
                f"{row.epoch} (max_bad_share; {ALWAYS_TOLERATED} in any case), got {num_masked:,} (the last: "
                f"shard {row.shard}, field {row.field or '-'}, {row.reason}); {remedy_of(row.reason)}, or "
                "raise max_bad_share."
            )


def _of(row: QuarantineRow) -> str:
    return "" if row.component is None else f" of component {row.component + 1}"
