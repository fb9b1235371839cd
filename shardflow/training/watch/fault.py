"""What one rank is at, and what is wrong with one: plain values that cross between processes as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

__all__ = ["Beat", "Fault", "FaultKind"]

FaultKind = Literal["gone", "failed", "stopped", "held", "stuck", "silent"]
"""``gone``: the process ended without a word. ``failed``: it ended with an error. ``stopped``: a signal
stopped it. ``held``: it runs no Python, as where an extension keeps the interpreter's lock. ``stuck``: its
main thread does not get on. ``silent``: nothing comes from its machine."""

_FOUND = {
    "gone": "an end without a word, as by SIGKILL or for want of memory",
    "failed": "an error",
    "stopped": "a process that a signal has stopped",
    "held": "no sign of its interpreter",
    "stuck": "no progress",
    "silent": "nothing from its machine",
}
_REMEDIES = {
    "gone": "look at the kernel's log of that machine, and start again to go on",
    "failed": "look at what that rank logged",
    "stopped": "find who sent SIGSTOP, and start again to go on",
    "held": "look at its stacks in the run's folder health, and start again to go on",
    "stuck": "look at its stacks in the run's folder health, and start again to go on",
    "silent": "see whether that machine and its network are well, and start again to go on",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a rank was last seen at."""

    phase: str = "starting"
    """Such as ``"step 17, waiting for data"``."""
    phase_s: float = 0.0
    """For how long."""
    waits_for: str = ""
    """Where it waits for data: shard, tier and stage of each busy loader thread."""

    def describe(self) -> str:
        """Say it in a message."""
        text = f"{self.phase} for {self.phase_s:.0f} s"
        return f"{text}: {self.waits_for}" if self.waits_for else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The first thing that went wrong in a run."""

    kind: FaultKind
    rank: int
    host: str
    pid: int
    beat: Beat
    after_s: float = 0.0
    """For how long nothing came, where that is the fault."""
    text: str = ""
    """Of ``failed``: the error, in words that hold no identifier."""
    is_refusal: bool = False
    """Of ``failed``: a start like this one fails again, as after a wrong setting."""

    def sentence(self) -> str:
        """Say what happened, where, and what to do."""
        found = _FOUND[self.kind]
        if self.kind == "failed" and self.text:
            found = f"{found}: {self.text}"
        if self.after_s:
            found = f"{found} for {self.after_s:.0f} s"
        return (
            f"rank {self.rank} must take part to the end, got {found} (host {self.host}, process {self.pid}, "
            f"{self.beat.describe()}); {_REMEDIES[self.kind]}."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fault as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote."""
        return cls(**{**value, "beat": Beat(**value["beat"])})
