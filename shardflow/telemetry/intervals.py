"""Interval records: the measurements of consecutive steps over all ranks, one line of ``metrics.jsonl`` each.

Only the schema lives here: training fills the records in; monitoring judges, draws and exports them, and
JSON is all that passes between the two. Readers ignore unknown keys and supply defaults for missing ones, so
runs of other versions stay readable. Verdicts and tuner moves are records of the same file.

`Tunables` is the interface of settings that may change while a loader runs, with their values and limits.
Changing them never changes what is read or trained, or in which order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Final, Literal, Protocol, Self

_MOST: Final = 1e18
"""Numbers beyond it are nothing that was measured, and do not fit where numbers are kept."""
_MOST_WHOLE: Final = 10**18
MoveKind = Literal["propose", "try", "keep", "revert", "settle", "resume"]
"""``propose``: only observing, nothing was changed. ``resume``: settled before, and looking again."""
_MIB: Final = 1 << 20


def number_of(value: object) -> float:
    """Return a number of JSON.

    Raises:
        ValueError: It is none, or none that can have been measured.
    """
    if type(value) not in (int, float) or not -_MOST <= value <= _MOST:  # type: ignore[operator]
        raise ValueError("a number must be measured")
    return value  # type: ignore[return-value]


def mapping_of(value: object) -> Mapping[str, Any]:
    """Return an object of JSON.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, Mapping):
        raise TypeError("an object must be one")
    return value


def _whole(value: object) -> int:
    # Of whole numbers there are most, and a file may hold millions of them.
    return value if type(value) is int and -_MOST_WHOLE <= value <= _MOST_WHOLE else int(number_of(value))


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("a truth value must be one")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text must be one")
    return value


def _setting(value: object) -> int | float | str:
    return value if isinstance(value, str | bool) else number_of(value)


_READERS: Final[Mapping[str, Callable[[object], object]]] = {
    "float": number_of,
    "int": _whole,
    "bool": _truth,
    "str": _text,
}
"""By the type of a field, as it is written here."""


@cache
def _readers(kind: type) -> Mapping[str, Callable[[object], object]]:
    return {one.name: _READERS[str(one.type)] for one in fields(kind) if one.type in _READERS}


