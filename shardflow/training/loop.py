"""Training loop: steps become epochs, with evaluations between them.

A step is a straight line: forward and backward of each micro-batch, one exchange of a `StepReport`, one
update of the weights. Everything beside it is a hook (`shardflow.training.hooks`): health monitor, clock,
ledger, stop signals, checkpoints, metrics, tuner, evaluation. All ranks take the same branches, because each
decision follows from numbers that every rank holds: the plan, the settings, and the reports. What they must
agree on is checked before the first step (contract S1).

An evaluation counts every sample of a split exactly once for any number of ranks: its tail is ``mask``, so
padding has weight 0, and sums of losses and tokens are exchanged, never means. A whole model is called
without DistributedDataParallel, so no rank waits inside a forward for another one's data; a sharded one
gathers its layers, and the plan gives all ranks the same number of forwards. A stop does not wait for the end
of a long evaluation: every other second ranks exchange whether one was requested.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, Final, Literal

import torch
from torch import nn

from shardflow.errors import ConfigError
from shardflow.loading import Batch, Loader
from shardflow.loading.rows.lock import lock_digest
from shardflow.training.adoption import Adoption
from shardflow.training.checkpoint.saving import CheckpointSaver
from shardflow.training.config import RunConfig
from shardflow.training.distributed import Ranks, StopRequest, settle
from shardflow.training.hooks import LoopHook, LoopHooks, PendingFeed, StepPlace, StepReport, StepReports
from shardflow.training.inputs import DeviceFeed, InputSource, MicroFeed, StepInputs, step_inputs
from shardflow.training.interval import CacheUse, RunMeasures
from shardflow.training.ledger import LedgerMicroBatch, LedgerWriter
from shardflow.training.metrics import CheckpointMetrics, EvaluationMetrics, MetricsWriter, StepMetrics
from shardflow.training.rates import OptimizerConfig, learning_rate
from shardflow.training.step import (
    Updates,
    accumulate_gradients,
    compute_loss,
    set_learning_rate,
)
from shardflow.training.tasks.task import Meter, Task
from shardflow.training.tuning import Tuning

# ruff: noqa: ARG002 - a hook receives more than it uses

_LOGGER = logging.getLogger(__name__)

_version = cache(version)  # It reads a file each time, while the steps wait for a checkpoint.

_POLL_EVERY_S: Final = 2.0
"""Interval at which ranks exchange whether to stop; schedulers leave 30 s and more."""

_MAX_PLANNED_EPOCHS: Final = 10_000
"""Epochs of unequal lengths that are planned before the first step; each takes a millisecond and more."""

Outcome = Literal["finished", "stopped", "renewed"]
"""``renewed``: a newer version of the dataset is there, and the next epoch is prepared with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What a run is made of; built once by ``shardflow.training.run``."""

    run: RunConfig
    optimization: OptimizerConfig
    micro_batches_per_step: int
    """Over all ranks."""
    exchanges_each: bool
    """Exchange gradients after each micro-batch, not once a step."""
    agreement: Mapping[str, Any]
    """Settings that all ranks must share, besides those of the plan."""
    ranks: Ranks
    model: nn.Module
    wrapped: nn.Module
    """``model`` with gradient exchange."""
    optimizer: torch.optim.Optimizer
    updates: Updates
    loader: Loader
    open_evaluation: Callable[[], AbstractContextManager[Iterable[Batch]]] | None
    """Opens one pass over the evaluation split; None where there is none."""
    open_tuning: Callable[[], Tuning] | None
    """Begins the tuner, with an exchange; None where it is off."""
    inputs: InputSource
    task: Task
    autocast: torch.dtype | None
    saver: CheckpointSaver
    ledger: LedgerWriter
    metrics: MetricsWriter | None
    """On rank 0 only."""
    measures: RunMeasures
    cache_use: CacheUse | None
    """None without a cache."""
    stop: StopRequest
    adoption: Adoption | None
    """Where newer versions of the dataset are adopted."""
    identity: Mapping[str, Any]
    """Written into every checkpoint: the settings that its tensors only fit together with, and the digest of
    the configuration."""


@dataclass(kw_only=True, slots=True)
class LoopProgress:
    """Progress of the run, besides the loader's position."""

    global_step: int = 0
    """Steps done over all epochs; in every checkpoint."""
    last_evaluation_step: int = -1
    """Global step of the newest evaluation, in every checkpoint: one that was cut off is repeated."""
    is_stopping: bool = False
    """The ranks agreed to stop."""


