"""The starts of a run, and when to stop starting: a run that fails at the same place again needs a person.

``starts.jsonl`` in the run folder has a line when a start begins, with the step of the checkpoint it goes on
from, and one when it ends as it should. A start without an end was killed or failed; after so many of them in
a row from one checkpoint another one is refused. Starts that were stopped by a signal, or refused for a
setting, do not count. Only rank 0 writes, while it holds the run's lock.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shardflow.errors import ConfigError, NoProgressError, PlanError, StateError, StorageError
from shardflow.logs import EventLog, read_events
from shardflow.training.watch import HEALTH_FOLDER, Fault
from shardflow.training.watch.settings import FAULTS_FILE

__all__ = ["REFUSALS", "STARTS_FILE", "check_progress", "recorded"]

REFUSALS: Final = (ConfigError, NoProgressError, PlanError, StateError)
"""Errors that every new start meets again, until a person changes something."""
STARTS_FILE: Final = "starts.jsonl"

_LOGGER = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8,})")


def check_progress(run: Path, checkpoint: str | None, *, max_failed_starts: int) -> None:
    """Refuse a start where the last ones came to nothing.

    Args:
        run: The run folder.
        checkpoint: The checkpoint to go on from; None for a fresh start.
        max_failed_starts: So many in a row from one checkpoint are enough; 0 for no limit.

    Raises:
        NoProgressError: There were as many; the message has the last fault that the watch saw.
    """
    step, failed = _step_of(checkpoint), 0
    for event in read_events(run / STARTS_FILE) if (run / STARTS_FILE).is_file() else ():
        is_failed_here = event["event"] == "begin" and event["step"] == step
        failed = failed + 1 if is_failed_here else 0
    if not max_failed_starts or failed < max_failed_starts:
        return
    raise NoProgressError(
        f"a run must get to a next checkpoint, got {failed} starts from step {step} that did not (limit "
        f"run.max_failed_starts={max_failed_starts}; {_last_fault(run)}); find the cause, lower "
        "run.checkpoint_every_steps if steps are lost to short-lived machines, and start once with --set "
        "run.max_failed_starts=0."
    )


@contextmanager
def recorded(run: Path, checkpoint: str | None, *, attempt: int) -> Iterator[None]:
    """Write down that a start begins, and, if the block ends as it should, that it ended.

    An end that cannot be written is a warning: the start is over, and counts as one that failed.

    Raises:
        StorageError: The run folder cannot be written when the start begins.
    """
    with EventLog(run / STARTS_FILE) as log:
        log.write("begin", attempt=attempt, step=_step_of(checkpoint))
        log.sync()
        try:
            yield
        except REFUSALS:
            _write_end(log, attempt, "refused")
            raise
        _write_end(log, attempt, "done")


def _write_end(log: EventLog, attempt: int, outcome: str) -> None:
    try:
        log.write("end", attempt=attempt, outcome=outcome)
    except StorageError as error:
        _LOGGER.warning("%s: %s", STARTS_FILE, error.message)


def _step_of(checkpoint: str | None) -> int:
    match = _STEP.fullmatch(Path(checkpoint).name) if checkpoint else None
    return int(match[1]) if match else 0


def _last_fault(run: Path) -> str:
    path = run / HEALTH_FOLDER / FAULTS_FILE
    faults = list(read_events(path)) if path.is_file() else []
    if not faults:
        return "the watch saw no fault"
    values = {name: value for name, value in faults[-1].items() if name not in {"event", "time_s"}}
    return f"last fault: {Fault.from_json(values).sentence()}"
