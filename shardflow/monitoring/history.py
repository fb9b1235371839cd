"""History of a run: its settings, and the records of its ``metrics.jsonl``.

Each step is kept once, as its latest start measured it; what a later start repeated is dropped, as in
`shardflow.training.metrics.read_metrics`. `RunFile` reads a file twice, first for the lines of starts, which
determine what is repeated, so that memory does not grow with the run. Invariant: following a file gives the
same records as reading it again from the start.

A file may hold lines that a kill truncated, that another version wrote, or that a disk or an editor damaged.
A line that does not match its event's schema is damaged: every reader skips the same ones and counts them.
Unknown events are not damage, and neither are missing keys that have a default. An incomplete last line waits
for the next call of `MetricsTail`, which follows the file while it grows.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from shardflow.errors import ConfigError, StorageError, os_reason
from shardflow.telemetry import Interval, Move, Verdict

CONFIG_FILE: Final = "resolved_config.toml"
"""In a run folder."""
METRICS_FILE: Final = "metrics.jsonl"
"""In a run folder."""
MOST_LINE_BYTES: Final = 16 << 20
"""A longer line is damaged: it is a file of something else, or one whose line ends are gone."""

_CHUNK_BYTES: Final = 1 << 20
_MOST: Final = 1e18
"""Numbers beyond it are damage; all below fit into 64 bits."""
_MOST_TIME_S: Final = 253_402_300_799.0
"""The end of the year 9999, the last one that a calendar here knows."""
_CONTROLS: Final = dict.fromkeys(
    # Controls, which a terminal obeys, and halves of characters, which no file takes.
    [*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)],
    "\N{REPLACEMENT CHARACTER}",
)


class MetricsLine(NamedTuple):
    """A line that matches its event's schema."""

    event: str
    time_s: float
    """When it was written, seconds since 1970."""
    values: dict[str, Any]
    """All keys of the line, and those with defaults that it lacks."""
    record: Interval | Verdict | Move | None = None
    """The record of an ``interval``, ``verdict`` or ``tune`` line."""


_NEEDED: Final = object()
"""In place of a default: a line without the key is damaged."""


class _Field(NamedTuple):
    """Type and bounds of a key."""

    types: tuple[type, ...]
    default: object = _NEEDED
    """For a key that is missing, or null: a number that was not finite."""
    least: float = 0.0


def _whole(default: object = _NEEDED) -> _Field:
    return _Field((int,), default)


def _amount(default: object = _NEEDED) -> _Field:
    return _Field((int, float), default)


_REAL: Final = _Field((int, float), None, -_MOST)
_FIELDS: Final[Mapping[str, Mapping[str, _Field]]] = {
    "attempt": {"start": _whole(), "attempt": _whole(1)},
    "plan": {"num_steps": _whole()},
    "end": {"global_step": _whole(0)},
    "step": {
        "global_step": _whole(),
        "step_s": _amount(),
        "attempt": _whole(1),
        "epoch": _whole(0),
        "data_wait_s": _amount(0.0),
        "num_samples": _amount(0.0),
        "num_tokens": _amount(0.0),
        "loss": _REAL,
        "gradient_norm": _REAL,
        "learning_rate": _REAL,
        "loss_scale": _REAL,
    },
    "checkpoint": {
        "global_step": _whole(),
        "stall_s": _amount(),
        "write_s": _amount(0.0),
        "num_bytes": _whole(0),
    },
    "evaluation": {"global_step": _whole(), "evaluation_s": _amount(), "loss": _REAL},
}
_RECORDS: Final[Mapping[str, Callable[[Mapping[str, Any]], Interval | Verdict | Move]]] = {
    "interval": Interval.from_json,
    "verdict": Verdict.from_json,
    "tune": Move.from_json,
}


def parse_line(line: bytes) -> MetricsLine | None:
    """Parse a line, without control characters; return None for a damaged one."""
    try:
        # Decoded strictly, which json.loads of bytes is not; NaN and Infinity are no JSON.
        record = _JSON.decode(line.decode("utf-8"))
        # Controls are escaped, or begin with this byte: rare enough to search the texts only then.
        if b"\\u" in line or b"\xc2" in line:
            record = _shown(record)
        return _checked(record) if isinstance(record, dict) else None
    except (TypeError, ValueError, RecursionError):
        return None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_JSON: Final = json.JSONDecoder(parse_constant=_no_number)


