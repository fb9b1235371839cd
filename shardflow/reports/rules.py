"""What the rules are, as a digest: equal digests read equal reports equally."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

__all__ = ["RULES_VERSION", "rules_digest"]

RULES_VERSION: Final = 2
"""Raised whenever a rule in code reads some text otherwise than before; the tables speak for themselves."""

_TABLES: Final = ("anatomy.csv", "cues.csv", "findings.csv", "headers.csv")


@cache
def rules_digest() -> str:
    """Return the SHA-256 of the shipped tables and the version of the rules."""
    hasher = hashlib.sha256(f"rules {RULES_VERSION}\n".encode("ascii"))
    for name in _TABLES:
        data = files("shardflow.reports").joinpath(name).read_bytes()
        hasher.update(f"{name} {len(data)}\n".encode("ascii"))
        hasher.update(data)
    return hasher.hexdigest()
