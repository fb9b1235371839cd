"""Shows where a packing job is, on standard error: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["BarProgress", "LineProgress", "make_progress"]

_TITLES: Final = {
    "headers": "reading headers",
    "reports": "linking reports",
    "studies": "packing studies",
    "samples": "writing the samples table",
    "ledger": "writing the ledger",
    "manifest": "publishing the manifest",
    "done": "done",
}
_LINE_EVERY_S: Final = 10.0


class LineProgress:
    """Plain lines: one for each phase, and one every ten seconds of a long one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""
        self._total = self._count = 0
        self._said_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def phase(self, name: str, total: int) -> None:
        """Begin a phase."""
        self._title, self._total, self._count = _TITLES[name], total, 0
        self._say(f"{self._title} ({total})" if total else self._title)

    def advance(self, count: int = 1) -> None:
        """Finish units of the phase."""
        self._count += count
        if time.monotonic() - self._said_at >= _LINE_EVERY_S:
            self._say(f"{self._title}: {self._count} of {self._total}")

    def note(self, text: str) -> None:
        """Say something."""
        self._say(text)

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._stream.write(f"{text}\n")
        self._stream.flush()


class BarProgress:
    """A bar for each phase, with counts and the time that is left."""

    def __init__(self, stream: TextIO) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def phase(self, name: str, total: int) -> None:
        """Begin a phase: the bar of the one before is full."""
        if self._task is not None:
            (task,) = (task for task in self._bars.tasks if task.id == self._task)
            self._bars.update(self._task, total=task.total or 1, completed=task.total or 1)
        self._task = None if name == "done" else self._bars.add_task(_TITLES[name], total=total or None)

    def advance(self, count: int = 1) -> None:
        """Finish units of the phase."""
        if self._task is not None:
            self._bars.update(self._task, advance=count)

    def note(self, text: str) -> None:
        """Say something above the bars."""
        self._bars.console.print(text, markup=False, highlight=False)


def make_progress(stream: TextIO | None = None) -> BarProgress | LineProgress:
    """Choose bars for a terminal and lines for anything else."""
    target = stream if stream is not None else sys.stderr
    return BarProgress(target) if target.isatty() else LineProgress(target)
