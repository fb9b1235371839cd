"""Names of samples, fields, splits and shards, and canonical JSON.

WebDataset cuts a member's name at its first dot into key and field, so a sample key contains no dot and a
field may. All names are lower-case ASCII, so an identifier such as a UID, a patient name or a path cannot be
one.

Canonical JSON has one byte sequence per value, which makes digests of JSON meaningful: sorted keys, no
spaces, everything outside ASCII escaped, integers only (languages print 0.1 + 0.2 differently, and a second
reader must be able to rebuild the bytes).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shardflow.errors import FormatError

# One for all values: `json.dumps` makes a new one for each.
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_PLAIN: Final = frozenset({str, int, bool, type(None)})

Json: TypeAlias = "bool | int | str | Sequence[Json] | Mapping[str, Json] | None"
STUDY_FIELD = "study.json"
REPORT_FIELD = "report.txt"
REPORT_JSON_FIELD = "report.json"
REPORT_COUNTS = "reports"
"""Extra of the manifest: reports that were read by language and by rules, those not read whole by reason."""
LANGUAGE_WITHOUT_RULES = "LANGUAGE_WITHOUT_RULES"
"""Reason why a part of a report is not read."""
CONVERSATION_FIELD = "conversation.json"
ANNOTATIONS_FIELD = "annotations.json"
RECORDS_FIELD = "records.json"
WAVEFORMS_FIELD = "waveforms.json"
DIGEST_PATTERN: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
"""SHA-256 in hexadecimal digits."""
SAMPLE_KEY_PATTERN = re.compile(r"[a-z0-9]{1,64}", re.ASCII)
FIELD_PATTERN = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*", re.ASCII)
SPLIT_PATTERN = re.compile(r"[a-z0-9]{1,32}", re.ASCII)
SHARD_NAME_PATTERN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_MAX_VARIANT: Final = 9999
_VOLUME_ENDING: Final = "volume.b2nd"
_MAX_LEVEL: Final = 99
_SLIDE_LEVEL = re.compile(r"s(\d{3,6})\.l(\d{2})\.tif", re.ASCII)
_SLICE = re.compile(r"s(\d{3,6})\.i(\d{4,8})\.([a-z0-9]+)", re.ASCII)
_MIDDLE = re.compile(r"(s\d{3,6})\.(small|v\d{2,4}|m\d{3,6})\.(i\d{4,8}\.[a-z0-9]+)", re.ASCII)


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Encode an object of a sample as `canonical_json` does, numbers with fractions too."""
    return _ENCODER.encode(value).encode("ascii")


def canonical_json(value: Json) -> bytes:
    """Encode a value without floating-point numbers as canonical JSON, without a line end.

    Raises:
        FormatError: The value holds something that canonical JSON has no bytes for.
    """
    _refuse_floats(value)
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"a JSON value must be plain data, got {type(error).__name__} on encoding."
        ) from None
    return text.encode("ascii")


def parse_json(data: bytes, *, what: str) -> Any:
    """Parse JSON bytes that claim to be canonical.

    Raises:
        FormatError: They are not JSON, or not the canonical bytes of their value: a flipped bit in a space or
            an escape
            would else go unseen.
    """
    try:
        value = json.loads(data)
        is_canonical = canonical_json(value) == data
    except (ValueError, RecursionError, FormatError) as error:
        raise FormatError(f"{what} must be canonical JSON, got {type(error).__name__} on reading.") from None
    if not is_canonical:
        raise FormatError(
            f"{what} must be canonical JSON (sorted keys, no spaces), got other bytes for the same value."
        )
    return value


def sha256_hex(data: bytes | memoryview) -> str:
    """Return the SHA-256 of a buffer as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _refuse_floats(value: Json) -> None:
    if type(value) in _PLAIN:
        return
    if isinstance(value, float):
        raise FormatError(
            "a number in the dataset's JSON must be an integer, got a float; write it as a string."
        )
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise FormatError("a key in the dataset's JSON must be a string, got another type.")
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_floats(item)


@dataclass(frozen=True, slots=True)
class SliceField:
    """The parts of a slice's field name: series number, index along the normal, codec."""

    series: int
    index: int
    codec: str


@dataclass(frozen=True, slots=True)
class MaskField:
    """The parts of a mask's field name: series number, region, index of the slice, codec."""

    series: int
    roi: int
    index: int
    codec: str


@dataclass(frozen=True, slots=True)
class VariantField:
    """The parts of a variant's field name: series number, variant, index of the slice, codec."""

    series: int
    variant: int
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
            f"{len(key)} characters; make keys with shardflow.packing.deid."
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


def small_field(series: int, index: int, codec: str) -> str:
    """Name the member of the small version of one slice, see `slice_field`.

    Example:
        >>> small_field(3, 45, "b2nd")
        's003.small.i0045.b2nd'
    """
    head, _, rest = slice_field(series, index, codec).partition(".")
    return f"{head}.small.{rest}"


def parse_small_field(field: str) -> SliceField | None:
    """Take the name of a small slice apart; None for all other fields, slices among them.

    Example:
        >>> parse_small_field("s003.small.i0045.b2nd")
        SliceField(series=3, index=45, codec='b2nd')
    """
    middle, part = _without_middle(field)
    return part if middle == "small" else None


