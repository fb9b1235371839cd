"""De-identification of one study: which images are held back, what its report may contain, what is recorded.

Reads attributes of a few files (one of each kind of image in each series) while the study is packed. What
identifies people is read only if there is a text to search, lives as long as the study is packed, and is
written nowhere. `counts_without` recomputes a version's counts after samples were removed.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from shardflow.errors import ShardflowError, SourceError
from shardflow.format.keys import STUDY_FIELD
from shardflow.format.reasons import Reason
from shardflow.packing.deid.heads import MIN_SLICES
from shardflow.packing.deid.identity import PublishedPerson
from shardflow.packing.deid.pixel_rules import DECLARED, PAGE, TEXT
from shardflow.packing.deid.pixel_text import is_page
from shardflow.packing.deid.pseudonyms import DateOffsets, StudyDates, parse_date
from shardflow.packing.sources.attachments import DAY_S
from shardflow.packing.sources.dicom.attributes import AttributeValue
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.pixels import DecodedSlice
from shardflow.seeds import derive

if TYPE_CHECKING:
    from datetime import date

    from numpy.typing import NDArray

    from shardflow.format.dataset import Dataset
    from shardflow.packing.deid.heads import Head
    from shardflow.packing.deid.pixel_rules import Blackout, Box, PixelRules, PixelVerdict
    from shardflow.packing.deid.pixel_text import FoundText, TextFinder
    from shardflow.packing.deid.pseudonyms import DatesMode, ReportTextMode, SecretKey
    from shardflow.packing.deid.report_text import Family, ScrubbedText
    from shardflow.packing.settings import DeidConfig, TimeResolution
    from shardflow.packing.sources.dicom.stacks import Stack

SliceReader: TypeAlias = Callable[[InstanceHeader, Sequence[int] | None], Iterable[DecodedSlice]]
"""Decodes frames of an image, all of them for None; raises SourceError."""
Attributes: TypeAlias = Mapping[str, Sequence[str | int | float]]
"""Values by DICOM keyword."""

_STUDY_DATE: Final = "StudyDate"
_BLACKOUT: Final = "blackout_slices"
RESOLUTIONS_S: Final[Mapping[TimeResolution, int]] = {"second": 1, "minute": 60, "hour": 3600, "day": DAY_S}
_DEFACED: Final = "defaced_slices"
_SEARCHED: Final = "text_searched_slices"
_BLANKED: Final = "text_blanked_slices"
_RING_PX: Final = 3
_BY_CONTENT: Final = "volume"
"""Name of the rule that finds heads in volumes."""

_PROJECTIONS: Final = frozenset({"CR", "DX", "MG", "PX", "IO"})
"""Modalities whose images are large, and no pages."""

_BASIC: Final = "113100"
_CLEAN_PIXELS: Final = "113101"
_CLEAN_FACES: Final = "113102"
_CLEAN_DESCRIPTORS: Final = "113105"
_MODIFIED_DATES: Final = "113107"
_PATIENT_CHARACTERISTICS: Final = "113108"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacyRules:
    """Privacy settings that all studies of a job share."""

    key: SecretKey
    settings: DeidConfig
    pixels: PixelRules
    recognize: Family | None = None
    """Finds more in texts than the rules: the model of the settings."""
    text: TextFinder | None = None
    """Finds text in pixels; None if they are not searched."""


def cleans_pixels(counts: Mapping[str, int]) -> bool:
    """Return whether boxes were blanked, by counts as `StudyPrivacy.tallies` returns them."""
    return counts.get(_BLACKOUT, 0) > 0 or counts.get(_BLANKED, 0) > 0


def profile_codes(dates: DatesMode, *, has_blackout: bool, is_defaced: bool = False) -> list[str]:
    """Return the codes of DICOM PS3.16 CID 7050 for the profile and its options, sorted."""
    codes = {_BASIC, _CLEAN_DESCRIPTORS, _PATIENT_CHARACTERISTICS}
    if dates != "remove":
        codes.add(_MODIFIED_DATES)
    if has_blackout:
        codes.add(_CLEAN_PIXELS)
    if is_defaced:
        codes.add(_CLEAN_FACES)
    return sorted(codes)


@dataclass(frozen=True, slots=True)
class _Group:
    """Images of one series that rules cannot tell apart."""

    headers: tuple[InstanceHeader, ...]
    verdict: PixelVerdict | None
    """None if no file of the group could be read."""
    problem: str | None


class StudyPrivacy:
    """De-identifier of one study.

    Args:
        rules: What holds for all studies.
        headers: Of the study's files, not empty.
        read_attributes: Reads attributes of an image by keyword; raises SourceError.
        person: How the patient appears, if another identifier stands for the person.
    """

    def __init__(
        self,
        rules: PrivacyRules,
        headers: Sequence[InstanceHeader],
        read_attributes: Callable[[InstanceHeader, Sequence[str]], Mapping[str, AttributeValue]],
        person: PublishedPerson | None = None,
    ) -> None:
        self._rules = rules
        self._read_attributes = read_attributes
        self._read: list[Mapping[str, AttributeValue]] = []
        groups: dict[tuple[object, ...], list[InstanceHeader]] = {}
        for header in headers:
            groups.setdefault(_kind(header), []).append(header)
        self._groups = [self._judge(group) for group in groups.values()]
        self._group_of = {header.file_index: group for group in self._groups for header in group.headers}
        self._num_frames: Counter[str] = Counter()
        for header in headers:
            self._num_frames[header.series_instance_uid] += header.image.num_frames
        self._patient_id = headers[0].patient_id if headers else ""
        self._person = person or PublishedPerson(
            patient_key=rules.key.surrogate("patient", self._patient_id),
            dates=DateOffsets.of(rules.key, self._patient_id),
        )
        self._tallies: Counter[str] = Counter()
        self._heads: dict[str, Head] = {}
        self._texts: dict[int, FoundText] = {}
        self.rules: dict[int, tuple[str, ...]] = {}
        """Names of the rules that hold images back, or blank text in them, by position; for the private
        folder."""

    def held_back(self) -> dict[int, str]:
        """Return the reasons of images that are not packed, by position, as headers alone tell."""
        reasons: dict[int, str] = {}
        for group in self._groups:
            for header in group.headers:
                if group.verdict is None:
                    reasons[header.file_index] = str(group.problem)
                elif group.verdict.held_back:
                    reasons[header.file_index] = Reason.BURNED_IN_ANNOTATION.value
                    self.rules[header.file_index] = group.verdict.held_back
                elif self._rules.settings.face_risk == "quarantine" and self._is_called_head(header):
                    reasons[header.file_index] = Reason.FACE_RISK.value
                    self.rules[header.file_index] = group.verdict.face
        return reasons

    def held_back_pages(self, headers: Iterable[InstanceHeader], read: SliceReader) -> dict[int, str]:
        """Look for pages of text in short series but radiographs; return the reasons of images held back.

        What cannot be decoded is found, and named, when it is packed.
        """
        for header in filter(self._may_be_page, headers):
            with suppress(SourceError):
                if is_page(next(iter(read(header, [0]))).pixels):
                    self.rules[header.file_index] = (PAGE,)
        return self._reasons(PAGE)

    def held_back_texts(self, headers: Iterable[InstanceHeader], read: SliceReader) -> dict[int, str]:
        """Search images for text to blank, if the settings say so; return the reasons of images held back.

        Searched are suspects and a keyed share of all others; where one of the share shows text, also the
        images that rules cannot tell from it.
        """
        finder = self._rules.text
        if finder is None:
            return {}
        for header in self._images_to_search(headers):
            with suppress(SourceError):
                frames = (decoded.pixels for decoded in read(header, None))
                self._take_text(header, finder.find_in_frames(frames, header.image.num_frames))
        return {**self._reasons(PAGE), **self._reasons(DECLARED)}

    def blanked(self) -> dict[int, tuple[Box, ...]]:
        """Return the boxes of blanked text by position, for the private folder."""
        return {at: found.boxes for at, found in sorted(self._texts.items()) if found.boxes}

    def _images_to_search(self, headers: Iterable[InstanceHeader]) -> Iterator[InstanceHeader]:
        others = []
        for header in headers:
            group = self._group_of[header.file_index]
            if group.verdict is None or group.verdict.accepts_text:
                continue
            if group.verdict.suspected or self._is_drawn(header):
                yield header
            else:
                others.append(header)
        shown = {id(self._group_of[at]) for at, found in self._texts.items() if found.boxes}
        yield from (header for header in others if id(self._group_of[header.file_index]) in shown)

    def _take_text(self, header: InstanceHeader, found: FoundText) -> None:
        """Take note of the text in an image.

        A file that declares text in which none is found is held back: the search missed it.
        """
        verdict = self._group_of[header.file_index].verdict
        if verdict is None:
            return
        suspected = verdict.suspected
        if found.is_page and not verdict.accepts_pages:
            self.rules[header.file_index] = (PAGE,)
        elif DECLARED in suspected and DECLARED not in verdict.accepted and not (found.boxes or found.kept):
            self.rules[header.file_index] = (DECLARED,)
        else:
            self._texts[header.file_index] = found
            if found.boxes:
                self.rules[header.file_index] = (TEXT, *suspected)

    def _reasons(self, name: str) -> dict[int, str]:
        """Return the reasons of images that one rule alone holds back."""
        held = (at for at, names in self.rules.items() if names == (name,))
        return dict.fromkeys(held, Reason.BURNED_IN_ANNOTATION.value)

    def _may_be_page(self, header: InstanceHeader) -> bool:
        verdict = self._group_of[header.file_index].verdict
        is_short = self._num_frames[header.series_instance_uid] < MIN_SLICES
        is_pictured = header.modality in _PROJECTIONS
        return is_short and not is_pictured and verdict is not None and not verdict.accepts_pages

    def _is_drawn(self, header: InstanceHeader) -> bool:
        """Return whether an image that no rule suspects is searched all the same."""
        drawn = derive(0, self._rules.key.surrogate("pixel-text", header.sop_instance_uid))
        return drawn < self._rules.settings.pixel_text_share * (1 << 64)

    @property
    def looks_for_heads(self) -> bool:
        """Whether volumes have to be examined for heads before anything is written."""
        return self._rules.settings.face_risk != "flag"

    def take_head(self, stack: Stack, head: Head | None) -> dict[int, str]:
        """Take note of the head in a volume; return the reasons of its images if they are held back.

        A volume that is called a head, but whose head cannot be found with its vertex, cannot be defaced.
        """
        first = stack.slices[0].instance
        if head is None and not self._is_called_head(first):
            return {}
        if self._rules.settings.face_risk == "deface" and head is not None and head.vertex_mm is not None:
            self._heads.setdefault(first.series_instance_uid, head)
            return {}
        verdict = self._group_of[first.file_index].verdict
        names = (*(verdict.face if verdict is not None else ()), *((_BY_CONTENT,) if head else ()))
        files = {one.instance.file_index for one in stack.slices}
        self.rules.update(dict.fromkeys(files, names))
        return dict.fromkeys(files, Reason.FACE_RISK.value)

    def has_face_risk(self, header: InstanceHeader) -> bool:
        """Return whether the series of an image is a volume of a head."""
        return self._is_called_head(header) or header.series_instance_uid in self._heads

    def _is_called_head(self, header: InstanceHeader) -> bool:
        verdict = self._group_of[header.file_index].verdict
        is_volume = self._num_frames[header.series_instance_uid] >= MIN_SLICES
        return verdict is not None and bool(verdict.face) and is_volume

    def clean(self, header: InstanceHeader, decoded: DecodedSlice) -> DecodedSlice:
        """Black out the boxes of a slice and blank its text; without any, return the slice itself."""
        found = self._texts.get(header.file_index)
        if found is not None:
            self._tallies[_SEARCHED] += 1
            if found.boxes:
                self._tallies[_BLANKED] += 1
                decoded = _blanked(decoded, found.boxes)
        blackout = self._blackout(header)
        if blackout is None:
            return decoded
        self._tallies[_BLACKOUT] += 1
        hidden = np.zeros(decoded.pixels.shape[:2], bool)
        for top, left, bottom, right in blackout.boxes:
            hidden[top:bottom, left:right] = True
        return _without(decoded, hidden)

    def deface(self, stack: Stack, index: int, decoded: DecodedSlice) -> DecodedSlice:
        """Cut the face off a slice of a head, if the settings say so; return other slices themselves."""
        head = self._heads.get(stack.series_instance_uid)
        affine = stack.geometry.affine_lps
        if head is None or affine is None or self._rules.settings.face_risk != "deface":
            return decoded
        self._tallies[_DEFACED] += 1
        return _without(decoded, head.face_mask(affine, index, (stack.rows, stack.columns)))

    def series_facts(self, stack: Stack) -> dict[str, Any]:
        """Return the de-identification object of a series for ``study.json``."""
        header = stack.slices[0].instance
        verdict, blackout = self._group_of[header.file_index].verdict, self._blackout(header)
        has_face = self.has_face_risk(header)
        self._tallies["face_risk_series"] += has_face
        return {
            "accepted_rules": [] if verdict is None else list(verdict.accepted),
            "blackout": None if blackout is None else blackout.name,
            **({"defaced": True} if has_face and self._rules.settings.face_risk == "deface" else {}),
            "face_risk": has_face,
            **self._text_facts(stack),
        }

    def _text_facts(self, stack: Stack) -> dict[str, Any]:
        """Return how many slices of a series were searched for text, and the boxes that were blanked."""
        if self._rules.text is None:
            return {}
        found = [self._texts.get(part.instance.file_index) for part in stack.slices]
        boxes: list[dict[str, Any]] = []
        for index, one in enumerate(found):
            blanked = [] if one is None else [list(box) for box in one.boxes]
            if boxes and blanked and boxes[-1]["slices"][1] == index and boxes[-1]["boxes"] == blanked:
                boxes[-1]["slices"][1] = index + 1
            elif blanked:
                boxes.append({"boxes": blanked, "slices": [index, index + 1]})
        return {"text": {"blanked": boxes, "searched_slices": sum(one is not None for one in found)}}

    def flag_head(self, facts: dict[str, Any]) -> None:
        """Flag a series in whose slices a head was found while they were written."""
        if not facts["face_risk"]:
            facts["face_risk"] = True
            self._tallies["face_risk_series"] += 1

    def examples(self) -> list[InstanceHeader]:
        """Return one image of each kind: the headers of a kind name the same people."""
        return [group.headers[0] for group in self._groups]

    def scrub_report(
        self, text: bytes, people: Iterable[Mapping[str, AttributeValue]]
    ) -> tuple[bytes, dict[str, int]]:
        """Return the scrubbed report, and the number of replacements by category.

        Args:
            text: UTF-8.
            people: People named in headers, by DICOM keyword; read lazily.
        """
        settings = self._rules.settings
        if settings.report_text == "keep":
            return text, {}
        done = self._scrub(text.decode("utf-8"), people, settings.report_text)
        for category, count in done.counts.items():
            self._tallies[f"report_{category}"] += count
        return done.text.encode("utf-8"), done.counts

    def scrub_text(self, text: str, people: Iterable[Attributes]) -> str:
        """Return the scrubbed text of an attachment.

        ``report_text = "keep"`` declares reports de-identified, not attachments, so these are always
        scrubbed.
        """
        mode = self._rules.settings.report_text
        return self._scrub(text, people, "scrub" if mode == "keep" else mode).text

    def _scrub(self, text: str, people: Iterable[Attributes], mode: ReportTextMode) -> ScrubbedText:
        # Imported for the first text: their patterns take long to compile.
        from shardflow.packing.deid.known_values import KnownValues
        from shardflow.packing.deid.report_text import scrub

        return scrub(
            text,
            KnownValues([*people, {"PatientID": (self._patient_id,)}]),
            mode=mode,
            order=self._rules.settings.date_order,
            recognize=self._rules.recognize,
            date_placeholder=self._dates().placeholder,
        )

    def when(self, day: date) -> dict[str, Any]:
        """Return what a record of the study may tell about a day."""
        return self._dates().when(day)

    @property
    def study_date(self) -> date | None:
        """First day of the study."""
        return self._dates().study_date

    @property
    def removes_dates(self) -> bool:
        """Whether all dates and times are removed."""
        return self._rules.settings.dates == "remove"

    @property
    def resolution_s(self) -> int:
        """Resolution of distances in time between images and what is attached to them."""
        return RESOLUTIONS_S[self._rules.settings.times]

    def surrogate(self, kind: str, value: str) -> str:
        """Return the surrogate of an identifier."""
        return self._rules.key.surrogate(kind, value)

    def facts(self, report_counts: Mapping[str, int]) -> dict[str, Any]:
        """Return the de-identification object of ``study.json``."""
        settings = self._rules.settings
        has_blackout = cleans_pixels(self._tallies)
        return {
            "dates": "REMOVED" if settings.dates == "remove" else "MODIFIED",
            "profile_codes": profile_codes(
                settings.dates, has_blackout=has_blackout, is_defaced=self._tallies[_DEFACED] > 0
            ),
            "report_text": {"mode": settings.report_text, "replaced": dict(report_counts)},
        }

    def timeline(self) -> dict[str, Any]:
        """Return the dates of the study, as far as the settings allow."""
        return self._dates().facts()

    def patient_key(self) -> str:
        """Return the surrogate of the patient, which all studies of a person share."""
        return self._person.patient_key

    def tallies(self) -> dict[str, int]:
        """Return the counts for the manifest, sorted."""
        return {name: count for name, count in sorted(self._tallies.items()) if count}

    def restart(self) -> None:
        """Reset the counts: the study is packed again from the start."""
        self._tallies.clear()

    def _dates(self) -> StudyDates:
        settings = self._rules.settings
        days = [parse_date(str(value)) for read in self._read for value in read.get(_STUDY_DATE, ())]
        return StudyDates(
            offsets=self._person.dates,
            # Series may disagree on the date of their study: the earliest one counts.
            study_date=min((day for day in days if day is not None), default=None),
            mode=settings.dates,
            keeps_weekday=settings.shift_keeps_weekday,
        )

    def _blackout(self, header: InstanceHeader) -> Blackout | None:
        verdict = self._group_of[header.file_index].verdict
        return None if verdict is None else verdict.blackout

    def _judge(self, headers: Sequence[InstanceHeader]) -> _Group:
        """Judge a group by its first readable file."""
        keywords = sorted({*self._rules.pixels.keywords, _STUDY_DATE})
        problem = None
        for header in headers:
            try:
                values = self._read_attributes(header, keywords)
            except SourceError as error:
                problem = error.reason
                continue
            self._read.append(values)
            settings = self._rules.settings
            verdict = self._rules.pixels.judge(
                {**values, **_header_values(header)},
                accept=settings.accept,
                trusts_no=settings.trust_declared_clean,
                blanks_text=self._rules.text is not None,
            )
            return _Group(tuple(headers), verdict, None)
        return _Group(tuple(headers), None, problem)


def _without(decoded: DecodedSlice, hidden: NDArray[np.bool_]) -> DecodedSlice:
    """Return a slice whose hidden pixels have the darkest remaining value, so that its range stays."""
    pixels = decoded.pixels.copy()
    pixels[hidden] = pixels[~hidden].min() if not hidden.all() else 0
    return dataclasses.replace(decoded, pixels=pixels)


def _blanked(decoded: DecodedSlice, boxes: Sequence[Box]) -> DecodedSlice:
    """Return a slice whose boxes have the median value of what surrounds each, so that none stands out."""
    pixels = decoded.pixels.copy()
    hidden = np.zeros(pixels.shape[:2], bool)
    for top, left, bottom, right in boxes:
        hidden[top:bottom, left:right] = True
    for top, left, bottom, right in boxes:
        around = np.s_[max(0, top - _RING_PX) : bottom + _RING_PX, max(0, left - _RING_PX) : right + _RING_PX]
        ring = decoded.pixels[around][~hidden[around]]
        if not ring.size:
            ring = decoded.pixels[~hidden] if not hidden.all() else np.zeros_like(decoded.pixels[:1, 0])
        # The lower of two middle values: a value that is there, whatever the dtype.
        pixels[top:bottom, left:right] = np.sort(ring, axis=0)[(len(ring) - 1) // 2]
    return dataclasses.replace(decoded, pixels=pixels)


def _kind(header: InstanceHeader) -> tuple[object, ...]:
    image = header.image
    return (
        header.series_instance_uid,
        header.sop_class_uid,
        header.modality,
        header.image_type,
        header.burned_in,
        image.rows,
        image.columns,
        image.photometric_interpretation,
    )


def _header_values(header: InstanceHeader) -> dict[str, tuple[str, ...]]:
    image = header.image
    return {
        "SOPClassUID": (header.sop_class_uid,),
        "Modality": (header.modality,),
        "ImageType": header.image_type,
        "BurnedInAnnotation": (header.burned_in,) if header.burned_in else (),
        "Rows": (str(image.rows),),
        "Columns": (str(image.columns),),
        "PhotometricInterpretation": (image.photometric_interpretation,),
    }


def counts_without(recorded: Mapping[str, Any], dataset: Dataset, rows: Iterable[int]) -> dict[str, Any]:
    """Return ``extra.deidentification`` of a manifest for a version without some of its samples.

    Args:
        recorded: That of the previous version.
        dataset: The previous version.
        rows: Samples to remove. A sample that cannot be read stays in the counts: a damaged shard must not
            prevent a removal.
    """
    counts = Counter({name: int(count) for name, count in recorded.get("counts", {}).items()})
    for row in rows:
        try:
            study = json.loads(dataset.read_fields(row, [STUDY_FIELD])[STUDY_FIELD])
            counts.subtract(_tallies(study))
        except (ShardflowError, ValueError, KeyError, TypeError):
            continue
    kept = {name: count for name, count in sorted(counts.items()) if count > 0}
    codes = [
        code
        for code in recorded.get("profile_codes", ())
        if (code != _CLEAN_PIXELS or cleans_pixels(kept)) and (code != _CLEAN_FACES or kept.get(_DEFACED))
    ]
    return {**recorded, "counts": kept, "profile_codes": codes}


def _tallies(study: Mapping[str, Any]) -> Counter[str]:
    """Recompute the tallies of a study from its ``study.json``."""
    found: Counter[str] = Counter()
    for category, count in study["deidentification"]["report_text"]["replaced"].items():
        found[f"report_{category}"] += int(count)
    for series in study["series"]:
        done = series["deidentification"]
        found["face_risk_series"] += bool(done["face_risk"])
        if done["blackout"] is not None:
            found[_BLACKOUT] += int(series["num_slices"])
        if done.get("defaced"):
            found[_DEFACED] += int(series["num_slices"])
        if text := done.get("text"):
            found[_SEARCHED] += int(text["searched_slices"])
            found[_BLANKED] += sum(last - first for first, last in (one["slices"] for one in text["blanked"]))
    return found
