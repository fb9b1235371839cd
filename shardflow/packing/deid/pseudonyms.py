"""Keyed surrogates of identifiers, and dates relative to a keyed origin per patient.

A surrogate is a keyed hash, so that all processes of all runs agree on it and share only the key; without the
key nobody can find an identifier by trying all patient numbers. docs/adr/0020-surrogates.md explains why
this is not a random table, and what that costs.

The studies of a patient keep their distances in days, without calendar dates. The origin depends only on the
key and the patient identifier, so that a study that is added years later fits in, and no written sample has
to change. Identifiers of one person share one (`shardflow.packing.people`).
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import re
import secrets
import stat
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from shardflow.errors import ConfigError, StorageError, os_reason
from shardflow.storage import write_atomic

MIN_KEY_BYTES = 32
"""Minimum length of the key: that of the hash."""

SURROGATE_LENGTH = 26
"""Characters of a surrogate: 128 bits in base32."""

_MAX_KEY_BYTES = 4096
# Base32 (RFC 4648, section 6) in lower case, two characters at a time.
_PAIRS = ["".join(pair) for pair in itertools.product("abcdefghijklmnopqrstuvwxyz234567", repeat=2)]
_SHIFTS = range(120, -1, -10)
_HOW_TO_MAKE = "for a new dataset make one with: (umask 077; head -c 32 /dev/urandom > FILE)"
_KEY_ID_LABEL = b"shardflow-key-id-1"


class SecretKey:
    """The key behind every surrogate of a dataset.

    The bytes of the key never leave the object: not in ``repr``, not in a pickle (pass the path between
    processes). Surrogates are frozen by golden values: changing the derivation renames every sample.
    """

    __slots__ = ("_key", "key_id")

    def __init__(self, key: bytes) -> None:
        """Create a key from its bytes.

        Raises:
            ConfigError: The key is shorter than `MIN_KEY_BYTES`.
        """
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"the secret key must be at least {MIN_KEY_BYTES} bytes, got {len(key)}; {_HOW_TO_MAKE}."
            )
        self._key = key
        self.key_id: str = hmac.new(key, _KEY_ID_LABEL, hashlib.sha256).hexdigest()[:8]

    @classmethod
    def load(cls, path: Path) -> SecretKey:
        """Read a key file that only its owner can read.

        Raises:
            ConfigError: The file is missing, not a regular file, readable by others, too short or too long.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ConfigError(
                f"the secret key file must be readable, got {os_reason(error)}; "
                f"give its path, or {_HOW_TO_MAKE}."
            ) from None
        try:
            _check_private(os.fstat(descriptor))
            key = os.read(descriptor, _MAX_KEY_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(key) > _MAX_KEY_BYTES:
            raise ConfigError(
                f"the secret key must be at most {_MAX_KEY_BYTES} bytes; is this the right file?"
            )
        return cls(key)

    @classmethod
    def create(cls, path: Path) -> SecretKey:
        """Write a new random key with mode 0600 and load it.

        A kill or a full disk leaves no half key behind, which would be refused from then on.

        Raises:
            ConfigError: The file exists, or its folder cannot be written.
        """
        try:
            write_atomic(path, [secrets.token_bytes(MIN_KEY_BYTES)], mode=0o600)
        except StorageError as error:
            raise ConfigError(
                "the secret key file must not exist and its folder must be writable, "
                f"got {type(error.__cause__ or error).__name__}; make room, or give another path."
            ) from None
        return cls.load(path)

    def surrogate(self, kind: str, value: str) -> str:
        """Return the surrogate of an identifier.

        Args:
            kind: Kind of identifier, such as ``"study"``; equal values of different kinds get unrelated
                surrogates.
            value: The identifier.

        Returns:
            26 characters of ``[a-z2-7]``: lower-case base32 of the first 128 bits of the keyed hash.
        """
        # 128 bits and two of padding are thirteen pairs of characters; `base64` takes three times as long.
        bits = int.from_bytes(self._digest(kind, value)[:16], "big") << 2
        return "".join([_PAIRS[bits >> shift & 1023] for shift in _SHIFTS])

    def bucket(self, kind: str, value: str, modulus: int) -> int:
        """Assign a value to one of ``modulus`` buckets, always the same one.

        Returns:
            An integer in ``[0, modulus)``; the bias is below ``modulus / 2**64``.
        """
        if modulus < 1:
            raise ConfigError(f"modulus must be at least 1, got {modulus}.")
        return int.from_bytes(self._digest(kind, value)[16:24], "big") % modulus

    def _digest(self, kind: str, value: str) -> bytes:
        if "\0" in kind:
            raise ConfigError("kind must not contain a zero byte, which separates kind and value.")
        message = kind.encode() + b"\0" + value.encode("utf-8", "surrogatepass")
        return hmac.digest(self._key, message, "sha256")

    def __repr__(self) -> str:
        return f"SecretKey(key_id={self.key_id!r})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a SecretKey is never serialized; pass the path of the key file")


def _check_private(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("the secret key must be a regular file; give the path of a file.")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            "the secret key file must be closed to group and others, "
            f"got mode {stat.S_IMODE(status.st_mode):04o}; run chmod 600 on it."
        )


