"""How an input of a dataset can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

__all__ = ["OUTCOMES", "Outcome", "OutcomeCounts"]

Outcome: TypeAlias = Literal["packed", "skipped", "quarantined"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeCounts:
    """How the inputs ended; their sum is the number of inputs."""

    packed: int
    skipped: int
    quarantined: int
