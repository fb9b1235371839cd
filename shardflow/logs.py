"""Logging of jobs: a rank-aware handler on standard error, JSONL event files, and numbers in messages.

Library modules only call ``logging.getLogger(__name__)``; a job calls :func:`configure_logging` once. Jobs
that read patient data withhold text of third parties (log messages, exception texts), because parsers quote
the values they fail on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from shardflow.errors import ShardflowError, StorageError, os_reason

if TYPE_CHECKING:
    from types import TracebackType

LINE_EVERY_S: Final = 10.0
"""Interval of progress lines of long work in a log."""

_OWN_LOGGERS: Final = ("shardflow", "pipelines")
_HANDLER_NAME: Final = "shardflow-job"
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_UNIT_BYTES: Final = 1024


def configure_logging(
    *,
    level: int | str = logging.INFO,
    rank: int | None = None,
    withhold_foreign_text: bool = False,
    stream: TextIO | None = None,
) -> None:
    """Send log records of this process to standard error; calling it again replaces the former configuration.

    Args:
        level: Lowest level shown for shardflow's own loggers; others are shown from WARNING on.
        rank: Prefix of every line, if given, to tell the lines of several ranks apart. Ranks above 0 show
            warnings and errors only.
        withhold_foreign_text: Show only logger, level and class names of third-party records and
            exceptions; for jobs that read patient data.
        stream: Where to write; standard error by default.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.get_name() == _HANDLER_NAME]:
        root.removeHandler(handler)
        handler.close()
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(_JobFormatter(rank=rank, withhold_foreign_text=withhold_foreign_text))
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    own_level = logging.WARNING if rank is not None and rank > 0 else level
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(own_level)
    logging.captureWarnings(withhold_foreign_text)


def describe_exception(error: BaseException) -> str:
    """Describe an exception by classes and code locations, without text of third parties.

    Returns:
        ``"KeyError at shardflow/packing/plan.py:41 in build_plan"``, one line for each link of the chain; the
        message follows only for a :class:`ShardflowError`, whose messages hold no identifier.
    """
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = traceback.extract_tb(current.__traceback__)
        place = (
            f" at {_short_path(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"
            if frames
            else ""
        )
        text = f": {current.message}" if isinstance(current, ShardflowError) else ""
        lines.append(f"{type(current).__name__}{place}{text}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n  caused by ".join(lines)


def time_left(done: int, total: int, elapsed_s: float, *, is_least: bool = False) -> str:
    """Estimate the remaining time at the same rate: ``, about 4 min left``.

    Args:
        done: Units that are done.
        total: All units.
        elapsed_s: Seconds for which they were done.
        is_least: Whether some of the rest take longer than those: ``, at least 4 min left``.

    Returns:
        A clause with its leading comma; empty if nothing or everything is done.
    """
    if not 0 < done < total:
        return ""
    left_s = elapsed_s / done * (total - done)
    about = "at least" if is_least else "about"
    if left_s < _MINUTE_S:
        return f", {about} {max(1, round(left_s))} s left"
    if left_s < _HOUR_S:
        return f", {about} {round(left_s / _MINUTE_S)} min left"
    return f", {about} {left_s / _HOUR_S:.1f} h left"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Render a number of things: ``1 shard``, ``1,000 shards``."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def human_bytes(num_bytes: int) -> str:
    """Render a size: ``1.4 GiB``; exact below one KiB."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < _UNIT_BYTES:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= _UNIT_BYTES
    return f"{size:.1f} TiB"


class EventLog:
    """Append-only JSONL file: one JSON object a line, each line one write.

    A line that a killed process left unfinished is terminated when the file is opened again, and
    :func:`read_events` skips it. Non-finite floats are written as null: JSON has none, and a log must not
    stop the job that it describes.
    """

    def __init__(
        self, path: str | Path, *, clock: Callable[[], float] | None = time.time, mode: int = 0o644
    ) -> None:
        """Open ``path`` for appending.

        Args:
            path: The file; its folder must exist.
            clock: Gives ``time_s`` of each line; ``None`` leaves the key out.
            mode: Permissions of a new file.

        Raises:
            StorageError: The file cannot be opened or written.
        """
        self._clock = clock
        self._descriptor = -1
        self._is_torn = False
        with _writing():
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")

    def write(self, event: str, /, **fields: Any) -> None:
        """Append ``{"event": event, "time_s": ..., **fields}``.

        Raises:
            StorageError: The line could not be written completely, for example because the disk is full.
                The next event still starts on a line of its own.
        """
        record: dict[str, Any] = {"event": event}
        if self._clock is not None:
            record["time_s"] = round(self._clock(), 6)
        record.update(fields)
        line = json.dumps(_finite(record), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        rest = memoryview((b"\n" if self._is_torn else b"") + line.encode() + b"\n")
        with _writing():
            # A disk that fills up writes a part without an error; only the next call raises.
            while rest.nbytes:
                rest = rest[os.write(self._descriptor, rest) :]
                self._is_torn = bool(rest.nbytes)

    def sync(self) -> None:
        """Sync the file to disk.

        Raises:
            StorageError: The sync failed.
        """
        with _writing():
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write an event file: {os_reason(error)} ({os_reason(error)}); free disk space or "
            "correct its folder, and run the job again."
        ) from None


def read_events(path: str | Path) -> Iterator[dict[str, Any]]:
    """Read the objects of a JSONL event file in order, skipping lines that a kill left unfinished."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


class _JobFormatter(logging.Formatter):
    """``12:30:01 rank 0 WARNING shardflow.loading: text``."""

    def __init__(self, *, rank: int | None, withhold_foreign_text: bool) -> None:
        prefix = "%(asctime)s " + (f"rank {rank} " if rank is not None else "")
        super().__init__(prefix + "%(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        self._withhold_foreign_text = withhold_foreign_text

    def format(self, record: logging.LogRecord) -> str:
        """Render a record; foreign text is replaced where it must not be shown."""
        if self._withhold_foreign_text:
            record = _withheld(record)
        return super().format(record)


def _withheld(record: logging.LogRecord) -> logging.LogRecord:
    own = record.name.partition(".")[0] in _OWN_LOGGERS
    text = record.getMessage() if own else "text of a third-party library withheld"
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        text = f"{text}\n  {describe_exception(error)}"
    return logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, text, None, None)


def _short_path(path: str) -> str:
    """Cut a source file's path to where its package starts: folders above it may name a user."""
    parts = Path(path).parts
    for anchor in (
        *_OWN_LOGGERS,
        "tests",
        "site-packages",
        f"python{sys.version_info.major}.{sys.version_info.minor}",
    ):
        if anchor in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(anchor) :])
    return parts[-1] if parts else path


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
