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
    from pathlib import Path

    from shardflow.packing.pool import Failure

__all__ = ["RecordedOutcomes", "reason_of_failure"]

_REASONS: Final[dict[str, Reason]] = {
    "failed": Reason.WORKER_FAILED,
    "killed": Reason.WORKER_KILLED,
    "out_of_memory": Reason.WORKER_OUT_OF_MEMORY,
    "timeout": Reason.WORKER_TIMEOUT,
}


def reason_of_failure(failure: Failure) -> Reason:
    """Return the ledger's reason for a failed task."""
    return _REASONS[failure]


class RecordedOutcomes:
    """The recorded outcomes of one private folder.

    Args:
        path: The JSONL file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, int], str] = {}
        if path.exists():
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

    def add(self, surrogate: str, num_bytes: int, reason: str) -> None:
        """Record an outcome, durably.

        Raises:
            StorageError: It cannot be written.
        """
        with EventLog(self._path, mode=0o600) as log:
            log.write("resource_outcome", input=surrogate, num_bytes=num_bytes, reason=str(reason))
            log.sync()
        self._known[surrogate, num_bytes] = str(reason)
