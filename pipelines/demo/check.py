"""What the demo claims, compared: the committed samples of two runs, the plan, and the course of the loss."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import read_metrics

__all__ = ["Losses", "SlotSequence", "committed_sequence", "first_difference", "losses", "planned_sequence"]

Slot = tuple[int, int, int, int, str | None]
"""Epoch, step, micro-batch, slot in it, and the sample's key; None for padding."""
SlotSequence = list[Slot]

_AVERAGED_STEPS = 8


def committed_sequence(run: Path) -> SlotSequence:
    """Every slot of every step that a checkpoint of the run counts, from the run's ledger."""
    return [
        (step.epoch, step.step, batch.micro, slot, key)
        for step in read_ledger(run)
        for batch in step.micro_batches
        for slot, key in enumerate(batch.keys)
    ]


def planned_sequence(plans: Iterable[tuple[int, str]], *, micro_batches_per_step: int) -> SlotSequence:
    """The same, from what ``shardflow plan --json`` printed for each epoch; fillers are nobody's samples."""
    found: SlotSequence = []
    for epoch, printed in plans:
        lines: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]
        found += [
            (epoch, line["step"], line["micro"], slot, key)
            for line in sorted(lines, key=lambda line: (line["step"], line["micro"]))
            if line["micro"] < micro_batches_per_step
            for slot, key in enumerate(line["keys"])
        ]
    return found


def first_difference(found: Sequence[Slot], expected: Sequence[Slot]) -> str | None:
    """Where two sequences part, in words; None where they are equal."""
    for number, (left, right) in enumerate(zip(found, expected, strict=False)):
        if left != right:
            return f"slot {number}: {left} instead of {right}"
    if len(found) != len(expected):
        return f"{len(found)} slots instead of {len(expected)}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """The course of one run's training loss."""

    steps: list[int]
    values: list[float]
    """Nats a token."""
    attempts: list[int]
    """Which start of the job made each step."""

    @property
    def first(self) -> float:
        """Mean of the first steps."""
        return sum(self.values[:_AVERAGED_STEPS]) / len(self.values[:_AVERAGED_STEPS])

    @property
    def last(self) -> float:
        """Mean of the last steps."""
        return sum(self.values[-_AVERAGED_STEPS:]) / len(self.values[-_AVERAGED_STEPS:])


def losses(run: Path) -> Losses:
    """Read the losses of a run; each step once, as its last attempt made it."""
    lines = [line for line in read_metrics(run) if line["loss"] is not None]
    return Losses(
        steps=[int(line["global_step"]) + 1 for line in lines],
        values=[float(line["loss"]) for line in lines],
        attempts=[int(line["attempt"]) for line in lines],
    )