def variant_field(series: int, variant: int, index: int, codec: str) -> str:
    """Name the member of an augmented variant of one slice, see `slice_field`.

    Args:
        series: Number of the series in its sample.
        variant: Number of the variant, from 1.
        index: Place of the slice.
        codec: Name of the codec.

    Raises:
        FormatError: A number is too small or too large.

    Example:
        >>> variant_field(3, 1, 45, "b2nd")
        's003.v01.i0045.b2nd'
    """
    head, _, rest = slice_field(series, index, codec).partition(".")
    if not 1 <= variant <= _MAX_VARIANT:
        raise FormatError(f"a variant must have a number in 1..{_MAX_VARIANT}, got {variant}.")
    return f"{head}.v{variant:02d}.{rest}"


def parse_variant_field(field: str) -> VariantField | None:
    """Take the name of an augmented variant apart; None for all other fields, slices among them.

    Example:
        >>> parse_variant_field("s003.v01.i0045.b2nd")
        VariantField(series=3, variant=1, index=45, codec='b2nd')
    """
    middle, part = _without_middle(field)
    if part is None or not middle.startswith("v"):
        return None
    variant = int(middle[1:])
    if not variant or middle != f"v{variant:02d}":
        return None
    return VariantField(part.series, variant, part.index, part.codec)


def mask_prefix(series: int, roi: int) -> str:
    """Name what the masks of a region have in common.

    Args:
        series: Number of the series in its sample.
        roi: Number of the region in ``annotations.json``.

    Raises:
        FormatError: A number is negative or too large.

    Example:
        >>> mask_prefix(3, 12)
        's003.m012'
    """
    prefix = f"s{series:03d}.m{roi:03d}"
    if not _MIDDLE.fullmatch(f"{prefix}.i0000.b2nd"):
        raise FormatError(
            f"a mask must have a series and a region in 0..999999, got series {series}, region {roi}."
        )
    return prefix


def mask_field(series: int, roi: int, index: int, codec: str) -> str:
    """Name the member of the mask of a region in one slice, see `slice_field`.

    Example:
        >>> mask_field(3, 12, 45, "b2nd")
        's003.m012.i0045.b2nd'
    """
    _, _, rest = slice_field(series, index, codec).partition(".")
    return f"{mask_prefix(series, roi)}.{rest}"


def parse_mask_field(field: str) -> MaskField | None:
    """Take the name of a mask apart; None for all other fields.

    Example:
        >>> parse_mask_field("s003.m012.i0045.b2nd")
        MaskField(series=3, roi=12, index=45, codec='b2nd')
    """
    middle, part = _without_middle(field)
    if part is None or not middle.startswith("m"):
        return None
    roi = int(middle[1:])
    return MaskField(part.series, roi, part.index, part.codec) if middle == f"m{roi:03d}" else None


def _without_middle(field: str) -> tuple[str, SliceField | None]:
    """Split the part between series and index off a field name; return it and the slice, if there is one."""
    match = _MIDDLE.fullmatch(field)
    return ("", None) if match is None else (match[2], parse_slice_field(f"{match[1]}.{match[3]}"))


def volume_field(series: int, roi: int | None = None) -> str:
    """Name the member of a volume in bricks: of a series, or of the mask of a region in it.

    Example:
        >>> volume_field(3)
        's003.volume.b2nd'
        >>> volume_field(3, 12)
        's003.m012.volume.b2nd'
    """
    prefix = slice_field(series, 0, "b2nd").partition(".")[0] if roi is None else mask_prefix(series, roi)
    return f"{prefix}.{_VOLUME_ENDING}"


def parse_volume_field(field: str) -> tuple[int, int | None] | None:
    """Return series and region of a volume in bricks, the region None for that of a series; else None.

    Example:
        >>> parse_volume_field("s003.volume.b2nd")
        (3, None)
        >>> parse_volume_field("s003.m012.volume.b2nd")
        (3, 12)
    """
    prefix, dot, ending = field.partition(".volume.")
    slice_like = f"{prefix}.i0000.b2nd"
    if not dot or f"volume.{ending}" != _VOLUME_ENDING:
        return None
    part, mask = parse_slice_field(slice_like), parse_mask_field(slice_like)
    if part is not None:
        return part.series, None
    return None if mask is None else (mask.series, mask.roi)


def level_field(series: int, level: int) -> str:
    """Name the member of a level of a slide.

    Args:
        series: Number of the slide among the series of its sample.
        level: Number of the level among those that are stored, from 0, the finest.

    Example:
        >>> level_field(3, 1)
        's003.l01.tif'
    """
    prefix = slice_field(series, 0, "tif").partition(".")[0]
    if not 0 <= level <= _MAX_LEVEL:
        raise FormatError(f"a level must have a number in 0..{_MAX_LEVEL}, got {level}.")
    return f"{prefix}.l{level:02d}.tif"


def parse_level_field(field: str) -> tuple[int, int] | None:
    """Return series and level of a level of a slide; None for all other fields.

    Example:
        >>> parse_level_field("s003.l01.tif")
        (3, 1)
    """
    match = _SLIDE_LEVEL.fullmatch(field)
    if match is None:
        return None
    found = int(match[1]), int(match[2])
    return found if level_field(*found) == field else None


def thumbnail_field(series: int) -> str:
    """Name the member of a series' thumbnail.

    Example:
        >>> thumbnail_field(3)
        's003.thumb.jpg'
    """
    return f"s{series:03d}.thumb.jpg"


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
