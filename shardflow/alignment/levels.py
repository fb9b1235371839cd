"""E7: where in a scanned body part such anatomy usually lies. Never enough by itself.

The table ``levels.csv`` gives shares of the scanned height, from the head's side down: rough places for
whole examinations of a body part. The best linear rules of this kind miss by 6 mm and more, so the weight
is capped.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from shardflow.alignment.evidence import Evidence
from shardflow.alignment.images import SeriesFacts
from shardflow.alignment.lesions import Finding, is_same_place
from shardflow.alignment.rules import AlignmentRules

__all__ = ["level_evidence"]


def level_evidence(finding: Finding, series: Sequence[SeriesFacts], rules: AlignmentRules) -> list[Evidence]:
    """Guess the slices of the first axial stack of a body part that the table knows."""
    for one in series:
        if one.is_localizer or one.plane != "axial" or len(one.heights_mm) < 2:
            continue
        bounds = _bounds(one.body_part, finding.anatomy)
        if bounds is None:
            return []
        top, bottom = max(one.heights_mm), min(one.heights_mm)
        middle, reach = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
        weights = {}
        for place, height in enumerate(one.heights_mm):
            share = (top - height) / (top - bottom)
            if bounds[0] <= share <= bounds[1]:
                weights[place] = max(1.0 - (abs(share - middle) / reach) ** 2, 0.01)
        if not weights:
            return []
        return [
            Evidence(
                rule="E7",
                family="level",
                series=one.index,
                weights=weights,
                confidence=rules.level_prior,
                is_region=True,
                facts={"level": [*bounds]},
            )
        ]
    return []


def _bounds(body_part: str, anatomy: str) -> tuple[float, float] | None:
    """Look up anatomy, or what it is part of; the narrowest stretch of those that fit."""
    if not anatomy:
        return None
    fitting = [bounds for name, bounds in _table().get(body_part, {}).items() if is_same_place(anatomy, name)]
    return min(fitting, key=lambda one: (one[1] - one[0], one), default=None)


@cache
def _table() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    table: dict[str, dict[str, tuple[float, float]]] = {}
    with files("shardflow.alignment").joinpath("levels.csv").open("r", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            table.setdefault(row["body_part"], {})[row["anatomy"]] = (float(row["from"]), float(row["to"]))
    return table
