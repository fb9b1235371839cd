"""What was concluded from intervals, as lines of ``metrics.jsonl``: verdicts, and moves of the tuner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

__all__ = ["Advice", "Move", "MoveKind", "Verdict"]

MoveKind = Literal["propose", "try", "keep", "revert", "settle", "resume"]
"""``propose``: only observing, nothing was changed. ``resume``: settled before, and looking again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One thing to do."""

    text: str
    """A sentence for a person; names the setting, the old and the new value where there is one."""
    setting: str = ""
    """As in the configuration, ``loader.num_threads``; empty where it is no setting of ours."""
    old: str = ""
    new: str = ""
    gain: float = 0.0
    """Expected rate of steps over the present one, less 1: 0.25 is a quarter faster. An estimate from the
    shares of the step, not a promise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a stretch of steps was bound by. Written as the event ``"verdict"``."""

    global_step: int
    code: str
    """See `shardflow.monitoring.verdict`."""
    text: str
    """One sentence with the evidence in numbers."""
    share: float = 0.0
    """Share of the step's time that this explains, 0 to 1."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the line."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the verdict of a line."""
        return cls(
            global_step=int(value["global_step"]),
            code=str(value["code"]),
            text=str(value["text"]),
            share=float(value.get("share") or 0.0),
            evidence={str(name): float(one) for name, one in (value.get("evidence") or {}).items()},
            advice=tuple(Advice(**one) for one in value.get("advice") or ()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """What the tuner did. Written as the event ``"tune"``."""

    global_step: int
    kind: MoveKind
    setting: str = ""
    """Empty for ``settle`` and ``resume``."""
    old: str = ""
    new: str = ""
    rate_before: float = 0.0
    """Samples a second before the move."""
    rate_after: float = 0.0
    """And after it; 0 while it is not known."""
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the line."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the move of a line."""
        names = ("kind", "setting", "old", "new", "text")
        return cls(
            global_step=int(value["global_step"]),
            rate_before=float(value.get("rate_before") or 0.0),
            rate_after=float(value.get("rate_after") or 0.0),
            **{name: str(value.get(name, "")) for name in names},  # type: ignore[arg-type]
        )
