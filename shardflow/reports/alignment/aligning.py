"""Alignment of one study: collects the evidence of all rules and combines it for each finding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardflow.errors import FormatError
from shardflow.reports.alignment.evidence import AlignmentRules, Evidence, entry
from shardflow.reports.alignment.images import is_of_projections, read_series
from shardflow.reports.alignment.lesions import (
    Finding,
    count_distinct,
    is_same_finding,
    level_evidence,
    read_finding,
)
from shardflow.reports.alignment.mentions import ELIGIBLE, Clauses, MentionResolver, projection_evidence
from shardflow.reports.alignment.regions import read_regions, region_evidence

FORMAT_VERSION = 1
NO_EVIDENCE = "NO_EVIDENCE"
"""Reason: no evidence of its place."""
UNBOUND = "MENTION_WITHOUT_FINDING"
"""Reason of a mention: no finding is near it."""
PRIOR = "MENTION_OF_ANOTHER_STUDY"
"""Reason of a mention: it refers to a comparison study."""

_REASONS = {"absent": "ABSENT", "historical": "HISTORICAL", "hypothetical": "HYPOTHETICAL"}


def align(
    study: Mapping[str, Any],
    report: Mapping[str, Any],
    annotations: Mapping[str, Any] | None,
    rules: AlignmentRules,
    *,
    text: str,
) -> dict[str, Any]:
    """Align the findings of a report with the slices that show them.

    Args:
        study: ``study.json`` of the sample.
        report: ``report.json``.
        annotations: ``annotations.json``, if there is one.
        rules: The weights.
        text: ``report.txt``, which the places in ``report`` belong to.

    Returns:
        ``alignment.json``. A pure function: equal arguments give equal objects, and no order within
        ``mentions`` or ``rois`` matters. Confidences and weights are rounded to 4 decimals.

    Raises:
        FormatError: One of the objects is not what it should be.
    """
    series = read_series(study)
    regions = read_regions(annotations, series)
    try:
        clauses = Clauses(text, report)
        entities: Sequence[Mapping[str, Any]] = report["entities"]
        findings = [
            read_finding(number, one) for number, one in enumerate(entities) if one["assertion"] in ELIGIBLE
        ]
        resolver = MentionResolver(series, clauses, rules)
        mentioned, unresolved, missing = _mentioned(report["mentions"], entities, clauses, resolver)
    except (KeyError, TypeError, IndexError) as error:
        raise FormatError(
            "report.json must hold sections, entities and mentions (docs/format.md, section 4), got "
            f"{type(error).__name__} while reading it; pack the study again."
        ) from None
    is_flat = is_of_projections(series)
    entries: list[dict[str, Any]] = []
    unaligned = [
        {"entity": number, "reason": _REASONS.get(one["assertion"], "OTHER_ASSERTION")}
        for number, one in enumerate(entities)
        if one["assertion"] not in ELIGIBLE
    ]
    for finding in findings:
        evidence = mentioned.get(finding.entity) or _carried(finding, findings, mentioned, rules)
        if is_flat and not evidence:
            first, last = entities[finding.entity]["span"]
            evidence = projection_evidence(finding, (first, last), clauses, series, rules)
        evidence = evidence + region_evidence(finding, findings, regions, rules)
        evidence = evidence or level_evidence(finding, series, rules)
        by_series: dict[int, list[Evidence]] = defaultdict(list)
        for one in evidence:
            by_series[one.series].append(one)
        entries += [
            entry(finding.entity, number, by_series[number], rules, is_uncertain=finding.is_uncertain)
            for number in sorted(by_series)
        ]
        if not by_series:
            reason = missing.get(finding.entity, NO_EVIDENCE)
            unaligned.append({"entity": finding.entity, "reason": reason})
    return {
        "format_version": FORMAT_VERSION,
        "rules": rules.digest(),
        "threshold": rules.threshold,
        "entities": entries,
        "unaligned": sorted(unaligned, key=lambda one: int(one["entity"])),
        "unresolved": unresolved,
    }


def _mentioned(
    mentions: Sequence[Mapping[str, Any]],
    entities: Sequence[Mapping[str, Any]],
    clauses: Clauses,
    resolver: MentionResolver,
) -> tuple[dict[int, list[Evidence]], list[dict[str, Any]], dict[int, str]]:
    """Give every mention to its finding.

    Returns:
        The evidence by finding, the mentions that led nowhere, and why findings whose mentions all did have
        none.
    """
    found: dict[int, list[Evidence]] = defaultdict(list)
    unresolved: list[dict[str, Any]] = []
    missing: dict[int, str] = {}
    for number, mention in enumerate(mentions):
        span = (mention["span"][0], mention["span"][1])
        entity = None if clauses.section_of(span) == "comparison" else clauses.bind(span)
        if entity is None and mention.get("is_tentative"):
            continue
        if entity is None:
            is_prior = clauses.section_of(span) == "comparison"
            unresolved.append({"mention": number, "reason": PRIOR if is_prior else UNBOUND})
            continue
        evidence, reason = resolver.resolve(number, mention, entities[entity].get("size_mm") or ())
        if reason:
            unresolved.append({"mention": number, "reason": reason})
            missing[entity] = max(reason, missing.get(entity, ""))
        found[entity] += evidence
    widened = {
        entity: resolver.widen(evidence, entities[entity].get("size_mm") or ())
        for entity, evidence in found.items()
    }
    return widened, unresolved, missing


def _carried(
    finding: Finding,
    findings: Sequence[Finding],
    mentioned: Mapping[int, list[Evidence]],
    rules: AlignmentRules,
) -> list[Evidence]:
    """Take the images that are named where the report speaks of the same finding elsewhere."""
    same = [
        one
        for one in findings
        if one.entity != finding.entity and mentioned.get(one.entity) and is_same_finding(one, finding)
    ]
    # Something must say that they are the same: the place, or the size. And it must be one thing only.
    tied = [
        one
        for one in same
        if (one.anatomy and one.anatomy == finding.anatomy and one.side == finding.side)
        or (one.size_mm and finding.size_mm)
    ]
    if not tied or count_distinct(tied) > 1:
        return []
    return [
        replace(
            one,
            confidence=one.confidence * rules.same_finding,
            modifiers=(*one.modifiers, "same_finding"),
            facts={**one.facts, "from_entity": other.entity},
        )
        for other in tied
        for one in mentioned[other.entity]
    ]
