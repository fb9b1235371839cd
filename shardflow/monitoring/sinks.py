"""A run's numbers for services that keep experiments: read from its file, in a thread, at leisure.

The loop writes ``metrics.jsonl`` and knows of nothing here. A thread a service reads what was appended and
hands it on; a service that fails, or does not answer, costs a warning and its own numbers, never a step. Only
numbers go out, and settings that are no places: no path, no address, no text that somebody wrote.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, TypeGuard

from shardflow.errors import ConfigError
from shardflow.monitoring.lines import MetricsLine
from shardflow.monitoring.settings import read_settings
from shardflow.monitoring.tail import EventTail
from shardflow.storage import write_atomic
from shardflow.telemetry import Interval, Verdict

__all__ = ["SINKS", "Record", "Sink", "SinkFollower", "record_of", "require_sinks", "shareable_settings"]

_LOGGER = logging.getLogger(__name__)

SINKS: Final = {"wandb": "wandb", "mlflow": "mlflow"}
"""Names of sinks, and the module that each needs."""
_POLL_S: Final = 2.0
_CLOSE_S: Final = 60.0
"""How long the end of a run waits for sinks at most."""
_NUMBERED: Final = frozenset({"step", "evaluation", "checkpoint"})
"""Events whose keys are numbers themselves."""
_NO_NUMBERS: Final = frozenset({"event", "time_s", "attempt", "global_step"})
_WORD: Final = re.compile(r"[A-Za-z0-9_.+-]{0,64}")
_PLACES: Final = frozenset(
    {
        "cache.directory",
        "data.dataset",
        "model.path",
        "monitor.prometheus",
        "run.output",
        "run.resume",
        "text.tokenizer",
    }
)
"""Settings whose value may be a place even where it looks like a word."""
_NAMES_FILE: Final = "sinks.json"
"""In the run folder: under which name each service knows the run, so that a restart goes on with it."""

Scalar = int | float | str | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Numbers of one moment of a run."""

    global_step: int
    time_s: float
    """Seconds since 1970."""
    values: Mapping[str, float]
    """By name, ``step/loss``; all finite."""


class Sink(Protocol):
    """A service that keeps experiments. All calls come from one thread, and are left alone when they hang."""

    def open(self, run: Path, name: str, settings: Mapping[str, Scalar]) -> str:
        """Begin, or go on with what is known under a name.

        Args:
            run: The run folder, where a service that keeps files may keep them.
            name: What `open` returned at an earlier start of the run; empty at the first.
            settings: Of the run, by dotted name.

        Returns:
            The name under which the service knows the run.
        """

    def write(self, records: Sequence[Record]) -> None:
        """Take numbers, in the order in which they were measured."""

    def close(self) -> None:
        """End."""


def require_sinks(names: Iterable[str]) -> None:
    """Refuse sinks that are unknown, or whose package is missing.

    Raises:
        ConfigError: One is.
    """
    for name in names:
        if name not in SINKS:
            known = ", ".join(sorted(SINKS))
            raise ConfigError(f"monitor.sinks must name some of {known}, got {name!r}; correct it.")
        if find_spec(SINKS[name]) is None:
            raise ConfigError(
                f"monitor.sinks needs the package {SINKS[name]} for {name!r}, got an environment without it; "
                f"install 'shardflow[{name}]', or leave it out."
            )


def shareable_settings(run: Path) -> dict[str, Scalar]:
    """Return a run's settings by dotted name: numbers and single words, none of them a place."""
    settings: dict[str, Scalar] = {}
    for name, value in read_settings(run).items():
        if name in _PLACES:
            continue
        if _is_plain(value):
            settings[name] = value
        elif isinstance(value, list) and all(map(_is_plain, value)):
            settings[name] = ", ".join(map(str, value))
    return settings


def _is_plain(value: object) -> TypeGuard[Scalar]:
    return isinstance(value, int | float) or (isinstance(value, str) and bool(_WORD.fullmatch(value)))


