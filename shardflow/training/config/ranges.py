"""Ranges that several settings share.

Owns the annotated number types of the tables; each is checked by ``shardflow.configs.check_fields``.
"""

from __future__ import annotations

from typing import Annotated

from shardflow.configs import Bounds

__all__ = ["Count", "CountOrZero", "Seconds", "SecondsOrZero", "Share"]

Count = Annotated[int, Bounds(1)]
CountOrZero = Annotated[int, Bounds(0)]
_LONGEST_S = 10_000_000.0  # four months; what is far above no clock of the system takes
Seconds = Annotated[float, Bounds(0.1, _LONGEST_S)]
SecondsOrZero = Annotated[float, Bounds(0.0, _LONGEST_S)]
Share = Annotated[float, Bounds(0.0, 1.0)]
