"""Planted corpus: generated sentences of reports with identifiers whose places are known, in five languages.

`corpus` makes the texts; `measure` runs a scrubber over them and counts what it missed and what it removed
without need. Nothing here is of a person, and nothing here is a real report.
"""

from __future__ import annotations

from shardflow.synthetic.identifiers.corpus import CATEGORIES, LANGUAGES, PlantedText, plant
from shardflow.synthetic.identifiers.measuring import Measured, measure

__all__ = ["CATEGORIES", "LANGUAGES", "Measured", "PlantedText", "measure", "plant"]
