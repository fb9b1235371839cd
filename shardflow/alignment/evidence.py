"""A piece of evidence: that a finding is seen on some slices of one series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Evidence", "Family", "Rule"]

Rule = Literal["E1", "E2", "E3", "E4", "E5", "E6", "E7"]
Family = Literal["mention", "roi", "organ", "view", "level"]
"""Evidence of one family has one source and is counted once; families are independent of each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Says where one finding is seen."""

    rule: Rule
    family: Family
    series: int
    """Number of the series in the sample."""
    weights: Mapping[int, float]
    """Slice to weight; the highest is 1 where the finding is seen best."""
    confidence: float
    """That the slices of the highest weight show it, from this evidence alone."""
    is_region: bool = False
    """Whether the slices are those of a region that the finding is somewhere in."""
    modifiers: tuple[str, ...] = ()
    """What lowered the confidence."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What it rests on, as JSON."""

    @property
    def is_pointed(self) -> bool:
        """Whether somebody has pointed at an image, rather than that the finding must be on one."""
        return self.facts.get("cue") not in ("none", "single")

    def order(self) -> tuple[Any, ...]:
        """Give a total order that does not depend on the order of the inputs."""
        return (
            self.rule,
            -self.confidence,
            self.series,
            sorted(self.weights),
            sorted(map(repr, self.facts.items())),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "rule": self.rule,
            "confidence": round(self.confidence, 4),
            **self.facts,
            **({"region": True} if self.is_region else {}),
            **({"modifiers": list(self.modifiers)} if self.modifiers else {}),
        }
