"""Shows where a packing job is, on standard error: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TextIO

from pipelines.pace import LINE_EVERY_S, time_left

if TYPE_CHECKING:
    from pipelines.pack_bars import BarProgress

__all__ = ["LineProgress", "make_progress"]

_TITLES: Final = {
    "headers": "reading headers",
    "reports": "linking reports",
    "studies": "packing studies",
    "inputs": "looking at the files",
    "duplicates": "looking for duplicates",
    "parts": "packing parts",
    "index": "numbering shards",
    "outcomes": "writing the outcomes of lines",
    "shards": "writing shards again",
    "samples": "writing the samples table",
    "ledger": "writing the ledger",
    "page": "writing the page (report.html)",
    "manifest": "publishing the manifest",
    "upload": "sending the rest to the object store",
    "done": "done",
}


class LineProgress:
    """Plain lines: one for each phase, and one every ten seconds of a long one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""
        self._total = self._count = 0
        self._said_at = self._began_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def phase(self, name: str, total: int) -> None:
        """Begin a phase."""
        self._title, self._total, self._count = _TITLES[name], total, 0
        self._began_at = time.monotonic()
        self._say(f"{self._title} ({total})" if total else self._title)

    def advance(self, count: int = 1) -> None:
        """Finish units of the phase."""
        self._count += count
        now = time.monotonic()
        if now - self._said_at >= LINE_EVERY_S:
            rest = time_left(self._count, self._total, now - self._began_at)
            self._say(f"{self._title}: {self._count} of {self._total}{rest}")

    def note(self, text: str) -> None:
        """Say something."""
        self._say(text)

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._stream.write(f"{text}\n")
        self._stream.flush()


def make_progress(stream: TextIO | None = None) -> BarProgress | LineProgress:
    """Choose bars for a terminal and lines for anything else."""
    target = stream if stream is not None else sys.stderr
    if not target.isatty():
        return LineProgress(target)
    from pipelines.pack_bars import BarProgress

    return BarProgress(target, _TITLES)
