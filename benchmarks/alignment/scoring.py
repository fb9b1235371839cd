"""What alignments are worth: is the finding on the slice that is thought best, as often as promised?"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.alignment.studies import PackedStudy

__all__ = ["Scored", "StudyScore", "calibration", "score_study", "summary"]

_BINS = 10
_TOP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One entry of an ``alignment.json``."""

    kind: str
    """The rules it rests on, and what else matters, such as ``E1+E3`` or ``E1 same_finding``."""
    confidence: float
    is_right: bool
    """Whether the slice of the highest weight shows the finding."""
    is_near: bool
    """Whether one of the three best does."""
    overlap: float
    """Intersection over union of its slices and those that show it."""
    distance_mm: float | None
    """From the best slice to the one that shows most of it; None where the series shows nothing of it."""
    asserted: str
    """What the truth says of the finding; empty where it knows none there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyScore:
    """One study."""

    entries: tuple[Scored, ...]
    num_wanted: int
    """Findings that the report asserts or leaves open, and that images show."""
    num_found: int
    """Of those: with an entry above the threshold whose best slice shows it."""
    has_aligned: bool
    """Whether any entry is above the threshold."""


def score_study(study: PackedStudy, aligned: Mapping[str, Any], report: Mapping[str, Any]) -> StudyScore:
    """Compare an alignment with the truth."""
    entries = []
    found: set[int] = set()
    threshold = aligned["threshold"]
    for one in aligned["entities"]:
        number = _truth_of(study, report["entities"][one["entity"]]["span"])
        truth = None if number is None else study.entities[number]
        shown = {} if truth is None else truth["shown"].get(one["series"], {})
        scored = _score(one, shown, study.study["series"][one["series"]], truth)
        entries.append(scored)
        if number is not None and scored.is_right and one["confidence"] > threshold:
            found.add(number)
    wanted = {
        number
        for number, one in enumerate(study.entities)
        if one["lesion_id"] and one["assertion"] in ("present", "uncertain") and one["shown"]
    }
    return StudyScore(
        entries=tuple(entries),
        num_wanted=len(wanted),
        num_found=len(wanted & found),
        has_aligned=any(one["confidence"] > threshold for one in aligned["entities"]),
    )


def calibration(entries: Sequence[Scored]) -> dict[str, Any]:
    """Compare confidence with how often it was right, in ten bins of equal width."""
    bins: dict[int, list[Scored]] = defaultdict(list)
    for one in entries:
        bins[min(int(one.confidence * _BINS), _BINS - 1)].append(one)
    table = [
        {
            "confidence": [number / _BINS, (number + 1) / _BINS],
            "num": len(group),
            "mean_confidence": round(statistics.fmean(one.confidence for one in group), 4),
            "right": round(statistics.fmean(one.is_right for one in group), 4),
        }
        for number, group in sorted(bins.items())
    ]
    error = sum(
        len(group)
        * abs(
            statistics.fmean(one.confidence for one in group)
            - statistics.fmean(one.is_right for one in group)
        )
        for group in bins.values()
    )
    return {"expected_error": round(error / max(1, len(entries)), 4), "num": len(entries), "bins": table}


def summary(studies: Sequence[StudyScore], threshold: float) -> dict[str, Any]:
    """Sum up."""
    entries = [one for study in studies for one in study.entries]
    accepted = [one for one in entries if one.confidence > threshold]
    told = [study for study in studies if study.num_wanted]
    kinds: dict[str, list[Scored]] = defaultdict(list)
    for one in entries:
        kinds[one.kind].append(one)
    wanted = sum(study.num_wanted for study in studies)
    return {
        "studies": len(studies),
        "studies_with_a_finding_that_images_show": len(told),
        "share_of_those_with_an_aligned_finding": _mean([study.has_aligned for study in told]),
        "findings_that_images_show": wanted,
        "share_of_those_aligned_rightly": round(
            sum(study.num_found for study in studies) / max(1, wanted), 4
        ),
        "aligned_though_not_asserted": sum(
            one.asserted in ("absent", "historical", "hypothetical") for one in accepted
        ),
        "above_the_threshold": _measures(accepted),
        "all_entries": _measures(entries),
        "calibration": calibration(entries),
        "by_evidence": {name: _measures(kinds[name]) for name in sorted(kinds)},
    }


def _measures(entries: Sequence[Scored]) -> dict[str, Any]:
    distances = [one.distance_mm for one in entries if one.distance_mm is not None]
    return {
        "num": len(entries),
        "mean_confidence": _mean([one.confidence for one in entries]),
        "hit_at_1": _mean([one.is_right for one in entries]),
        f"hit_at_{_TOP}": _mean([one.is_near for one in entries]),
        "iou": _mean([one.overlap for one in entries]),
        "median_dz_mm": round(statistics.median(distances), 2) if distances else None,
        "mean_dz_mm": round(statistics.fmean(distances), 2) if distances else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def _truth_of(study: PackedStudy, span: Sequence[int]) -> int | None:
    """Return the finding of the truth that shares most characters with a span."""
    shared = [
        (min(span[1], one["span"][1]) - max(span[0], one["span"][0]), -number)
        for number, one in enumerate(study.entities)
    ]
    best = max(shared, default=(0, 0))
    return -best[1] if best[0] > 0 else None


def _score(
    entry: Mapping[str, Any],
    shown: Mapping[int, int],
    series: Mapping[str, Any],
    truth: Mapping[str, Any] | None,
) -> Scored:
    ranked = sorted(zip(entry["slices"], entry["weights"], strict=True), key=lambda one: (-one[1], one[0]))
    best = ranked[0][0]
    slices = set(entry["slices"])
    names = sorted({one["rule"] for one in entry["evidence"]})
    carried = {mark for one in entry["evidence"] for mark in one.get("modifiers", ())}
    step = [row[2] for row in series["affine_lps"][:3]] if series.get("affine_lps") else None
    distance = None
    if shown and step is not None:
        middle = min(shown, key=lambda place: (-shown[place], place))
        distance = abs(best - middle) * sum(value * value for value in step) ** 0.5
    return Scored(
        kind=" ".join(["+".join(names), *sorted(carried | set(entry.get("modifiers", ())))]),
        confidence=entry["confidence"],
        is_right=best in shown,
        is_near=any(place in shown for place, _ in ranked[:_TOP]),
        overlap=len(slices & shown.keys()) / len(slices | shown.keys()),
        distance_mm=distance,
        asserted="" if truth is None else truth["assertion"],
    )
