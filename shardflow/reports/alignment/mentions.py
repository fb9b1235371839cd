"""Rules E1, E2 and E6: images that the report names, and projection images where it names none.

A mention belongs to the nearest finding of its clause. A mention in parentheses belongs to what stands in
them, else to what stands to the left; a mention that *shows* something to what follows. A clause without a
finding takes the one of its sentence, a sentence without one the only finding of the sentence before. Words
around the mention narrow it down: planes, contrast, views, totals. Images are found by their numbers, never
by their position in a list; if several fit (two series of one number, a mention without series), each has a
share of the weight.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardflow.reports.alignment.evidence import AlignmentRules, Evidence, Rule
from shardflow.reports.alignment.images import SeriesFacts
from shardflow.reports.alignment.lesions import Finding, are_same_side
from shardflow.reports.language import language_of
from shardflow.reports.tokens import tokenize

Span = tuple[int, int]

ELIGIBLE = frozenset(("present", "uncertain"))
"""Assertions of findings that images can show."""

_SEPARATOR = re.compile(
    r";|,\s(?=no\b)|(?:,\s|\s)(?:but|however|whereas|while|although|though|except)\b|,?\sand\s(?=(?:on\s)?(?:image|im|series|se)\b)",
    re.IGNORECASE,
)
_SHOWS = re.compile(
    r"(?:\s(?:of|in|on)\s(?:the\s)?(?:series|ser?)\s?\d+)?[\s)\]]*(?:also\s)?(?:shows?|showing|demonstrates?|demonstrating|reveals?|depicts?|contains?|"
    r",?\s*there (?:is|are))\b",
    re.IGNORECASE,
)
# How a sentence begins that speaks of what the one before named.
_GOES_ON = re.compile(
    r"[\s(\[*-]*(?:this|these|it|they|the\s(?:lesion|finding|abnormality|former|latter)|(?:best\s)?seen|see|"
    r"key\simage|images?|img?|series|ser?|slices?|s?\d)\b",
    re.IGNORECASE,
)


class Clauses:
    """The sentences and clauses of a report, and the findings in them.

    Args:
        text: The report.
        report: ``report.json`` of it.
    """

    def __init__(self, text: str, report: Mapping[str, Any]) -> None:
        self.text = text
        self._entities: Sequence[Mapping[str, Any]] = report["entities"]
        self._sections: Sequence[Mapping[str, Any]] = report["sections"]
        tokens = tokenize(text, language_of(report))
        self._sentences = [(tokens.starts[first], tokens.ends[last - 1]) for first, last in tokens.sentences]
        self._starts = [start for start, _ in self._sentences]

    def bind(self, mention: Span) -> int | None:
        """Return the number of the finding that a mention belongs to, or None."""
        place = bisect_right(self._starts, mention[0]) - 1
        if place < 0:
            return None
        sentence = self._sentences[place]
        inside = self._findings(sentence)
        if not inside:
            return self._sole_before(place)
        near = self._findings(self._parentheses(sentence, mention))
        if near:
            return self._nearest(near, mention)
        clause = self.clause(mention)
        near = self._findings(clause) or inside
        right = [number for number in near if self._span(number)[0] >= mention[1]]
        if right and _SHOWS.match(self.text, mention[1], clause[1]):
            return right[0]
        return self._nearest(near, mention)

    def clause(self, span: Span) -> Span:
        """Return the clause that a place of the text begins in."""
        place = bisect_right(self._starts, span[0]) - 1
        if place < 0:
            return span
        first, last = self._sentences[place]
        for match in _SEPARATOR.finditer(self.text, first, last):
            if match.end() <= span[0]:
                first = match.end()
            elif match.start() >= span[1]:
                last = match.start()
                break
        return first, last

    def section_of(self, span: Span) -> str:
        """Return the kind of the section that a place lies in; empty outside of all."""
        for one in self._sections:
            if one["span"][0] <= span[0] < one["span"][1]:
                return str(one["kind"])
        return ""

    def words(self, span: Span) -> str:
        """Return a stretch of the text."""
        return self.text[span[0] : span[1]]

    def _span(self, number: int) -> Span:
        first, last = self._entities[number]["span"]
        return first, last

    def _findings(self, span: Span) -> list[int]:
        """Numbers of the findings that begin in a span, in the text's order."""
        found = [
            number for number in range(len(self._entities)) if span[0] <= self._span(number)[0] < span[1]
        ]
        return sorted(found, key=self._span)

    def _nearest(self, numbers: Sequence[int], mention: Span) -> int:
        """Take the nearest to the left, else to the right; what images can show comes first."""
        left = [number for number in numbers if self._span(number)[1] <= mention[0]]
        # "a nodule without calcification (3:45)" speaks of the nodule.
        for side in (left[::-1], [number for number in numbers if number not in left]):
            shown = [number for number in side if self._entities[number]["assertion"] in ELIGIBLE]
            if side:
                return (shown or side)[0]
        return numbers[0]

    def _sole_before(self, place: int) -> int | None:
        if place == 0 or not _GOES_ON.match(self.text, *self._sentences[place]):
            return None
        before, here = self._sentences[place - 1], self._sentences[place]
        if self._section_start(before) != self._section_start(here):
            return None
        found = self._findings(before)
        return found[0] if len(found) == 1 else None

    def _section_start(self, span: Span) -> int:
        return max((one["span"][0] for one in self._sections if one["span"][0] <= span[0]), default=-1)

    def _parentheses(self, sentence: Span, mention: Span) -> Span:
        """Return what the parentheses around a mention hold; an empty span where there are none."""
        opening = self.text.rfind("(", sentence[0], mention[0] + 1)
        if opening < 0 or ")" in self.text[opening : mention[0]]:
            return mention[0], mention[0]
        closing = self.text.find(")", opening, sentence[1])
        return opening, closing if closing >= 0 else sentence[1]


