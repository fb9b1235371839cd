"""Settings of de-identification."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardflow.configs import check_fields
from shardflow.deid.dates import DatesMode
from shardflow.deid.pixel_rules import PixelRules, load_rules
from shardflow.deid.report_text import ReportTextMode
from shardflow.deid.text_dates import DateOrder
from shardflow.errors import ConfigError

__all__ = ["DeidConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeidConfig:
    """What is done to what could name a person, beyond the allowlist and the surrogates."""

    report_text: ReportTextMode = "scrub"
    """``scrub``: values of the study's headers and patterns are replaced. ``strict``: words that are on no
    list too. ``keep``: reports stay as they came, for those that were de-identified before."""
    date_order: DateOrder = "unknown"
    """How reports write 03/04/2019: ``mdy``, ``dmy``, or ``unknown``, which takes such dates out."""
    dates: DatesMode = "days"
    """``days``: studies and dates in reports as distances in days. ``shift``: dates, moved by one keyed
    number of days a patient. ``remove``: neither."""
    shift_keeps_weekday: bool = False
    """Whether dates are moved by whole weeks."""
    accept: tuple[str, ...] = ()
    """Names of rules for burned-in text whose images are packed all the same, such as ``ultrasound``."""
    trust_declared_clean: bool = False
    """Whether BurnedInAnnotation = NO in a file clears a suspicion."""
    face_risk: Literal["flag", "quarantine"] = "flag"
    """What becomes of volumes of the head, whose surface is a face."""
    rules_file: Path | None = None
    """TOML file of further rules and blackout boxes; see docs/deidentification.md."""

    def __post_init__(self) -> None:
        check_fields(self)

    def rules_text(self) -> tuple[str, ...]:
        """Return the site's own rules.

        Raises:
            ConfigError: The file cannot be read.
        """
        if self.rules_file is None:
            return ()
        try:
            return (self.rules_file.read_text(encoding="utf-8"),)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"deid.rules_file must be a readable UTF-8 file, got {type(error).__name__}; check the path."
            ) from None

    def rules(self) -> PixelRules:
        """Return all pixel rules.

        Raises:
            ConfigError: The site's own are not as they must be, or ``accept`` names one that is none.
        """
        rules = load_rules(*self.rules_text())
        rules.check_names(self.accept)
        return rules

    def content(self) -> dict[str, Any]:
        """Return what decides bytes, as JSON."""
        return {
            "accept": sorted(self.accept),
            "date_order": self.date_order,
            "dates": self.dates,
            "face_risk": self.face_risk,
            "report_text": self.report_text,
            "rules_sha256": self.rules().digest,
            "shift_keeps_weekday": self.shift_keeps_weekday,
            "trust_declared_clean": self.trust_declared_clean,
        }
