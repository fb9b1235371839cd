"""E6: studies of projection images, where a finding is on a picture of the whole."""

from __future__ import annotations

from collections.abc import Sequence

from shardflow.alignment.clauses import Clauses, Span
from shardflow.alignment.cues import view_of
from shardflow.alignment.evidence import Evidence
from shardflow.alignment.images import SeriesFacts
from shardflow.alignment.lesions import Finding, are_same_side
from shardflow.alignment.rules import AlignmentRules

__all__ = ["projection_evidence"]


def projection_evidence(
    finding: Finding, span: Span, clauses: Clauses, series: Sequence[SeriesFacts], rules: AlignmentRules
) -> list[Evidence]:
    """Find the views that show a finding.

    Args:
        finding: The finding.
        span: Its place in the text.
        clauses: Of the report.
        series: Of a study of projections.
        rules: The weights.
    """
    images = [(one, place) for one in series if not one.is_localizer for place in range(one.num_slices)]
    if len(images) == 1:
        return [_evidence(*images[0], rules.single_image, cue="single")]
    view = view_of(clauses.words(clauses.clause(span)))
    viewed = [image for image in images if view and image[0].view == view]
    sided = [image for image in viewed or images if are_same_side(finding.side, image[0].laterality)]
    chosen = sided or viewed
    cue, base = "none", rules.view_unnamed
    if chosen:
        cue, base = ("side" if sided and not viewed else "view"), rules.view_named
    chosen = chosen or images
    # Each view of a part of the body shows all of it; which part is meant is what is not known.
    parts = len({(one.body_part, one.laterality) for one, _ in chosen})
    return [_evidence(one, place, base / parts, cue=cue, candidates=parts) for one, place in chosen]


def _evidence(
    series: SeriesFacts, place: int, confidence: float, *, cue: str, candidates: int = 1
) -> Evidence:
    return Evidence(
        rule="E6",
        family="view",
        series=series.index,
        weights={place: 1.0},
        confidence=confidence,
        facts={"cue": cue, "candidates": candidates},
    )
