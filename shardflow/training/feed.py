"""Takes the micro-batches of a step from the loader; notes which samples they held and how long they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from shardflow.loading import Batch
from shardflow.training.inputs import MicroInputs
from shardflow.training.ledger import LedgerMicroBatch

__all__ = ["StepFeed"]


class StepFeed:
    """A rank's micro-batches of one step.

    Args:
        batches: The loader's iterator, at the step's first micro-batch.
        make_inputs: Moves a batch to the device.
        per_step: Micro-batches of the step over all ranks; from this number on they are fillers.

    Attributes:
        taken: What was taken so far, without fillers: they belong to the world size, not to the step.
        wait_s: Time the loop waited for batches so far.
    """

    def __init__(
        self, batches: Iterator[Batch], make_inputs: Callable[[Batch], MicroInputs], per_step: int
    ) -> None:
        self.taken: list[LedgerMicroBatch] = []
        self.wait_s = 0.0
        self._batches = batches
        self._make_inputs = make_inputs
        self._per_step = per_step

    def take(self, num_micro_batches: int) -> Iterator[tuple[int, MicroInputs]]:
        """Yield number and inputs of each micro-batch, fillers included; fewer where the loader ends."""
        for _ in range(num_micro_batches):
            started = time.perf_counter()
            batch = next(self._batches, None)
            self.wait_s += time.perf_counter() - started
            if batch is None:
                return
            if batch.micro < self._per_step:
                self.taken.append(
                    LedgerMicroBatch(
                        micro=batch.micro,
                        keys=tuple(batch.keys),
                        weights=tuple(batch.arrays["weight"].tolist()),
                    )
                )
            yield batch.micro, self._make_inputs(batch)
