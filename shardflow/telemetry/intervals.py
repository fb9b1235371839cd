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
"""Largest number accepted: nothing measured is larger, and consumers store 64-bit numbers."""
_MOST_INTEGER: Final = 10**18
MoveKind = Literal["propose", "try", "keep", "revert", "settle", "resume"]
"""``propose``: observing only, nothing was changed. ``resume``: settled before, now searching again."""
_MIB: Final = 1 << 20


class _JsonRecord:
    """A frozen dataclass that is written to and read from a JSON object."""

    __slots__ = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; unknown keys are ignored, missing and null ones get their defaults.

        Raises:
            TypeError, ValueError: A field without a default is missing, or a value has the wrong type.
        """
        kind: type = cls
        readers, found = _readers(kind), {}
        for name, item in _mapping(value).items():
            read = readers.get(name)
            if read is not None and item is not None:
                found[name] = read(item)
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageNumbers(_JsonRecord):
    """Totals of a stage over all ranks."""

    seconds: float = 0.0
    """Summed over ranks and their threads."""
    num_bytes: int = 0
    num_items: int = 0
    most_seconds: float = 0.0
    """Of the rank that spent the most time there."""
    most_rank: int = 0
    least_seconds: float = 0.0
    """Of the rank that spent the least time there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaugeNumbers(_JsonRecord):
    """Mean and extremes of a gauge, over the ranks and the interval."""

    mean: float = 0.0
    least: float = 0.0
    most: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNumbers(_JsonRecord):
    """One rank's part of an interval; seconds are wall time of its loop unless stated otherwise."""

    rank: int
    host: str = ""
    data_wait_s: float = 0.0
    compute_s: float = 0.0
    """Forward and backward, up to its own last gradient."""
    exchange_s: float = 0.0
    """Waiting for other ranks' gradients: shortest on the rank that all others wait for."""
    optimizer_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the process and its loader processes, all threads."""
    runnable_s: float = 0.0
    """Time that its threads were runnable but had no processor; 0 if the kernel does not report it."""
    gil_wait_share: float = 0.0
    """Share of the time that a thread which needs the GIL waits for it, 0 to 1."""
    pss_bytes: int = 0
    """Proportional set size of the process and its loader processes: a shared page counts by its share."""
    pinned_bytes: int = 0
    device_bytes: int = 0
    """Peak memory of the device; 0 on CPUs."""
    cache_ram_bytes: int = 0
    cache_disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval(_JsonRecord):
    """Measurements of consecutive steps. Written by rank 0 as the event ``"interval"``."""

    global_step: int
    """Last step of the interval."""
    num_steps: int
    epoch: int = 0
    is_warm_up: bool = False
    """Whether this is the first step of a start, which builds connections and may compile; not judged."""
    wall_s: float = 0.0
    """On rank 0, since the end of the previous interval: steps, checkpoints, evaluations."""
    step_s: float = 0.0
    """Sum over its steps of the slowest rank's time, as in the step events."""
    slowest_wait_s: float = 0.0
    """Sum over its steps of the longest wait for data of any rank, as in the step events; more than any one
    rank waited in total if ranks wait in turn."""
    num_samples: float = 0.0
    num_tokens: float = 0.0
    world_size: int = 1
    ranks_per_node: int = 1
    stages: Mapping[str, StageNumbers] = field(default_factory=dict)
    """By name, see `shardflow.telemetry.measures.STAGES`."""
    gauges: Mapping[str, GaugeNumbers] = field(default_factory=dict)
    """``ready_batches`` and ``buffered_bytes`` (sampled when the loop takes a batch), ``ahead_batches``
    (prefetched into the cache, sampled when the loader reaches one), ``fetching_bytes``, ``pinned_regions``,
    ``threads_busy`` (mean number of busy loader threads)."""
    ranks: tuple[RankNumbers, ...] = ()
    """All ranks, up to 64; of more, the 64 with the largest ``compute_s + data_wait_s``, by rank."""
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    """The tunables at the end of the interval: ``loader.execution``, ``loader.num_threads``,
    ``loader.prefetch_bytes``, ``cache.read_ahead_bytes``, ..."""
    num_cpus: int = 1
    """Processors that the processes of a node may use, including quotas."""
    memory_bytes: int = 0
    """Memory of the node, or of its cgroup."""
    available_bytes: int = 0
    """Minimum over the nodes at the end of the interval."""
    tier: str = "local"
    """Where the dataset is stored: ``local``, or the scheme of its URL."""
    total_steps: int = 0
    """Steps of the whole run; 0 if unknown."""
    num_masked: int = 0
    """Slots masked because their sample could not be read, over all ranks."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Counts of events too short to be a stage, over all ranks: ``service_local`` (micro-batches that no data
    server delivered), ``service_resent`` (requests that went to another one), ``cache_fault``,
    ``cache_poisoned``, ``cache_unsound``, ``cache_ram_evicted``, ``cache_disk_evicted``."""
    cache_free_bytes: int = -1
    """Minimum over the nodes of the free space on the disk of the cache folder; -1 without one."""

    def stage(self, name: str) -> StageNumbers:
        """Return a stage's numbers; zeros for one that did not run."""
        return self.stages.get(name) or StageNumbers()


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice(_JsonRecord):
    """One recommended action."""

    text: str
    """A sentence for a person; names the setting, the old and the new value where there is one."""
    setting: str = ""
    """As in the configuration, ``loader.num_threads``; empty if it is not a setting of shardflow."""
    old: str = ""
    new: str = ""
    gain: float = 0.0
    """Expected step rate over the current one, minus 1: 0.25 is a quarter faster. Estimated from the shares
    of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(_JsonRecord):
    """What limited the speed of an interval. Written as the event ``"verdict"``."""

    global_step: int
    code: str
    """See `shardflow.monitoring.verdict`."""
    text: str
    """One sentence with the evidence in numbers."""
    share: float = 0.0
    """Share of the step's time that this explains, 0 to 1."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Move(_JsonRecord):
    """An action of the tuner. Written as the event ``"tune"``."""

    global_step: int
    kind: MoveKind
    setting: str = ""
    """Empty for ``settle`` and ``resume``."""
    old: str = ""
    new: str = ""
    rate_before: float = 0.0
    """Samples per second before the move."""
    rate_after: float = 0.0
    """Samples per second after the move; 0 while unknown."""
    text: str = ""


