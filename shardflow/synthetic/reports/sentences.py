"""Sentences of generated reports, each with the marks that make its truth."""

from __future__ import annotations

from collections.abc import Sequence

from shardflow.synthetic.draws import Draws
from shardflow.synthetic.lesions import Lesion
from shardflow.synthetic.reports.document import Mark, Piece, Sentence
from shardflow.synthetic.reports.words import SYNONYMS, indefinite, place_of, place_words

__all__ = [
    "absent_sentence",
    "distractor_sentence",
    "entity",
    "hypothetical_sentence",
    "lesion_sentence",
    "size_text",
    "uncertain_sentence",
]

# {k} a kind of size and name, {p} the place, {r} the mention.
_PRESENT = (
    "there is {k} in the {p} {r}.",
    "{k} in the {p} {r}.",
    "{k} is seen in the {p} {r}.",
    "in the {p}, there is {k} {r}.",
    "the {p} contains {k} {r}.",
    "{r}: {k} in the {p}.",
)
_PRESENT_AGAIN = (
    "again noted is {k} in the {p} {r}.",
    "again seen is {k} in the {p} {r}.",
    "stable appearance of {k} in the {p} {r}.",
)
_UNCERTAIN = (
    "possible {n} in the {p} {r}.",
    "there is a questionable {n} in the {p} {r}.",
    "{k} in the {p} {r} cannot be excluded.",
    "findings in the {p} {r} are suspicious for {n}.",
    "density in the {p} {r} may represent {k}.",
)
_ABSENT = (
    ("no {0}.", 1),
    ("no {0} or {1}.", 2),
    ("there is no {0}, {1}, or {2}.", 3),
    ("no evidence of {0}.", 1),
    ("negative for {0}.", 1),
    ("neither {0} nor {1} is identified.", 2),
    ("{0} is not seen.", 1),
    ("without {0} or {1}.", 2),
)
_UNCERTAIN_FINDINGS = (
    "early {0} cannot be excluded.",
    "{0} is felt to be unlikely but not excluded.",
    "possible mild {0}.",
)
_HYPOTHETICAL = (
    "if there is clinical concern for {0}, dedicated imaging is recommended.",
    "should symptoms suggest {0}, short interval follow-up is advised.",
)
# (before, distractor, its kind, after)
_DISTRACTORS: tuple[tuple[str, str, str, str], ...] = (
    ("degenerative change at ", "T2/3", "level", "."),
    ("mild disc space narrowing at ", "L4/5", "level", "."),
    ("the lower paraesophageal node measures ", "3/4 cm", "fraction", "."),
    ("the fat plane measures up to ", "1/2 cm", "fraction", "."),
    ("findings were discussed by telephone at ", "10:45", "time", "."),
    ("the patient was scanned at ", "5:30 pm", "time", " after repositioning."),
    ("a ", "2 of 5", "count", " point scale was used for image quality."),
    ("grade ", "1/2", "grade", " motion is noted."),
    ("follow-up on ", "03/14", "date", " was requested."),
    ("contrast was given at ", "3/4", "fraction", " of the usual dose."),
    ("field strength and ", "T1/T2", "weighting", " protocol were standard."),
    ("quality score ", "4:5", "score", "."),
    ("a total of ", "3 series", "count", " was planned."),
    ("the protocol calls for ", "120 images", "count", " per pass."),
)


def entity(
    text: str,
    label: str,
    assertion: str,
    *,
    lesion: Lesion | None = None,
    size_mm: Sequence[int] = (),
) -> Mark:
    """Mark the name of a finding."""
    facts = {
        "label": label,
        "assertion": assertion,
        "lesion_id": lesion.lesion_id if lesion else None,
        "anatomy": place_of(lesion) if lesion else None,
        "laterality": (lesion.side or None) if lesion else None,
        "size_mm": list(size_mm) or None,
    }
    return Mark(kind="entity", text=text, facts=facts)


def size_text(draws: Draws, lesion: Lesion) -> tuple[str, list[int]]:
    """Write a lesion's size in a drawn way; also as millimetres."""
    longest, second, _ = (max(1, round(2 * axis)) for axis in sorted(lesion.semi_axes_mm, reverse=True))
    style = draws.choice(("mm", "mm", "cm", "two", "two-cm"))
    if style == "cm" and longest >= 10:
        return f"{longest / 10:.1f} cm", [longest]
    if style == "two":
        return f"{longest} x {second} mm", [longest, second]
    if style == "two-cm" and longest >= 10:
        return f"{longest / 10:.1f} x {second / 10:.1f} cm", [longest, second]
    return f"{longest} mm", [longest]


