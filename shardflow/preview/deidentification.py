"""What the page says about de-identification: what was kept, replaced, coarsened, removed, or left alone.

`summarise` is the one place that turns a manifest into these statements. Whoever changes what packing does
to identifiers changes it too: a page must not promise what did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from shardflow.preview.html import counted

if TYPE_CHECKING:
    from shardflow.shards import Manifest

__all__ = ["DeidSummary", "Statement", "Treatment", "summarise"]


_OPTIONS: Final = {
    "113100": "Basic Application Confidentiality Profile",
    "113101": "Clean Pixel Data Option",
    "113105": "Clean Descriptors Option",
    "113107": "Retain Longitudinal Temporal Information Modified Dates Option",
    "113108": "Retain Patient Characteristics Option",
}
_HELD_BACK: Final = ("BURNED_IN_ANNOTATION", "FACE_RISK")


class Treatment(StrEnum):
    """What became of a category of information."""

    REMOVED = "removed"
    REPLACED = "replaced"
    GENERALISED = "generalised"
    KEPT = "kept"
    UNTOUCHED = "stored as is"
    """Nobody looked at it: what identifies a person may be in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One category and its treatment."""

    treatment: Treatment
    category: str
    how: str
    details: tuple[str, ...] = ()
    """Names to be listed on request, such as attributes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeidSummary:
    """What was done to identifiers in a dataset."""

    key_id: str | None
    """Which secret key made the surrogates; not the key."""
    statements: tuple[Statement, ...]
    option_codes: tuple[tuple[str, str], ...] = ()
    """Code and meaning of each option of DICOM PS3.15, E.1, that was applied, such as ``("113100", ...)``."""


def summarise(
    manifest: Manifest, *, num_reports: int, kept_keywords: Sequence[str], max_age_years: int
) -> DeidSummary | None:
    """Say what packing did; None for a dataset that shardflow did not pack.

    Args:
        manifest: Of the dataset.
        num_reports: Samples with a report.
        kept_keywords: DICOM keywords of the technical attributes that packing keeps.
        max_age_years: Age from which on packing names no year.
    """
    if manifest.key_id is None:
        return None
    statements = [
        Statement(
            treatment=Treatment.REMOVED,
            category="Everything not named below",
            how="names, addresses, record numbers, dates and times, descriptions, comments, private "
            "elements, file names: an attribute that is on no list stays behind",
        ),
        Statement(
            treatment=Treatment.REPLACED,
            category="Identifiers of patient, study, series and inputs",
            how="by surrogates that only the holder of the secret key can make again",
        ),
        Statement(
            treatment=Treatment.GENERALISED,
            category="Age, maker, contrast agent",
            how=f"whole years, from {max_age_years} on as one class; one spelling of a known maker; only "
            "whether there was contrast",
        ),
        Statement(
            treatment=Treatment.KEPT,
            category=f"Sex, and up to {len(kept_keywords)} technical attributes",
            how="only where the value is a plausible number or a word of a closed list",
            details=tuple(kept_keywords),
        ),
    ]
    done: Any = manifest.extra.get("deidentification", {})
    counts: Mapping[str, int] = done.get("counts", {})
    statements += _pixels(manifest, counts)
    if num_reports:
        statements.append(_reports(num_reports, str(done.get("report_text", "keep")), counts))
    codes = tuple((code, _OPTIONS.get(code, "")) for code in done.get("profile_codes", ()))
    return DeidSummary(key_id=manifest.key_id, statements=tuple(statements), option_codes=codes)


def _pixels(manifest: Manifest, counts: Mapping[str, int]) -> list[Statement]:
    statements = [
        Statement(
            treatment=Treatment.UNTOUCHED,
            category="Pixels of images that no rule suspects",
            how="nobody looked for text or faces in them",
        )
    ]
    reasons: Any = manifest.extra.get("reasons", {})
    num_held = sum(int(reasons.get(reason, 0)) for reason in _HELD_BACK)
    if num_held:
        statements.append(
            Statement(
                treatment=Treatment.REMOVED,
                category=f"{num_held:,} images that may show text or a face",
                how="quarantined by rules over their headers",
            )
        )
    if counts.get("blackout_slices"):
        statements.append(
            Statement(
                treatment=Treatment.REMOVED,
                category=f"Boxes in {counts['blackout_slices']:,} slices",
                how="blanked where the site's rules say that the device writes",
            )
        )
    if counts.get("face_risk_series"):
        statements.append(
            Statement(
                treatment=Treatment.UNTOUCHED,
                category=f"{counts['face_risk_series']:,} series of heads",
                how="flagged only: their surface could be rendered as a face",
            )
        )
    return statements


def _reports(num_reports: int, mode: str, counts: Mapping[str, int]) -> Statement:
    if mode == "keep":
        return Statement(
            treatment=Treatment.UNTOUCHED,
            category=f"Text of {counted(num_reports, 'report')}",
            how="as it came: names, dates and numbers in it are still there",
        )
    places = {name.removeprefix("report_"): n for name, n in counts.items() if name.startswith("report_")}
    return Statement(
        treatment=Treatment.GENERALISED,
        category=f"Text of {counted(num_reports, 'report')}",
        how=f"{sum(places.values()):,} places replaced by their category (mode {mode}): values of the "
        "study's headers and forms such as dates and numbers; what has neither may still be there",
        details=tuple(f"{name}: {count:,}" for name, count in sorted(places.items())),
    )
