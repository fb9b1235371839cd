"""The loop: steps become epochs, and what they leave behind is written down.

Owns the order of things around a step: data, gradient, update, ledger line, metrics, evaluation,
checkpoint, stop. All ranks take the same branches, because each decision follows from numbers that every
rank holds: the plan, the settings, and one small exchange a step (sums, waits, stop requests).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from shardflow.configs import dump_config
from shardflow.loading import Batch, Loader
from shardflow.training.agreement import agree
from shardflow.training.checkpoint import CheckpointFolder
from shardflow.training.config import TrainConfig
from shardflow.training.distributed import Ranks
from shardflow.training.evaluate import evaluate
from shardflow.training.feed import StepFeed
from shardflow.training.inputs import MicroInputs
from shardflow.training.ledger import LedgerWriter
from shardflow.training.metrics import EvaluationMetrics, MetricsWriter, StepMetrics
from shardflow.training.model import ReportModel
from shardflow.training.optimizer import learning_rate, set_learning_rate
from shardflow.training.signals import StopRequest
from shardflow.training.step import accumulate_gradients, apply_gradients
from shardflow.training.tensors import model_tensors, optimizer_tensors

__all__ = ["LoopProgress", "Outcome", "RunParts", "TrainingLoop"]

_LOGGER = logging.getLogger(__name__)

Outcome = Literal["finished", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What a run is made of; built once by ``shardflow.training.run``."""

    config: TrainConfig
    ranks: Ranks
    model: ReportModel
    wrapped: DistributedDataParallel
    """``model`` with gradient exchange."""
    optimizer: torch.optim.Optimizer
    loader: Loader
    open_evaluation: Callable[[], AbstractContextManager[Iterable[Batch]]] | None
    """Opens one pass over the evaluation split; None where there is none."""
    make_inputs: Callable[[Batch], MicroInputs]
    autocast: torch.dtype | None
    checkpoints: CheckpointFolder
    ledger: LedgerWriter
    metrics: MetricsWriter | None
    """On rank 0 only."""
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
        self._saved_step = progress.global_step if is_saved else -1
        self._stopping = False

    def run(self) -> Outcome:
        """Train; a checkpoint stands at the end, however the run ends.

        Raises:
            RanksDisagreeError: the ranks would not run the same steps; raised before the epoch's first one.
            ShardflowError: whatever ends a run: data that does not come, a gradient that is not finite, ...
        """
        self._evaluate_if_due()
        while self.progress.global_step < self.num_steps and not self._stopping:
            self._run_epoch()
        self._save()
        return "stopped" if self._stopping else "finished"

    def _run_epoch(self) -> None:
        """Run the rest of the loader's epoch."""
        loader, progress = self.parts.loader, self.progress
        first = loader.position
        self._agree(first.epoch, first.step)
        last = min(loader.num_steps, first.step + self.num_steps - progress.global_step)
        batches = iter(loader)
        for step in range(first.step, last):
            self._run_step(batches, first.epoch, step)
            progress.global_step += 1
            if self._stopping:
                return
            self._evaluate_if_due()
            if progress.global_step % self.parts.config.run.checkpoint_every_steps == 0:
                self._save()

    def _agree(self, epoch: int, step: int) -> None:
        loader = self.parts.loader
        agree(
            self.parts.ranks,
            f"epoch {epoch}",
            {
                "plan_id": loader.plan_id,
                "seed": self.parts.config.run.seed,
                "epoch": epoch,
                "start step": step,
                "global step": self.progress.global_step,
                "num_steps": loader.num_steps,
                "steps of the run": self.num_steps,
                "micro-batches per rank and step": loader.num_micro_batches_per_rank,
                "world_size": self.parts.ranks.world_size,
            },
        )

    def _run_step(self, batches: Iterator[Batch], epoch: int, step: int) -> None:
        parts, config = self.parts, self.parts.config
        started = time.perf_counter()
        feed = StepFeed(batches, parts.make_inputs, config.batch.micro_batches_per_step)
        sums = accumulate_gradients(
            parts.wrapped,
            feed.take(parts.loader.num_micro_batches_per_rank),
            num_micro_batches=parts.loader.num_micro_batches_per_rank,
            world_size=parts.ranks.world_size,
            position=(config.run.seed, epoch, step),
            autocast=parts.autocast,
        )
        own = [sums.loss, sums.num_tokens, sums.num_samples, feed.wait_s, float(parts.stop.is_set)]
        by_rank = parts.ranks.gather_numbers(own, self._exchange_timeout)
        loss, num_tokens, num_samples, wait_s, num_stops = by_rank.sum(dim=0).tolist()
        rate = learning_rate(config.optimizer, self.progress.global_step, self.num_steps)
        set_learning_rate(parts.optimizer, rate)
        norm = apply_gradients(
            parts.model,
            parts.optimizer,
            num_tokens=num_tokens,
            max_gradient_norm=config.optimizer.max_gradient_norm,
            where=f"epoch {epoch}, step {step}",
        )
        parts.ledger.write(self.progress.global_step, epoch=epoch, step=step, micro_batches=feed.taken)
        self._stopping = num_stops > 0
        self._report(
            StepMetrics(
                global_step=self.progress.global_step,
                epoch=epoch,
                step=step,
                loss=loss / num_tokens if num_tokens else None,
                num_tokens=num_tokens,
                num_samples=num_samples,
                learning_rate=rate,
                gradient_norm=norm,
                step_s=time.perf_counter() - started,
                data_wait_s=float(by_rank[:, 3].max()),
                mean_data_wait_s=wait_s / parts.ranks.world_size,
            )
        )

    @property
    def _exchange_timeout(self) -> timedelta:
        """For one exchange of a step; the first one may take longer, it builds the connections."""
        timeouts = self.parts.ranks.timeouts
        return timeouts.startup if self.last_step is None else timeouts.steady

    def _report(self, metrics: StepMetrics) -> None:
        if self.last_step is None:  # the first exchange has built all connections
            self.parts.ranks.enter_steady_state()
        self.last_step = metrics
        if self.parts.metrics is not None:
            self.parts.metrics.write_step(metrics)
        if self._on_step is not None:
            self._on_step(metrics, self.num_steps)

    def _evaluate_if_due(self) -> None:
        parts, step = self.parts, self.progress.global_step
        if parts.open_evaluation is None or step in {0, self.progress.last_evaluation_step}:
            return
        every = parts.config.run.evaluate_every_steps
        is_due = step % every == 0 if every else parts.loader.position.step == 0
        if not is_due and step < self.num_steps:
            return
        position = parts.loader.position
        epoch = position.epoch - (
            position.step == 0
        )  # at an epoch's end the position is the next one's start
        with parts.open_evaluation() as batches:
            self.last_evaluation = evaluate(
                parts.model,
                batches,
                parts.ranks,
                make_inputs=parts.make_inputs,
                autocast=parts.autocast,
                global_step=step,
                epoch=epoch,
            )
        self.progress.last_evaluation_step = step
        if parts.metrics is not None:
            parts.metrics.write_evaluation(self.last_evaluation)
        _LOGGER.info("evaluation after %d steps: loss %s", step, self.last_evaluation.loss)

    def _save(self) -> None:
        """Write a checkpoint of what is done; rank 0 writes, the others wait for it in a meeting."""
        parts, progress = self.parts, self.progress
        if self._saved_step == progress.global_step:
            return
        parts.ledger.sync()
        # Gathered after every rank's sync, so no checkpoint counts a step whose ledger lines could be lost.
        masks = parts.ranks.gather_json(parts.loader.masks())
        if parts.ranks.rank == 0:
            name = parts.checkpoints.save(
                progress.global_step,
                state={
                    "global_step": progress.global_step,
                    "last_evaluation_step": progress.last_evaluation_step,
                    "loader": parts.loader.state_dict(),
                    "masks": _union(masks),
                    "bindings": dict(parts.bindings),
                    "config_digest": hashlib.sha256(dump_config(parts.config).encode()).hexdigest(),
                    "world_size": parts.ranks.world_size,
                    "versions": {name: version(name) for name in ("shardflow", "torch", "transformers")},
                },
                model=model_tensors(parts.model),
                optimizer=optimizer_tensors(parts.model, parts.optimizer),
            )
            _LOGGER.info("wrote checkpoint %s", name)
        self._saved_step = progress.global_step
        parts.ranks.meet("checkpoint written", parts.ranks.timeouts.control)


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