class TrainingLoop:
    """Training loop from the resumed position to the end of the run, or to a stop request.

    Args:
        parts: Everything the loop works with; the model and optimizer already hold the resumed state.
        progress: Progress of the run.
        on_step: Called on every rank after every step, with its metrics and the steps of the whole run.
        is_saved: A checkpoint of this very state exists already.
    """

    def __init__(
        self,
        parts: RunParts,
        progress: LoopProgress,
        on_step: Callable[[StepMetrics, int], None] | None = None,
        *,
        is_saved: bool = False,
    ) -> None:
        self.parts = parts
        self.progress = progress
        self.num_steps = parts.measures.total_steps = _run_length(
            parts.run, parts.loader, None if parts.adoption is None else progress.global_step
        )
        self._is_renewed = False
        self.last_step: StepMetrics | None = None
        self._on_step = on_step
        self.evaluation = _Evaluation(parts, progress, self.num_steps)
        self._checkpoints = _Checkpoints(parts, progress, is_saved=is_saved)
        self._hooks = self._all_hooks(tuning=None)

    def run(self) -> Outcome:
        """Train; a checkpoint exists at the end, however the run ends.

        Raises:
            RanksDisagreeError: the ranks would not run the same steps; raised before the epoch's first one.
            ShardflowError: whatever ends a run: data that does not come, a gradient that is not finite, ...
        """
        parts, progress = self.parts, self.progress
        if parts.ranks.rank == 0:
            for line in parts.loader.summary().lines():
                _LOGGER.info("%s", line)
        if parts.metrics is not None:
            parts.metrics.write_plan(self.num_steps)
        self._agree()
        if parts.open_tuning is not None:
            tuning = parts.open_tuning()
            parts.measures.listeners.append(tuning)
            self._hooks = self._all_hooks(tuning)
        self._hooks.on_run_begin()
        while progress.global_step < self.num_steps and not (progress.is_stopping or self._is_renewed):
            self._run_epoch()
        self._hooks.on_run_end()
        outcome: Outcome = "stopped" if progress.is_stopping else "finished"
        if parts.metrics is not None:
            ended = "stopped" if self._is_renewed else outcome
            parts.metrics.write_end(ended, global_step=progress.global_step)
        return "renewed" if self._is_renewed and not progress.is_stopping else outcome

    def _run_epoch(self) -> None:
        """Run the rest of the loader's epoch."""
        parts, progress = self.parts, self.progress
        self._agree()
        first = parts.loader.position
        if parts.adoption is not None and parts.ranks.rank == 0 and first.step == 0:
            parts.adoption.record(progress.global_step, first.epoch)
        last = min(parts.loader.num_steps, first.step + self.num_steps - progress.global_step)
        # On a CPU nothing is copied, so a second micro-batch would only take memory.
        feed = DeviceFeed(
            parts.loader,
            parts.inputs,
            looks_ahead=parts.ranks.device.type != "cpu",
            shows_first=parts.ranks.rank == 0 and self.last_step is None,
        )
        for step in range(first.step, last):
            self.run_step(feed, first.epoch, step)
            progress.global_step += 1
            if not progress.is_stopping:
                self._hooks.on_boundary(feed, is_last=step + 1 == last)
            if progress.is_stopping:
                return
        if parts.adoption is not None and progress.global_step < self.num_steps:
            self._is_renewed = self._finds_newer_version(parts.adoption)

    def _finds_newer_version(self, adoption: Adoption) -> bool:
        """Return whether rank 0 finds a newer version of the dataset; a collective."""
        ranks, phase = self.parts.ranks, "looking for a newer version"
        ranks.health.enter(phase, ranks.timeouts.startup_s)
        found = adoption.finds_newer() if ranks.rank == 0 else None
        ranks.barrier(phase, ranks.timeouts.startup_s)
        return bool(ranks.broadcast({"found": found})["found"])

    def run_step(self, data: MicroFeed, epoch: int, step: int) -> None:
        """Run one step; whoever calls it counts it in ``progress``.

        Args:
            data: At the step's first micro-batch.
            epoch: The step's epoch.
            step: Its number in the epoch.
        """
        parts, hooks = self.parts, self._hooks
        started = time.perf_counter()
        place = StepPlace(global_step=self.progress.global_step, epoch=epoch, step=step)
        hooks.on_step_begin(place)

        # Forward and backward of this rank's micro-batches; gradients are zero or None before.
        num_micro_batches = parts.loader.num_micro_batches_per_rank
        own = accumulate_gradients(
            parts.wrapped,
            step_inputs(data, num_micro_batches, hooks),
            num_micro_batches=num_micro_batches,
            world_size=parts.ranks.world_size,
            position=(parts.run.seed, epoch, step),
            autocast=parts.autocast,
            loss_scale=parts.updates.loss_scale,
            exchange_each=parts.exchanges_each,
            hooks=hooks,
        )
        hooks.on_loss()

        # One exchange: what each rank did in this step.
        own.data_wait_s = data.drain()
        hooks.fill(own)
        timeouts = parts.ranks.timeouts
        # The first exchange may take longer: it builds the connections.
        timeout_s = timeouts.startup_s if self.last_step is None else timeouts.steady_s
        with parts.measures.timed("agree"):
            reports = StepReports.exchange(parts.ranks, own, timeout_s)
        total = reports.total

        # Clip, step, zero_grad.
        rate = learning_rate(parts.optimization, place.global_step, self.num_steps)
        set_learning_rate(parts.optimizer, rate)
        hooks.on_optimizer()
        norm = parts.updates.apply(total.num_tokens, loss=total.loss, where=str(place))
        hooks.on_optimizer_end()

        if self.last_step is None:
            parts.ranks.enter_steady_state()
        self.last_step = self._metrics_of(place, reports, rate, norm, time.perf_counter() - started)
        hooks.on_step_end(self.last_step, reports)

    def _metrics_of(
        self, place: StepPlace, reports: StepReports, rate: float, norm: float | None, step_s: float
    ) -> StepMetrics:
        """Return the metrics of a step, equal on all ranks except for ``step_s``."""
        parts, total = self.parts, reports.total
        return StepMetrics(
            global_step=place.global_step,
            epoch=place.epoch,
            step=place.step,
            loss=total.loss / total.num_tokens if total.num_tokens and math.isfinite(total.loss) else None,
            num_tokens=total.num_tokens,
            num_samples=total.num_samples,
            learning_rate=rate,
            gradient_norm=norm,
            num_skipped=parts.updates.num_skipped,
            loss_scale=parts.updates.loss_scale,
            step_s=step_s,
            data_wait_s=reports.largest.data_wait_s,
            mean_data_wait_s=total.data_wait_s / parts.ranks.world_size,
            cache=None if parts.cache_use is None else CacheUse.of(total),
        )

    def _all_hooks(self, tuning: Tuning | None) -> LoopHooks:
        """Return the hooks in the order in which they are called."""
        parts = self.parts
        observers = [
            _Phases(parts),
            parts.measures.clock,
            parts.measures.last_gradient,
            parts.cache_use,
            _Ledger(parts),
            _Stop(parts.stop, self.progress),
            _Metrics(parts.metrics, self._on_step, self.num_steps),
            tuning,
            self.evaluation,
            self._checkpoints,  # behind the evaluation, which it notes
            parts.measures,
        ]
        return LoopHooks([hook for hook in observers if hook is not None])

    def _agree(self) -> None:
        """Compare with all ranks what the coming epoch follows from; an exchange."""
        loader, position = self.parts.loader, self.parts.loader.position
        self.parts.ranks.agree(
            f"epoch {position.epoch}",
            {
                "plan_id": loader.plan_id,
                "run_id": loader.run_id,
                "lock": lock_digest(loader.lock()),
                "seed": self.parts.run.seed,
                "epoch": position.epoch,
                "start step": position.step,
                "global step": self.progress.global_step,
                "num_steps": loader.num_steps,
                "steps of the run": self.num_steps,
                "micro-batches per rank and step": loader.num_micro_batches_per_rank,
                "world_size": self.parts.ranks.world_size,
                **self.parts.agreement,
            },
        )


