"""The lines of a run's ``metrics.jsonl``, each once, while the file grows.

Whoever follows a run (a view, an exporter) makes what it wants of them. A line that is not written whole
yet waits for the next call; one that a kill left unfinished is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from shardflow.errors import ConfigError

__all__ = ["METRICS_FILE", "EventTail", "check_holds_metrics"]

METRICS_FILE: Final = "metrics.jsonl"
"""In a run folder."""
_CHUNK_BYTES: Final = 1 << 20
_CONTROLS: Final = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}")


class EventTail:
    """Reads what was appended since it was read last.

    Args:
        run: The run folder.
        from_end: Leave out what stands there already; a file that is not there yet is read whole.
    """

    def __init__(self, run: Path, *, from_end: bool = False) -> None:
        self._path = run / METRICS_FILE
        self._offset = self._path.stat().st_size if from_end and self._path.exists() else 0
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the events that were written since the last call, in bounded memory.

        Raises:
            ConfigError: The folder holds no metrics.
        """
        check_holds_metrics(self._path.parent)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(_CHUNK_BYTES):
                self._offset += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                yield from _events(lines)


def check_holds_metrics(run: Path) -> None:
    """Refuse a folder that no training run has written to.

    Raises:
        ConfigError: It holds no metrics.
    """
    if not (run / METRICS_FILE).is_file():
        raise ConfigError(
            f"RUN must be the folder of a training run, which holds {METRICS_FILE}, got another one; correct "
            "it."
        )


def _events(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "event" in record:
            # Escaped in JSON, or the second half of them as they are: rare enough to look only then.
            yield _shown(record) if b"\\u00" in line or b"\xc2" in line else record


def _shown(value: Any) -> Any:
    """Return a value without the control characters of its texts, which a terminal would obey."""
    if isinstance(value, str):
        return value.translate(_CONTROLS)
    if isinstance(value, dict):
        return {_shown(name): _shown(item) for name, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value
