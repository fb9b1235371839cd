"""E1 and E2: the images that the report names, found by their numbers.

A number that fits several places (two series of one number, an image whose series is left open) is worth its
share of one. Nothing is found by a place in a list.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardflow.alignment.clauses import Clauses, Span
from shardflow.alignment.cues import contrast_of, default_series, plane_of, total_of
from shardflow.alignment.evidence import Evidence
from shardflow.alignment.images import SeriesFacts
from shardflow.alignment.rules import AlignmentRules

__all__ = ["UNRESOLVED", "WHOLE_SERIES", "MentionResolver", "window"]

UNRESOLVED = "MENTION_UNRESOLVED"
"""Reason: no image of the study has the numbers that the report names."""
WHOLE_SERIES = "MENTION_OF_A_SERIES"
"""Reason: a series is named and no image of it."""


class MentionResolver:
    """Finds the slices that mentions mean.

    Args:
        series: Of the study.
        clauses: Of the report.
        rules: The weights.
    """

    def __init__(self, series: Sequence[SeriesFacts], clauses: Clauses, rules: AlignmentRules) -> None:
        self._series = series
        self._images = [one for one in series if not one.is_localizer]
        self._clauses = clauses
        self._rules = rules
        self._default = default_series(clauses.text)

    def resolve(
        self, number: int, mention: Mapping[str, Any], size_mm: Sequence[float] = ()
    ) -> tuple[list[Evidence], str]:
        """Find the images of one mention.

        Args:
            number: The mention's place in ``report.json``.
            mention: The mention.
            size_mm: Size of the finding that it belongs to; empty where unknown.

        Returns:
            Evidence for each series that it fits, and a reason where there is none.
        """
        first, last = mention["first"], mention["last"]
        named = mention["series"]
        span: Span = (mention["span"][0], mention["span"][1])
        words = self._clauses.words(self._clauses.clause(span))
        if first is None:
            whole = [one for one in self._series if one.number == named]
            if len(whole) != 1 or whole[0].num_slices != 1:
                return [], WHOLE_SERIES if whole else UNRESOLVED
            fitting = whole
            found: dict[int, tuple[int, ...]] = {whole[0].index: (0,)}
        else:
            fitting = self._candidates(named, first, last, span, words)
            found = {one.index: one.slices_of(first, last) for one in fitting}
        if not fitting:
            return [], UNRESOLVED
        rule, base = ("E2", self._rules.image_only) if named is None else ("E1", self._rules.series_and_image)
        plane = plane_of(words)
        evidence = []
        for one in fitting:
            share = self._share(one, fitting, found, max(size_mm, default=0.0))
            is_other = bool(plane and one.plane and one.plane != plane)
            evidence.append(
                Evidence(
                    rule="E1" if rule == "E1" else "E2",
                    family="mention",
                    series=one.index,
                    weights=dict.fromkeys(found[one.index], 1.0),
                    confidence=base * share * (self._rules.other_plane if is_other else 1.0),
                    modifiers=("other_plane",) if is_other else (),
                    facts={"mention": number, "candidates": len(fitting)},
                )
            )
        return evidence, ""

    def widen(self, evidence: Sequence[Evidence], size_mm: Sequence[float]) -> list[Evidence]:
        """Give named slices their surroundings: all that is named of one finding in a series is one extent.

        Args:
            evidence: What `resolve` found for all mentions of one finding.
            size_mm: Size of the finding; empty where unknown.
        """
        named: dict[int, set[int]] = defaultdict(set)
        for one in evidence:
            named[one.series].update(one.weights)
        weights = {
            number: window(sorted(places), self._series[number], size_mm, self._rules)
            for number, places in named.items()
        }
        return [replace(one, weights=weights[one.series]) for one in evidence]

    def _candidates(
        self, named: int | None, first: int, last: int, span: Span, words: str
    ) -> list[SeriesFacts]:
        """Return the series that hold the numbers; localizers only where they are named and alone."""
        if named is not None:
            fitting = [one for one in self._images if one.number == named and one.slices_of(first, last)]
            return fitting or [
                one for one in self._series if one.number == named and one.slices_of(first, last)
            ]
        fitting = [one for one in self._images if one.slices_of(first, last)]
        total, plane, contrast = total_of(self._clauses.text, span), plane_of(words), contrast_of(words)
        for narrower in (
            [one for one in fitting if one.number == self._default and self._default is not None],
            [one for one in fitting if total is not None and _counts(one, total)],
            [one for one in fitting if plane and one.plane == plane],
            [one for one in fitting if contrast is not None and one.has_contrast is contrast],
        ):
            kept = [one for one in fitting if one in narrower]
            fitting = kept or fitting
        return fitting

    def _share(
        self,
        series: SeriesFacts,
        fitting: Sequence[SeriesFacts],
        found: Mapping[int, Sequence[int]],
        extent_mm: float,
    ) -> float:
        """Return the share of the slices with a number that show what this series shows there.

        Two kernels of one scan have the same numbers at the same places, and either is right; parallel stacks
        show the same as far as the finding reaches; planes that cross may. Of several numbers the least
        certain one counts.
        """
        places = [(one, place) for one in fitting for place in found[one.index]]
        shares = []
        for place in found[series.index]:
            rivals = [(one, other) for one, other in places if one.numbers[other] == series.numbers[place]]
            alike = [series.likeness(place, one, other, extent_mm) for one, other in rivals]
            same = math.fsum(self._rules.crossing if one is None else one for one in alike)
            shares.append(same / len(rivals))
        return min(shares, default=1.0)


def window(
    named: Sequence[int], series: SeriesFacts, size_mm: Sequence[float], rules: AlignmentRules
) -> dict[int, float]:
    """Weigh the slices around named ones: as far as the finding reaches.

    A run of several named slices is taken as the finding's extent; a single one reaches half the size to
    either side, or a set number of slices. Weights fall from the middle like the cut through a ball.
    """
    named = sorted(set(named))
    if len(named) > 1 and named[-1] - named[0] + 1 == len(named):
        middle, reach = (named[0] + named[-1]) / 2, (len(named) - 1) / 2
        return {place: _fall(abs(place - middle), reach) for place in named}
    reach = rules.neighbours
    if size_mm and series.spacing_mm:
        reach = math.ceil(max(size_mm) / 2 / series.spacing_mm)
    # A reach beyond what is kept anyway would only cost time.
    reach = min(reach, rules.max_slices)
    weights: dict[int, float] = {}
    for center in named:
        for place in range(max(0, center - reach), min(series.num_slices, center + reach + 1)):
            weights[place] = max(weights.get(place, 0.0), _fall(abs(place - center), reach))
    return weights


def _fall(distance: float, reach: float) -> float:
    """Area of a ball's cut at a distance from its middle; 0 one slice behind its end."""
    share = distance / (reach + 1)
    return 1.0 - share * share


def _counts(series: SeriesFacts, total: int) -> bool:
    return (
        series.num_slices == total
        or max((one for one in series.numbers if one is not None), default=0) == total
    )