class _Phases(LoopHook):
    """Reporter of this rank's phase to the health monitor, with how long it may take alone."""

    def __init__(self, parts: RunParts) -> None:
        self._ranks, self._compiles = parts.ranks, parts.run.compile
        self._describe_wait = parts.loader.describe_activity
        self._place: StepPlace | None = None
        self._is_first = True

    def on_step_begin(self, place: StepPlace) -> None:
        self._place = place

    def on_data_wait(self) -> None:
        # The loader has a deadline of its own, so this phase has none.
        self._ranks.health.enter(f"{self._place}, waiting for data", describe=self._describe_wait)

    def on_micro_batch(self, entry: LedgerMicroBatch, *, is_last: bool) -> None:
        # Gradients are exchanged in the last one: what it waits for may be another rank.
        self._ranks.health.enter(f"{self._place}, computing", self._limit_s, together=is_last)

    def on_look_ahead(self) -> None:
        self._ranks.health.enter(f"{self._place}, reading ahead", describe=self._describe_wait)

    def on_look_ahead_end(self) -> None:
        self._ranks.health.enter(f"{self._place}, computing", self._limit_s, together=True)

    def on_loss(self) -> None:
        self._ranks.health.enter(f"{self._place}, updating the weights", self._limit_s)

    def on_step_end(self, metrics: StepMetrics, reports: StepReports) -> None:
        self._is_first = False

    @property
    def _limit_s(self) -> float | None:
        """The first step, and any of a compiled model, may take as long as compiling does."""
        timeouts = self._ranks.timeouts
        may_compile = self._is_first or self._compiles
        if not timeouts.hang_s:
            return None
        return timeouts.startup_s if may_compile else timeouts.hang_s


