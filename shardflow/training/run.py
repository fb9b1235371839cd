"""A whole run: from settings to a summary.

Every rank joins, learns from rank 0 where the run starts, prepares, and runs the loop. Nothing here is
particular to a number of ranks: one process without torchrun takes the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from shardflow.errors import CheckpointError, ConfigError, NoProgressError, StorageError
from shardflow.monitoring import check_outlets
from shardflow.training.checkpoint import Checkpoint, CheckpointFolder, read_checkpoint
from shardflow.training.config import TrainConfig
from shardflow.training.devices import prefer_determinism
from shardflow.training.distributed import Ranks, Timeouts, join_ranks
from shardflow.training.faults import watch_over
from shardflow.training.loop import LoopProgress, Outcome, TrainingLoop
from shardflow.training.metrics import StepMetrics
from shardflow.training.prepare import prepare_run
from shardflow.training.resume import RunLock, StartDecision, decide_start
from shardflow.training.signals import StopRequest
from shardflow.training.starts import check_progress, recorded
from shardflow.training.watch import HEALTH_FOLDER

_REFUSALS: Final = (ConfigError, CheckpointError, NoProgressError, StorageError)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """What a run did; plain JSON values, equal on all ranks but for ``rank``."""

    outcome: Outcome
    """``stopped``: a signal asked for it, a checkpoint stands, start again to go on."""
    stop_signal: str | None
    """The signal that this rank got, if any."""
    rank: int
    world_size: int
    attempt: int
    resumed_from: str | None
    """Name of the checkpoint this start went on from."""
    damaged_checkpoints: int
    """Newer checkpoints that were passed over."""
    global_step: int
    """Steps done over all starts of the run."""
    num_steps: int
    """Steps of the whole run."""
    loss: float | None
    """Training loss of the last step of this start."""
    evaluation_loss: float | None
    """Newest evaluation of this start."""
    num_masked_samples: int
    """Samples that this rank knows to be masked because they could not be read."""
    elapsed_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        return asdict(self)


def train(
    config: TrainConfig,
    *,
    on_step: Callable[[StepMetrics, int], None] | None = None,
    stop: StopRequest | None = None,
) -> TrainSummary:
    """Run or resume a training job; every rank that torchrun started calls this once.

    Args:
        config: All settings.
        on_step: Called on every rank after every step, with its metrics and the steps of the whole run.
        stop: Where stop signals arrive; a caller that listens passes its own.

    Returns:
        The summary of this start.

    Raises:
        ShardflowError: settings, dataset, checkpoint or data are wrong, ranks are missing, or a step cannot
            be taken.
    """
    timeouts = Timeouts(
        startup=timedelta(seconds=config.timeouts.startup_s),
        steady=timedelta(seconds=config.timeouts.steady_s),
        control=timedelta(seconds=config.timeouts.control_s),
        hang=timedelta(seconds=config.timeouts.hang_s) if config.timeouts.hang_s else None,
    )
    if config.run.deterministic:
        prefer_determinism()
    with (
        join_ranks(config.run.device, timeouts, traces=config.run.output / HEALTH_FOLDER) as joined,
        watch_over(joined, config.run.output, lost_s=config.timeouts.lost_s) as ranks,
    ):
        return train_on(ranks, config, on_step=on_step, stop=stop)


def train_on(
    ranks: Ranks,
    config: TrainConfig,
    *,
    on_step: Callable[[StepMetrics, int], None] | None = None,
    stop: StopRequest | None = None,
) -> TrainSummary:
    """Do the same on ranks that have joined already; arguments and errors as in :func:`train`."""
    started = time.perf_counter()
    stop = stop or StopRequest()
    with ExitStack() as stack:
        checkpoints = CheckpointFolder(config.run.output / "checkpoints", keep_last=config.run.keep_last)
        ranks.watch.enter("choosing a checkpoint", ranks.timeouts.startup_s)
        decision = _decide(config, ranks, checkpoints, stack)
        ranks.watch.enter("preparing", ranks.timeouts.startup_s)
        checkpoint = read_checkpoint(Path(decision.checkpoint)) if decision.checkpoint else None
        progress = _progress(checkpoint)
        parts = prepare_run(config, ranks, checkpoints, decision, checkpoint, stop, stack)
        # Of its own checkpoints a run needs no second copy; another run's is not in its folder yet.
        is_saved = checkpoint is not None and checkpoint.name in checkpoints.names()
        loop = TrainingLoop(parts, progress, on_step, is_saved=is_saved)
        resumed_from = checkpoint.name if checkpoint else None
        del checkpoint  # the model and the optimizer hold its tensors now
        outcome = loop.run()
        return TrainSummary(
            outcome=outcome,
            stop_signal=stop.signal_name,
            rank=ranks.rank,
            world_size=ranks.world_size,
            attempt=decision.attempt,
            resumed_from=resumed_from,
            damaged_checkpoints=len(decision.damaged),
            global_step=progress.global_step,
            num_steps=loop.num_steps,
            loss=loop.last_step.loss if loop.last_step else None,
            evaluation_loss=loop.evaluation.newest.loss if loop.evaluation.newest else None,
            num_masked_samples=len(parts.loader.masks()),
            elapsed_s=time.perf_counter() - started,
        )


def _decide(
    config: TrainConfig, ranks: Ranks, checkpoints: CheckpointFolder, stack: ExitStack
) -> StartDecision:
    """Let rank 0 lock the run folder and choose the start, then tell everybody, a refusal included."""
    told: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            stack.callback(RunLock(config.run.output).release)
            check_outlets(config.monitor.prometheus, config.monitor.sinks)
            checkpoints.remove_unfinished()
            run = config.run
            decision = decide_start(run, checkpoints)
            check_progress(run.output, decision.checkpoint, max_failed_starts=run.max_failed_starts)
            stack.enter_context(recorded(run.output, decision.checkpoint, attempt=decision.attempt))
            told["decision"] = decision.to_json()
        except _REFUSALS as error:
            told[type(error).__name__] = error.message
    # Rank 0 may read and verify large checkpoints; the others wait here, not in a collective's own timeout.
    ranks.meet("choosing a checkpoint", ranks.timeouts.startup)
    told = ranks.from_first(told)
    for kind in _REFUSALS:
        if kind.__name__ in told:
            raise kind(told[kind.__name__])
    return StartDecision.from_json(told["decision"])


def _progress(checkpoint: Checkpoint | None) -> LoopProgress:
    if checkpoint is None:
        return LoopProgress()
    return LoopProgress(
        global_step=checkpoint.state["global_step"],
        last_evaluation_step=checkpoint.state["last_evaluation_step"],
    )
