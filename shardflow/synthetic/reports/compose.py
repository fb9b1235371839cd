"""Composition of a whole report: its sections and style, which lesions it describes, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardflow.synthetic.anatomy import Lesion
from shardflow.synthetic.draws import GENERATED, Draws
from shardflow.synthetic.render import Appearance, contrast_of
from shardflow.synthetic.reports.mentions import (
    Document,
    Mark,
    Piece,
    Report,
    Sentence,
    Sighting,
    mention,
    plain_mention,
    sightings_of,
    view_mention,
    wrong_number,
)
from shardflow.synthetic.reports.sentences import (
    ABSENT_FINDINGS,
    HISTORIES,
    NORMAL_SENTENCES,
    SYNONYMS,
    absent_sentence,
    distractor_sentence,
    entity,
    hypothetical_sentence,
    lesion_sentence,
    place_of,
    uncertain_sentence,
)
from shardflow.synthetic.study import StudyPlan

_REGION_WORDS = {"abdomen": "abdomen", "chest": "chest", "head": "brain", "spine": "lumbar spine"}
_MODALITY_WORDS = {"CT": "CT", "MR": "MRI", "CR": "Radiograph", "DX": "Radiograph"}
_HEADERS = {
    "upper": "{}:",
    "title": "{}:",
    "spaced": "{} :",
    "bold": "**{}:**",
}
# A lesion must differ by this from its organ to be called visible: HU, and MR signal of about 1000.
_VISIBLE = {"CT": 20.0, "MR": 60.0, "CR": 0.0, "DX": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """A study and where its lesions appear."""

    study: StudyPlan
    appearances: Sequence[Appearance]

    def visible(self) -> Mapping[str, tuple[Sighting, ...]]:
        """Return the sightings in which a reader could see the lesion, by lesion id."""
        lesions = {lesion.lesion_id: lesion for lesion in self.study.lesions}
        threshold = _VISIBLE[self.study.visit.modality]
        seen = {
            lesion_id: tuple(
                item
                for item in sightings
                if abs(contrast_of(lesions[lesion_id], item.appearances[0].item.contrast)) >= threshold
            )
            for lesion_id, sightings in sightings_of(self.study, self.appearances).items()
        }
        return {lesion_id: sightings for lesion_id, sightings in seen.items() if sightings}


def write_report(
    seed: int, story: Story, prior: Story | None, oddities: Mapping[str, int] | None = None
) -> Report:
    """Write the report of a study.

    Args:
        seed: Run-level seed.
        story: The study.
        prior: The patient's study before, if there is one.
        oddities: Chances in percent of `REPORT_ODDITIES`.
    """
    return _Writer(Draws(seed, "report", story.study.number), story, prior, oddities or {}).write()


class _Writer:
    def __init__(self, draws: Draws, story: Story, prior: Story | None, oddities: Mapping[str, int]) -> None:
        self.draws = draws
        self.oddities = oddities
        self.study = story.study
        self.region = story.study.region
        self.seen = story.visible()
        self.prior = prior
        # Only a study of the same kind shows the same lesions on images that can be named.
        same_kind = prior is not None and prior.study.visit.modality == self.study.visit.modality
        self.prior_seen = prior.visible() if prior is not None and same_kind else {}
        self.style = draws.choice(tuple(_HEADERS))
        self.document = Document()
        self.main_series = self._main_series()
        # One finding may be left open, the others denied, so the report never contradicts itself.
        self.open_finding, *self.denied = draws.at("denied").shuffled(ABSENT_FINDINGS[self.region])
        self.unsaid = self.denied
        self.reported = [lesion for lesion in self.study.lesions if self._is_reported(lesion)]

    def write(self) -> Report:
        self.document.add(f"{GENERATED}\n\n")
        self._write_head()
        states_default = self.main_series is not None and self.draws.at("default").chance(40)
        self._write_technique(states_default=states_default)
        self._write_comparison()
        self._write_findings(self.main_series if states_default else None)
        self._write_impression()
        if self.draws.at("addendum").chance(10):
            self._section("addendum", "addendum")
            self._write(distractor_sentence(self.draws.at("addendum-words")))
            self.document.add("\n")
        return self.document.finish()

    def _main_series(self) -> int | None:
        """Return the series in which most lesions are seen best."""
        counts: dict[int, int] = {}
        for sightings in self.seen.values():
            for item in sightings:
                if item.series.kind == "volume":
                    counts[item.series.index] = counts.get(item.series.index, 0) + len(item.appearances)
        return max(counts, key=lambda index: (counts[index], -index)) if counts else None

    def _is_reported(self, lesion: Lesion) -> bool:
        """Return whether a visible lesion is reported: nine of ten are, as readers overlook some."""
        return lesion.lesion_id in self.seen and self.draws.at("told", int(lesion.lesion_id[-2:])).chance(90)

    def _assertion(self, lesion: Lesion) -> str:
        """Draw the assertion of a lesion for the whole report."""
        return "uncertain" if self.draws.at("sure", int(lesion.lesion_id[-2:])).chance(15) else "present"

    def _section(self, name: str, words: str) -> None:
        header = _HEADERS[self.style].format(words.title() if self.style == "title" else words.upper())
        self.document.add("\n")
        self.document.open_section(name, f"{header}\n" if self.draws.chance(60) else f"{header} ")

    def _write(self, sentence: Sequence[Piece], end: str = " ") -> None:
        self.document.write(sentence)
        self.document.add(end)

    def _write_head(self) -> None:
        draws, study = self.draws.at("head"), self.study
        self.document.add(
            f"EXAMINATION: {_MODALITY_WORDS[study.visit.modality]} {_REGION_WORDS[self.region]}\n"
        )
        self._section(
            "indication", draws.choice(("indication", "history", "clinical history", "reason for exam"))
        )
        history, finding = draws.choice(HISTORIES[self.region]), draws.choice(ABSENT_FINDINGS[self.region])
        age = study.patient.age_years(study.visit)
        sentence: Sentence = [f"{age} year old with history of ", entity(history, history, "historical"), "."]
        self._write(sentence)
        verb = draws.choice(("evaluate for ", "rule out ", "assess for "))
        self._write([verb, entity(finding, finding, "hypothetical"), "."], "\n")

    def _write_technique(self, *, states_default: bool) -> None:
        draws, study = self.draws.at("technique"), self.study
        self._section("technique", draws.choice(("technique", "procedure")))
        volumes = [series for series in study.series if series.kind == "volume"]
        if volumes:
            thinnest = min(volumes, key=lambda series: (series.spacing_mm or 0, series.index))
            thickness = f"{thinnest.thickness_mm:g} mm"
            self._write(
                [
                    "images were reconstructed at ",
                    Mark(kind="distractor", text=thickness, facts={"kind": "size"}),
                    ".",
                ]
            )
        else:
            self._write([f"{len(study.series)} series of radiographs of the chest."])
        if states_default and self.main_series is not None:
            self._write(
                [f"image numbers refer to series {study.series[self.main_series].number} unless stated."]
            )
        if draws.chance(40):
            self._write(distractor_sentence(draws))
        self.document.add("\n")

    def _write_comparison(self) -> None:
        draws, prior = self.draws.at("comparison"), self.prior
        self._section("comparison", draws.choice(("comparison", "comparisons")))
        if prior is None:
            self._write([draws.choice(("none.", "none available.", "no prior studies."))], "\n")
            return
        day = prior.study.visit.day
        date = draws.choice((f"{day:%m/%d/%Y}", f"{day:%Y-%m-%d}", f"{day:%d.%m.%Y}"))
        pieces: Sentence = [
            f"{_MODALITY_WORDS[prior.study.visit.modality]} of ",
            Mark(kind="distractor", text=date, facts={"kind": "date"}),
        ]
        stacks = [series for series in prior.study.series if series.kind == "volume"]
        if stacks and draws.chance(30):
            mark = plain_mention(
                draws, prior.study, draws.choice(stacks), assertion="historical", is_prior=True
            )
            pieces += [" " if mark.text.startswith("(") else ", ", mark]
        self._write([*pieces, "."], "\n")

    def _write_findings(self, default_series: int | None) -> None:
        draws = self.draws.at("findings")
        self._section("findings", "findings")
        sentences: list[Sentence] = []
        for count, lesion in enumerate(self.reported):
            own, assertion = draws.at("lesion", count), self._assertion(lesion)
            reference = None if own.chance(12) else self._reference(own, lesion, assertion, default_series)
            tail = self._about_prior(own.at("prior"), lesion)
            sentences.append(
                lesion_sentence(own.at("words"), lesion, reference, assertion=assertion, tail=tail)
            )
        sentences += [
            self._resolved(draws.at("resolved", count), item)
            for count, item in enumerate(self.study.resolved)
        ]
        sentences += [self._absent(draws.at("absent", count)) for count in range(draws.integer(1, 3))]
        normal = draws.some(NORMAL_SENTENCES[self.region], draws.integer(1, 3))
        sentences += [[text] for text in normal]
        if draws.chance(35):
            sentences.append(distractor_sentence(draws.at("distractor")))
        if draws.chance(25):
            sentences.append(uncertain_sentence(draws.at("uncertain"), self.open_finding))
        if draws.chance(30):
            sentences.append(self._aside(draws.at("aside")))
        if self._is_odd(draws.at("overcall"), "overcall"):
            sentences.append(self._overcall(draws.at("overcall-words")))
        end = "\n" if draws.chance(40) else " "
        for sentence in draws.at("order").shuffled(sentences):
            self._write(sentence, end)
        self.document.add("\n" if end == " " else "")

    def _write_impression(self) -> None:
        draws = self.draws.at("impression")
        self._section("impression", draws.choice(("impression", "impression", "conclusion")))
        numbered = draws.chance(60)
        sentences: list[Sentence] = []
        for count, lesion in enumerate(self.reported[:3]):
            own, assertion = draws.at("lesion", count), self._assertion(lesion)
            reference = self._reference(own, lesion, assertion, None) if own.chance(30) else None
            sentences.append(lesion_sentence(own.at("words"), lesion, reference, assertion=assertion))
        if not sentences or draws.chance(50):
            sentences.append(absent_sentence(draws.at("absent"), self.denied))
        if draws.chance(30):
            sentences.append(hypothetical_sentence(draws.at("hypothetical"), self.denied))
        for number, sentence in enumerate(sentences, 1):
            self.document.add(f"{number}. " if numbered else "")
            self._write(sentence, "\n")

    def _reference(
        self, draws: Draws, lesion: Lesion, assertion: str, default_series: int | None
    ) -> Mark | None:
        """Name the images of a lesion: mostly in the main series, else in any in which it is seen."""
        if self._is_odd(draws.at("no-image"), "no-image"):
            return None
        sightings = self.seen[lesion.lesion_id]
        main = [item for item in sightings if item.series.index == self.main_series]
        chosen = main[0] if main and draws.chance(70) else draws.choice(sightings)
        if chosen.series.kind == "projection" and draws.chance(75):
            return view_mention(draws, self.study, chosen, assertion=assertion, lesion_id=lesion.lesion_id)
        wrong = draws.at("wrong-image")
        return mention(
            draws,
            self.study,
            chosen,
            assertion=assertion,
            lesion_id=lesion.lesion_id,
            default_series=default_series,
            says_series=not self._is_odd(draws.at("no-series"), "no-series"),
            says_image=wrong_number(wrong, chosen) if self._is_odd(wrong, "wrong-image") else None,
        )

    def _is_odd(self, draws: Draws, name: str) -> bool:
        return draws.chance(self.oddities.get(name, 0))

    def _overcall(self, draws: Draws) -> Sentence:
        """Suspect a finding on an image that shows nothing."""
        series = draws.choice([item for item in self.study.series if item.kind != "localizer"])
        mark = plain_mention(draws, self.study, series, assertion="uncertain")
        noun = draws.choice(("tiny nodule", "subtle lesion", "small mass"))
        return ["possible ", entity(noun, noun, "uncertain"), " ", mark, "."]

    def _about_prior(self, draws: Draws, lesion: Lesion) -> Sentence:
        """Compare with the previous study, naming its images where possible."""
        if self.prior is None or lesion.prior_mm is None:
            return []
        change = {"growing": "increased", "shrinking": "decreased"}.get(lesion.course, "unchanged")
        words: Sentence = [f", {change}, previously {max(1, round(lesion.prior_mm))} mm"]
        reference = self._prior_reference(draws, lesion, 60)
        if reference is not None:
            words += [draws.choice((" ", " on the prior study ")), reference]
        return words

    def _prior_reference(self, draws: Draws, lesion: Lesion, percent: int) -> Mark | None:
        """Name the images of a lesion in the previous study in ``percent`` of the cases that can be named."""
        sightings = self.prior_seen.get(lesion.lesion_id, ())
        if self.prior is None or not sightings or not draws.chance(percent):
            return None
        return mention(
            draws,
            self.prior.study,
            draws.choice(sightings),
            assertion="historical",
            lesion_id=lesion.lesion_id,
            is_prior=True,
        )

    def _absent(self, draws: Draws) -> Sentence:
        """Deny findings that this section has not denied yet."""
        sentence = absent_sentence(draws, self.unsaid or self.denied)
        said = {piece.facts["label"] for piece in sentence if isinstance(piece, Mark)}
        self.unsaid = [finding for finding in self.unsaid if finding not in said]
        return sentence

    def _resolved(self, draws: Draws, lesion: Lesion) -> Sentence:
        noun = draws.choice(SYNONYMS[lesion.label])
        mark = entity(noun, lesion.label, "historical", lesion=lesion)
        pieces: Sentence = ["previously seen ", mark, f" in the {place_of(lesion)} has resolved"]
        reference = self._prior_reference(draws, lesion, 50)
        if reference is not None:
            pieces += [" (formerly ", reference, ")"]
        return [*pieces, "."]

    def _aside(self, draws: Draws) -> Sentence:
        """Name an image without a lesion: for an artifact, or an absent finding."""
        series = draws.choice([item for item in self.study.series if item.kind != "localizer"])
        if draws.chance(50):
            mark = plain_mention(draws, self.study, series, assertion="present")
            return [entity("motion artifact", "motion artifact", "present"), " is noted ", mark, "."]
        finding = draws.choice(self.denied)
        mark = plain_mention(draws, self.study, series, assertion="absent")
        return ["no ", entity(finding, finding, "absent"), " is present ", mark, "."]