class _Ledger(LoopHook):
    """Writer of the samples of each step, without padding micro-batches: those depend on the world size."""

    def __init__(self, parts: RunParts) -> None:
        self._writer, self._per_step = parts.ledger, parts.micro_batches_per_step
        self._taken: list[LedgerMicroBatch] = []

    def on_step_begin(self, place: StepPlace) -> None:
        self._taken = []

    def on_micro_batch(self, entry: LedgerMicroBatch, *, is_last: bool) -> None:
        if entry.micro < self._per_step:
            self._taken.append(entry)

    def on_step_end(self, metrics: StepMetrics, reports: StepReports) -> None:
        self._writer.write(
            metrics.global_step, epoch=metrics.epoch, step=metrics.step, micro_batches=self._taken
        )


class _Stop(LoopHook):
    """Stop requests: ends the run on all ranks once one was asked to stop."""

    def __init__(self, stop: StopRequest, progress: LoopProgress) -> None:
        self._stop, self._progress = stop, progress

    def fill(self, report: StepReport) -> None:
        report.is_stopping = self._stop.is_set

    def on_step_end(self, metrics: StepMetrics, reports: StepReports) -> None:
        self._progress.is_stopping = reports.largest.is_stopping > 0


class _Metrics(LoopHook):
    """Writer of each step's line on rank 0; also calls ``on_step``."""

    def __init__(
        self,
        writer: MetricsWriter | None,
        on_step: Callable[[StepMetrics, int], None] | None,
        num_steps: int,
    ) -> None:
        self._writer, self._on_step, self._num_steps = writer, on_step, num_steps

    def on_step_end(self, metrics: StepMetrics, reports: StepReports) -> None:
        if self._writer is not None:
            self._writer.write_step(metrics)
        if self._on_step is not None:
            self._on_step(metrics, self._num_steps)


