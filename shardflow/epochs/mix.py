"""How well a blend is mixed: what each step holds of the components, against what the epoch holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from shardflow.epochs.blend import Blend
from shardflow.epochs.plan import EpochPlan

__all__ = ["BlendMix", "measure_mix"]

_MOST_STEPS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendMix:
    """The mix of an epoch's steps, but for the last one, which the tail fills or shortens."""

    shares: tuple[float, ...]
    """Share of each component in the epoch."""
    mean_deviation: float
    """How far the share of a component in a step lies from that, mean over steps and components."""
    max_deviation: float
    """The farthest that it lies from it in any step."""
    num_steps: int
    """Steps that were looked at, spread over the epoch."""

    def to_json(self) -> dict[str, object]:
        """Return the numbers as a JSON object."""
        return {**asdict(self), "shares": list(self.shares)}


def measure_mix(plan: EpochPlan) -> BlendMix | None:
    """Walk an epoch, or steps spread over it; None where the plan is of one dataset."""
    blend = plan.population
    if not isinstance(blend, Blend):
        return None
    last = max(1, plan.num_steps - 1)
    shares = blend.shares()
    deviations = []
    for step in range(0, last, -(-last // _MOST_STEPS)):
        numbers, weights = plan.numbered_step(step)
        components = blend.components_of(numbers[weights > 0])
        counts = np.bincount(components, minlength=len(shares))
        deviations.append(np.abs(counts / max(1, counts.sum()) - shares))
    found = np.array(deviations)
    return BlendMix(
        shares=tuple(shares.tolist()),
        mean_deviation=float(found.mean()),
        max_deviation=float(found.max()),
        num_steps=len(found),
    )
