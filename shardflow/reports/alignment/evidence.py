"""Evidence that a finding is seen on some slices of one series: weights of the rules, and their combination.

The default weights are the published starting points (docs/reports.md) where generated studies gave no
reason to change them; `benchmarks/alignment` measures them on studies that no weight was chosen with.

Independent evidence that agrees (its slices overlap) is combined by noisy-or; where it names other slices,
only the strongest counts, and less. Evidence of one family is one source: the same mention, or the same
drawing, is not counted twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from shardflow.config import Bounds, check_fields

RULES_VERSION = 3
"""Part of every digest: raised when the same weights give another answer."""

Share = Annotated[float, Bounds(0, 1)]
"""A weight or a factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentRules:
    """Weights of the kinds of evidence, and of what lowers them."""

    threshold: Share = 0.7
    """Entity samples need a confidence strictly above it."""
    cap: Share = 0.99
    """No confidence is higher."""

    series_and_image: Share = 0.98
    """E1: series and image are named and found; times the share of the fitting slices that lie there."""
    image_only: Share = 0.92
    """E2: an image without its series; times the same share."""
    crossing: Share = 0.15
    """E1, E2: how often an image shows what another one of its number shows, in a plane that crosses it (or
    lies nobody knows how)."""
    roi_finding: Share = 0.95
    """E3: a marked region whose label is the finding; divided by the regions or findings it fits."""
    roi_place: Share = 0.85
    """E4: a marked region in the same anatomy on the same side, its finding unsaid."""
    roi_sole: Share = 0.6
    """E4: the only marked region, and the only focal finding that is there."""
    organ_mask: Share = 0.75
    """E5: the outline of the organ that the finding is in."""
    single_image: Share = 0.97
    """E6: a study of one projection image."""
    view_named: Share = 0.98
    """E6: the words name the view or the side; divided by the parts of the body that such views are of."""
    view_unnamed: Share = 0.98
    """E6: several views, none named; divided by the parts of the body (and sides) that they are of."""
    level_prior: Annotated[float, Bounds(0, 0.6)] = 0.1
    """E7: where in the body part such anatomy lies. Capped: no such rule finds a slice (see the ADR)."""
    same_finding: Share = 0.95
    """Factor where the images are named at another mention of the same finding."""

    uncertain: Share = 0.85
    """Factor of what the report leaves open, if its reader gives no probability."""
    uncertain_unseen: Share = 0.3
    """The same where nothing but the study points at an image: E6 without a view."""
    other_side: Share = 0.3
    """Factor where the sides differ."""
    other_size: Share = 0.7
    """Factor where sizes differ by more than half of the larger one."""
    other_plane: Share = 0.8
    """Factor where the words name another plane than the series has."""
    disjoint: Share = 0.8
    """Factor of the strongest evidence where other evidence of the series names other slices."""

    neighbours: Annotated[int, Bounds(0, 64)] = 1
    """Slices on either side of a named one where the finding's size is unknown."""
    max_slices: Annotated[int, Bounds(1, 4096)] = 32
    """Slices of one entry; those of the highest weight stay."""

    def __post_init__(self) -> None:
        check_fields(self)

    def digest(self) -> str:
        """Return 16 hexadecimal digits; equal rules of one version have the same."""
        facts = {"version": RULES_VERSION, **asdict(self)}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    """Confidence that the slices of the highest weight show it, from this evidence alone."""
    is_region: bool = False
    """Whether the slices are those of a region that the finding is somewhere in."""
    modifiers: tuple[str, ...] = ()
    """Modifiers that lowered the confidence."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Its source, as JSON."""

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