ReportTextMode: TypeAlias = Literal["scrub", "strict", "keep"]
"""``scrub``: known values and patterns. ``strict``: unknown words too. ``keep``: the text is
not changed."""

DateOrder: TypeAlias = Literal["unknown", "mdy", "dmy"]
"""Order of day and month in 03/04/2019; if unknown, such a date is removed, because its day is ambiguous."""

DatesMode: TypeAlias = Literal["days", "shift", "remove"]
"""``days``: distances in days. ``shift``: dates, moved into the past by 1 to 365 days. ``remove``:
nothing."""

_ORIGINS: Final = 1_000_000
_MAX_SHIFT_DAYS: Final = 365
_MAX_SHIFT_WEEKS: Final = 52
_DAYS_BITS: Final = 9
_WEEKS_BITS: Final = 6
_DATE: Final = re.compile(r"(\d{4})[.-]?(\d{2})[.-]?(\d{2})")
_FIRST_YEAR: Final = 1900
_MAX_REPORT_DAYS: Final = 3653
"""Distance from the study up to which a date of a report is kept; dates far away are birth dates."""
_MAX_PAST_DAYS: Final = 89 * 365
"""Distance from the study up to which a record's day is kept: an age of 90 years and more identifies."""


@lru_cache(maxsize=4096)
def parse_date(value: str) -> date | None:
    """Parse a DICOM date; None if it is partial, impossible or before 1900.

    Example:
        >>> parse_date("20190314"), parse_date("201903"), parse_date("20190230")
        (datetime.date(2019, 3, 14), None, None)
    """
    match = _DATE.fullmatch(value.strip())
    if match is None or int(match[1]) < _FIRST_YEAR:
        return None
    try:
        return date(int(match[1]), int(match[2]), int(match[3]))
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class DateOffsets:
    """How the dates of one person are moved, whatever they are of."""

    origin_days: int
    """Added to the day of a study, below 1,000,000."""
    shift_days: int
    """Subtracted from dates with ``dates = "shift"``, 1 to 365."""
    shift_weeks: int
    """Likewise with ``shift_keeps_weekday``, 1 to 52."""

    @classmethod
    def of(cls, key: SecretKey, patient_id: str) -> DateOffsets:
        """Return the offsets of a patient identifier."""
        return cls(
            origin_days=key.bucket("date-origin", patient_id, _ORIGINS),
            shift_days=1 + key.bucket("date-shift", patient_id, _MAX_SHIFT_DAYS),
            shift_weeks=1 + key.bucket("date-shift-weeks", patient_id, _MAX_SHIFT_WEEKS),
        )

    @classmethod
    def from_int(cls, number: int) -> DateOffsets:
        """Return the offsets that `to_int` wrote."""
        return cls(
            origin_days=number >> _DAYS_BITS + _WEEKS_BITS,
            shift_days=number >> _WEEKS_BITS & (1 << _DAYS_BITS) - 1,
            shift_weeks=number & (1 << _WEEKS_BITS) - 1,
        )

    def to_int(self) -> int:
        """Return the offsets as one integer below 2**35, for the private folder."""
        days = self.origin_days << _DAYS_BITS | self.shift_days
        return days << _WEEKS_BITS | self.shift_weeks


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyDates:
    """The dates of one study of one person."""

    offsets: DateOffsets
    study_date: date | None
    mode: DatesMode
    keeps_weekday: bool

    def facts(self) -> dict[str, Any]:
        """Return the facts about the day of the study for ``study.json``."""
        if self.mode == "remove":
            return {"mode": self.mode}
        if self.mode == "shift":
            shifted = None if self.study_date is None else self._shift(self.study_date)
            return {"mode": self.mode, "study_date": None if shifted is None else shifted.isoformat()}
        day = None
        if self.study_date is not None:
            day = self.study_date.toordinal() + self.offsets.origin_days
        return {"mode": self.mode, "study_day": day}

    def when(self, day: date) -> dict[str, Any]:
        """Return the publishable form of a day of a record; no distance that reveals a great age."""
        distance = None if self.study_date is None else (day - self.study_date).days
        offset = {} if distance is None or distance <= -_MAX_PAST_DAYS else {"day_offset": distance}
        if self.mode == "shift":
            shifted = self._shift(day)
            return {} if shifted is None else {"date": shifted.isoformat(), **offset}
        return {} if self.mode == "remove" else offset

    def placeholder(self, day: date) -> str | None:
        """Return what replaces a date of a report; None if nothing of the date may be told."""
        if self.mode == "remove" or self.study_date is None:
            return None
        distance = (day - self.study_date).days
        if abs(distance) > _MAX_REPORT_DAYS:
            return None
        if self.mode == "days":
            return f"DATE{distance:+d}"
        shifted = self._shift(day)
        return None if shifted is None else f"DATE {shifted.isoformat()}"

    def _shift(self, day: date) -> date | None:
        """Move a date by the number of days of the person; None if the result is before 1900."""
        days = 7 * self.offsets.shift_weeks if self.keeps_weekday else self.offsets.shift_days
        shifted = day - timedelta(days=days)
        return shifted if shifted.year >= _FIRST_YEAR else None
