"""Options of the generator, and the patients and visits that follow from them.

Study i does not depend on the number of studies, so a larger set contains the smaller one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, Literal

from shardflow.errors import ConfigError
from shardflow.synthetic.draws import Draws

ModalityChoice = Literal["CT", "MR", "CR", "DX", "mixed"]
MODALITIES: tuple[ModalityChoice, ...] = ("CT", "MR", "CR", "DX", "mixed")
"""Modality of the studies; ``mixed`` uses all of them."""

PATHOLOGIES: dict[str, str] = {
    "duplicates": "an instance stands twice, byte for byte, under two file names",
    "high-bits": "bits above Bits Stored are set, as old overlays leave them",
    "missing-slices": "one to three slices inside a stack are lost",
    "mixed-phases": "two contrast phases, at the same positions, in one series",
    "oblique": "the whole stack is turned in space",
    "padding": "a circle is reconstructed; outside lies a padding value, with or without its attribute",
    "same-number": "two series of a study have one Series Number",
    "shuffled": "Instance Numbers run interleaved or in no order",
    "stray-files": "files that are not DICOM lie among the images",
    "tilt": "the gantry is tilted: planes lean, and do not follow each other along their normal",
    "truncated": "the pixel data of one instance is cut short",
}
"""Descriptions of all pathologies."""

DEFAULT_PATHOLOGIES: dict[str, int] = {
    "duplicates": 15,
    "high-bits": 15,
    "missing-slices": 15,
    "mixed-phases": 15,
    "oblique": 30,
    "padding": 30,
    "same-number": 8,
    "shuffled": 30,
    "stray-files": 20,
    "tilt": 25,
    "truncated": 0,
}
"""Chance of each in percent, for every series (or study) it can happen to. By default no file is damaged."""

REPORT_ODDITIES: dict[str, str] = {
    "no-image": "no image of a finding is named",
    "no-series": "an image is named without its series",
    "overcall": "something is thought possible on an image that shows nothing",
    "wrong-image": "the image that is named is another one, or there is none of the number",
}
"""Errors and omissions of reports beyond their usual styles, all off by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthOptions:
    """Options of the generator. Equal options give equal bytes."""

    num_studies: int
    seed: int
    modality: ModalityChoice = "mixed"
    min_slices: int = 24
    max_slices: int = 64
    """Slices of the finest stack of a CT or MR series; thick ones and reformats have fewer."""
    size: int = 512
    """Rows and columns of CT; MR has about half as many, CR and DX four times."""
    min_lesions: int = 0
    max_lesions: int = 5
    """Lesions that grow in a patient."""
    pathologies: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_PATHOLOGIES))
    """Chance in percent by name; 0 for names that are missing."""

    report_oddities: Mapping[str, int] = field(default_factory=dict)
    """Chance in percent by name, for every mention of images (`overcall`: every report)."""

    def __post_init__(self) -> None:
        _check_range("num_studies", self.num_studies, 1, 10_000_000)
        _check_range("size", self.size, 16, 1024)
        _check_range("min_slices", self.min_slices, 1, 2000)
        _check_range("max_slices", self.max_slices, self.min_slices, 2000)
        _check_range("min_lesions", self.min_lesions, 0, 20)
        _check_range("max_lesions", self.max_lesions, self.min_lesions, 20)
        if self.modality not in MODALITIES:
            raise ConfigError(f"modality must be one of {', '.join(MODALITIES)}, got {self.modality!r}.")
        for what, chances, known in (
            ("a pathology", self.pathologies, PATHOLOGIES),
            ("an oddity", self.report_oddities, REPORT_ODDITIES),
        ):
            for name, percent in chances.items():
                if name not in known:
                    raise ConfigError(f"{what} must be one of {', '.join(known)}, got {name!r}.")
                _check_range(name, percent, 0, 100)

    def chance_of(self, pathology: str) -> int:
        """Return the chance of a pathology in percent."""
        return self.pathologies.get(pathology, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        oddities = {name: percent for name, percent in sorted(self.report_oddities.items()) if percent}
        return {
            "num_studies": self.num_studies,
            "seed": self.seed,
            "modality": self.modality,
            "slices": [self.min_slices, self.max_slices],
            "size": self.size,
            "lesions": [self.min_lesions, self.max_lesions],
            "pathologies": {name: self.pathologies[name] for name in sorted(self.pathologies)},
            # Left out where there are none: the bytes of older settings stay.
            **({"report_oddities": oddities} if oddities else {}),
        }


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be from {low} to {high}, got {value}.")


Region = Literal["chest", "abdomen", "head", "spine"]

_FIRST_DAY = date(2015, 1, 1)
_NUM_VISITS = ((1, 60), (2, 27), (3, 13))
_REGIONS: dict[ModalityChoice, tuple[tuple[Region, int], ...]] = {
    "CT": (("chest", 45), ("abdomen", 38), ("head", 17)),
    "MR": (("head", 50), ("abdomen", 25), ("spine", 25)),
    "CR": (("chest", 100),),
    "DX": (("chest", 100),),
    "mixed": (("chest", 46), ("abdomen", 26), ("head", 20), ("spine", 8)),
}
_MODALITIES: dict[Region, tuple[tuple[str, int], ...]] = {
    "chest": (("CT", 45), ("DX", 35), ("CR", 20)),
    "abdomen": (("CT", 65), ("MR", 35)),
    "head": (("CT", 35), ("MR", 65)),
    "spine": (("MR", 100),),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One study of a patient."""

    number: int
    """From 0."""
    modality: str
    day: date
    minute: int
    """Of the day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patient:
    """One generated patient."""

    number: int
    sex: str
    birth_day: date
    region: Region
    scale: float
    """Of the body, 1 for a middle-sized adult."""
    visits: tuple[Visit, ...]

    def age_years(self, visit: Visit) -> int:
        """Return the age at a visit."""
        born, day = self.birth_day, visit.day
        return day.year - born.year - ((day.month, day.day) < (born.month, born.day))


def iter_visits(options: SynthOptions) -> Iterator[tuple[Patient, int]]:
    """Yield (patient, number of the visit) for each study, in order."""
    patient_number, num_studies = 0, 0
    while True:
        patient = draw_patient(options, patient_number)
        for visit in patient.visits:
            if num_studies == options.num_studies:
                return
            yield patient, visit.number
            num_studies += 1
        patient_number += 1


def draw_patient(options: SynthOptions, number: int) -> Patient:
    """Draw one patient with all visits."""
    draws = Draws(options.seed, "patient", number)
    sex = draws.weighted((("F", 49), ("M", 49), ("O", 2)))
    region = draws.weighted(_REGIONS[options.modality])
    scale = draws.real(0.94, 1.08) - (0.04 if sex == "F" else 0.0)
    first_day = _FIRST_DAY + timedelta(days=draws.integer(0, 3000))
    born = first_day - timedelta(days=draws.integer(20 * 365, 96 * 365))
    visits: list[Visit] = []
    day = first_day
    for visit in range(draws.weighted(_NUM_VISITS)):
        own = draws.at("visit", visit)
        fixed = options.modality
        modality = own.weighted(_MODALITIES[region]) if fixed == "mixed" else fixed
        if visit and fixed == "mixed" and own.chance(60):
            modality = visits[-1].modality
        visits.append(Visit(number=visit, modality=modality, day=day, minute=own.integer(7 * 60, 21 * 60)))
        day += timedelta(days=own.integer(20, 420))
    return Patient(
        number=number, sex=sex, birth_day=born, region=region, scale=round(scale, 3), visits=tuple(visits)
    )
