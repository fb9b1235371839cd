"""Stage 2 of the plan, the slots: how the positions of an epoch fill whole steps, in closed form.

An epoch has ``num_steps * samples_per_step`` sample slots. Slot ``s`` holds position ``s`` of the order as
long as there is one; the tail rule says what the slots behind the last position hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardflow.epochs.spec import BatchSpec
from shardflow.errors import PlanError

__all__ = ["EpochSlots"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSlots:
    """The slots of an epoch, and what the tail rule did to them.

    Always ``num_samples - num_dropped + num_repeated + num_padding_slots == num_slots``.
    """

    num_samples: int
    num_steps: int
    num_slots: int
    num_dropped: int
    """Samples that this epoch leaves out (tail ``drop``)."""
    num_repeated: int
    """Slots that hold a sample again, at weight 1 (tail ``repeat``)."""
    num_padding_slots: int
    """Slots that hold no sample, at weight 0 (tail ``mask``): the last ones of the last step."""

    @classmethod
    def of(cls, num_samples: int, spec: BatchSpec) -> EpochSlots:
        """Deal ``num_samples`` (at least 1) into steps.

        Raises:
            PlanError: Tail ``drop``, and the samples do not fill one step.
        """
        num_steps, remainder = divmod(num_samples, spec.samples_per_step)
        missing = spec.samples_per_step - remainder if remainder and spec.tail != "drop" else 0
        num_steps += bool(missing)
        if not num_steps:
            raise PlanError(
                f"num_steps must be at least 1, got 0 (tail 'drop': {num_samples} samples do not fill one "
                f"step of micro_batch_size {spec.micro_batch_size} * micro_batches_per_step "
                f"{spec.micro_batches_per_step} = {spec.samples_per_step}); choose tail 'repeat' or 'mask', "
                f"or sizes whose product is at most {num_samples}."
            )
        return cls(
            num_samples=num_samples,
            num_steps=num_steps,
            num_slots=num_steps * spec.samples_per_step,
            num_dropped=remainder if spec.tail == "drop" else 0,
            num_repeated=missing if spec.tail == "repeat" else 0,
            num_padding_slots=missing if spec.tail == "mask" else 0,
        )

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions that the slots ``[start, stop)`` hold, int64.

        Padding slots lie last and hold none, so the result may be shorter than ``stop - start``.
        """
        stop = min(stop, self.num_slots - self.num_padding_slots)
        positions = np.arange(start, stop, dtype=np.int64)
        if stop > self.num_samples:
            # The epoch's own order from its start, and again while it is shorter than what is missing.
            np.remainder(positions, self.num_samples, out=positions)
        return positions