def lesion_sentence(
    draws: Draws, lesion: Lesion, reference: Mark | None, *, assertion: str, tail: Sequence[Piece] = ()
) -> Sentence:
    """Say that a lesion is, or may be, there.

    Args:
        draws: Chooses the words.
        lesion: Which one.
        reference: The images it is seen on; None leaves them out.
        assertion: ``present`` or ``uncertain``.
        tail: What stands before the final full stop.
    """
    size, size_mm = size_text(draws, lesion)
    noun = draws.choice(SYNONYMS[lesion.label])
    again = _PRESENT_AGAIN[:2] if lesion.course != "stable" else _PRESENT_AGAIN
    known = _PRESENT + (again if lesion.prior_mm is not None else ())
    template = draws.choice(known if assertion == "present" else _UNCERTAIN)
    if reference is None or reference.text.startswith("("):
        # Words in parentheses follow what they stand for; only a bare mention can lead.
        template = template if not template.startswith("{r}") else _PRESENT[0]
    mark = entity(noun, lesion.label, assertion, lesion=lesion, size_mm=size_mm if "{k}" in template else ())
    article = "" if template.startswith("{k}") else indefinite(size).split(" ", 1)[0] + " "
    pieces: Sentence = []
    for part in _split(template):
        if part == "{k}":
            pieces += [f"{article}{size} ", mark]
        elif part == "{n}":
            pieces.append(mark)
        elif part == "{p}":
            pieces.append(place_words(draws, lesion))
        elif part == "{r}":
            pieces.append(reference if reference is not None else "")
        else:
            pieces.append(part)
    return _with_tail(_tidy(pieces), tail)


def absent_sentence(draws: Draws, findings: Sequence[str]) -> Sentence:
    """Deny one to three of some findings."""
    forms = [form for form in _ABSENT if form[1] <= len(findings)]
    return _about_findings(draws, draws.choice(forms), findings, "absent")


def uncertain_sentence(draws: Draws, finding: str) -> Sentence:
    """Leave a finding open."""
    return _about_findings(draws, (draws.choice(_UNCERTAIN_FINDINGS), 1), (finding,), "uncertain")


def hypothetical_sentence(draws: Draws, findings: Sequence[str]) -> Sentence:
    """Speak of a finding that nobody has seen."""
    return _about_findings(draws, (draws.choice(_HYPOTHETICAL), 1), findings, "hypothetical")


def distractor_sentence(draws: Draws) -> Sentence:
    """Write numbers that look like images and are none."""
    before, text, kind, after = draws.choice(_DISTRACTORS)
    return [before, Mark(kind="distractor", text=text, facts={"kind": kind}), after]


def _about_findings(draws: Draws, form: tuple[str, int], findings: Sequence[str], assertion: str) -> Sentence:
    template, count = form
    findings = draws.some(findings, count)
    pieces: Sentence = []
    for part in _split(template):
        if part.startswith("{"):
            finding = findings[int(part[1])]
            pieces.append(entity(finding, finding, assertion))
        else:
            pieces.append(part)
    return pieces


def _split(template: str) -> list[str]:
    """Cut a template at its placeholders."""
    parts: list[str] = []
    while template:
        before, opening, rest = template.partition("{")
        if before:
            parts.append(before)
        if not opening:
            break
        name, _, template = rest.partition("}")
        parts.append("{" + name + "}")
    return parts


def _tidy(pieces: Sentence) -> Sentence:
    """Drop the space that a missing mention leaves behind."""
    tidy: Sentence = []
    for piece in pieces:
        if piece == "":
            continue
        if isinstance(piece, str) and tidy and isinstance(before := tidy[-1], str) and piece[0] in " .,":
            tidy[-1] = before.rstrip()
        tidy.append(piece)
    return tidy


def _with_tail(pieces: Sentence, tail: Sequence[Piece]) -> Sentence:
    if not tail or not isinstance(pieces[-1], str) or not pieces[-1].endswith("."):
        return pieces
    return [*pieces[:-1], pieces[-1][:-1], *tail, "."]
