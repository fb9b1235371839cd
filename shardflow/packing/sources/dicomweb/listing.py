"""Instances that an archive lists: the files they become, and the inputs of a job that follow from both."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from shardflow.errors import ConfigError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.dicom.discover import DiscoveredFile
from shardflow.storage.local import write_atomic

_SAFE_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_MAX_META_BYTES: Final = 1 << 16
_META_START: Final = 132
_LONG_VRS: Final = {b"OB", b"OW", b"SQ", b"UN", b"UT"}


class Instance(NamedTuple):
    """One listed instance. Holds identifiers; its ``repr`` shows none."""

    study: str
    series: str
    instance: str

    def __repr__(self) -> str:
        return "Instance()"

    @property
    def relative_path(self) -> str:
        """POSIX path below the folder of files: the UIDs, or a digest of what is unfit for a file name."""
        return "/".join(map(_name, self)) + ".dcm"


def _name(uid: str) -> str:
    if _SAFE_NAME.fullmatch(uid):
        return uid
    return "x" + hashlib.sha256(uid.encode("utf-8", "surrogatepass")).hexdigest()[:40]


@dataclass(slots=True)
class Listing:
    """What the archive holds of the wanted studies. Holds identifiers; its ``repr`` shows none."""

    instances: list[Instance] = field(default_factory=list, repr=False)
    reasons: dict[Instance, Reason] = field(default_factory=dict, repr=False)
    """Why an instance has no file."""
    missing: list[str] = field(default_factory=list, repr=False)
    """Studies of the list of studies that the archive does not have."""

    def select(self, found: Sequence[DiscoveredFile], root_index: int) -> list[DiscoveredFile]:
        """Return the inputs, sorted as `shardflow.packing.sources.dicom.discover.discover` does.

        Args:
            found: Files of the folder; those that are not listed are no inputs.
            root_index: Of the folder.
        """
        by_path = {file.relative_path: file for file in found}
        files = []
        for instance in self.instances:
            path = instance.relative_path
            file = by_path.get(path)
            if file is None:
                reason = self.reasons.get(instance, Reason.NOT_RETRIEVED)
                file = _without_file(root_index, path, reason, instance.study, instance.instance)
            files.append(file)
        # Inputs of no study: what comes of it later is packed without them.
        files += [_without_file(root_index, _name(study), Reason.NOT_RETRIEVED) for study in self.missing]
        files.sort(key=lambda file: os.fsencode(file.relative_path))
        return files

    def save(self, path: Path) -> None:
        """Write the listing.

        Raises:
            StorageError: It cannot be written.
        """
        rows = {
            "instances": self.instances,
            "missing": self.missing,
            "reasons": [[*one, reason.value] for one, reason in sorted(self.reasons.items())],
        }
        write_atomic(path, [json.dumps(rows).encode("ascii")], replace=True, mode=0o600)

    @classmethod
    def load(cls, path: Path) -> Listing:
        """Read what `save` wrote.

        Raises:
            ConfigError: There is none.
        """
        try:
            rows = json.loads(path.read_bytes())
            return cls(
                instances=[Instance(*one) for one in rows["instances"]],
                reasons={Instance(*one): Reason(reason) for *one, reason in rows["reasons"]},
                missing=rows["missing"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                "tasks, merges and retries go by what was fetched before, and nothing was; run `shardflow "
                "pack --dry-run` first, which fetches."
            ) from None


def _without_file(
    root_index: int, path: str, reason: Reason, study: str = "", instance: str = ""
) -> DiscoveredFile:
    return DiscoveredFile(
        root_index=root_index,
        relative_path=path,
        num_bytes=0,
        problem=reason,
        study_instance_uid=study,
        sop_instance_uid=instance,
    )


def instance_uid(head: bytes | bytearray, *, is_whole: bool) -> str | None:
    """Return the Media Storage SOP Instance UID of a file (PS3.10, 7.1), from its first bytes.

    Args:
        head: As many as have come.
        is_whole: Whether no more will come.

    Returns:
        The UID; ``""`` if the file has none; None if more bytes are needed.
    """
    unknown = "" if is_whole or len(head) > _MAX_META_BYTES else None
    if len(head) < _META_START:
        return unknown
    if head[_META_START - 4 : _META_START] != b"DICM":
        return ""
    at = _META_START
    while at + 12 <= len(head):
        group, element, vr, num_bytes = struct.unpack_from("<HH2sH", head, at)
        value = at + 8
        if group != 2:
            return ""
        if vr in _LONG_VRS:
            (num_bytes,) = struct.unpack_from("<I", head, value)
            value += 4
        if value + num_bytes > len(head):
            return unknown
        if element == 3:
            return bytes(head[value : value + num_bytes]).decode("latin-1").strip("\0 ")
        at = value + num_bytes
    return unknown