def record_of(line: MetricsLine) -> Record | None:
    """Return the numbers of a line; None for one that has none."""
    record, kind = line.record, line.event
    if kind in _NUMBERED:
        named = {f"{kind}/{name}": value for name, value in line.values.items() if name not in _NO_NUMBERS}
        step = line.values["global_step"]
    elif isinstance(record, Interval):
        named, step = dict(_numbers_of(record)), record.global_step
    elif isinstance(record, Verdict):
        named, step = {f"verdict/{record.code}": record.share}, record.global_step
    else:
        return None
    values = {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Record(global_step=step, time_s=line.time_s, values=values) if values else None


def _numbers_of(interval: Interval) -> Iterator[tuple[str, object]]:
    num_steps, wall_s = max(1, interval.num_steps), interval.wall_s
    if wall_s:
        yield "interval/steps_per_s", interval.num_steps / wall_s
        yield "interval/samples_per_s", interval.num_samples / wall_s
        yield "interval/tokens_per_s", interval.num_tokens / wall_s
    for name, stage in interval.stages.items():
        yield f"stage_s/{name}", stage.seconds / num_steps / max(1, interval.world_size)
    for name, gauge in interval.gauges.items():
        yield f"loader/{name}", gauge.mean
    for name, value in interval.settings.items():
        yield f"setting/{name}", value
    yield "memory/available_bytes", interval.available_bytes or None
    yield "memory/ranks_bytes", sum(rank.pss_bytes for rank in interval.ranks)
    yield "interval/num_masked", interval.num_masked


class SinkFollower:
    """Hands what a run writes from now on to sinks, until it is closed.

    Each sink has a thread of its own: one that fails or hangs costs its own numbers and nobody else's.

    Args:
        run: The run folder, in which this start has begun to write.
        sinks: By name.
        poll_s: How often a thread looks for what is new.
    """

    def __init__(self, run: Path, sinks: Mapping[str, Sink], *, poll_s: float = _POLL_S) -> None:
        self._ending = threading.Event()
        names = _Names(run)
        self._feeders = [
            _Feeder(run, name, sink, names, self._ending, poll_s) for name, sink in sinks.items()
        ]
        for feeder in self._feeders:
            feeder.start()

    @property
    def failed(self) -> list[str]:
        """Names of the sinks that failed, or had not taken all when this was closed."""
        return [feeder.sink_name for feeder in self._feeders if not feeder.is_well]

    def close(self, wait_s: float = _CLOSE_S) -> None:
        """Hand on the rest, and end; sinks that take longer than this, all together, are left alone."""
        self._ending.set()
        until_s = time.monotonic() + wait_s
        for feeder in self._feeders:
            feeder.join(max(0.0, until_s - time.monotonic()))
            if feeder.is_alive():
                feeder.is_well = False
                _LOGGER.warning("%s did not take the last numbers within %.0f s", feeder.sink_name, wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Feeder(threading.Thread):
    """Reads a run for one sink."""

    def __init__(
        self, run: Path, name: str, sink: Sink, names: _Names, ending: threading.Event, poll_s: float
    ) -> None:
        super().__init__(name=f"shardflow-sinks-{name}", daemon=True)
        self.sink_name, self.is_well = name, True
        self._folder, self._sink = run, sink
        self._names, self._ending, self._poll_s = names, ending, poll_s
        # Here and not in the thread: what is written after this is handed on.
        self._tail = EventTail(run, from_end=True)

    def run(self) -> None:
        try:
            known_as = self._sink.open(
                self._folder, self._names.get(self.sink_name), shareable_settings(self._folder)
            )
            self._names.put(self.sink_name, known_as)
            while not self._ending.wait(self._poll_s):
                self._hand_on()
            self._hand_on()
            self._sink.close()
        # Also what would end a process: whatever a service does, the run goes on.
        except BaseException as error:  # noqa: BLE001
            # Its text may quote addresses and names of accounts.
            _LOGGER.warning("%s failed (%s) and gets no more numbers", self.sink_name, type(error).__name__)
            self.is_well = False

    def _hand_on(self) -> None:
        records = [record for line in self._tail.read() if (record := record_of(line))]
        if records:
            self._sink.write(records)


class _Names:
    """Under which name each service knows the run; kept in its folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._known = _read_names(run)

    def get(self, name: str) -> str:
        return self._known.get(name, "")

    def put(self, name: str, known_as: str) -> None:
        with self._lock:
            self._known[name] = known_as
            write_atomic(self._run / _NAMES_FILE, [json.dumps(self._known).encode()], replace=True)


def _read_names(run: Path) -> dict[str, str]:
    try:
        found = json.loads((run / _NAMES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def new_name() -> str:
    """Return a name that says nothing."""
    return secrets.token_hex(8)