_PLANES = re.compile(r"\b(axial|coronal|sagittal)\b", re.IGNORECASE)
_WITHOUT = re.compile(
    r"\b(?:non-?\s?contrast|non-?enhanced|unenhanced|pre-?\s?contrast|without\s(?:iv\s|intravenous\s)?contrast)\b",
    re.IGNORECASE,
)
_WITH = re.compile(
    r"\b(?:post-?\s?contrast|contrast-?\s?enhanced|arterial\sphase|(?:portal\s)?venous\sphase|delayed\sphase)\b",
    re.IGNORECASE,
)
_PICTURE = r"(?:views?|radiographs?|projections?|images?|films?|x-?rays?)"
_VIEWS = (
    ("lateral", re.compile(rf"\blateral\s{_PICTURE}\b|\blateral\schest\s{_PICTURE}\b", re.IGNORECASE)),
    (
        "frontal",
        re.compile(
            rf"\b(?:frontal|pa|ap|portable|posteroanterior|anteroposterior)\s(?:chest\s)?{_PICTURE}\b",
            re.IGNORECASE,
        ),
    ),
    ("mlo", re.compile(r"\bMLO\b|\bmediolateral\soblique\b", re.IGNORECASE)),
    ("cc", re.compile(r"\bCC\s(?:view|projection|image)\b|\bcraniocaudal\b", re.IGNORECASE)),
    ("oblique", re.compile(rf"\boblique\s{_PICTURE}\b", re.IGNORECASE)),
)
_TOTAL = re.compile(r"\s?(?:of|/)\s?(\d{1,5})\b(?!\s*(?:mm|cm|%))", re.IGNORECASE)
_IN_SPAN = re.compile(r"\d\s?(?:of|/)\s?(\d{1,5})\b", re.IGNORECASE)
_DEFAULT = re.compile(
    r"\bimage\snumbers?\s(?:\w+\s){0,3}?(?:refer|correspond|relate|belong)s?\sto\s(?:the\s)?(?:\w+\s)?series\s(\d{1,5})\b",
    re.IGNORECASE,
)


def plane_of(words: str) -> str:
    """Return the plane that is named; empty if none, or several."""
    return _only({match.group(1).lower() for match in _PLANES.finditer(words)})


def contrast_of(words: str) -> bool | None:
    """Whether images with contrast are meant; None if unsaid, or both are."""
    with_it, without_it = _WITH.search(words), _WITHOUT.search(words)
    return None if (with_it is None) == (without_it is None) else with_it is not None


def view_of(words: str) -> str:
    """Return the view of a projection that is named; empty if none, or several."""
    return _only({name for name, pattern in _VIEWS if pattern.search(words)})


def total_of(text: str, mention: Span) -> int | None:
    """Return the number of images that "image 5 of 10" names."""
    match = _IN_SPAN.search(text, *mention) or _TOTAL.match(text, mention[1])
    return int(match.group(1)) if match else None


def default_series(text: str) -> int | None:
    """Return the series that a report says its image numbers refer to; None if none, or several."""
    found = {int(match.group(1)) for match in _DEFAULT.finditer(text)}
    return found.pop() if len(found) == 1 else None


def _only(found: set[str] | Sequence[str]) -> str:
    return next(iter(found)) if len(found) == 1 else ""


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
            return [], "" if mention.get("is_tentative") else UNRESOLVED
        rule: Rule = "E2" if named is None else "E1"
        base = self._rules.image_only if named is None else self._rules.series_and_image
        plane = plane_of(words)
        evidence = []
        for one in fitting:
            share = self._share(one, fitting, found, max(size_mm, default=0.0))
            is_other = bool(plane and one.plane and one.plane != plane)
            evidence.append(
                Evidence(
                    rule=rule,
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
