"""A run played back: at each instant the view that was to be seen then."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shardflow.errors import ConfigError
from shardflow.monitoring.lines import METRICS_FILE, open_metrics, parse_line
from shardflow.monitoring.live import LiveRun, LiveView
from shardflow.monitoring.tail import EventTail

__all__ = ["Replay"]

_TAIL_BYTES: Final = 1 << 20


class Replay:
    """Stands at an instant of a run, first at its first line.

    Args:
        run: The run folder.

    Attributes:
        position_s: Since the first line.
        length_s: From the first line to the one that was last when this was made.

    Raises:
        ConfigError: The folder holds no metrics, or an empty file of them.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        first = next(EventTail(run).read(), None)
        if first is None:
            raise ConfigError(
                f"RUN must have written a line of {METRICS_FILE} to be played back, got none; wait for one."
            )
        self._start_s = first.time_s
        self.position_s = 0.0
        self.length_s = max(0.0, self._last_time_s() - self._start_s)
        self._live = LiveRun(run)
        self._shown_s = 0.0

    def move(self, seconds: float) -> None:
        """Go on so far, or back; never beyond an end."""
        self.position_s = min(self.length_s, max(0.0, self.position_s + seconds))

    def view(self) -> LiveView:
        """Return what was known of the run at this instant."""
        if self.position_s < self._shown_s:  # what was read cannot be unread
            self._live = LiveRun(self._run)
        self._shown_s = self.position_s
        now_s = self._start_s + self.position_s
        return self._live.follow(now_s, until_s=now_s)

    def _last_time_s(self) -> float:
        with open_metrics(self._run) as file:
            size, num_bytes = file.seek(0, 2), _TAIL_BYTES
            while True:
                file.seek(max(0, size - num_bytes))
                for line in reversed(file.read(num_bytes).split(b"\n")):
                    if (last := parse_line(line)) is not None:
                        return last.time_s
                if num_bytes >= size:
                    return self._start_s
                num_bytes *= 8
