"""The starts of a run, and when to stop starting: a run that fails at the same place again needs a person.

``starts.jsonl`` in the run folder has a line when a start begins, with the step of the checkpoint it goes on
from, and one when it ends as it should. A start without an end was killed or failed; after so many of them in
a row from one checkpoint another one is refused. Starts that were stopped by a signal, or refused for a
setting, do not count. Only rank 0 writes, while it holds the run's lock.

Puts the watch over a run, and turns a broken exchange into the sentence of who broke it.

When a rank dies, the others meet it as a torn connection somewhere in a backward pass; when one hangs, they
wait. Either way the watch knows which rank it is. Here the ranks' sides are introduced to each other, and the
error that follows from another rank's fault becomes a :class:`RankLostError` with that fault's sentence.
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
)
from shardflow.logs import EventLog, describe_exception, read_events
from shardflow.training.distributed import Ranks
from shardflow.training.health.heartbeat import FAULTS_FILE, HEALTH_FOLDER, Fault
from shardflow.training.health.monitor import RankWatch

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


_NAMED_WITHIN_S: Final = 3.0
"""A connection breaks at once; that its rank is gone is known a moment later."""
_LOOPBACK: Final = "127.0.0.1"
_START_S: Final = 20.0


@contextmanager
def watch_over(ranks: Ranks, run: Path, *, lost_s: float) -> Iterator[Ranks]:
    """Watch the ranks for the length of the block.

    A process that torchrun did not start has no watch: there is nobody to tell, and a person may be
    debugging.

    Args:
        ranks: The ranks, joined; ``timeouts.hang`` bounds what each does alone.
        run: The run folder, for stacks and the list of faults.
        lost_s: How long nothing may be heard of another machine.

    Yields:
        The same ranks, watched.

    Raises:
        RankLostError: another rank ended or hangs, and the block met the consequence.
    """
    if "RANK" not in os.environ:
        yield ranks
        return
    if not hasattr(os, "memfd_create"):
        _LOGGER.warning("ranks are watched on Linux only; a rank that hangs is not named here")
        yield ranks
        return
    watch = _start(ranks, run, lost_s)
    try:
        yield replace(ranks, watch=watch)
    except (RuntimeError, WaitTimeoutError) as error:
        fault = watch.fault_elsewhere(_NAMED_WITHIN_S)
        if fault is None:
            watch.bye("failed", text=describe_exception(error).splitlines()[0])
            raise
        watch.bye("lost")
        raise RankLostError(fault.sentence(), is_refusal=fault.is_refusal) from None
    except ShardflowError as error:
        watch.bye("failed", text=error.message, is_refusal=isinstance(error, REFUSALS))
        raise
    except BaseException as error:
        watch.bye("failed", text=describe_exception(error).splitlines()[0])
        raise
    else:
        watch.bye("finished")
    finally:
        watch.close()


def _start(ranks: Ranks, run: Path, lost_s: float) -> RankWatch:
    """Start this rank's side and introduce it to that of rank 0."""
    hosts = ranks.gather_json(socket.gethostname())
    # As little of the network as will do: a run on one machine listens on nothing else.
    address = _LOOPBACK if len(set(hosts)) == 1 else os.environ["MASTER_ADDR"]
    listen = _resolve(address) if ranks.rank == 0 else ""
    watch = RankWatch(
        rank=ranks.rank,
        hang_s=ranks.timeouts.hang_s or 0.0,
        lost_s=lost_s,
        run=run,
        listen=listen,
        token=ranks.from_first(secrets.token_hex(16)),
    )
    # None where rank 0 listens nowhere: each rank is then watched by itself.
    port = ranks.from_first(watch.hub_port(_START_S) if listen else None)
    if ranks.rank > 0 and port is not None:
        watch.report_to(address, port)
    return watch


def _resolve(address: str) -> str:
    """Address to listen on; empty where the rendezvous' name leads nowhere on this machine."""
    try:
        return socket.gethostbyname(address)
    except OSError as error:
        _LOGGER.warning(
            "the rendezvous address must resolve on its own machine, got %s; faults of other ranks are not "
            "named",
            type(error).__name__,
        )
        return ""
