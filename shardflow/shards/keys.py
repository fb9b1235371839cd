"""Names of the format: samples, fields, splits and shards.

WebDataset cuts a member's name at its first dot into key and field. So a sample key holds no dot, and a field
may. All names are lower-case ASCII: an identifier such as a UID, a patient name or a path cannot be one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardflow.errors import FormatError

__all__ = [
    "FIELD_PATTERN",
    "REPORT_FIELD",
    "SAMPLE_KEY_PATTERN",
    "SHARD_NAME_PATTERN",
    "SPLIT_PATTERN",
    "STUDY_FIELD",
    "SliceField",
    "check_field",
    "check_sample_key",
    "count_slices",
    "parse_slice_field",
    "shard_name",
    "slice_field",
]

STUDY_FIELD = "study.json"
REPORT_FIELD = "report.txt"

SAMPLE_KEY_PATTERN = re.compile(r"[a-z0-9]{1,64}", re.ASCII)
FIELD_PATTERN = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*", re.ASCII)
SPLIT_PATTERN = re.compile(r"[a-z0-9]{1,32}", re.ASCII)
SHARD_NAME_PATTERN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_SLICE = re.compile(r"s(\d{3,6})\.i(\d{4,8})\.([a-z0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class SliceField:
    """The parts of a slice's field name: series number, index along the normal, codec."""

    series: int
    index: int
    codec: str


def check_sample_key(key: str) -> str:
    """Return ``key`` if it is a sample key.

    Raises:
        FormatError: It is not. The message does not repeat it: what was meant to be a surrogate may be a UID.
    """
    if not SAMPLE_KEY_PATTERN.fullmatch(key):
        raise FormatError(
            "a sample key must match [a-z0-9]{1,64}, got another string of "
            f"{len(key)} characters; make keys with shardflow.deid."
        )
    return key


def check_field(field: str) -> str:
    """Return ``field`` if it is a field name.

    Raises:
        FormatError: It is not; the message does not repeat it.
    """
    if not FIELD_PATTERN.fullmatch(field):
        raise FormatError(
            "a field name must be dotted parts of [a-z0-9_], got another string of "
            f"{len(field)} characters; see docs/format.md, section 3."
        )
    return field


def slice_field(series: int, index: int, codec: str) -> str:
    """Name the member of one slice.

    Args:
        series: Number of the series in its sample, from 0; 0 is the primary series.
        index: Place of the slice in geometric order, from 0.
        codec: Name of the codec, such as ``"b2nd"``.

    Raises:
        FormatError: A number is negative or too large, or the codec's name has other characters.

    Example:
        >>> slice_field(3, 45, "b2nd")
        's003.i0045.b2nd'
    """
    field = f"s{series:03d}.i{index:04d}.{codec}"
    if not _SLICE.fullmatch(field):
        raise FormatError(
            "a slice must have a series in 0..999999, an index in 0..99999999 and a codec of [a-z0-9], "
            f"got series {series}, index {index}."
        )
    return field


def parse_slice_field(field: str) -> SliceField | None:
    """Take a slice's field name apart; None for fields that are no slices.

    Example:
        >>> parse_slice_field("s003.i0045.b2nd")
        SliceField(series=3, index=45, codec='b2nd')
        >>> parse_slice_field("report.txt") is None
        True
    """
    match = _SLICE.fullmatch(field)
    if match is None:
        return None
    parsed = SliceField(int(match[1]), int(match[2]), match[3])
    # "s0003.i0045.b2nd" would be a second name of the same slice.
    return parsed if slice_field(parsed.series, parsed.index, parsed.codec) == field else None


def count_slices(fields: Iterable[str]) -> tuple[int, int]:
    """Count the series and the slices of a sample from its field names.

    A slice that is present in several codecs counts once.

    Returns:
        ``(num_series, num_slices)`` as the samples table records them.
    """
    slices = {(part.series, part.index) for part in map(parse_slice_field, fields) if part}
    return len({series for series, _ in slices}), len(slices)


def shard_name(split: str, number: int) -> str:
    """Name a shard of a split, numbered from 0.

    Raises:
        FormatError: The split's name has other characters than ``[a-z0-9]``, or the number is negative.

    Example:
        >>> shard_name("train", 42)
        'train-000042'
    """
    if not SPLIT_PATTERN.fullmatch(split) or number < 0:
        raise FormatError(
            f"a shard must have a split of [a-z0-9]{{1,32}} and a number from 0, got number {number}."
        )
    return f"{split}-{number:06d}"
