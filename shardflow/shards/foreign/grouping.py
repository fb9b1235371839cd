"""From members to samples, as webdataset groups them; what it would tear or mix is refused or mended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from shardflow.errors import FormatError
from shardflow.shards.foreign.images import IMAGE_KINDS, image_size
from shardflow.shards.foreign.names import FOREIGN_FIELD_PATTERN, is_meta, split_member
from shardflow.shards.foreign.scan import TarMember
from shardflow.shards.index import FieldLocation

__all__ = ["ForeignSample", "GroupedShard", "GroupingPolicy", "group_members"]

_MAX_KEY_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupingPolicy:
    """What becomes of members that do not fit."""

    interleaved: Literal["refuse", "repair"] = "refuse"
    """A sample whose members do not follow each other. ``repair``: they are one sample all the same."""
    duplicate_keys: Literal["refuse", "rename"] = "refuse"
    """A key that a second sample has. ``rename``: that one gets a sample key of its own."""
    other_members: Literal["refuse", "skip"] = "refuse"
    """Members whose field is not of ``[a-z0-9_@+-]`` and dots. ``skip``: they are left out."""


@dataclass(slots=True)
class ForeignSample:
    """A sample under way: its fields in the order of the tar."""

    key: bytes
    fields: dict[str, FieldLocation] = field(default_factory=dict)
    rows: int = 0
    """The largest height of its images, in pixels, as their headers tell; 0 without any."""
    columns: int = 0


@dataclass(slots=True)
class GroupedShard:
    """The samples of a shard, by their first members."""

    samples: list[ForeignSample] = field(default_factory=list)
    num_skipped: int = 0
    """Regular members that are no fields."""
    num_repaired: int = 0
    """Members that came after those of another sample."""


def group_members(members: Iterable[TarMember], *, shard: str, policy: GroupingPolicy) -> GroupedShard:
    """Group the members of one tar.

    Args:
        members: In the order of the tar.
        shard: What errors call it.
        policy: What to do with what does not fit.

    Raises:
        FormatError: Something does not fit and is to be refused; the message names shard and member.
    """
    grouped = GroupedShard()
    latest: dict[bytes, ForeignSample] = {}
    current: ForeignSample | None = None
    for member in members:
        parts = None if is_meta(member.name) else split_member(member.name)
        if parts is None:
            grouped.num_skipped += 1
            continue
        key, name = parts
        if len(key) > _MAX_KEY_BYTES:
            raise FormatError(
                f"a key must have at most {_MAX_KEY_BYTES} bytes, got {len(key)} ({shard}, member "
                f"{member.number}); write the shard again with shorter names."
            )
        if not FOREIGN_FIELD_PATTERN.fullmatch(name):
            if policy.other_members == "refuse":
                raise _error(
                    shard, member, "a field name of [a-z0-9_@+-] and dots", "another", "--other-members skip"
                )
            grouped.num_skipped += 1
            continue
        sample = latest.get(key)
        if sample is not None and name in sample.fields:
            if policy.duplicate_keys == "refuse":
                raise _error(
                    shard,
                    member,
                    "a key and field of its own",
                    "one that was there",
                    "--duplicate-keys rename",
                )
            sample = None
        elif sample is not None and sample is not current:
            if policy.interleaved == "refuse":
                raise _error(
                    shard,
                    member,
                    "to follow the others of its sample",
                    "members of another sample between",
                    "--interleaved repair",
                )
            grouped.num_repaired += 1
        if sample is None:
            sample = latest[key] = ForeignSample(key)
            grouped.samples.append(sample)
        current = sample
        _add(sample, name, member)
    return grouped


def _add(sample: ForeignSample, name: str, member: TarMember) -> None:
    sample.fields[name] = FieldLocation(name, member.offset, member.num_bytes, member.crc32c)
    if name.rpartition(".")[2] in IMAGE_KINDS:
        size = image_size(member.head)
        if size is not None:
            sample.rows, sample.columns = max(sample.rows, size[0]), max(sample.columns, size[1])


def _error(shard: str, member: TarMember, expected: str, found: str, option: str) -> FormatError:
    return FormatError(
        f"a member must have {expected}, got {found} ({shard}, member {member.number}); "
        f"write the shard again, or index it with {option}."
    )