def _checked(record: dict[str, Any]) -> MetricsLine | None:
    event, time_s = record.get("event"), record.get("time_s")
    if type(event) is not str or type(time_s) not in (int, float) or not 0.0 <= time_s <= _MOST_TIME_S:  # type: ignore[operator]
        return None
    time_s = float(time_s)  # type: ignore[arg-type]
    if (read := _RECORDS.get(event)) is not None:
        found = read(record)
        return MetricsLine(event, time_s, record, found) if _can_be(found) else None
    fields = _FIELDS.get(event)
    if fields is None:
        return MetricsLine(event, time_s, record)
    for value in record.values():
        if type(value) in (int, float) and not -_MOST <= value <= _MOST:
            return None
    for name, (types, default, least) in fields.items():
        value = record.get(name)
        if value is None and default is not _NEEDED:
            record[name] = default
        elif type(value) not in types or value < least:  # type: ignore[operator]
            return None
    if event == "end" and type(record.get("outcome")) is not str:
        return None
    return MetricsLine(event, time_s, record)


def _can_be(found: Interval | Verdict | Move) -> bool:
    """Return whether the numbers used as divisors and counts are in range."""
    if isinstance(found, Interval) and (
        min(found.num_steps, found.wall_s, found.step_s, found.total_steps) < 0
        or min(found.world_size, found.ranks_per_node, found.num_cpus) < 1
    ):
        return False
    return found.global_step >= 0


def _shown(value: Any) -> Any:
    """Return a value without the characters of its texts that cannot be shown."""
    if isinstance(value, str):
        return value.translate(_CONTROLS)
    if isinstance(value, dict):
        return {_shown(name): _shown(item) for name, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value


def run_name(run: Path) -> str:
    """Return the name of a run's folder as it can be shown."""
    return run.resolve().name.translate(_CONTROLS)


def check_holds_metrics(run: Path) -> None:
    """Refuse a folder that no training run has written to.

    Raises:
        ConfigError: It holds no metrics.
    """
    if not (run / METRICS_FILE).is_file():
        raise ConfigError(
            f"RUN must be the folder of a training run; this one holds no {METRICS_FILE}. Correct the path."
        )


def refuse_dataset(run: Path) -> None:
    """Refuse the folder of a dataset, which will never hold the first line that a command waits for.

    Raises:
        ConfigError: It holds a manifest, and no metrics.
    """
    if next(run.glob("manifest-*.json"), None) is not None and not (run / METRICS_FILE).exists():
        raise ConfigError(
            "RUN must be the folder of a training run, got a dataset; see that with: shardflow info DATASET."
        )


def open_metrics(run: Path) -> BinaryIO:
    """Open the measurements of a run folder.

    Raises:
        ConfigError: It holds no metrics.
        StorageError: They cannot be read.
    """
    check_holds_metrics(run)
    try:
        return (run / METRICS_FILE).open("rb")
    except OSError as error:
        raise _unreadable(error) from None


def split_lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """Yield the whole lines from a file's position, in bounded memory.

    A last line without its end is left out: it is being written.

    Yields:
        A line without its end, None for a piece of one that is too long; and how many bytes it takes.

    Raises:
        StorageError: The file cannot be read.
    """
    rest = b""
    while chunk := _read(file):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line, len(line) + 1
        if len(rest) > MOST_LINE_BYTES:
            yield None, len(rest)
            rest = b""


def damage_note(num_damaged: int) -> str:
    """Return a sentence about lines that were left out; empty for none."""
    if not num_damaged:
        return ""
    lines = "1 damaged line was" if num_damaged == 1 else f"{num_damaged:,} damaged lines were"
    return f"{lines} left out of {METRICS_FILE}."


def _read(file: BinaryIO) -> bytes:
    try:
        return file.read(_CHUNK_BYTES)
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError) -> StorageError:
    return StorageError(
        f"{METRICS_FILE} in RUN cannot be read ({os_reason(error)}); correct its permissions, or check "
        "the disk or the network behind it."
    )


_HEAD_BYTES: Final = 256


