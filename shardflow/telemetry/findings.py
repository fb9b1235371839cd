"""What was concluded from intervals, as lines of ``metrics.jsonl``: verdicts, and moves of the tuner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from shardflow.telemetry.intervals import mapping_of, number_of

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
        """Return the verdict of a line.

        Raises:
            TypeError, ValueError: A field is missing, or of another kind.
        """
        evidence, advice = mapping_of(value.get("evidence") or {}), value.get("advice") or ()
        if not isinstance(advice, list | tuple):
            raise TypeError("advice must be a list")
        return cls(
            global_step=_step_of(value),
            code=_text_of(value, "code"),
            text=_text_of(value, "text"),
            share=float(number_of(value.get("share") or 0.0)),
            evidence={str(name): float(number_of(one)) for name, one in evidence.items() if one is not None},
            advice=tuple(_advice_of(mapping_of(one)) for one in advice),
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
        """Return the move of a line.

        Raises:
            TypeError, ValueError: A field is missing, or of another kind.
        """
        names = ("setting", "old", "new", "text")
        return cls(
            global_step=_step_of(value),
            kind=_text_of(value, "kind"),  # type: ignore[arg-type]
            rate_before=float(number_of(value.get("rate_before") or 0.0)),
            rate_after=float(number_of(value.get("rate_after") or 0.0)),
            **{name: _text_of(value, name, "") for name in names},
        )


def _advice_of(value: Mapping[str, Any]) -> Advice:
    return Advice(
        text=_text_of(value, "text"),
        **{name: _text_of(value, name, "") for name in ("setting", "old", "new")},
        gain=float(number_of(value.get("gain") or 0.0)),
    )


def _step_of(value: Mapping[str, Any]) -> int:
    return int(number_of(value.get("global_step")))


def _text_of(value: Mapping[str, Any], name: str, default: str | None = None) -> str:
    found = value.get(name, default)
    if not isinstance(found, str):
        raise TypeError("a text must be one")
    return found
