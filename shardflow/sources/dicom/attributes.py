"""The full set of technical attributes, once per stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["AttributeValue", "read_attributes"]

AttributeValue = str | int | float | list[str] | list[int] | list[float]


def read_attributes(path: Path, keywords: Sequence[str]) -> dict[str, AttributeValue]:
    """Read named attributes of one file, by DICOM keyword; absent and unreadable ones are left out.

    The values are as they stand in the file: pass them through `shardflow.deid.allowlist` before anything else.
    """
    raise NotImplementedError
