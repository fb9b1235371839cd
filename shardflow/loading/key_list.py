"""Lists of sample keys: a text file that says which samples of a dataset are meant.

A key is a surrogate, so messages may name it; a line that is no key is never repeated. While a list is
resolved it takes about 100 bytes a line; what is left afterwards are rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardflow.epochs.rows import Rows, select_rows
from shardflow.errors import ConfigError
from shardflow.shards import Dataset
from shardflow.shards.keys import SAMPLE_KEY_PATTERN

__all__ = ["listed_rows"]

_DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def listed_rows(dataset: Dataset, spans: Sequence[range], path: Path) -> Rows:
    """Return the rows of the samples that a file lists.

    Args:
        dataset: The dataset.
        spans: Rows of the splits that the samples lie in, ascending.
        path: A sample key a line, or ``sha256:`` and the SHA-256 of one; blank lines do not count.

    Raises:
        ConfigError: The file cannot be read, a line is no key, or stands twice, or names no sample.
    """
    keys, digests = _read_list(path)
    column = dataset.samples.column("sample_key")
    wanted = np.array(sorted(keys), "S") if keys else np.zeros(0, "S1")
    is_found = np.zeros(len(wanted), bool)
    seen: set[bytes] = set()

    def choose(start: int, stop: int) -> NDArray[np.bool_]:
        inside = np.zeros(stop - start, bool)
        for span in spans:
            inside[max(span.start - start, 0) : max(span.stop - start, 0)] = True
        block = column[start:stop]
        chosen = np.zeros(len(block), bool)
        if len(wanted):
            place = np.minimum(np.searchsorted(wanted, block), len(wanted) - 1)
            chosen = (wanted[place] == block) & inside
            is_found[place[chosen]] = True
        if digests:
            hits = [hashlib.sha256(key).digest() for key in block.tolist()]
            is_listed = np.array([hit in digests for hit in hits], bool) & inside
            seen.update(hits[number] for number in np.flatnonzero(is_listed).tolist())
            chosen |= is_listed
        return chosen

    rows = select_rows(range(spans[0].start, spans[-1].stop), choose)
    num_missing = len(wanted) - int(is_found.sum()) + len(digests) - len(seen)
    if num_missing:
        unknown = next(iter(wanted[~is_found].tolist()), b"")
        example = f"{unknown.decode('ascii')} the first" if unknown else "all of them as digests"
        raise ConfigError(
            f"every line of a key list must be a sample of the split, got {num_missing:,} that are not, "
            f"{example} ({path.name}); correct the list or the split."
        )
    return rows


def _read_list(path: Path) -> tuple[set[bytes], set[bytes]]:
    """Return the keys of a list, and the digests."""
    keys: set[bytes] = set()
    digests: set[bytes] = set()
    for number, line in _lines(path):
        if line.startswith(_DIGEST_PREFIX):
            digest = line.removeprefix(_DIGEST_PREFIX)
            if not _DIGEST.fullmatch(digest):
                raise ConfigError(
                    f"a digest in a key list must be 64 hexadecimal digits, got {len(digest)} characters "
                    f"(line {number} of {path.name}); correct it."
                )
            target, entry = digests, bytes.fromhex(digest)
        elif SAMPLE_KEY_PATTERN.fullmatch(line):
            target, entry = keys, line.encode("ascii")
        else:
            # Not repeated: a file that is no key list may hold anything.
            raise ConfigError(
                f"a line of a key list must be a sample key, got {len(line)} characters that are none (line "
                f"{number} of {path.name}); sample keys are 1 to 64 of a-z and 0-9."
            )
        if entry in target:
            raise ConfigError(
                f"a key list must name a sample once, got {line} a second time (line {number} of "
                f"{path.name}); remove the line."
            )
        target.add(entry)
    both = next((key for key in keys if digests and hashlib.sha256(key).digest() in digests), None)
    if both is not None:
        raise ConfigError(
            f"a key list must name a sample once, got {both.decode('ascii')} as key and as digest "
            f"({path.name}); remove one."
        )
    if not keys and not digests:
        raise ConfigError(f"a key list must hold at least one line, got none ({path.name}); correct it.")
    return keys, digests


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, and their numbers from 1."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except FileNotFoundError:
        raise ConfigError(
            f"the key list of a subset must exist, got no file of the name {path.name!r}; correct the path."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the key list of a subset must be a text file that can be read, got {type(error).__name__} "
            f"({path.name}); check it."
        ) from None