class MetricsTail:
    """Reads what was appended to a run's measurements since the last read.

    Args:
        run: The run folder.
        from_end: Skip what the file holds already; a file that does not exist yet is read whole.

    Attributes:
        num_damaged: Lines that were left out so far.
    """

    def __init__(self, run: Path, *, from_end: bool = False) -> None:
        self._run = run
        self._path = run / METRICS_FILE
        self._offset = self._path.stat().st_size if from_end and self._path.exists() else 0
        self._head = b""
        self.num_damaged = 0

    def read(self) -> Iterator[MetricsLine]:
        """Yield the lines that were written since the last call, in bounded memory.

        Raises:
            ConfigError: The folder holds no metrics.
            StorageError: They cannot be read.
        """
        with open_metrics(self._run) as file:
            if len(self._head) < _HEAD_BYTES:
                self._head = file.read(_HEAD_BYTES)
            file.seek(self._offset)
            for line, num_bytes in split_lines(file):
                self._offset += num_bytes
                if line == b"":  # ends a line that a kill truncated
                    continue
                found = None if line is None else parse_line(line)
                if found is None:
                    self.num_damaged += 1
                else:
                    yield found

    def is_of_another_run(self) -> bool:
        """Return whether a new run was begun in the folder, so that the file is another one.

        Followers must then begin again, with a new tail.
        """
        try:
            with self._path.open("rb") as file:
                return file.read(len(self._head)) != self._head or file.seek(0, 2) < self._offset
        except OSError:
            return False  # missing or unreadable for the moment: that is no evidence


def read_settings(run: Path) -> dict[str, object]:
    """Return the settings of a run by dotted name; an empty dict if its folder holds no readable ones."""
    try:
        tables = tomllib.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(_flat(tables, ""))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


_KIND: Final = re.compile(rb'"event":\s*"(\w+)"')
_GLOBAL_STEP: Final = re.compile(rb'"global_step":\s*(\d{1,18})\b')
_NEVER: Final = 1 << 62
_BY_NUMBER: Final = ("step", "interval", "verdict", "tune")
"""Events whose ``global_step`` is the number of a step."""
_BY_STEPS_DONE: Final = ("checkpoint", "evaluation")
"""Events whose ``global_step`` is the number of steps done before them."""
_OF_A_START: Final = ("plan", "end")
"""Events that describe a start rather than a step."""


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of a run, in their order."""

    steps: tuple[int, ...]
    """Global step at which each begins."""
    _redone_from: tuple[int, ...] = ()
    """By start, the first step that a later one repeats."""

    @classmethod
    def of(cls, steps: tuple[int, ...]) -> Starts:
        """Derive which steps each start repeats from the global steps at which starts begin."""
        redone_from, lowest = [], _NEVER
        for step in reversed(steps):
            redone_from.append(lowest)
            lowest = min(lowest, step)
        return cls(steps, tuple(reversed(redone_from)))

    def counts(self, event: str, number: int, start: int) -> bool:
        """Return whether a line counts: no later start repeats it.

        Args:
            event: Its event.
            number: Its global step.
            start: Number of the start that wrote it, from 0.
        """
        last = self._redone_from[start]
        return number < last if event in _BY_NUMBER else number <= last


class RunFile:
    """The measurements of a run folder.

    Args:
        run: The run folder.

    Attributes:
        starts: Its starts.
        num_steps: One more than the largest global step that was measured; 0 without steps.
        num_intervals: Lines of intervals, damaged ones too.
        has_verdicts: Whether there are lines of verdicts.
        num_damaged: Lines that `lines` left out when it was read last.

    Raises:
        ConfigError: It holds no metrics.
        StorageError: They cannot be read.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        steps: list[int] = []
        self.num_steps = self.num_intervals = self.num_damaged = 0
        self.has_verdicts = False
        # A running run may grow between the two reads; what is new belongs to the next one.
        self._num_bytes = 0
        with open_metrics(run) as file:
            for line, num_bytes in split_lines(file):
                self._num_bytes += num_bytes
                if line is None:
                    continue
                kind = found[1] if (found := _KIND.search(line, 0, 64)) else b""
                if kind == b"step" and (number := _GLOBAL_STEP.search(line)):
                    num_steps = int(number[1]) + 1
                    # Validate only what leaps ahead, so that no damaged line lengthens the run.
                    if num_steps <= self.num_steps + 1 or parse_line(line) is not None:
                        self.num_steps = max(self.num_steps, num_steps)
                elif kind == b"attempt" and (start := parse_line(line)) is not None:
                    steps.append(start.values["start"])
                self.num_intervals += kind == b"interval"
                self.has_verdicts |= kind == b"verdict" and parse_line(line) is not None
        self.starts = Starts.of(tuple(steps))

    def intervals(self) -> Iterator[Interval]:
        """Read the intervals that count, in order."""
        for line, counts in self.lines():
            if counts and isinstance(line.record, Interval):
                yield line.record

    def lines(self) -> Iterator[tuple[MetricsLine, bool]]:
        """Read all lines since the first start, in order, and whether they count; those about a start do.

        Lines of unknown events are left out, and damaged ones, which are counted.
        """
        start, left, self.num_damaged = -1, self._num_bytes, 0
        with open_metrics(self._run) as file:
            for raw, num_bytes in split_lines(file):
                left -= num_bytes
                if left < 0:
                    return
                line = None if raw is None else parse_line(raw)
                if line is None:
                    self.num_damaged += raw != b""
                elif line.event == "attempt":
                    start += 1
                    yield line, True
                elif start >= 0 and line.event in _OF_A_START:
                    yield line, True
                elif start >= 0 and (line.event in _BY_NUMBER or line.event in _BY_STEPS_DONE):
                    step = line.record.global_step if line.record is not None else line.values["global_step"]
                    yield line, self.starts.counts(line.event, step, start)


