"""Planted corpora: generated reports and images with identifiers whose places are known.

`corpus` makes texts in five languages, `burned_in` images; `measuring` runs a scrubber or a text detector
over them and counts misses and unneeded removals. No text is a real report or describes a real person.
"""

from __future__ import annotations

from shardflow.synthetic.identifiers.burned_in import (
    PlantedImage,
    PlantedLine,
    letters_of,
    make_backgrounds,
    plant_text,
    typeface,
)
from shardflow.synthetic.identifiers.corpus import CATEGORIES, LANGUAGES, PlantedText, plant
from shardflow.synthetic.identifiers.measuring import Measured, MeasuredPixels, measure, measure_pixels

__all__ = [
    "CATEGORIES",
    "LANGUAGES",
    "Measured",
    "MeasuredPixels",
    "PlantedImage",
    "PlantedLine",
    "PlantedText",
    "letters_of",
    "make_backgrounds",
    "measure",
    "measure_pixels",
    "plant",
    "plant_text",
    "typeface",
]
