"""Names that others chose: brace patterns of shards, and members as webdataset cuts them.

Measured against webdataset 1.0: the key is the path up to the first dot of its last part, folders included;
the rest, in lower case, is the field. Members without a dot, and ``__names__`` at the top, are none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Final

from shardflow.errors import ConfigError

__all__ = ["FOREIGN_FIELD_PATTERN", "expand_braces", "foreign_sample_key", "is_meta", "split_member"]

FOREIGN_FIELD_PATTERN: Final = re.compile(r"[a-z0-9_@+-]+(\.[a-z0-9_@+-]+)*", re.ASCII)
MAX_PATTERN_NAMES: Final = 1_000_000
_MEMBER: Final = re.compile(rb"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
_META: Final = re.compile(rb"__[^/]*__(/|\Z)")
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)


def split_member(name: bytes) -> tuple[bytes, str] | None:
    """Cut a member's name into key and field; None where webdataset skips the member.

    Example:
        >>> split_member(b"images/0001.seg.PNG")
        (b'images/0001', 'seg.png')
    """
    found = _MEMBER.fullmatch(name)
    if found is None:
        return None
    return found[1], found[2].decode("utf-8", "replace").lower()


def is_meta(name: bytes) -> bool:
    """Tell whether webdataset takes a member for a note about the shard: ``__name__`` at the top."""
    return _META.match(name) is not None


def foreign_sample_key(key: bytes, *, shard: str = "", occurrence: int = 0) -> str:
    """Derive the sample key of a foreign key: 32 hexadecimal digits, always of the same key the same.

    Foreign keys have any characters and may be names of people, and sample keys stand in logs and masks; so
    none is taken over, not even one that would be allowed.

    Args:
        key: The key as the tar has it.
        shard: For a key that was taken before: the shard that has it again.
        occurrence: For such a key: its number in that shard.
    """
    text = b"\0".join(
        [b"foreign sample key 1", key, *([shard.encode(), b"%d" % occurrence] if shard else [])]
    )
    return hashlib.sha256(text).hexdigest()[:32]


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand ``{000000..000123}`` and ``{a,b}``; several in one pattern, the last one fastest.

    Raises:
        ConfigError: A brace has no partner or no list in it, or there are too many names.
    """
    found = _BRACES.search(pattern)
    if found is None:
        if "{" in pattern or "}" in pattern:
            raise ConfigError("a pattern's braces must be closed and not nested, got others; correct it.")
        yield pattern
        return
    head, tail = pattern[: found.start()], pattern[found.end() :]
    tails = list(expand_braces(tail))
    items = _items(found[1])
    if len(items) * len(tails) > MAX_PATTERN_NAMES:
        raise ConfigError(
            f"a pattern must name at most {MAX_PATTERN_NAMES} files, got {len(items) * len(tails)}."
        )
    for item in items:
        for rest in tails:
            yield f"{head}{item}{rest}"


def _items(text: str) -> list[str]:
    found = _RANGE.fullmatch(text)
    if found is None:
        if "," not in text:
            raise ConfigError(
                "a pattern's brace must be {first..last} or {one,other}, got another; correct it."
            )
        return text.split(",")
    first, last = int(found[1]), int(found[2])
    if abs(last - first) >= MAX_PATTERN_NAMES:
        raise ConfigError(f"a pattern must name at most {MAX_PATTERN_NAMES} files, got more; correct it.")
    numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
    is_padded = any(len(part) > 1 and part.startswith("0") for part in found.groups())
    width = max(map(len, found.groups())) if is_padded else 0
    return [str(number).zfill(width) for number in numbers]
