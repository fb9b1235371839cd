"""Discovery of input files: walks the input folders and does not look into the files.

Nothing is skipped silently: an entry that cannot be read as a file is returned with the reason in
``problem``, so that inputs = packed + skipped + quarantined holds from the beginning. The list is sorted by
root and relative path, so every process that walks the same tree gets the same list.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardflow.errors import ConfigError, os_reason
from shardflow.format.reasons import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveredFile:
    """One entry below an input folder. Holds a path, so it never goes into a message, log or dataset."""

    root_index: int
    """Position of the input folder in the list that was given."""
    relative_path: str
    """POSIX path below that folder; ``"."`` where the root itself is a file."""
    num_bytes: int
    """Size; 0 where there is a problem."""
    problem: Reason | None = None
    """Why there is no file to read, such as ``NOT_REGULAR_FILE`` or ``FILE_UNREADABLE``."""
    study_instance_uid: str = ""
    """Of an input without a file that is known to be of a study; else the file or its layout says it."""
    sop_instance_uid: str = ""
    """Likewise."""

    def __repr__(self) -> str:
        return f"DiscoveredFile({self.num_bytes} bytes, problem={self.problem})"

    def path(self, roots: Sequence[Path]) -> Path:
        """Return the full path, given the same list of roots."""
        return roots[self.root_index] / self.relative_path


def discover(roots: Sequence[Path]) -> list[DiscoveredFile]:
    """List all entries below the roots, sorted by root and by the bytes of the relative path.

    Links to files are followed (data sets are often trees of links); links to folders are not, because they
    can form circles, and come back as ``NOT_REGULAR_FILE``. Folders that cannot be listed come back as
    ``FILE_UNREADABLE``.

    Raises:
        ConfigError: There is no root, a root does not exist, or one root lies inside another (its files would
            be read twice).
    """
    if not roots:
        raise ConfigError("the inputs must name at least one folder, got none; set it in the configuration.")
    _check_roots(roots)
    found: list[DiscoveredFile] = []
    for index, root in enumerate(roots):
        entries = list(_walk(index, root))
        entries.sort(key=lambda entry: os.fsencode(entry.relative_path))
        found.extend(entries)
    return found


def _check_roots(roots: Sequence[Path]) -> None:
    resolved: list[Path] = []
    for number, root in enumerate(roots, start=1):
        try:
            resolved.append(root.resolve(strict=True))
        except OSError as error:
            raise ConfigError(
                f"input folder {number} of {len(roots)} must exist and be readable, got "
                f"{os_reason(error)}; correct its path in the configuration.",
                path=str(root),
            ) from None
    for number, root in enumerate(resolved, start=1):
        for other_number, other in enumerate(resolved, start=1):
            if number != other_number and root.is_relative_to(other):
                raise ConfigError(
                    f"input folders must not lie inside one another, got number {number} inside number "
                    f"{other_number}; remove one of them."
                )


def _walk(root_index: int, root: Path) -> Iterator[DiscoveredFile]:
    if not root.is_dir():
        yield _describe(root_index, root, ".")
        return
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(root / folder) as entries:
                listed = list(entries)
        except OSError:
            yield DiscoveredFile(
                root_index=root_index,
                relative_path=folder or ".",
                num_bytes=0,
                problem=Reason.FILE_UNREADABLE,
            )
            continue
        for entry in listed:
            relative = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                pending.append(relative)
            else:
                yield _describe(root_index, Path(entry.path), relative)


def _describe(root_index: int, path: Path, relative: str) -> DiscoveredFile:
    num_bytes, problem = 0, None
    try:
        status = path.stat()
    except OSError:
        problem = Reason.FILE_UNREADABLE
    else:
        if stat.S_ISREG(status.st_mode):
            num_bytes = status.st_size
        else:
            problem = Reason.NOT_REGULAR_FILE
    return DiscoveredFile(root_index=root_index, relative_path=relative, num_bytes=num_bytes, problem=problem)
