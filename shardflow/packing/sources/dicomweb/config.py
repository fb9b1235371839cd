"""Settings of what is fetched from an archive, without the client that fetches it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import SplitResult, urlsplit

from shardflow.config import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError
from shardflow.storage.requests import RetryPolicy

TOKEN: Final = "SHARDFLOW_DICOMWEB_TOKEN"  # noqa: S105 - the name of a variable
USER: Final = "SHARDFLOW_DICOMWEB_USER"
PASSWORD: Final = "SHARDFLOW_DICOMWEB_PASSWORD"  # noqa: S105
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")
_DATE: Final = re.compile(r"\d{8}", re.ASCII)
_MODALITY: Final = re.compile(r"[A-Z][A-Z0-9_ ]{0,15}")
_TAG: Final = re.compile(r"[0-9A-Fa-f]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveConfig:
    """What is fetched from the archive, and how."""

    folder: Path | None = None
    """Folder that keeps the files for resumed jobs and later versions; by default ``archive`` in the private
    folder. It holds identifiers and takes the room of the files."""
    studies: Path | None = None
    """Text file of Study Instance UIDs, one a line; without it the archive is asked which studies match."""
    modalities: tuple[str, ...] = ()
    """Modalities of the series to fetch, such as ``["CT", "SEG"]``; empty for all."""
    study_dates: str = ""
    """Study dates as DICOM writes them: ``20240131``, ``20240101-20241231``, ``20240101-``, ``-20241231``."""
    match: dict[str, str] = field(default_factory=dict)
    """Further attributes that studies must match, by keyword, such as ``StudyDescription = "*CHEST*"``."""
    ca_file: Path | None = None
    """PEM file of the authority that signed the archive's certificate; without it those of the system."""
    allow_plain_http: bool = False
    """Whether ``http://`` may lead to another machine: all that is sent then travels unencrypted."""
    num_connections: Annotated[int, Bounds(1, 64)] = 4
    """Connections that are used at the same time."""
    max_requests_per_s: Annotated[float, Bounds(0.0)] = 20.0
    """Requests of all connections; 0 for no limit."""
    max_bytes_per_s: Annotated[ByteSize, Bounds(0)] = 0
    """Received bytes of all connections; 0 for no limit."""
    page_size: Annotated[int, Bounds(1, 100_000)] = 500
    """Results to ask for at once; an archive may return fewer."""
    timeout_s: Annotated[float, Bounds(0.1)] = 60.0
    """Time to connect, for the first byte, and for each kibibyte after it."""
    retry: RetryPolicy = field(
        default_factory=lambda: RetryPolicy(
            max_attempts=6, deadline_s=600.0, first_wait_s=0.5, max_wait_s=30.0
        )
    )
    """Limits on the retries of transient faults; a ``Retry-After`` of the archive is kept besides."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.study_dates and not _is_range(self.study_dates):
            raise ConfigError(
                "study_dates must be a date or a range such as 20240101-20241231, the earlier one first, got "
                "something else; correct it."
            )
        if self.studies is not None and (self.study_dates or self.match):
            raise ConfigError("studies names the studies itself: remove study_dates and match, or studies.")
        # In small letters, or two in one, they match nothing.
        wrong = [name for name in self.modalities if not _MODALITY.fullmatch(name)]
        if wrong:
            raise ConfigError(
                f"modalities must be DICOM terms in capitals such as 'CT', one each, got {wrong[0]!r}; "
                "correct it."
            )
        unknown = sorted(name for name in self.match if not _is_attribute(name))
        if unknown:
            raise ConfigError(f"match must have DICOM keywords, got {unknown[0]!r}; correct it.")


def _is_range(dates: str) -> bool:
    """Whether a text is a date or a range of dates as DICOM writes them."""
    ends = [end for end in dates.split("-", 1) if end]
    return bool(ends) and all(map(_is_date, ends)) and ends == sorted(ends)


def _is_date(text: str) -> bool:
    try:
        datetime.strptime(text, "%Y%m%d")  # noqa: DTZ007 - a date alone
    except ValueError:
        return False
    return _DATE.fullmatch(text) is not None


def _is_attribute(name: str) -> bool:
    """Whether a name is a DICOM keyword or tag; archives ignore what they do not know, and return all."""
    from pydicom.datadict import tag_for_keyword

    return _TAG.fullmatch(name) is not None or tag_for_keyword(name) is not None


def check_address(url: str, settings: ArchiveConfig) -> SplitResult:
    """Check the address of an archive.

    Raises:
        ConfigError: It cannot be used.
    """
    try:
        found = urlsplit(url)
        is_usable = found.scheme in {"http", "https"} and bool(found.hostname) and found.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or found.query or found.fragment:
        raise ConfigError(
            "inputs.dicomweb must be the root of a DICOMweb service, such as https://archive/dicom-web, got "
            "something else; correct it."
        )
    if found.username is not None or found.password is not None:
        raise ConfigError(
            f"inputs.dicomweb must not hold credentials; set {TOKEN}, or {USER} and {PASSWORD}, in the "
            "environment."
        )
    if found.scheme == "http" and found.hostname not in _LOCAL and not settings.allow_plain_http:
        raise ConfigError(
            "inputs.dicomweb must begin with https://, because images and names travel there; or set "
            "inputs.archive.allow_plain_http."
        )
    return found
