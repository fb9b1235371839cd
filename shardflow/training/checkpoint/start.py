"""Start of a run: who may write into its folder, from which checkpoint it goes on, and who watches its ranks.

Rank 0 locks the run folder (two jobs must not write into one run) and decides where the run starts: its own
newest sound checkpoint, another run's, or step 0.

``starts.jsonl`` in the run folder gets a line when a start begins, with the step of the checkpoint it resumes
from, and one when it ends normally. A start without an end was killed or failed; after a number of them in a
row from one checkpoint another one is refused, because it needs a person. Starts that a signal stopped or
that a setting refused do not count.

When a rank dies, the others see a broken connection somewhere in a backward pass; when one hangs, they wait.
`monitor_health` connects the monitor processes of all ranks, and turns the error that follows from another
rank's fault into a `RankLostError` with that fault's sentence.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardflow.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    ManifestError,
    NoProgressError,
    PlanError,
    RankLostError,
    ShardflowError,
    SignatureError,
    StateError,
    StorageError,
    WaitTimeoutError,
    os_reason,
)
from shardflow.logs import EventLog, describe_exception, read_events
from shardflow.monitoring import check_outlets
from shardflow.training.adoption import choose_version
from shardflow.training.checkpoint.files import (
    STATE_FILE,
    CheckpointFolder,
    read_checkpoint,
    read_run_state,
    step_of,
)
from shardflow.training.config import RunConfig, TrainConfig
from shardflow.training.distributed import Ranks
from shardflow.training.health.heartbeat import FAULTS_FILE, HEALTH_FOLDER, Fault
from shardflow.training.health.monitor import RankHealthMonitor
from shardflow.training.ledger import next_attempt

_LOGGER = logging.getLogger(__name__)
_REFUSALS: Final = (
    ConfigError,
    CheckpointError,
    NoProgressError,
    SignatureError,
    ManifestError,
    FormatError,
    StorageError,
)
_RECURRING: Final = (ConfigError, NoProgressError, PlanError, StateError)
"""Errors that recur at every start until a person changes something."""
STARTS_FILE: Final = "starts.jsonl"
_NAMED_WITHIN_S: Final = 3.0
"""A connection breaks at once; which rank is gone is known a moment later."""
_LOOPBACK: Final = "127.0.0.1"
_START_S: Final = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StartDecision:
    """Decision of rank 0, broadcast to the others; plain JSON values."""

    attempt: int
    """Number of this start of the job, from 1."""
    checkpoint: str | None
    """Absolute folder to resume from; None for a fresh start."""
    damaged: Sequence[str]
    """A sentence for each newer checkpoint that was skipped."""
    version: int | None = None
    """Of the dataset, where newer ones are adopted."""


def decide_start(run: RunConfig, folder: CheckpointFolder) -> StartDecision:
    """Find where the run starts; only on rank 0, which holds the lock, before anybody waits in a collective.

    Newer checkpoints that are damaged are set aside, so that they are never taken for the run's newest.

    Raises:
        ConfigError: ``run.resume`` names no folder, or is ``never`` and the run has checkpoints.
        CheckpointError: the run has checkpoints and none of them is sound; or the named one is damaged.
    """
    attempt = next_attempt(run.output)
    own = folder.names()
    if run.resume == "never" and own:
        raise ConfigError(
            f"run.resume is 'never', but run.output holds {len(own)} checkpoints, {own[0]} the newest; "
            "choose another folder, or resume with 'auto'."
        )
    if own:
        sound, problems = folder.newest_sound()
        if sound is None:
            raise CheckpointError(
                f"none of the run's {len(own)} checkpoints can be used: {' '.join(problems)} Restore one, or "
                "start a new run in another folder."
            )
        for problem in problems:
            _LOGGER.warning("%s Falling back to %s.", problem, sound.name)
        folder.resume_from(sound.name)
        return StartDecision(attempt=attempt, checkpoint=str(folder.path / sound.name), damaged=problems)
    if run.resume in {"auto", "never"}:
        return StartDecision(attempt=attempt, checkpoint=None, damaged=())
    foreign = Path(run.resume).expanduser().resolve()
    if not (foreign / STATE_FILE).is_file():
        found = "a folder without a checkpoint" if foreign.is_dir() else "no folder"
        raise ConfigError(
            f"run.resume must be 'auto', 'never' or a checkpoint folder, got {found} of the name "
            f"{foreign.name!r}; correct it."
        )
    read_checkpoint(foreign)
    return StartDecision(attempt=attempt, checkpoint=str(foreign), damaged=())


class RunLock:
    """Lock that keeps a second job out of the run folder for as long as this process lives.

    The kernel frees it when the process ends, however it ends, so a restart after SIGKILL finds it free.

    Raises:
        ConfigError: Another job holds it, or the folder cannot be written.
    """

    def __init__(self, run: Path) -> None:
        self._descriptor = -1
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"run.output cannot be written ({os.strerror(error.errno or 0)}); name a writable folder."
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                "another job is running in run.output; stop it, or choose another folder."
            ) from None
        except OSError as error:
            _LOGGER.warning(
                "run.output cannot be locked (%s); start no second job in it", os.strerror(error.errno or 0)
            )

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def agree_on_start(
    config: TrainConfig,
    ranks: Ranks,
    checkpoints: CheckpointFolder,
    stack: ExitStack,
    lock: ExitStack | None,
) -> StartDecision:
    """Let rank 0 lock the run folder and choose the start, then broadcast it, a refusal included.

    Args:
        config: All settings.
        ranks: The ranks of the run.
        checkpoints: The run's checkpoints.
        stack: Holds the record of this start.
        lock: Holds the lock of the run folder; None if that is held already.
    """
    answer: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            if lock is not None:
                lock.callback(RunLock(config.run.output).release)
            monitor = config.monitor
            check_outlets(monitor.prometheus, monitor.sinks, monitor.prometheus_token_file)
            checkpoints.remove_unfinished()
            # A start that adopts a version continues from the checkpoint that was saved for it.
            run = config.run if lock is not None else replace(config.run, resume="auto")
            decision = decide_start(run, checkpoints)
            if config.data.adopt_new_versions == "epoch":
                state = read_run_state(Path(decision.checkpoint)) if decision.checkpoint else None
                decision = replace(decision, version=choose_version(config, state))
            refuse_crash_loop(run.output, decision.checkpoint, max_failed_starts=run.max_failed_starts)
            stack.enter_context(record_start(run.output, decision.checkpoint, attempt=decision.attempt))
            answer["decision"] = asdict(decision)
        except _REFUSALS as error:
            kind = next(one for one in _REFUSALS if isinstance(error, one))
            answer[kind.__name__] = error.message
    # Rank 0 may verify large checkpoints; the others wait here, not within the timeout of a collective.
    ranks.barrier("choosing a checkpoint", ranks.timeouts.startup_s)
    answer = ranks.broadcast(answer)
    for kind in _REFUSALS:
        if kind.__name__ in answer:
            raise kind(answer[kind.__name__])
    return StartDecision(**answer["decision"])


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
        except _RECURRING:
            _write_end(log, attempt, "refused")
            raise
        _write_end(log, attempt, "done")


def _write_end(log: EventLog, attempt: int, outcome: str) -> None:
    try:
        log.write("end", attempt=attempt, outcome=outcome)
    except StorageError as error:
        _LOGGER.warning("%s: %s", STARTS_FILE, error.message)


def _step_of(checkpoint: str | None) -> int:
    return max(0, step_of(Path(checkpoint).name)) if checkpoint else 0


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
