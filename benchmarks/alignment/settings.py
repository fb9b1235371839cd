"""What is generated: settings that weights may be chosen with, and others that they never were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardflow.synthetic import DEFAULT_PATHOLOGIES, SynthOptions

__all__ = ["SETTINGS", "Marks", "Part", "Setting"]

Part = Literal["tuning", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Who marks lesions on the images, and how badly; chances in percent."""

    marked: int
    """Of the lesions; each in one series."""
    elsewhere: int
    """Of the marks: on slices that show nothing of the lesion."""
    unlabelled: int
    """Of the marks: without a label."""
    size_error: int
    """Of the marks: a diameter that is off by 40 % or less; others by 10 % or less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One generated dataset."""

    name: str
    part: Part
    options: Mapping[str, Any]
    oddities: Mapping[str, int] = field(default_factory=dict)
    pathologies: Mapping[str, int] = field(default_factory=dict)
    """On top of the generator's own chances."""
    marks: Marks | None = None

    def synth(self, num_studies: int) -> SynthOptions:
        """Return the generator's options."""
        return SynthOptions(
            num_studies=num_studies,
            report_oddities=dict(self.oddities),
            pathologies={**DEFAULT_PATHOLOGIES, **self.pathologies},
            **self.options,
        )


_SMALL = {"size": 64, "min_slices": 12, "max_slices": 24, "min_lesions": 1}

SETTINGS = (
    Setting(name="plain", part="tuning", options={**_SMALL, "seed": 101}),
    Setting(
        name="careless",
        part="tuning",
        options={**_SMALL, "seed": 102},
        oddities={"no-image": 30, "no-series": 25, "wrong-image": 3, "overcall": 8},
        pathologies={"same-number": 30},
    ),
    Setting(
        name="marked",
        part="tuning",
        options={**_SMALL, "seed": 103},
        oddities={"no-image": 60, "no-series": 15},
        marks=Marks(marked=80, elsewhere=4, unlabelled=20, size_error=10),
    ),
    Setting(
        name="thin slices",
        part="tuning",
        options={
            "size": 48,
            "min_slices": 40,
            "max_slices": 90,
            "min_lesions": 0,
            "max_lesions": 6,
            "seed": 9001,
        },
        pathologies={"shuffled": 60, "missing-slices": 30},
    ),
    Setting(
        name="careless, other rates",
        part="tuning",
        options={**_SMALL, "max_slices": 40, "max_lesions": 7, "seed": 9002},
        oddities={"no-image": 40, "no-series": 40, "wrong-image": 4, "overcall": 12},
        pathologies={"same-number": 15, "mixed-phases": 40},
    ),
    Setting(
        name="marked, other rates",
        part="tuning",
        options={**_SMALL, "max_lesions": 3, "seed": 9003},
        oddities={"no-image": 75, "no-series": 30, "wrong-image": 2},
        marks=Marks(marked=65, elsewhere=6, unlabelled=35, size_error=25),
    ),
    Setting(
        name="radiographs",
        part="tuning",
        options={"size": 32, "modality": "CR", "min_lesions": 1, "seed": 9004},
        oddities={"no-image": 20, "overcall": 5},
    ),
    Setting(
        name="as it comes",
        part="tuning",
        options={"size": 48, "min_slices": 20, "max_slices": 50, "seed": 70001},
    ),
    Setting(
        name="CT, thin slices, shuffled",
        part="tuning",
        options={**_SMALL, "size": 48, "min_slices": 50, "max_slices": 100, "modality": "CT", "seed": 70002},
        oddities={"no-image": 10, "no-series": 10, "wrong-image": 1, "overcall": 4},
        pathologies={"shuffled": 80, "missing-slices": 40, "duplicates": 0},
    ),
    Setting(
        name="MR, careless",
        part="tuning",
        options={**_SMALL, "max_lesions": 6, "modality": "MR", "seed": 70003},
        oddities={"no-image": 25, "no-series": 45, "wrong-image": 4, "overcall": 6},
        pathologies={"same-number": 25, "mixed-phases": 25},
    ),
    Setting(
        name="CT, marked",
        part="tuning",
        options={**_SMALL, "max_slices": 36, "max_lesions": 4, "modality": "CT", "seed": 70004},
        oddities={"no-image": 65, "no-series": 20, "wrong-image": 3, "overcall": 2},
        marks=Marks(marked=70, elsewhere=5, unlabelled=25, size_error=20),
    ),
    Setting(
        name="radiographs, careless",
        part="tuning",
        options={"size": 24, "modality": "DX", "min_lesions": 0, "max_lesions": 4, "seed": 70005},
        oddities={"no-image": 30, "no-series": 10, "wrong-image": 3, "overcall": 3},
    ),
    Setting(
        name="as it comes, larger",
        part="test",
        options={"size": 96, "min_slices": 16, "max_slices": 60, "seed": 880011},
    ),
    Setting(
        name="CT, turned and tilted",
        part="test",
        options={**_SMALL, "max_slices": 44, "max_lesions": 8, "modality": "CT", "seed": 880012},
        oddities={"no-image": 20, "no-series": 20, "wrong-image": 1},
        pathologies={"oblique": 90, "tilt": 80, "padding": 70, "same-number": 20},
    ),
    Setting(
        name="MR, series rarely named",
        part="test",
        options={**_SMALL, "min_slices": 18, "max_slices": 56, "modality": "MR", "seed": 880013},
        oddities={"no-image": 10, "no-series": 70, "wrong-image": 2, "overcall": 5},
        pathologies={"oblique": 5, "shuffled": 60, "missing-slices": 0},
    ),
    Setting(
        name="marked half, half of it unlabelled",
        part="test",
        options={**_SMALL, "min_slices": 24, "max_slices": 48, "max_lesions": 5, "seed": 880014},
        oddities={"no-image": 55, "no-series": 35, "wrong-image": 3, "overcall": 6},
        marks=Marks(marked=45, elsewhere=3, unlabelled=50, size_error=30),
    ),
    Setting(
        name="radiographs, many lesions, overcalls",
        part="test",
        options={"size": 40, "modality": "CR", "min_lesions": 2, "max_lesions": 6, "seed": 880015},
        oddities={"no-image": 45, "no-series": 20, "wrong-image": 2, "overcall": 15},
    ),
    Setting(
        name="careless, phases in one series",
        part="test",
        options={**_SMALL, "size": 48, "min_slices": 30, "max_slices": 70, "seed": 880016},
        oddities={"no-image": 15, "no-series": 30, "wrong-image": 6, "overcall": 10},
        pathologies={"mixed-phases": 70, "shuffled": 100, "same-number": 40, "stray-files": 50},
    ),
)
