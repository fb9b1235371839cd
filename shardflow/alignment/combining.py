"""What several pieces of evidence about one series say together.

Independent evidence that agrees (its slices overlap) is combined by noisy-or; where it names other slices the
strongest alone counts, and less. Evidence of one family is one source: the same mention, or the same drawing,
is not counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardflow.alignment.evidence import Evidence
from shardflow.alignment.rules import AlignmentRules

__all__ = ["entry"]

_DIGITS = 4
"""Of confidences and weights in the file; the threshold is compared with what is in the file."""


def entry(
    entity: int, series: int, evidence: Sequence[Evidence], rules: AlignmentRules, *, is_uncertain: bool
) -> dict[str, Any]:
    """Combine the evidence for one finding in one series.

    Args:
        entity: The finding.
        series: The series.
        evidence: All of that series; at least one piece.
        rules: The weights.
        is_uncertain: Whether the report leaves the finding open.

    Returns:
        An entry of ``alignment.json``.
    """
    ordered = sorted(evidence, key=lambda one: one.order())
    sources = [_Source([one for one in ordered if one.family == name]) for name in _families(ordered)]
    # The level of the body is known before anybody has looked: it helps only where nobody did.
    seen = [one for one in sources if one.family != "level"] or sources
    best = min(seen, key=lambda one: (one.is_region, -one.confidence, len(one.weights), one.family))
    agreeing = [one for one in seen if one is best or not one.weights.keys().isdisjoint(best.weights)]
    modifiers = []
    if len(agreeing) < len(seen):
        # Slices of the strongest, which need not be the narrowest.
        best = max(seen, key=lambda one: (one.confidence, one is best))
        agreeing = [best]
        modifiers.append("disjoint")
    doubt = 1.0
    for one in agreeing:
        doubt *= 1.0 - one.confidence
    confidence = (1.0 - doubt) * (rules.disjoint if modifiers else 1.0)
    if is_uncertain:
        pointed = any(one.is_pointed for one in ordered)
        confidence *= rules.uncertain if pointed else rules.uncertain_unseen
        modifiers.append("uncertain")
    weights = _kept(_limited(best, agreeing), rules.max_slices)
    return {
        "entity": entity,
        "series": series,
        "slices": list(weights),
        "weights": [round(value, _DIGITS) for value in weights.values()],
        "confidence": round(min(confidence, rules.cap), _DIGITS),
        **({"region": True} if best.is_region else {}),
        **({"modifiers": modifiers} if modifiers else {}),
        "evidence": [one.to_json() for one in ordered],
    }


class _Source:
    """The evidence of one family: the union of its slices, the confidence of its best."""

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        self.family = evidence[0].family
        self.confidence = max(one.confidence for one in evidence)
        self.is_region = all(one.is_region for one in evidence)
        weights: dict[int, float] = {}
        for one in evidence:
            for place, value in one.weights.items():
                # A weaker alternative of the same source counts for less.
                share = value * one.confidence / self.confidence if self.confidence else value
                weights[place] = max(weights.get(place, 0.0), share)
        self.weights: Mapping[int, float] = weights


def _families(evidence: Sequence[Evidence]) -> list[str]:
    return sorted({one.family for one in evidence})


def _limited(best: _Source, agreeing: Sequence[_Source]) -> Mapping[int, float]:
    """Limit the slices around a mention to the extent of a region that was drawn."""
    if best.family != "mention":
        return best.weights
    for other in agreeing:
        if other.family == "roi":
            return {place: value for place, value in best.weights.items() if place in other.weights}
    return best.weights


def _kept(weights: Mapping[int, float], most: int) -> dict[int, float]:
    """Keep the highest weights, of equals the first; in the order of the slices."""
    ranked = sorted(weights, key=lambda place: (-weights[place], place))[:most]
    return {place: weights[place] for place in sorted(ranked)}
