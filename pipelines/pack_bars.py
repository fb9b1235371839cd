"""Bars for a packing job on a terminal; apart, because a job in a log need not load what draws them."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

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

__all__ = ["BarProgress"]


class BarProgress:
    """A bar for each phase, with counts and the time that is left."""

    def __init__(self, stream: TextIO, titles: Mapping[str, str]) -> None:
        self._titles = titles
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
        self._task = None if name == "done" else self._bars.add_task(self._titles[name], total=total or None)

    def advance(self, count: int = 1) -> None:
        """Finish units of the phase."""
        if self._task is not None:
            self._bars.update(self._task, advance=count)

    def note(self, text: str) -> None:
        """Say something above the bars."""
        self._bars.console.print(text, markup=False, highlight=False)
