"""Settings of what is packed beside the images: attachments, and what reports say."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from shardflow.configs import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError

__all__ = ["AttachmentsConfig", "BadInstancePolicy", "ReportsConfig", "digest_of"]

BadInstancePolicy: TypeAlias = Literal["quarantine_study", "drop_instance"]

_KIND = re.compile(r"[a-z0-9-]{1,32}")
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachmentsConfig:
    """Files that belong to a study and are no images; docs/attachments.md names the kinds."""

    enabled: bool = True
    """Whether they are packed; without, they are what they are among images: no image."""
    leave_out: tuple[str, ...] = ()
    """Kinds that are not packed, such as ``fhir``."""
    window_hours: Annotated[int, Bounds(0, 24 * 366)] = 24
    """Largest distance in time between a record that names only its patient and the patient's study."""
    max_bytes: Annotated[ByteSize, Bounds(1)] = _GIB
    """Size of a file above which it is not read."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.leave_out:
            if not _KIND.fullmatch(name):
                raise ConfigError(
                    f"attachments.leave_out must hold names of [a-z0-9-], got {name!r}; "
                    "see docs/attachments.md."
                )

    def content(self) -> dict[str, Any] | None:
        """Return what decides the dataset's bytes; None where nothing is set."""
        if self == AttachmentsConfig():
            return None
        return {
            "enabled": self.enabled,
            "leave_out": sorted(self.leave_out),
            "max_bytes": self.max_bytes,
            "window_hours": self.window_hours,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportsConfig:
    """What is made of reports."""

    extract: bool = True
    """Whether ``report.json`` is written: sections, findings and the images that the report names."""
    findings: tuple[Path, ...] = ()
    """Tables of findings beside the shipped one (docs/reports.md); theirs win over it."""
    anatomy: tuple[Path, ...] = ()
    """Tables of anatomy, likewise."""
    extractors: tuple[str, ...] = ()
    """Names of further extractors that installed packages offer."""
    align: bool = True
    """Whether ``alignment.json`` is written: which slices show what the report speaks of. Needs
    ``extract``."""

    def __post_init__(self) -> None:
        check_fields(self)

    def content(self) -> dict[str, Any] | None:
        """Return what decides the dataset's bytes; None where nothing is set.

        Raises:
            ConfigError: A table cannot be read.
        """
        if self == ReportsConfig():
            return None
        return {
            "align": self.align,
            "anatomy": [digest_of(path) for path in self.anatomy],
            "extract": self.extract,
            "extractors": sorted(self.extractors),
            "findings": [digest_of(path) for path in self.findings],
        }


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a table.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"reports.findings and reports.anatomy must name readable tables, got {type(error).__name__}; "
            "check the paths."
        ) from None
