"""Start of a run: who may write into its folder, and from which checkpoint it goes on.

Rank 0 locks the run folder (two jobs must not write into one run) and decides where the run starts: its own
newest sound checkpoint, another run's, or step 0.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardflow.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    ManifestError,
    NoProgressError,
    SignatureError,
    StorageError,
)
from shardflow.monitoring import check_outlets
from shardflow.training.adoption import choose_version
from shardflow.training.checkpoint.files import STATE_FILE, CheckpointFolder, read_checkpoint, read_run_state
from shardflow.training.config import RunConfig, TrainConfig
from shardflow.training.distributed import Ranks
from shardflow.training.faults import record_start, refuse_crash_loop
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
