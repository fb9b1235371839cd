"""Which technical attributes may leave; everything else stays behind."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KEYWORDS", "allow_patient", "allow_technical"]

KEYWORDS: tuple[str, ...] = ()
"""DICOM keywords worth reading; hand them to `shardflow.sources.dicom.read_attributes`."""


def allow_technical(attributes: Mapping[str, object]) -> dict[str, object]:
    """Keep the technical attributes whose name and value are both allowed; JSON-able, sorted by keyword."""
    raise NotImplementedError


def allow_patient(attributes: Mapping[str, object]) -> dict[str, object]:
    """Patient characteristics that may leave: ``{"sex": "F" | "M" | "O" | None, "age_years": 0..90 | None}``."""
    raise NotImplementedError
