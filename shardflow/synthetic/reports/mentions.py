"""Report text with marks, and the ways in which reports name images.

A sentence is a list of pieces: plain strings, and marks, whose span in the final text becomes the truth.
Offsets count characters from 0; the text is ASCII, so they are bytes too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardflow.synthetic.draws import Draws
from shardflow.synthetic.render import Appearance
from shardflow.synthetic.study import SeriesPlan, StudyPlan

MarkKind = Literal["entity", "mention", "distractor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Text whose span is part of the truth."""

    kind: MarkKind
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


Piece = str | Mark
Sentence = list[Piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A finished report and its truth, ready for JSON."""

    text: str
    sections: list[dict[str, Any]]
    entities: list[dict[str, Any]]
    mentions: list[dict[str, Any]]
    distractors: list[dict[str, Any]]


class Document:
    """Collects text and spans."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._marks: dict[MarkKind, list[dict[str, Any]]] = {"entity": [], "mention": [], "distractor": []}
        self._sections: list[dict[str, Any]] = []

    def add(self, text: str) -> None:
        """Append plain text."""
        self._parts.append(text)
        self._length += len(text)

    def open_section(self, name: str, header: str) -> None:
        """Start a section; ``header`` is its heading as written."""
        self._close_section()
        start = self._length
        self.add(header)
        self._sections.append({"name": name, "span": [start, -1]})

    def write(self, sentence: Iterable[Piece]) -> None:
        """Append one sentence, its first letter a capital."""
        is_first = True
        for piece in sentence:
            text = piece if isinstance(piece, str) else piece.text
            if not text:
                continue
            if is_first:
                text = text[0].upper() + text[1:]
                is_first = False
            if isinstance(piece, Mark):
                start = self._length
                section = self._sections[-1]["name"] if self._sections else ""
                row = {"span": [start, start + len(text)], "text": text, "section": section}
                self._marks[piece.kind].append({**row, **piece.facts})
            self.add(text)

    def finish(self) -> Report:
        """Return the report."""
        self._close_section()
        return Report(
            text="".join(self._parts),
            sections=self._sections,
            entities=self._marks["entity"],
            mentions=self._marks["mention"],
            distractors=self._marks["distractor"],
        )

    def _close_section(self) -> None:
        if self._sections and self._sections[-1]["span"][1] < 0:
            self._sections[-1]["span"][1] = self._length


_VIEW_WORDS = {
    "PA": ("on the frontal view", "on the PA view", "on the frontal radiograph"),
    "AP": ("on the frontal view", "on the AP view", "on the portable view"),
    "LL": ("on the lateral view", "on the lateral radiograph", "on the lateral projection"),
}
# {s} series, {i} image, {a} first and {b} last image of a range, {l} a list, {n} images of the series.
_Forms = tuple[tuple[str, str, int], ...]

_SINGLE_FORMS: _Forms = (
    ("series-image", "(series {s}, image {i})", 10),
    ("series-image", "(Series {s}, Image {i})", 4),
    ("series-image", "(series {s} image {i})", 6),
    ("series-image", "(series {s}/image {i})", 4),
    ("abbreviated", "(se {s} im {i})", 6),
    ("abbreviated", "(Se:{s} Im:{i})", 3),
    ("abbreviated", "(ser {s}, img {i})", 4),
    ("abbreviated", "(S{s}I{i})", 3),
    ("pair", "({s}:{i})", 8),
    ("pair", "({s}/{i})", 5),
    ("image-first", "(image {i} of series {s})", 5),
    ("image-first", "(image {i}, series {s})", 5),
    ("image-first", "(im {i} se {s})", 3),
    ("bare", "on series {s}, image {i}", 7),
    ("bare", "seen on image {i} of series {s}", 5),
    ("bare", "best seen on series {s} image {i}", 5),
    ("bare", "at axial image {i} series {s}", 2),
    ("key", "(key image {i}, series {s})", 2),
)
_RANGE_FORMS: _Forms = (
    ("range", "(series {s}, images {a}-{b})", 8),
    ("range", "(se {s} im {a}-{b})", 6),
    ("range", "(ser {s}, img {a}-{b})", 3),
    ("range", "({s}:{a}-{b})", 4),
    ("range", "on images {a} through {b} of series {s}", 4),
    ("range", "on series {s}, images {a} to {b}", 4),
)
_LIST_FORMS: _Forms = (
    ("list", "(series {s}, images {l})", 6),
    ("list", "on images {l} of series {s}", 5),
    ("list", "(se {s} im {l})", 3),
)
_SHORT_FORMS: _Forms = (
    ("image-only", "(image {i})", 6),
    ("image-only", "on image {i}", 4),
    ("image-of-total", "(image {i} of {n})", 3),
    ("image-of-total", "slice {i}/{n}", 2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """One lesion in one stack of one series."""

    series: SeriesPlan
    stack: int
    appearances: tuple[Appearance, ...]

    @property
    def best(self) -> Appearance:
        """Instance that shows the largest part of it; the first of equals."""
        return max(self.appearances, key=lambda item: (item.num_pixels, -item.item.instance_number))

    @property
    def numbers(self) -> list[int]:
        """Instance numbers, ascending."""
        return sorted(item.item.instance_number for item in self.appearances)


def sightings_of(study: StudyPlan, appearances: Sequence[Appearance]) -> Mapping[str, tuple[Sighting, ...]]:
    """Return the sightings of each lesion, by lesion id; of readable instances only."""
    groups: dict[tuple[str, int, int], list[Appearance]] = {}
    for item in appearances:
        if not item.item.is_truncated:
            groups.setdefault((item.lesion_id, item.series_index, item.item.stack), []).append(item)
    found: dict[str, list[Sighting]] = {}
    for (lesion_id, series, stack), items in groups.items():
        sighting = Sighting(series=study.series[series], stack=stack, appearances=tuple(items))
        found.setdefault(lesion_id, []).append(sighting)
    return {lesion_id: tuple(items) for lesion_id, items in found.items()}


def mention(
    draws: Draws,
    study: StudyPlan,
    sighting: Sighting,
    *,
    assertion: str,
    lesion_id: str | None,
    default_series: int | None = None,
    is_prior: bool = False,
    says_series: bool = True,
    says_image: int | None = None,
) -> Mark:
    """Name the images of a sighting in a drawn form.

    Args:
        draws: Chooses the form.
        study: The study that the images belong to.
        sighting: The lesion in a stack of a series.
        assertion: Assertion of the sentence about the finding.
        lesion_id: The lesion; None if the sentence is about something else.
        default_series: Index of the series that the report says image numbers refer to.
        is_prior: Whether the study is an earlier one than the report's.
        says_series: Whether the series may be named.
        says_image: A number to name in place of the right one.
    """
    numbers = sighting.numbers
    is_run = len(numbers) > 1 and numbers[-1] - numbers[0] + 1 == len(numbers)
    best = sighting.best.item.instance_number
    forms, named = _SINGLE_FORMS, [best]
    if says_image is not None or not says_series:
        forms = _SINGLE_FORMS if says_series else _SHORT_FORMS[:2]
    elif default_series == sighting.series.index and not is_prior and draws.chance(45):
        forms = _SHORT_FORMS if _counts_from_one(sighting.series) else _SHORT_FORMS[:2]
    elif is_run and draws.chance(30):
        forms, named = _RANGE_FORMS, numbers
    elif 2 <= len(numbers) <= 4 and draws.chance(30):
        forms, named = _LIST_FORMS, numbers
    form, template, _ = draws.weighted([(item, item[2]) for item in forms])
    text = template.format(
        s=sighting.series.number,
        i=best if says_image is None else says_image,
        a=named[0],
        b=named[-1],
        l=_listed(named),
        n=len(sighting.series.slices),
    )
    mark = _mark(
        text,
        form,
        study,
        sighting.series,
        named,
        assertion=assertion,
        lesion_id=lesion_id,
        says_series="{s}" in template,
        is_prior=is_prior,
    )
    if says_image is None:
        return mark
    return Mark(
        kind="mention", text=text, facts={**mark.facts, "image_numbers": [says_image], "is_wrong": True}
    )


def plain_mention(
    draws: Draws, study: StudyPlan, series: SeriesPlan, *, assertion: str, is_prior: bool = False
) -> Mark:
    """Name one drawn image of a series, whatever it shows."""
    item = draws.choice(series.slices)
    form, template, _ = draws.weighted([(form, form[2]) for form in _SINGLE_FORMS])
    text = template.format(s=series.number, i=item.instance_number)
    return _mark(
        text,
        form,
        study,
        series,
        [item.instance_number],
        assertion=assertion,
        lesion_id=None,
        says_series=True,
        is_prior=is_prior,
    )


def wrong_number(draws: Draws, sighting: Sighting) -> int:
    """Draw the number of an image of the series that does not show it, or sometimes of none."""
    shown = set(sighting.numbers)
    others = sorted({item.instance_number for item in sighting.series.slices} - shown)
    if not others or draws.chance(20):
        return max(item.instance_number for item in sighting.series.slices) + draws.integer(40, 90)
    return draws.choice(others)


def view_mention(
    draws: Draws, study: StudyPlan, sighting: Sighting, *, assertion: str, lesion_id: str
) -> Mark:
    """Name a radiograph by its view."""
    item = draws.choice(sighting.appearances).item
    mark = _mark(
        draws.choice(_VIEW_WORDS[item.view]),
        "view",
        study,
        sighting.series,
        [item.instance_number],
        assertion=assertion,
        lesion_id=lesion_id,
        says_series=False,
        is_prior=False,
    )
    return Mark(kind="mention", text=mark.text, facts={**mark.facts, "image_numbers": [], "view": item.view})


def _mark(
    text: str,
    form: str,
    study: StudyPlan,
    series: SeriesPlan,
    numbers: Sequence[int],
    *,
    assertion: str,
    lesion_id: str | None,
    says_series: bool,
    is_prior: bool,
) -> Mark:
    wanted = set(numbers)
    facts: dict[str, Any] = {
        "form": form,
        "assertion": assertion,
        "lesion_id": lesion_id,
        "refers_to": "prior" if is_prior else "current",
        "series_number": series.number if says_series else None,
        "image_numbers": list(numbers),
        "target": {
            "study_instance_uid": study.uid,
            "series_instance_uid": series.uid,
            "sop_instance_uids": [
                item.sop_instance_uid for item in series.slices if item.instance_number in wanted
            ],
        },
        "is_ambiguous": _is_ambiguous(study, series, wanted, says_series=says_series),
    }
    return Mark(kind="mention", text=text, facts=facts)


def _is_ambiguous(study: StudyPlan, series: SeriesPlan, numbers: set[int], *, says_series: bool) -> bool:
    """Return whether the words alone could mean another series too."""
    return any(
        other.index != series.index
        and (not says_series or other.number == series.number)
        and numbers <= {item.instance_number for item in other.slices}
        for other in study.series
    )


def _counts_from_one(series: SeriesPlan) -> bool:
    numbers = [item.instance_number for item in series.slices]
    return max(numbers) <= len(numbers)


def _listed(numbers: Sequence[int]) -> str:
    *head, last = map(str, numbers)
    return f"{', '.join(head)} and {last}" if head else last
