"""Crash-loop guard of a run, and its health monitor, which names the rank that broke an exchange.

``starts.jsonl`` in the run folder gets a line when a start begins, with the step of the checkpoint it resumes
from, and one when it ends normally. A start without an end was killed or failed; after a number of them in a
row from one checkpoint another one is refused, because it needs a person. Starts that a signal stopped or
that a setting refused do not count. Only rank 0 writes, while it holds the run's lock.

When a rank dies, the others see a broken connection somewhere in a backward pass; when one hangs, they wait.
`monitor_health` connects the monitor processes of all ranks, and turns the error that follows from another
rank's fault into a `RankLostError` with that fault's sentence.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from shardflow.errors import (
    ConfigError,
    NoProgressError,
    PlanError,
    RankLostError,
    ShardflowError,
    StateError,
    StorageError,
    WaitTimeoutError,
    os_reason,
)
from shardflow.logs import EventLog, describe_exception, read_events
from shardflow.training.distributed import Ranks
from shardflow.training.health.heartbeat import FAULTS_FILE, HEALTH_FOLDER, Fault
from shardflow.training.health.monitor import RankHealthMonitor

REFUSALS: Final = (ConfigError, NoProgressError, PlanError, StateError)
"""Errors that recur at every start until a person changes something."""
STARTS_FILE: Final = "starts.jsonl"

_STEP: Final = re.compile(r"step-(\d{8,})")
_NAMED_WITHIN_S: Final = 3.0
"""A connection breaks at once; which rank is gone is known a moment later."""
_LOOPBACK: Final = "127.0.0.1"
_START_S: Final = 20.0

_LOGGER = logging.getLogger(__name__)


def refuse_crash_loop(run: Path, checkpoint: str | None, *, max_failed_starts: int) -> None:
    """Refuse a start if the last ones reached no new checkpoint.

    Args:
        run: The run folder.
        checkpoint: The checkpoint to resume from; None for a fresh start.
        max_failed_starts: Limit of failed starts in a row from one checkpoint; 0 for none.

    Raises:
        NoProgressError: The limit is reached; the message has the last fault that the health monitor saw.
    """
    step, failed = _step_of(checkpoint), 0
    for event in read_events(run / STARTS_FILE) if (run / STARTS_FILE).is_file() else ():
        is_failed_here = event["event"] == "begin" and event["step"] == step
        failed = failed + 1 if is_failed_here else 0
    if not max_failed_starts or failed < max_failed_starts:
        return
    raise NoProgressError(
        f"The run was started {failed} times from step {step} without reaching a new checkpoint (limit "
        f"run.max_failed_starts={max_failed_starts}; {_last_fault(run)}). Find the cause, lower "
        "run.checkpoint_every_steps if machines do not live long enough, and start once with --set "
        "run.max_failed_starts=0."
    )


@contextmanager
def record_start(run: Path, checkpoint: str | None, *, attempt: int) -> Iterator[None]:
    """Record that a start begins and, if the block ends normally, that it ended.

    If the end cannot be written, a warning is logged, and the start counts as failed.

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
        return "the health monitor saw no fault"
    values = {name: value for name, value in faults[-1].items() if name not in {"event", "time_s"}}
    return f"last fault: {Fault.from_json(values).sentence()}"


@contextmanager
def monitor_health(ranks: Ranks, run: Path) -> Iterator[Ranks]:
    """Monitor the ranks for the duration of the block.

    A process that torchrun did not start is not monitored: it has no peers, and may be in a debugger.

    Args:
        ranks: The ranks, joined; ``timeouts.hang_s`` bounds what each does alone, ``timeouts.lost_s`` the
            silence of another machine.
        run: The run folder, for stacks and the list of faults.

    Yields:
        The same ranks with their monitor.

    Raises:
        RankLostError: another rank ended or hangs, and an exchange of this one failed.
    """
    if "RANK" not in os.environ:
        yield ranks
        return
    if not hasattr(os, "memfd_create"):
        _LOGGER.warning("health is monitored on Linux only; a rank that hangs is not named here")
        yield ranks
        return
    monitor = _start_monitor(ranks, run)
    try:
        yield replace(ranks, health=monitor)
    except (RuntimeError, WaitTimeoutError) as error:
        fault = monitor.fault_elsewhere(_NAMED_WITHIN_S)
        if fault is None:
            monitor.report_end("failed", text=describe_exception(error).splitlines()[0])
            raise
        monitor.report_end("lost")
        raise RankLostError(fault.sentence(), exit_code=fault.exit_code) from None
    except ShardflowError as error:
        monitor.report_end("failed", text=error.message, exit_code=error.exit_code)
        raise
    except BaseException as error:
        monitor.report_end("failed", text=describe_exception(error).splitlines()[0])
        raise
    else:
        monitor.report_end("finished")
    finally:
        monitor.close()


def _start_monitor(ranks: Ranks, run: Path) -> RankHealthMonitor:
    """Start this rank's monitor process and connect it to that of rank 0."""
    hosts = ranks.all_gather_json(socket.gethostname())
    # A run on one machine listens on the loopback only.
    address = _LOOPBACK if len(set(hosts)) == 1 else os.environ["MASTER_ADDR"]
    listen = _resolve(address) if ranks.rank == 0 else ""
    monitor = RankHealthMonitor(
        rank=ranks.rank,
        hang_s=ranks.timeouts.hang_s,
        lost_s=ranks.timeouts.lost_s,
        run=run,
        listen=listen,
        token=ranks.broadcast(secrets.token_hex(16)),
    )
    # None if rank 0 cannot listen: each rank is then monitored on its own.
    port = ranks.broadcast(monitor.hub_port(_START_S) if listen else None)
    if ranks.rank > 0 and port is not None:
        monitor.report_to(address, port)
    return monitor


def _resolve(address: str) -> str:
    """Return the address to listen on; empty if the rendezvous name does not resolve on this machine."""
    try:
        return socket.gethostbyname(address)
    except OSError as error:
        _LOGGER.warning(
            "the rendezvous address does not resolve on its own machine (%s); faults of other ranks are not "
            "named",
            os_reason(error),
        )
        return ""
