"""Deaths of packing processes, recorded as inputs of every later run.

Whether a study runs into a memory limit, a deadline or a crash may depend on the machine and the moment. So
the first such death only asks for a second try, alone; the second one is written down in the private folder,
and from then on it is what is known of that input: a re-run quarantines it without trying and comes to the
same bytes (see docs/adr/0031-recorded-deaths.md). To try again, remove the line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow.logs import EventLog, read_events
from shardflow.sources.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from shardflow.packing.engine import Failure

__all__ = ["RecordedOutcomes", "conversion_of", "reason_of_failure"]

_REASONS: Final[dict[str, Reason]] = {
    "failed": Reason.WORKER_FAILED,
    "killed": Reason.WORKER_KILLED,
    "out_of_memory": Reason.WORKER_OUT_OF_MEMORY,
    "timeout": Reason.WORKER_TIMEOUT,
}


_CONVERSION: Final = "/convert"
_PATTERN: Final = "resource_outcomes*.jsonl"


def reason_of_failure(failure: Failure) -> Reason:
    """Return the ledger's reason for a failed task."""
    return _REASONS[failure]


def conversion_of(surrogate: str) -> str:
    """Return what the conversion of an attachment is recorded as: the file itself can be read."""
    return f"{surrogate}{_CONVERSION}"


class RecordedOutcomes:
    """The recorded outcomes of one private folder.

    Args:
        path: The JSONL file to add to; need not exist. What tasks have recorded beside it is known too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, int], str] = {}
        for path in self._paths():
            for record in read_events(path):
                if record.get("event") == "resource_outcome" and record.get("reason") in set(
                    _REASONS.values()
                ):
                    self._known[str(record.get("input")), int(record.get("num_bytes", -1))] = record["reason"]

    def __len__(self) -> int:
        return len(self._known)

    def find(self, surrogate: str, num_bytes: int) -> str | None:
        """Return the recorded reason of a file or study, by surrogate and input size; None without one."""
        return self._known.get((surrogate, num_bytes))

    def lift(self, surrogates: Container[str]) -> None:
        """Forget what is recorded of files, their conversions and studies, so that they are tried again.

        Raises:
            StorageError: The file cannot be written.
        """
        kept = {
            key: reason
            for key, reason in self._known.items()
            if key[0].removesuffix(_CONVERSION) not in surrogates
        }
        if len(kept) == len(self._known):
            return
        unfinished = self._path.with_name(f"{self._path.name}.new")
        unfinished.unlink(missing_ok=True)
        with EventLog(unfinished, mode=0o600) as log:
            for (surrogate, num_bytes), reason in kept.items():
                log.write("resource_outcome", input=surrogate, num_bytes=num_bytes, reason=reason)
            log.sync()
        unfinished.replace(self._path)
        for path in self._paths():
            if path != self._path:
                path.unlink()
        self._known = kept

    def add(self, surrogate: str, num_bytes: int, reason: str) -> None:
        """Record an outcome, durably.

        Raises:
            StorageError: It cannot be written.
        """
        with EventLog(self._path, mode=0o600) as log:
            log.write("resource_outcome", input=surrogate, num_bytes=num_bytes, reason=str(reason))
            log.sync()
        self._known[surrogate, num_bytes] = str(reason)

    def _paths(self) -> list[Path]:
        own = [self._path] if self._path.exists() else []
        return [*own, *(path for path in sorted(self._path.parent.glob(_PATTERN)) if path != self._path)]
