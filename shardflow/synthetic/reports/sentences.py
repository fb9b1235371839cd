"""Sentences of generated reports: names of findings, places, and the marks that make the truth."""

from __future__ import annotations

from collections.abc import Sequence

from shardflow.synthetic.anatomy import Lesion
from shardflow.synthetic.draws import Draws
from shardflow.synthetic.options import Region
from shardflow.synthetic.reports.mentions import Mark, Piece, Sentence

SYNONYMS: dict[str, tuple[str, ...]] = {
    "brain metastasis": ("metastasis", "brain metastasis", "metastatic lesion"),
    "calcified granuloma": ("calcified granuloma", "calcified nodule"),
    "ground-glass nodule": ("ground-glass nodule", "ground glass nodule", "GGN"),
    "hepatic cyst": ("cyst", "hepatic cyst", "simple cyst"),
    "hepatic hemangioma": ("hemangioma", "hepatic hemangioma"),
    "hepatic metastasis": ("metastasis", "hepatic metastasis", "hypodense metastatic lesion"),
    "intracranial hemorrhage": ("intraparenchymal hemorrhage", "hemorrhage", "hematoma"),
    "lacunar infarct": ("lacunar infarct", "old lacune"),
    "lytic bone lesion": ("lytic lesion", "lytic bone lesion"),
    "meningioma": ("meningioma",),
    "pulmonary nodule": ("nodule", "pulmonary nodule", "solid nodule", "lung nodule"),
    "renal calculus": ("calculus", "renal stone", "renal calculus", "nonobstructing stone"),
    "renal cyst": ("cyst", "renal cyst", "simple cyst"),
    "sclerotic bone lesion": ("sclerotic lesion", "sclerotic focus", "bone island"),
    "splenic cyst": ("cyst", "splenic cyst"),
    "white matter lesion": ("white matter lesion", "white matter focus", "T2 hyperintense focus"),
}
"""Names of a lesion in reports; the truth keeps the label."""

ABSENT_FINDINGS: dict[Region, tuple[str, ...]] = {
    "chest": (
        "pleural effusion",
        "pneumothorax",
        "consolidation",
        "pericardial effusion",
        "hilar lymphadenopathy",
        "pulmonary edema",
        "acute rib fracture",
    ),
    "abdomen": (
        "ascites",
        "free air",
        "bowel obstruction",
        "hydronephrosis",
        "biliary dilatation",
        "retroperitoneal lymphadenopathy",
        "acute pancreatitis",
    ),
    "head": (
        "midline shift",
        "hydrocephalus",
        "mass effect",
        "acute territorial infarct",
        "extra-axial fluid collection",
        "skull fracture",
    ),
    "spine": (
        "cord compression",
        "spinal canal stenosis",
        "compression fracture",
        "epidural collection",
        "marrow edema",
    ),
}
"""Findings that no generated patient has."""

HISTORIES: dict[Region, tuple[str, ...]] = {
    "chest": ("pneumonia", "asthma", "smoking", "right breast cancer"),
    "abdomen": ("cholecystectomy", "appendectomy", "colon cancer", "hypertension"),
    "head": ("stroke", "migraine", "seizures", "lung cancer"),
    "spine": ("low back pain", "lumbar fusion", "osteoporosis", "prostate cancer"),
}

NORMAL_SENTENCES: dict[Region, tuple[str, ...]] = {
    "chest": (
        "The heart is normal in size.",
        "The trachea and central airways are patent.",
        "The aorta is of normal caliber.",
        "The thyroid is unremarkable.",
    ),
    "abdomen": (
        "The gallbladder is unremarkable.",
        "The pancreas enhances normally.",
        "The adrenal glands are unremarkable.",
        "The bowel is of normal caliber.",
    ),
    "head": (
        "The ventricles and sulci are normal for age.",
        "The orbits are unremarkable.",
        "The mastoid air cells are clear.",
        "The basal cisterns are patent.",
    ),
    "spine": (
        "Vertebral body heights are maintained.",
        "Alignment is normal.",
        "The conus terminates at a normal level.",
        "The paraspinal soft tissues are unremarkable.",
    ),
}

_SHORT_PLACES = {
    "left lower lobe": "LLL",
    "left upper lobe": "LUL",
    "right lower lobe": "RLL",
    "right middle lobe": "RML",
    "right upper lobe": "RUL",
    "lower pole of the left kidney": "left lower pole",
    "lower pole of the right kidney": "right lower pole",
    "upper pole of the left kidney": "left upper pole",
    "upper pole of the right kidney": "right upper pole",
}
_SEGMENTS = {(-1, 1): "VIII", (-1, -1): "VI", (1, 1): "IVa", (1, -1): "IVb"}


def indefinite(phrase: str) -> str:
    """Put ``a`` or ``an`` in front."""
    vowels = phrase[0].lower() in "aeiou" or phrase.startswith(("8 ", "8.", "11 ", "18 ", "80 "))
    return f"{'an' if vowels else 'a'} {phrase}"


def place_of(lesion: Lesion) -> str:
    """Return the place of a lesion in words, without the article."""
    x, y, z = lesion.host_value
    if lesion.organ == "lung":
        return f"{lesion.side} {_lobe(lesion.side, y, z)}"
    if lesion.organ == "liver":
        return f"hepatic segment {_SEGMENTS[1 if x > 0 else -1, 1 if z > 0 else -1]}"
    if lesion.organ == "kidney":
        pole = "upper pole" if z > 0.3 else "lower pole" if z < -0.3 else "interpolar region"
        return f"{pole} of the {lesion.side} kidney"
    if lesion.organ == "vertebra":
        return f"{lesion.level} vertebral body"
    if lesion.organ == "brain":
        lobe = "frontal" if y < -0.3 else "occipital" if y > 0.55 else "parietal" if z > 0.1 else "temporal"
        return f"{lesion.side} {lobe} lobe"
    return "spleen"


def place_words(draws: Draws, lesion: Lesion) -> str:
    """Return the place of a lesion, in full or abbreviated, as drawn."""
    place = place_of(lesion)
    if draws.chance(30):
        return _SHORT_PLACES.get(place, place)
    return place


def _lobe(side: str, y: float, z: float) -> str:
    """Name a lobe by height and depth within the lung."""
    if z > 0.25:
        return "upper lobe"
    if y < -0.1 and z > -0.5:
        return "middle lobe" if side == "right" else "upper lobe"
    return "lower lobe"


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
    """Return a lesion's size in a drawn notation, and in millimeters."""
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
    """Write that a lesion is, or may be, present.

    Args:
        draws: Chooses the words.
        lesion: The lesion.
        reference: The images it is seen on; None leaves them out.
        assertion: ``present`` or ``uncertain``.
        tail: Words before the final full stop.
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
    """State a finding as uncertain."""
    return _about_findings(draws, (draws.choice(_UNCERTAIN_FINDINGS), 1), (finding,), "uncertain")


def hypothetical_sentence(draws: Draws, findings: Sequence[str]) -> Sentence:
    """Mention a finding hypothetically."""
    return _about_findings(draws, (draws.choice(_HYPOTHETICAL), 1), findings, "hypothetical")


def distractor_sentence(draws: Draws) -> Sentence:
    """Write numbers that look like image numbers but are not."""
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
