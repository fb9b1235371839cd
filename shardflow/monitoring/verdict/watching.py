"""Judges beside a run that goes on: writes verdicts when they change, and says the first one in a log line.

A new first verdict must hold for two intervals before it is said, so that one odd interval changes nothing;
the very first one is said as soon as enough was measured.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from shardflow.monitoring.verdict.judging import WINDOW, judge
from shardflow.monitoring.verdict.stretch import Settings
from shardflow.telemetry import Interval, Verdict

__all__ = ["VerdictWatch"]

_LOGGER = logging.getLogger(__name__)

_NEEDED: Final = 2
"""Intervals in a row that a new first verdict must hold for."""
_WRITTEN_EVERY: Final = 12
"""Intervals after which an unchanged verdict is written again, with the numbers of now."""
_QUIET_S: Final = 60.0
"""Least time between two log lines; what changes in between is written only."""


class VerdictWatch:
    """Listens to intervals, on rank 0.

    Args:
        write: Gets each verdict to write, as the event ``"verdict"``.
        config: Settings of the run by dotted name, see `judge`.
        clock: Seconds that only grow.

    Attributes:
        verdicts: What holds now, the most important first.
    """

    def __init__(
        self,
        write: Callable[[Verdict], object],
        *,
        config: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verdicts: list[Verdict] = []
        self._write = write
        self._config = config
        self._clock = clock
        self._intervals: deque[Interval] = deque(maxlen=WINDOW)
        self._num_differing = 0
        self._num_since_written = 0
        self._said = ""
        self._said_s = -_QUIET_S

    def measured(self, interval: Interval) -> None:
        """Take the next interval."""
        self._intervals.append(interval)
        found = judge(tuple(self._intervals), config=self._config, before=self.verdicts)
        if not found:
            return
        self._num_since_written += 1
        is_changed = [one.code for one in found] != [one.code for one in self.verdicts]
        if self.verdicts and found[0].code != self.verdicts[0].code:
            self._num_differing += 1
            if self._num_differing < _NEEDED:
                return
        self._num_differing = 0
        self.verdicts = found
        if is_changed or self._num_since_written >= _WRITTEN_EVERY:
            self._num_since_written = 0
            for verdict in found:
                self._write(verdict)
        self._say(found[0])

    def _say(self, verdict: Verdict) -> None:
        now_s = self._clock()
        if verdict.code == self._said or now_s - self._said_s < _QUIET_S:
            return
        self._said, self._said_s = verdict.code, now_s
        _LOGGER.info("%s", " ".join([verdict.text, *(one.text for one in verdict.advice[:1])]))
