"""The loop: steps become epochs, and what they leave behind is written down.

Owns the order of things around a step: data, gradient, update, ledger line, metrics, evaluation,
checkpoint, stop. All ranks take the same branches, because each decision follows from numbers that every
rank holds: the plan, the settings, and one small exchange a step (sums, waits, stop requests).
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import nn

from shardflow.configs import dump_config
from shardflow.loading import Batch, Loader
from shardflow.training.agreement import agree
from shardflow.training.cache_use import CacheUse
from shardflow.training.config import TrainConfig
from shardflow.training.distributed import Ranks
from shardflow.training.evaluate import evaluate
from shardflow.training.feed import DeviceFeed, MicroFeed, StepFeed
from shardflow.training.inputs import InputMaker
from shardflow.training.ledger import LedgerWriter
from shardflow.training.measuring import RunMeasures
from shardflow.training.metrics import CheckpointMetrics, EvaluationMetrics, MetricsWriter, StepMetrics
from shardflow.training.optimizer import learning_rate, set_learning_rate
from shardflow.training.saving import CheckpointSaver
from shardflow.training.signals import StopRequest
from shardflow.training.step import accumulate_gradients
from shardflow.training.tuning import Tuning
from shardflow.training.updates import Updates

__all__ = ["LoopProgress", "Outcome", "RunParts", "TrainingLoop"]

_LOGGER = logging.getLogger(__name__)

Outcome = Literal["finished", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What a run is made of; built once by ``shardflow.training.run``."""

    config: TrainConfig
    ranks: Ranks
    model: nn.Module
    wrapped: nn.Module
    """``model`` with gradient exchange."""
    optimizer: torch.optim.Optimizer
    updates: Updates
    loader: Loader
    open_evaluation: Callable[[], AbstractContextManager[Iterable[Batch]]] | None
    """Opens one pass over the evaluation split; None where there is none."""
    inputs: InputMaker
    autocast: torch.dtype | None
    saver: CheckpointSaver
    ledger: LedgerWriter
    metrics: MetricsWriter | None
    """On rank 0 only."""
    measures: RunMeasures
    stop: StopRequest
    bindings: Mapping[str, Any]
    """Settings that a checkpoint of this run only fits together with."""


@dataclass(kw_only=True, slots=True)
class LoopProgress:
    """Where the run stands, besides the loader's position; goes into every checkpoint."""

    global_step: int = 0
    """Steps done over all epochs."""
    last_evaluation_step: int = -1
    """Global step of the newest evaluation: one that a kill or a stop cut off is made up for."""