# ---- reading JSON --------------------------------------------------------------------------------


def _number(value: object) -> float:
    if type(value) not in (int, float) or not -_MOST <= value <= _MOST:  # type: ignore[operator]
        raise ValueError("expected a finite number")
    return value  # type: ignore[return-value]


def _integer(value: object) -> int:
    # The fast path: most values are integers, and a file may hold millions of them.
    return value if type(value) is int and -_MOST_INTEGER <= value <= _MOST_INTEGER else int(_number(value))


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


def _setting(value: object) -> int | float | str:
    return value if isinstance(value, str | bool) else _number(value)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("expected an object")
    return value


def _by_name(read: Callable[[Any], object]) -> Callable[[object], object]:
    """Return a reader of objects that hold something by its name."""
    return lambda value: {name: read(item) for name, item in _mapping(value).items() if item is not None}


def _each(read: Callable[[Any], object]) -> Callable[[object], object]:
    """Return a reader of lists."""

    def read_all(value: object) -> object:
        if not isinstance(value, list | tuple):
            raise TypeError("expected a list")
        return tuple(map(read, value))

    return read_all


_READERS: Final[Mapping[str, Callable[[Any], object]]] = {
    "float": _number,
    "int": _integer,
    "bool": _boolean,
    "str": _text,
    "MoveKind": _text,
    "Mapping[str, float]": _by_name(_number),
    "Mapping[str, int]": _by_name(_integer),
    "Mapping[str, int | float | str]": _by_name(_setting),
    "Mapping[str, StageNumbers]": _by_name(StageNumbers.from_json),
    "Mapping[str, GaugeNumbers]": _by_name(GaugeNumbers.from_json),
    "tuple[RankNumbers, ...]": _each(RankNumbers.from_json),
    "tuple[Advice, ...]": _each(Advice.from_json),
}
"""Readers by the annotation of a field, as it is written in this module."""


@cache
def _readers(kind: type) -> Mapping[str, Callable[[Any], object]]:
    return {one.name: _READERS[str(one.type)] for one in fields(kind)}


# ---- tunables ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TunableLimit:
    """Allowed values of a setting on this machine, given the current values of the others."""

    least: int = 0
    most: int = 0
    """At least ``least``; both are 0 for a setting with choices."""
    choices: tuple[str, ...] = ()
    """Allowed words; empty for a number."""
    is_live: bool = True
    """Whether a change takes effect at once; otherwise at the next step or iteration."""


class Tunables(Protocol):
    """Settings by name, as in the configuration: ``loader.num_threads``, ``cache.ram_bytes``, ..."""

    def values(self) -> dict[str, int | str]:
        """Return the current value of every tunable."""

    def limits(self) -> dict[str, TunableLimit]:
        """Return the current limits of each tunable; a missing one cannot be changed here."""

    def set(self, name: str, value: int | str) -> None:
        """Change a tunable. Safe from any thread.

        Raises:
            ConfigError: There is no such tunable, or the value is outside its limits; nothing changes.
        """


def size_text(num_bytes: int) -> str:
    """Format a size as in a configuration file, rounded up to MiB from 1 MiB on."""
    return f"{math.ceil(num_bytes / _MIB)}MiB" if num_bytes >= _MIB else f"{num_bytes}"


def setting_text(name: str, value: int | str) -> str:
    """Format the value of a setting for people; sizes as in a configuration file."""
    text = str(value)
    return size_text(int(text)) if name.endswith("_bytes") and text.isascii() and text.isdigit() else text
