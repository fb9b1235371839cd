"""One line of the doctor's: what must hold, what was found, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Level", "error", "fine", "warning"]

Level = Literal["ok", "warning", "error"]
"""``error``: the job will fail, hang, or do something else than was meant. ``warning``: it may, or it wastes
something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one rule found."""

    level: Level
    topic: str
    """A variable, a limit, a package."""
    must: str
    """What must hold."""
    found: str
    fix: str
    """What to do; empty where all is well."""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)


def fine(topic: str, must: str, found: str) -> Finding:
    """A rule that holds."""
    return Finding(level="ok", topic=topic, must=must, found=found, fix="")


def warning(topic: str, must: str, found: str, fix: str) -> Finding:
    """A rule that does not hold, though the job may run."""
    return Finding(level="warning", topic=topic, must=must, found=found, fix=fix)


def error(topic: str, must: str, found: str, fix: str) -> Finding:
    """A rule that does not hold, and the job suffers."""
    return Finding(level="error", topic=topic, must=must, found=found, fix=fix)