class RunHistory:
    """Measurements of a run so far.

    Args:
        run: The run folder.
        keep: How many records of each kind are held, the newest ones; 0 for all. A restart that goes back
            further than that leaves fewer.
        on_line: Called with each line before it is added here, in the order of the file.

    Attributes:
        steps: Lines of steps, as `StepMetrics` has them, with ``time_s``.
        intervals: With the time of each, seconds since 1970.
        verdicts: The same of verdicts.
        moves: The same of moves of the tuner.
        checkpoints: Lines of checkpoints.
        evaluations: Lines of evaluations.
        attempts: Lines of starts.
        end: The line of the newest start's end, ``outcome`` in it; None while it runs, or if it was killed.
        num_planned_steps: Of the whole run; 0 while it is not known.
        last_event_s: When the newest line was written, seconds since 1970; 0 before the first.
    """

    def __init__(
        self, run: Path, *, keep: int = 0, on_line: Callable[[MetricsLine], None] | None = None
    ) -> None:
        self.steps: list[dict[str, Any]] = []
        self.intervals: list[tuple[float, Interval]] = []
        self.verdicts: list[tuple[float, Verdict]] = []
        self.moves: list[tuple[float, Move]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None
        self.num_planned_steps = 0
        self.last_event_s = 0.0
        self._held: dict[str, list[Any]] = {
            "step": self.steps,
            "interval": self.intervals,
            "verdict": self.verdicts,
            "tune": self.moves,
            "checkpoint": self.checkpoints,
            "evaluation": self.evaluations,
            "attempt": self.attempts,
        }
        self._tail = MetricsTail(run)
        self._keep = keep
        self._on_line = on_line

    def follow(self) -> bool:
        """Read what was written since the last call; return whether there was anything.

        An incomplete last line waits for the next call; damaged ones are left out.

        Raises:
            ConfigError: The folder holds no metrics.
            StorageError: They cannot be read.
        """
        has_read = False
        for line in self._tail.read():
            has_read = True
            if self._on_line is not None:
                self._on_line(line)
            self._add(line)
        return has_read

    @property
    def num_damaged(self) -> int:
        """Lines that were left out so far."""
        return self._tail.num_damaged

    @property
    def is_of_another_run(self) -> bool:
        """Whether a new run was begun in the folder, see `MetricsTail.is_of_another_run`."""
        return self._tail.is_of_another_run()

    def _add(self, line: MetricsLine) -> None:
        self.last_event_s = max(self.last_event_s, line.time_s)
        if line.event == "attempt":
            self._go_back_to(line.values["start"])
            self.end = None
        elif line.event == "plan":
            self.num_planned_steps = line.values["num_steps"]
        elif line.event == "end":
            self.end = dict(line.values)
        held = self._held.get(line.event)
        if held is None:
            return
        held.append(line.values if line.record is None else (line.time_s, line.record))
        # Rarely, so that a step costs no copy of all others; the same lines leave the same ones held.
        if self._keep and len(held) >= 2 * self._keep:
            del held[: -self._keep]

    def _go_back_to(self, start: int) -> None:
        """Forget what a start at this global step repeats."""
        self.steps[:] = [line for line in self.steps if line["global_step"] < start]
        for event in _BY_STEPS_DONE:
            self._held[event][:] = [line for line in self._held[event] if line["global_step"] <= start]
        for event in ("interval", "verdict", "tune"):
            self._held[event][:] = [one for one in self._held[event] if one[1].global_step < start]


def read_history(run: Path) -> RunHistory:
    """Read a run folder.

    Raises:
        ConfigError: It holds no metrics.
        StorageError: They cannot be read.
    """
    history = RunHistory(run)
    history.follow()
    return history
