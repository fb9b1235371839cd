"""Inputs and outputs of the tuner: step numbers and their windows, starting values, and ``tuned.toml``.

The rate of a window is the sustainable one: it excludes micro-batches taken from buffers, or made from bytes
fetched long before. Otherwise a loop that drains its buffers would look as fast as one whose loader keeps up.
Starting values suit the machine before anything is measured; the settings that a tuner found are written as
TOML, for people to read and paste.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardflow.errors import ConfigError, os_reason
from shardflow.telemetry import STAGES

_FETCH: Final = tuple(
    name
    for name, stage in STAGES.items()
    if stage.group == "fetch" and not stage.is_part_of and name != "cache_origin"
)
_MAKE: Final = tuple(name for name, stage in STAGES.items() if stage.group == "make")
_MOST_DRAINED: Final = 0.95
_RESTS: Final = 0.05
"""Share of their time below which threads have nothing to do, whatever the reason."""
_LEAST_MADE: Final = 0.5
"""Least production, as a share of consumption, from which a need for threads can be estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTotals:
    """Work of a loader since it was created; seconds are summed over its threads."""

    fetch_s: float = 0.0
    make_s: float = 0.0
    user_s: float = 0.0
    """Of ``make_s``: the user's own transform."""
    origin_s: float = 0.0
    """Waits of read-ahead threads for the store behind the cache."""
    num_ready: float = 0.0
    """Finished micro-batches that the loop has not taken."""
    num_ahead: float = 0.0
    """Fetched micro-batches that no thread has begun."""

    @classmethod
    def of(cls, snapshot: Mapping[str, Mapping[str, float]]) -> LoaderTotals:
        """Return the totals of a snapshot of counters, see `shardflow.telemetry.measures.StageCounters`."""

        def seconds(*names: str) -> float:
            return sum(snapshot[name]["seconds"] for name in names if name in snapshot)

        return cls(
            fetch_s=seconds(*_FETCH),
            make_s=seconds(*_MAKE),
            user_s=seconds("user_transform"),
            origin_s=seconds("cache_origin"),
            num_ready=snapshot.get("ready_batches", {}).get("last", 0.0),
            num_ahead=snapshot.get("ahead_batches", {}).get("last", 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """One step, as the rank that decides sees it."""

    step_s: float
    """Wall time, waiting for data included."""
    data_wait_s: float
    """Of the rank that waited longest."""
    num_samples: float = 0.0
    num_micro_batches: int = 1
    """That this rank took."""
    loader: LoaderTotals = field(default_factory=LoaderTotals)
    """At the end of the step."""
    gil_wait_share: float = 0.0
    """As last measured, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Steps in a row under the same settings."""

    num_steps: int
    rate: float
    """Steps a second that can last."""
    error: float
    """Standard error of the rate, as a share of it."""
    samples_per_s: float
    """At that rate."""
    wait_share: float
    """Share of the steps' time that the loop waits for data, or will once the buffers are empty."""
    drained: float
    """Share of the micro-batches that were made or fetched before the window, 0 to 1."""
    num_fetching: float
    """Threads of the loader that read, on average; 1.5 of 2 is one and a half."""
    num_making: float
    """Threads of the loader that check, decode, transform."""
    num_needed: float
    """Threads that are busy if production equals consumption; infinite if too little was made to tell."""
    user_share: float
    """Of their making: the user's own transform."""
    origin_share: float
    """Of the steps' time that the store behind the cache was waited for, summed over the threads that read
    ahead: above 1 where several wait."""
    gil_wait_share: float

    @property
    def is_fetching(self) -> bool:
        """Whether fetching occupies more threads than making micro-batches."""
        return self.num_fetching > self.num_making

    @property
    def num_busy(self) -> float:
        """Threads of the loader at work, on average."""
        return self.num_fetching + self.num_making


def measure_window(before: LoaderTotals, steps: Sequence[StepNumbers], num_threads: int = 1) -> Window:
    """Measure a window.

    Args:
        before: The loader at the end of the step before.
        steps: At least one.
        num_threads: Of the loader.
    """
    num, seconds = len(steps), sum(step.step_s for step in steps)
    waited = sum(min(step.data_wait_s, step.step_s) for step in steps)
    after = steps[-1].loader
    wall_s = max(seconds, 1e-9)
    fetching_s = max(0.0, after.fetch_s - before.fetch_s)
    making_s = max(0.0, after.make_s - before.make_s)
    num_busy = (fetching_s + making_s) / wall_s
    # Production = consumption minus the fall of the ready micro-batches; fetching falls short of production
    # by the fall of the fetched ones. A loader with idle threads makes less than it can: the epoch is ending,
    # or its bound on bytes became smaller.
    taken = [step.num_micro_batches for step in steps]
    num_taken = max(1, sum(taken))
    seen = [before, *(step.loader for step in steps)]
    num_made = num_taken - _fall([one.num_ready for one in seen], taken)
    busy_share = min(1.0, num_busy / num_threads)
    could_make = num_made / busy_share if busy_share > _RESTS else num_taken
    fallen = max(0.0, num_taken - could_make) + _fall([one.num_ahead for one in seen], taken)
    drained = min(_MOST_DRAINED, fallen / num_taken)
    rate = num / wall_s * (1 - drained)
    own_s = (seconds - waited) / num
    return Window(
        num_steps=num,
        rate=rate,
        error=_error([step.step_s for step in steps]),
        samples_per_s=sum(step.num_samples for step in steps) / num * rate,
        wait_share=max(0.0, 1 - rate * own_s),
        drained=drained,
        num_fetching=fetching_s / wall_s,
        num_making=making_s / wall_s,
        num_needed=num_busy * num_taken / num_made if num_made > _LEAST_MADE * num_taken else math.inf,
        user_share=max(0.0, after.user_s - before.user_s) / max(making_s, 1e-9),
        origin_share=max(0.0, after.origin_s - before.origin_s) / wall_s,
        gil_wait_share=steps[-1].gil_wait_share,
    )


def _fall(seen: Sequence[float], taken: Sequence[int]) -> float:
    """Return the fall of a level, by a least-squares line through its observations; 0 if it rises.

    A single observation is off by as much as a window's fall. A level that falls by more than was taken was
    reset: a new epoch's stream begins empty.
    """
    level, levels = seen[0], [seen[0]]
    for old, new, most in zip(seen, seen[1:], taken, strict=False):
        level += max(new - old, -most)
        levels.append(level)
    num, middle = len(levels), (len(levels) - 1) / 2
    mean = sum(levels) / num
    spread = sum((place - middle) ** 2 for place in range(num))
    slope = sum((place - middle) * (level - mean) for place, level in enumerate(levels)) / spread
    return max(0.0, -slope * (num - 1))


def _error(seconds: Sequence[float]) -> float:
    """Return the standard error of the mean as a share of it."""
    num = len(seconds)
    mean = sum(seconds) / num
    if num < 2 or mean <= 0:
        return 1.0
    variance = sum((one - mean) ** 2 for one in seconds) / (num - 1)
    return math.sqrt(variance / num) / mean


_MIB: Final = 1 << 20
_MOST_THREADS: Final = 8
"""Threads to start with: few jobs need more, and those search for it."""
_MOST_PREFETCH: Final = 1024 * _MIB
_READY: Final = 4
"""Micro-batches that each thread may have under way or ready: more shows no effect in a window."""
_SHARE: Final = 1 / 8
"""Share of the free memory for buffered batches of all loaders of a node; their pools take as much again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Resources of a node for its ranks."""

    num_cpus: float
    """Processors that they may use together, quotas counted."""
    available_bytes: int
    """Memory that is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """Properties of the data to load."""

    micro_batch_bytes: int = 0
    """In the memory of the host; 0 where that is not known."""
    has_images: bool = True
    is_remote: bool = False


def default_settings(machine: MachineFacts, ranks_per_node: int, data: DataFacts) -> dict[str, int | str]:
    """Return defaults by name, for settings that nobody has set.

    A processor stays with each rank's loop; the loader gets the others, up to eight. Text alone is read by
    one thread. A remote store wants more requests than threads, so reading ahead gets sixteen.

    Example:
        >>> machine = MachineFacts(num_cpus=64, available_bytes=1 << 39)
        >>> default_settings(machine, 8, DataFacts(micro_batch_bytes=16 << 20))
        {'loader.num_threads': 7, 'loader.prefetch_bytes': 536870912}
    """
    num_ranks = max(1, ranks_per_node)
    num_threads = max(1, min(_MOST_THREADS, int(machine.num_cpus / num_ranks) - 1)) if data.has_images else 1
    most = min(_MOST_PREFETCH, int(machine.available_bytes * _SHARE / num_ranks))
    wanted = (num_threads + 1) * _READY * data.micro_batch_bytes or 256 * _MIB
    prefetch = max(16 * _MIB, min(most, wanted))
    found: dict[str, int | str] = {
        "loader.num_threads": num_threads,
        "loader.prefetch_bytes": prefetch,
    }
    if data.is_remote:
        found["cache.read_ahead_threads"] = 16
    return found


TUNED_FILE: Final = "tuned.toml"
"""In the run folder."""
_MOST_BYTES: Final = 1 << 20
"""A longer file is something else, such as a shard."""


def tuned_text(values: Mapping[str, int | str]) -> str:
    """Write settings as tables of TOML, sorted."""
    lines = ["# Found by the tuner. [loader] and [cache] can go into a configuration as they are."]
    table = ""
    for dotted, value in sorted(values.items()):
        head, _, name = dotted.partition(".")
        if head != table:
            table = head
            lines += ["", f"[{table}]"]
        lines.append(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}")
    return "\n".join(lines) + "\n"


def read_tuned(path: Path) -> dict[str, int | str]:
    """Read what `tuned_text` wrote.

    Raises:
        ConfigError: There is no such file, or it is another one.
    """
    try:
        with path.open("rb") as file:
            tree = tomllib.loads(file.read(_MOST_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"a file of tuned settings must be readable TOML; {path.name} is not ({os_reason(error)}). "
            "Correct it, or do without it."
        ) from None
    found: dict[str, int | str] = {}
    for table, entries in tree.items():
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(value, int | str) or isinstance(value, bool):
                raise ConfigError(
                    f"tuned settings must be numbers or words; {table}.{name} in {path.name} is neither. "
                    "Correct it, or remove it."
                )
            found[f"{table}.{name}"] = value
    if not found:
        raise ConfigError(f"{path.name} holds no tuned settings in tables; correct it, or do without it.")
    return found
