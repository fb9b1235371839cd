"""The plans of a loader's epochs: only those that are asked for are worked out."""

from __future__ import annotations

from shardflow.epochs import EpochPlan, LoaderState
from shardflow.loading.selection import Selection

__all__ = ["EpochPlans"]

# Where one epoch ends and the next begins both are asked for, in turn.
_NUM_KEPT = 2


class EpochPlans:
    """Plans by epoch; the newest two are kept.

    Under a token budget a plan takes a second at 200 million samples, so a run that goes on in epoch 7 never
    plans epoch 0.

    Args:
        selection: The samples.
        state: Seed and batch spec of the run.
    """

    __slots__ = ("_kept", "_state", "selection")

    def __init__(self, selection: Selection, state: LoaderState) -> None:
        self.selection = selection
        """Where a first plan comes from; a forked child puts its own here."""
        self._state = state
        self._kept: list[EpochPlan] = []

    def of(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch.

        Raises:
            PlanError: No step can be formed.
        """
        for plan in self._kept:
            if plan.epoch == epoch:
                return plan
        if self._kept:
            plan = self._kept[0].for_epoch(epoch)
        else:
            plan = self.selection.plan(self._state.spec, seed=self._state.seed, epoch=epoch)
        self._kept = [plan, *self._kept[: _NUM_KEPT - 1]]
        return plan
