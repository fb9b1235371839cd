"""Patients and their studies: who comes when, for what; a pure function of seed and number.

Study i is the same for every number of studies asked for, so a larger set contains the smaller one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

from shardflow.synthetic.draws import Draws
from shardflow.synthetic.options import ModalityChoice, SynthOptions

__all__ = ["Patient", "Region", "Visit", "draw_patient", "iter_visits"]

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