class _Checkpoints(LoopHook):
    """Checkpoints: begun every so many steps and at the end, written while the next steps run."""

    def __init__(self, parts: RunParts, progress: LoopProgress, *, is_saved: bool) -> None:
        self._parts, self._progress = parts, progress
        self._saved_step = progress.global_step if is_saved else -1

    def fill(self, report: StepReport) -> None:
        report.saving_stage = self._parts.saver.stage

    def on_step_end(self, metrics: StepMetrics, reports: StepReports) -> None:
        stages = [reports.least.saving_stage, reports.largest.saving_stage]
        self._note(self._parts.saver.advance(stages))

    def on_boundary(self, feed: PendingFeed, *, is_last: bool) -> None:
        if self._progress.global_step % self._parts.run.checkpoint_every_steps == 0:
            self._save()

    def on_run_end(self) -> None:
        self._save()
        self._note(self._parts.saver.finish())

    def _save(self) -> None:
        parts, global_step = self._parts, self._progress.global_step
        if self._saved_step == global_step:
            return
        parts.ranks.health.enter(f"checkpoint after {global_step} steps", parts.ranks.timeouts.control_s)
        # Synced before the masks are exchanged, so no checkpoint counts a step whose lines could be lost.
        with parts.measures.timed("checkpoint"):
            parts.ledger.sync()
            former = parts.saver.begin(global_step, facts=parts.loader.masks(), state=self._state)
        self._note(former)
        self._saved_step = global_step

    def _state(self, masks: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return everything of a checkpoint that is no tensor."""
        parts = self._parts
        return {
            "global_step": self._progress.global_step,
            "last_evaluation_step": self._progress.last_evaluation_step,
            "loader": parts.loader.state_dict(),
            "masks": _union(masks),
            "updates": parts.updates.state_dict(),
            **parts.identity,
            "world_size": parts.ranks.world_size,
            "versions": {name: _version(name) for name in ("shardflow", "torch", "transformers")},
        }

    def _note(self, metrics: CheckpointMetrics | None) -> None:
        if metrics is None or self._parts.metrics is None:
            return
        self._parts.metrics.write_checkpoint(metrics)
        _LOGGER.info(
            "saved checkpoint step-%08d: %.2f s of training time, %.1f s in the background",
            metrics.global_step,
            metrics.stall_s,
            metrics.write_s,
        )


class _Evaluation(LoopHook):
    """Evaluations of the split when they are due, and at the start if one was cut off."""

    def __init__(self, parts: RunParts, progress: LoopProgress, num_steps: int) -> None:
        self._parts, self._progress, self._num_steps = parts, progress, num_steps
        self.newest: EvaluationMetrics | None = None

    def on_run_begin(self) -> None:
        self._evaluate_if_due()

    def on_boundary(self, feed: PendingFeed, *, is_last: bool) -> None:
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        parts, step, position = self._parts, self._progress.global_step, self._parts.loader.position
        if parts.open_evaluation is None or step in {0, self._progress.last_evaluation_step}:
            return
        every = parts.run.evaluate_every_steps
        is_due = step % every == 0 if every else position.step == 0
        if not is_due and step < self._num_steps:
            return
        is_average = parts.optimization.ema_decay > 0 and parts.optimization.evaluate_ema
        weights = parts.updates.average.swapped() if is_average else nullcontext()
        with parts.measures.timed("evaluate"), parts.open_evaluation() as batches, weights:
            found = evaluate(
                parts.model,
                batches,
                parts.ranks,
                make_inputs=parts.inputs.for_evaluation(),
                autocast=parts.autocast,
                global_step=step,
                # At an epoch's end the position is the next one's start.
                epoch=position.epoch - (position.step == 0),
                is_stopping=lambda: parts.stop.is_set,
                meter=parts.task.meter(parts.ranks),
            )
        if found is None:
            _LOGGER.info(
                "the evaluation after %d steps was cut off by a stop; the next start repeats it", step
            )
            self._progress.is_stopping = True
            return
        self.newest = found
        self._progress.last_evaluation_step = step
        if parts.metrics is not None:
            parts.metrics.write_evaluation(found)
        of = " of averaged weights" if is_average else ""
        _LOGGER.info("evaluation%s after %d steps: loss %s", of, step, found.loss)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: Ranks,
    *,
    make_inputs: Callable[[Batch], StepInputs],
    autocast: torch.dtype | None,
    global_step: int,
    epoch: int,
    is_stopping: Callable[[], bool] = lambda: False,
    meter: Meter | None = None,
) -> EvaluationMetrics | None:
    """Measure the loss over this rank's micro-batches and add up all ranks.

    Args:
        model: The bare model; left in the mode it had.
        batches: This rank's micro-batches of one epoch with tail ``mask``.
        ranks: The ranks of the run.
        make_inputs: Moves a batch to the device.
        autocast: Type to compute in, or None for that of the weights.
        global_step: Training steps done so far.
        epoch: Training epoch, for the record.
        is_stopping: Whether this rank was asked to stop.
        meter: Collects the scores that metrics follow from.

    Returns:
        The same on every rank; None where any rank was asked to stop: all of them then stop together.

    Raises:
        WaitTimeoutError: a rank is later than the first one by more than ``timeouts.control_s``.
    """
    started = time.perf_counter()
    losses: list[float] = []
    num_tokens = num_samples = 0.0
    next_poll, is_cut_off = 1, False
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ranks.health.enter(f"evaluation after {global_step} steps")
            for batch in batches:
                inputs = make_inputs(batch)
                keep = () if meter is None else (meter.add,)
                losses.append(float(compute_loss(model, inputs, autocast, *keep)))
                num_tokens += inputs.num_tokens
                num_samples += inputs.num_samples
                if len(losses) == next_poll:
                    each_s = (time.perf_counter() - started) / next_poll
                    by_rank = ranks.all_gather_numbers([is_stopping(), each_s], ranks.timeouts.control_s)
                    stop_requests, paces_s = by_rank.unbind(dim=1)
                    if is_cut_off := bool(stop_requests.any()):
                        break
                    # The slowest rank's pace, so that all poll again after the same micro-batch.
                    next_poll += max(1, int(_POLL_EVERY_S / max(float(paces_s.max()), 1e-3)))
    finally:
        model.train(was_training)
        settle(model)
    if is_cut_off:
        return None
    ranks.barrier("evaluation done", ranks.timeouts.control_s)
    own = [math.fsum(losses), num_tokens, num_samples]
    by_rank = ranks.all_gather_numbers(own, ranks.timeouts.control_s)
    total_loss, num_tokens, num_samples = by_rank.sum(dim=0).tolist()
    return EvaluationMetrics(
        global_step=global_step,
        epoch=epoch,
        loss=total_loss / num_tokens if num_tokens else None,
        num_tokens=num_tokens,
        num_samples=num_samples,
        scores={} if meter is None else meter.finish(),
        evaluation_s=time.perf_counter() - started,
    )


def _run_length(run: RunConfig, loader: Loader, done: int | None) -> int:
    """Global steps of the whole run; under a token budget epochs differ by a few steps.

    Args:
        run: The table ``[run]``.
        loader: At the position of the run.
        done: Steps done, where earlier epochs may have been of other versions of the dataset; else None.
    """
    if run.num_epochs is None and run.max_steps is not None:
        return run.max_steps
    first = 0 if done is None else loader.epoch
    num_steps = 0 if done is None else done - loader.position.step
    epochs = range(first, run.num_epochs or 1)
    if loader.plan.spec.budget is None:  # epochs are of one length
        num_steps += len(epochs) * loader.num_steps
        return num_steps if run.max_steps is None else min(num_steps, run.max_steps)
    if len(epochs) > _MAX_PLANNED_EPOCHS and run.max_steps is None:
        raise ConfigError(
            f"run.num_epochs is {run.num_epochs:,}, and under batch.max_tokens, where epochs differ in "
            f"length, {_MAX_PLANNED_EPOCHS:,} at most are planned before the first step; set run.max_steps."
        )
    for epoch in epochs:
        num_steps += loader.num_steps_in(epoch)
        if run.max_steps is not None and num_steps >= run.max_steps:
            return run.max_steps
    return num_steps


def _union(rows_by_rank: Iterable[Iterable[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Join the ranks' masks; ranks that resumed hold the same older rows."""
    places = ("epoch", "step", "micro", "slot_in_batch")
    rows = {tuple(row[name] for name in places): row for rows in rows_by_rank for row in rows}
    return [rows[place] for place in sorted(rows)]
