"""A run's numbers for services that keep experiments: read from its file, in a thread, at leisure.

The loop writes ``metrics.jsonl`` and knows of nothing here. A thread reads what was appended and hands it
on; a service that fails, or does not answer, costs a warning and its own numbers, never a step. Only numbers
go out, and settings that are no places: no path, no address, no text that somebody wrote.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeGuard

from shardflow.errors import ConfigError
from shardflow.monitoring.tail import EventTail
from shardflow.monitoring.verdict import read_settings
from shardflow.storage import write_atomic
from shardflow.telemetry import Interval, Verdict

__all__ = ["SINKS", "Record", "Sink", "SinkFollower", "record_of", "require_sinks", "shareable_settings"]

_LOGGER = logging.getLogger(__name__)

SINKS: Final = {"wandb": "wandb", "mlflow": "mlflow"}
"""Names of sinks, and the module that each needs."""
_POLL_S: Final = 2.0
_CLOSE_S: Final = 60.0
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
    """A service that keeps experiments. All calls come from one thread."""

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


def record_of(event: Mapping[str, Any]) -> Record | None:
    """Return the numbers of an event; None for one that has none."""
    kind = str(event["event"])
    match kind:
        case "step" | "evaluation" | "checkpoint":
            named = {f"{kind}/{name}": value for name, value in event.items() if name not in _NO_NUMBERS}
        case "interval":
            named = dict(_numbers_of(Interval.from_json(event)))
        case "verdict":
            verdict = Verdict.from_json(event)
            named = {f"verdict/{verdict.code}": verdict.share}
        case _:
            return None
    values = {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    time_s = float(event.get("time_s") or 0.0)
    return Record(global_step=int(event["global_step"]), time_s=time_s, values=values) if values else None


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

    Args:
        run: The run folder, in which this start has begun to write.
        sinks: By name.
    """

    def __init__(self, run: Path, sinks: Mapping[str, Sink]) -> None:
        self._run = run
        self._sinks = dict(sinks)
        self._tail = EventTail(run, from_end=True)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="shardflow-sinks", daemon=True)
        self._thread.start()

    def close(self, wait_s: float = _CLOSE_S) -> None:
        """Hand on the rest, and end; a sink that takes longer than this is left alone."""
        self._ending.set()
        self._thread.join(wait_s)
        if self._thread.is_alive():
            _LOGGER.warning("%s did not take the last numbers within %.0f s", ", ".join(self._sinks), wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self) -> None:
        settings, names = shareable_settings(self._run), _read_names(self._run)
        for name, sink in list(self._sinks.items()):
            # The default keeps the loop's variables as they are now.
            self._attempt(
                name,
                lambda sink=sink, name=name: self._open(sink, name, names, settings),  # type: ignore[misc]
            )
        while not self._ending.wait(_POLL_S):
            self._hand_on()
        self._hand_on()
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.close)

    def _open(self, sink: Sink, name: str, names: dict[str, str], settings: Mapping[str, Scalar]) -> None:
        names[name] = sink.open(self._run, names.get(name, ""), settings)
        write_atomic(self._run / _NAMES_FILE, [json.dumps(names).encode()], replace=True)

    def _hand_on(self) -> None:
        records = [record for event in self._tail.read() if (record := record_of(event))]
        if records:
            for name, sink in list(self._sinks.items()):
                self._attempt(name, lambda sink=sink: sink.write(records))  # type: ignore[misc]

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a service does, the run goes on
            # Its text may quote addresses and names of accounts.
            _LOGGER.warning("%s failed (%s) and gets no more numbers", name, type(error).__name__)
            self._sinks.pop(name, None)


def _read_names(run: Path) -> dict[str, str]:
    try:
        found = json.loads((run / _NAMES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def new_name() -> str:
    """Return a name that says nothing."""
    return secrets.token_hex(8)