class TrainingLoop:
    """Runs steps from where the parts stand to the end of the run, or to a stop request.

    Args:
        parts: Everything the loop works with; the model and optimizer already hold the resumed state.
        progress: Where the run stands.
        on_step: Called on every rank after every step, with its metrics and the steps of the whole run.
        is_saved: A checkpoint of this very state stands already.
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
        self.num_steps = _run_length(parts.config, parts.loader.num_steps_in)
        self.last_step: StepMetrics | None = None
        self.last_evaluation: EvaluationMetrics | None = None
        self._on_step = on_step
        self._cache_use = CacheUse(parts.loader.counters) if parts.config.cache.is_on else None
        self._tuning: Tuning | None = None
        self._saved_step = progress.global_step if is_saved else -1
        self._stopping = False

    def run(self) -> Outcome:
        """Train; a checkpoint stands at the end, however the run ends.

        Raises:
            RanksDisagreeError: the ranks would not run the same steps; raised before the epoch's first one.
            ShardflowError: whatever ends a run: data that does not come, a gradient that is not finite, ...
        """
        self._say_plan()
        metrics = self.parts.metrics
        if metrics is not None:
            metrics.write_plan(self.num_steps)
        # What is measured and tuned says what ranks exchange, now and in each step.
        self._agree(self.parts.loader.position.epoch, self.parts.loader.position.step)
        if self.parts.config.tune.mode != "off":
            self._tuning = Tuning(self.parts.config, self.parts.ranks, self.parts.loader, metrics)
            self.parts.measures.listeners.append(self._tuning)
        self._evaluate_if_due()
        while self.progress.global_step < self.num_steps and not self._stopping:
            self._run_epoch()
        self._save()
        self._note_checkpoint(self.parts.saver.finish())
        self.parts.measures.finish(self.num_steps)
        outcome: Outcome = "stopped" if self._stopping else "finished"
        if metrics is not None:
            metrics.write_end(outcome, global_step=self.progress.global_step)
        return outcome

    def _say_plan(self) -> None:
        """Say what the first epoch's steps hold, leave out, repeat or pad, before one runs."""
        if self.parts.ranks.rank == 0:
            for line in self.parts.loader.summary().lines():
                _LOGGER.info("%s", line)

    def _run_epoch(self) -> None:
        """Run the rest of the loader's epoch."""
        loader, progress = self.parts.loader, self.progress
        first = loader.position
        self._agree(first.epoch, first.step)
        last = min(loader.num_steps, first.step + self.num_steps - progress.global_step)
        # Two micro-batches on a CPU's way to itself would only take memory.
        feed = DeviceFeed(loader, self.parts.inputs, looks_ahead=self.parts.ranks.device.type != "cpu")
        for step in range(first.step, last):
            self.run_step(feed, first.epoch, step)
            self._carry_out(feed, f"epoch {first.epoch}, step {step}", is_last=step + 1 == last)
            progress.global_step += 1
            if self._stopping:
                return
            if not self._evaluate_if_due():
                return
            if progress.global_step % self.parts.config.run.checkpoint_every_steps == 0:
                self._save()

    def _carry_out(self, feed: DeviceFeed, where: str, *, is_last: bool) -> None:
        """Make the tuner's change, if one is due; whoever is about to stop needs none."""
        if self._tuning is None or self._stopping:
            return
        if self._tuning.due is not None:  # processes may need a while to end
            ranks = self.parts.ranks
            ranks.watch.enter(f"{where}, changing a setting", ranks.timeouts.control_s)
        self._tuning.carry_out(feed, is_last=is_last)

    def _agree(self, epoch: int, step: int) -> None:
        loader, config = self.parts.loader, self.parts.config
        agree(
            self.parts.ranks,
            f"epoch {epoch}",
            {
                "plan_id": loader.plan_id,
                "seed": config.run.seed,
                "epoch": epoch,
                "start step": step,
                "global step": self.progress.global_step,
                "num_steps": loader.num_steps,
                "steps of the run": self.num_steps,
                "micro-batches per rank and step": loader.num_micro_batches_per_rank,
                "world_size": self.parts.ranks.world_size,
                "tune.mode": config.tune.mode,
                "monitor.interval_s": config.monitor.interval_s,
                "a cache": config.cache.is_on,
            },
        )

    def run_step(self, data: MicroFeed, epoch: int, step: int) -> None:
        """Run one step and write down what it left; whoever calls it counts it in ``progress``.

        Args:
            data: At the step's first micro-batch.
            epoch: The step's epoch.
            step: Its number in the epoch.
        """
        parts, config = self.parts, self.parts.config
        started = time.perf_counter()
        watch, where = parts.ranks.watch, f"epoch {epoch}, step {step}"
        feed = StepFeed(
            data,
            config.batch.micro_batches_per_step,
            watch=watch,
            where=where,
            limit_s=self._limit_s,
            describe_wait=parts.loader.describe_activity,
        )
        sums = accumulate_gradients(
            parts.wrapped,
            feed.take(parts.loader.num_micro_batches_per_rank),
            num_micro_batches=parts.loader.num_micro_batches_per_rank,
            world_size=parts.ranks.world_size,
            position=(config.run.seed, epoch, step),
            autocast=parts.autocast,
            loss_scale=parts.updates.loss_scale,
            exchange_each=config.parallel.accumulation == "sharded",
            clock=parts.measures.clock,
            last_gradient=parts.measures.last_gradient,
        )
        # The loss is known, so the device has passed all of the backward.
        parts.measures.clock.settle()
        watch.enter(f"{where}, updating the weights", self._limit_s)
        own = [
            sums.loss,
            sums.num_tokens,
            sums.num_samples,
            feed.drain(),
            parts.stop.is_set,
            parts.saver.stage,
            parts.measures.elapsed(),
        ]
        if self._cache_use is not None:
            own += self._cache_use.since()
        tuning = self._tuning.column() if self._tuning is not None else []
        own += tuning
        with parts.measures.timed("agree"):
            by_rank = parts.ranks.gather_numbers(own, self._exchange_timeout)
        sum_of_ranks = by_rank[:, : len(own) - len(tuning)].sum(dim=0)
        loss, num_tokens, num_samples, wait_s, num_stops, _, _, *cache = sum_of_ranks.tolist()
        rate = learning_rate(config.optimizer, self.progress.global_step, self.num_steps)
        set_learning_rate(parts.optimizer, rate)
        parts.measures.clock.optimizer()
        update = parts.updates.apply(num_tokens, loss=loss, where=where)
        parts.measures.clock.updated()
        parts.ledger.write(self.progress.global_step, epoch=epoch, step=step, micro_batches=feed.taken)
        self._stopping = num_stops > 0
        self._note_checkpoint(parts.saver.advance(by_rank[:, 5].tolist()))
        if self._tuning is not None:
            self._tuning.heard(by_rank[0, len(own) - len(tuning) :].tolist())
        self._report(
            StepMetrics(
                global_step=self.progress.global_step,
                epoch=epoch,
                step=step,
                loss=loss / num_tokens if num_tokens and math.isfinite(loss) else None,
                num_tokens=num_tokens,
                num_samples=num_samples,
                learning_rate=rate,
                gradient_norm=update.norm,
                num_skipped=parts.updates.num_skipped,
                loss_scale=parts.updates.loss_scale,
                step_s=time.perf_counter() - started,
                data_wait_s=float(by_rank[:, 3].max()),
                mean_data_wait_s=wait_s / parts.ranks.world_size,
                cache=CacheUse.named(cache) if cache else None,
            ),
            elapsed_s=float(by_rank[:, 6].max()),
        )

    @property
    def _exchange_timeout(self) -> timedelta:
        """For one exchange of a step; the first one may take longer, it builds the connections."""
        timeouts = self.parts.ranks.timeouts
        return timeouts.startup if self.last_step is None else timeouts.steady

    @property
    def _limit_s(self) -> float | None:
        """For what a rank does alone in a step; the first one, and a compiled model in any, may compile."""
        timeouts = self.parts.ranks.timeouts
        may_compile = self.last_step is None or self.parts.config.run.compile
        return timeouts.startup_s if may_compile and timeouts.hang else timeouts.hang_s

    def _report(self, metrics: StepMetrics, *, elapsed_s: float) -> None:
        if self.last_step is None:  # the first exchange has built all connections
            self.parts.ranks.enter_steady_state()
        self.last_step = metrics
        if self.parts.metrics is not None:
            self.parts.metrics.write_step(metrics)
        if self._tuning is not None:
            self._tuning.stepped(metrics)
        if self._on_step is not None:
            self._on_step(metrics, self.num_steps)
        self.parts.measures.stepped(metrics, elapsed_s=elapsed_s, total_steps=self.num_steps)

    def _evaluate_if_due(self) -> bool:
        """Measure the loss, if it is time to; returns whether the run goes on, as no stop cut it off."""
        parts, step = self.parts, self.progress.global_step
        if parts.open_evaluation is None or step in {0, self.progress.last_evaluation_step}:
            return True
        every = parts.config.run.evaluate_every_steps
        is_due = step % every == 0 if every else parts.loader.position.step == 0
        if not is_due and step < self.num_steps:
            return True
        position = parts.loader.position
        epoch = position.epoch - (
            position.step == 0
        )  # at an epoch's end the position is the next one's start
        with parts.measures.timed("evaluate"), parts.open_evaluation() as batches:
            found = evaluate(
                parts.model,
                batches,
                parts.ranks,
                make_inputs=parts.inputs.for_evaluation(),
                autocast=parts.autocast,
                global_step=step,
                epoch=epoch,
                is_stopping=lambda: parts.stop.is_set,
            )
        if found is None:
            _LOGGER.info("the evaluation after %d steps was cut off by a stop; the next start does it", step)
            self._stopping = True
            return False
        self.last_evaluation = found
        self.progress.last_evaluation_step = step
        if parts.metrics is not None:
            parts.metrics.write_evaluation(found)
        _LOGGER.info("evaluation after %d steps: loss %s", step, found.loss)
        return True

    def _save(self) -> None:
        """Begin a checkpoint of what is done; it is written while the next steps run."""
        parts, progress = self.parts, self.progress
        if self._saved_step == progress.global_step:
            return
        parts.ranks.watch.enter(
            f"checkpoint after {progress.global_step} steps", parts.ranks.timeouts.control_s
        )
        # Synced before the masks are exchanged, so no checkpoint counts a step whose lines could be lost.
        with parts.measures.timed("checkpoint"):
            parts.ledger.sync()
            former = parts.saver.begin(progress.global_step, facts=parts.loader.masks(), state=self._state)
        self._note_checkpoint(former)
        self._saved_step = progress.global_step

    def _state(self, masks: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        """Everything of a checkpoint that is no tensor."""
        parts, progress = self.parts, self.progress
        return {
            "global_step": progress.global_step,
            "last_evaluation_step": progress.last_evaluation_step,
            "loader": parts.loader.state_dict(),
            "masks": _union(masks),
            "updates": parts.updates.state_dict(),
            "bindings": dict(parts.bindings),
            "config_digest": hashlib.sha256(dump_config(parts.config).encode()).hexdigest(),
            "world_size": parts.ranks.world_size,
            "versions": {name: version(name) for name in ("shardflow", "torch", "transformers")},
        }

    def _note_checkpoint(self, metrics: CheckpointMetrics | None) -> None:
        if metrics is None or self.parts.metrics is None:
            return
        self.parts.metrics.write_checkpoint(metrics)
        _LOGGER.info(
            "checkpoint step-%08d stands: %.2f s of training, %.1f s beside it",
            metrics.global_step,
            metrics.stall_s,
            metrics.write_s,
        )


def _run_length(config: TrainConfig, steps_in: Callable[[int], int]) -> int:
    """Global steps of the whole run; under a token budget epochs differ by a few steps."""
    num_epochs, max_steps = config.run.num_epochs, config.run.max_steps
    if num_epochs is None and max_steps is not None:
        return max_steps
    num_steps = 0
    for epoch in range(num_epochs or 1):
        num_steps += steps_in(epoch)
        if max_steps is not None and num_steps >= max_steps:
            return max_steps
    return num_steps


def _union(rows_by_rank: Iterable[Iterable[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Join the ranks' masks; ranks that resumed hold the same older rows."""
    places = ("epoch", "step", "micro", "slot_in_batch")
    rows = {tuple(row[name] for name in places): row for rows in rows_by_rank for row in rows}
    return [rows[place] for place in sorted(rows)]