def _plain(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that are numbers, texts and truth values."""
    readers, found = _readers(kind), {}
    for name, item in mapping_of(value).items():
        read = readers.get(name)
        if read is not None and item is not None:
            found[name] = read(item)
    return found


class _FromJson:
    """Reads a frozen dataclass of plain values from a JSON object."""

    __slots__ = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the record of a JSON object, see `to_json`.

        Raises:
            TypeError, ValueError: A field is missing, or of another kind.
        """
        return cls(**_plain(cls, value))

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageNumbers(_FromJson):
    """What all ranks did in a stage."""

    seconds: float = 0.0
    """Summed over ranks and their threads."""
    num_bytes: int = 0
    num_items: int = 0
    most_seconds: float = 0.0
    """Of the rank that spent most there."""
    most_rank: int = 0
    least_seconds: float = 0.0
    """Of the rank that spent least there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaugeNumbers(_FromJson):
    """Something that goes up and down, over the ranks and the interval."""

    mean: float = 0.0
    least: float = 0.0
    most: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNumbers(_FromJson):
    """One rank's part of an interval; seconds are wall time of its loop unless said otherwise."""

    rank: int
    host: str = ""
    data_wait_s: float = 0.0
    compute_s: float = 0.0
    """Forward and backward, up to its own last gradient."""
    exchange_s: float = 0.0
    """Waiting for others' gradients: least on the rank that all others wait for."""
    optimizer_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the process and its loader processes, all threads."""
    runnable_s: float = 0.0
    """Time that its threads could have run and had no processor; 0 where the kernel does not tell."""
    gil_wait_share: float = 0.0
    """Share of the time that a thread which wants the interpreter waits for it, 0 to 1."""
    pss_bytes: int = 0
    """Memory of the process and its loader processes, shared pages counted once over all who share."""
    pinned_bytes: int = 0
    device_bytes: int = 0
    """Most memory of the device held at once; 0 on CPUs."""
    cache_ram_bytes: int = 0
    cache_disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A stretch of steps. Written by rank 0 as the event ``"interval"``."""

    global_step: int
    """Last step of the stretch."""
    num_steps: int
    epoch: int = 0
    is_warm_up: bool = False
    """Of the first step of a start, which builds connections and may compile: nothing to judge a run by."""
    wall_s: float = 0.0
    """On rank 0, since the end of the interval before: steps, checkpoints, evaluations."""
    step_s: float = 0.0
    """Sum over its steps of the slowest rank's time, as in the lines of steps."""
    slowest_wait_s: float = 0.0
    """Sum over its steps of the wait for data of the rank that waited longest, as in the lines of steps; more
    than any rank waited in all where ranks wait in turn."""
    num_samples: float = 0.0
    num_tokens: float = 0.0
    world_size: int = 1
    ranks_per_node: int = 1
    stages: Mapping[str, StageNumbers] = field(default_factory=dict)
    """By name, see `shardflow.telemetry.counters.STAGES`."""
    gauges: Mapping[str, GaugeNumbers] = field(default_factory=dict)
    """``ready_batches`` and ``buffered_bytes`` (seen when the loop takes one), ``ahead_batches`` (those
    fetched ahead of the loader, seen as it comes to one), ``fetching_bytes``, ``pinned_regions``,
    ``threads_busy`` (threads of the loader at work, as a mean)."""
    ranks: tuple[RankNumbers, ...] = ()
    """All of them up to 64; of more, the 64 with the largest ``compute_s + data_wait_s``, by rank."""
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    """The tunables as they stood at the end: ``loader.execution``, ``loader.num_threads``,
    ``loader.prefetch_bytes``, ``cache.read_ahead_bytes``, ..."""
    num_cpus: int = 1
    """Processors that the processes of a node may use, quotas counted."""
    memory_bytes: int = 0
    """Of the node, or of its cgroup."""
    available_bytes: int = 0
    """Least over the nodes at the end."""
    tier: str = "local"
    """Where the dataset lies: ``local``, or the scheme of its address."""
    total_steps: int = 0
    """Steps of the whole run; 0 where it is not known."""
    num_masked: int = 0
    """Slots whose sample could not be read, and which were masked, over all ranks."""
    events: Mapping[str, int] = field(default_factory=dict)
    """How often something happened that takes no time worth a stage, over all ranks: ``cache_fault``,
    ``cache_poisoned``, ``cache_unsound``, ``cache_ram_evicted``, ``cache_disk_evicted``."""
    cache_free_bytes: int = -1
    """Least room, over the nodes, on the disk of the cache's folder; -1 without such a folder."""

    def stage(self, name: str) -> StageNumbers:
        """Return a stage's numbers; zeros for one that did not run."""
        return self.stages.get(name) or StageNumbers()

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the line, without ``event``, ``time_s`` and ``attempt``."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the interval of a line, see `to_json`.

        Raises:
            TypeError, ValueError: A field is missing, or of another kind.
        """
        found = _plain(cls, value)
        for name, read in _PARTS.items():
            held = mapping_of(value.get(name) or {})
            found[name] = {key: read(one) for key, one in held.items() if one is not None}
        ranks = value.get("ranks") or ()
        if not isinstance(ranks, list | tuple):
            raise TypeError("ranks must be a list")
        found["ranks"] = tuple(map(RankNumbers.from_json, ranks))
        return cls(**found)


_PARTS: Final[Mapping[str, Callable[[Any], object]]] = {
    "stages": StageNumbers.from_json,
    "gauges": GaugeNumbers.from_json,
    "settings": _setting,
    "events": _whole,
}
"""Fields of an interval that hold something by its name."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TunableLimit:
    """What a setting may be on this machine, with the other settings as they are."""

    least: int = 0
    most: int = 0
    """At least ``least``; both are 0 for a setting of words."""
    choices: tuple[str, ...] = ()
    """The words of a setting of words; empty for a number."""
    is_live: bool = True
    """Whether a change acts on what runs; otherwise from the next boundary of steps or iterations on."""


class Tunables(Protocol):
    """Settings by name, as in the configuration: ``loader.num_threads``, ``cache.ram_bytes``, ..."""

    def values(self) -> dict[str, int | str]:
        """Return all settings that can be changed here, as they were set last."""

    def limits(self) -> dict[str, TunableLimit]:
        """Return what each of them may be now; what is missing cannot be changed here."""

    def set(self, name: str, value: int | str) -> None:
        """Change one. Safe from any thread.

        Raises:
            ConfigError: There is no such setting here, or the value is outside its limits; nothing changes.
        """


def size_text(num_bytes: int) -> str:
    """Write a size as a configuration may hold it, to the next MiB from 1 MiB on."""
    return f"{math.ceil(num_bytes / _MIB)}MiB" if num_bytes >= _MIB else f"{num_bytes}"


def setting_text(name: str, value: int | str) -> str:
    """Write the value of a setting for people; sizes as in a configuration."""
    text = str(value)
    return size_text(int(text)) if name.endswith("_bytes") and text.isascii() and text.isdigit() else text
