"""Hooks of the training loop, and the record that ranks exchange in each step.

The loop computes; everything that watches, writes or decides beside it is a `LoopHook`: health monitor, step
clock, ledger, metrics, tuner, checkpoints, evaluation, stop signals. A hook adds its numbers to the step's
one exchange by filling its fields of the `StepReport`, so that no hook talks to other ranks on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, Self

from shardflow.training.ledger import LedgerMicroBatch

if TYPE_CHECKING:
    from shardflow.training.distributed import Ranks
    from shardflow.training.metrics import StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """Position of a step."""

    global_step: int
    epoch: int
    step: int
    """Number within the epoch."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


@dataclass(kw_only=True, slots=True)
class StepReport:
    """Numbers of one rank in the exchange of a step, or what became of those of all ranks.

    Every number is exact in float64, and all ranks send all fields: what is not in use is 0.
    """

    loss: float = 0.0
    """Sum of the weighted token losses."""
    num_tokens: float = 0.0
    num_samples: float = 0.0
    data_wait_s: float = 0.0
    is_stopping: float = 0.0
    """1 once this rank was asked to stop."""
    saving_stage: float = 0.0
    """`SavingStage` of the checkpoint that is being written."""
    elapsed_s: float = 0.0
    """Time since the report before."""
    cache_ram_blocks: float = 0.0
    """This and the following: what the cache did since the report before, see `CacheUse`."""
    cache_ram_bytes: float = 0.0
    cache_disk_blocks: float = 0.0
    cache_disk_bytes: float = 0.0
    cache_origin_blocks: float = 0.0
    cache_origin_bytes: float = 0.0
    cache_waits: float = 0.0
    cache_wait_s: float = 0.0
    tuner_change: float = 0.0
    """Number of the tuner's newest change; only rank 0 decides."""
    tuner_setting: float = 0.0
    """Index of the setting that it changes."""
    tuner_value: float = 0.0

    def encode(self) -> list[float]:
        """Return the fields as numbers, in their order."""
        return [float(getattr(self, one.name)) for one in fields(self)]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> Self:
        """Read what :meth:`encode` returned."""
        return cls(**{one.name: number for one, number in zip(fields(cls), numbers, strict=True)})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReports:
    """The reports of all ranks, summarized field by field; equal on all ranks."""

    total: StepReport
    least: StepReport
    largest: StepReport
    first: StepReport
    """That of rank 0."""

    @classmethod
    def exchange(cls, ranks: Ranks, own: StepReport, timeout_s: float) -> Self:
        """Exchange the reports of a step; a collective.

        Raises:
            WaitTimeoutError: a rank did not report within ``timeout_s``, or is gone.
        """
        by_rank = ranks.all_gather_numbers(own.encode(), timeout_s)
        return cls(
            total=StepReport.decode(by_rank.sum(dim=0).tolist()),
            least=StepReport.decode(by_rank.amin(dim=0).tolist()),
            largest=StepReport.decode(by_rank.amax(dim=0).tolist()),
            first=StepReport.decode(by_rank[0].tolist()),
        )


class PendingFeed(Protocol):
    """Source of micro-batches whose settings change between steps; see `DeviceFeed`."""

    def apply_pending(self) -> bool:
        """Apply changes that wait for a boundary."""


class LoopHook:
    """Base class of hooks; a hook overrides the methods it needs.

    Called on every rank, in the order of a step: ``on_step_begin``; for each micro-batch ``on_data_wait``,
    ``on_micro_batch``, ``on_forward``, ``on_backward``, ``on_backward_end``; then ``on_loss``, ``fill``,
    ``on_optimizer``, ``on_optimizer_end``, ``on_step_end`` and ``on_boundary``.
    """

    def on_run_begin(self) -> None:
        """Begin the run; the ranks agree on what they run."""

    def on_step_begin(self, place: StepPlace) -> None:
        """Begin a step."""

    def on_data_wait(self) -> None:
        """Begin to wait for the next micro-batch."""

    def on_micro_batch(self, entry: LedgerMicroBatch, *, is_last: bool) -> None:
        """Take a micro-batch that is about to be computed, padding ones included."""

    def on_forward(self) -> None:
        """Begin the forward pass of a micro-batch."""

    def on_backward(self, *, is_exchanged: bool) -> None:
        """Begin its backward pass, in which gradients are exchanged or not."""

    def on_backward_end(self) -> None:
        """End the backward pass, and with it the exchange."""

    def on_look_ahead(self) -> None:
        """Begin to send the next step's first micro-batch to the device."""

    def on_look_ahead_end(self) -> None:
        """End it; the device may still compute."""

    def on_loss(self) -> None:
        """Learn that the loss is known, so the device has passed the backward."""

    def fill(self, report: StepReport) -> None:
        """Set this hook's fields of the rank's report."""

    def on_optimizer(self) -> None:
        """Begin the update of the weights."""

    def on_optimizer_end(self) -> None:
        """End it."""

    def on_step_end(self, metrics: StepMetrics, reports: StepReports) -> None:
        """End a step, with its numbers over all ranks."""

    def on_boundary(self, feed: PendingFeed, *, is_last: bool) -> None:
        """Act between two steps; ``is_last`` ends the epoch or the run."""

    def on_run_end(self) -> None:
        """End the run, finished or stopped; not called after an error."""


class LoopHooks(LoopHook):
    """Several hooks as one: each method calls that of every hook, in their order."""

    def __init__(self, hooks: Sequence[LoopHook]) -> None:
        self._hooks = tuple(hooks)


def _calling_each(name: str) -> Callable[..., None]:
    def call(self: LoopHooks, *arguments: Any, **named: Any) -> None:
        for hook in self._hooks:
            getattr(hook, name)(*arguments, **named)

    return call


for _name in [name for name in vars(LoopHook) if not name.startswith("_")]:
    setattr(LoopHooks, _name, _calling_each(_name))
