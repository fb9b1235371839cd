"""The lines of a run's ``metrics.jsonl``, each once, while the file grows.

Whoever follows a run (a view, an exporter) makes what it wants of them. A line that is not written whole
yet waits for the next call; damaged ones are left out and counted, see `shardflow.monitoring.lines`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shardflow.monitoring.lines import METRICS_FILE, MetricsLine, open_metrics, parse_line, split_lines

__all__ = ["EventTail"]

_HEAD_BYTES: Final = 256


class EventTail:
    """Reads what was appended since it was read last.

    Args:
        run: The run folder.
        from_end: Leave out what stands there already; a file that is not there yet is read whole.

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
                if line == b"":  # closes off what a kill left
                    continue
                found = None if line is None else parse_line(line)
                if found is None:
                    self.num_damaged += 1
                else:
                    yield found

    def is_of_another_run(self) -> bool:
        """Whether the file is no longer the one that was read: a new run was begun in the folder.

        Whoever follows begins anew then, with another tail.
        """
        try:
            with self._path.open("rb") as file:
                return file.read(len(self._head)) != self._head or file.seek(0, 2) < self._offset
        except OSError:
            return False  # gone, or not to be seen just now: that tells nothing
