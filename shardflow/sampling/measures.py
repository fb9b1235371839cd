"""Plan measures: cost of a plan for nodes, caches and ranks, and the mix of a blend.

The numbers help to choose M, budgets and lanes. They come from evaluating the plan; no shard is read. Of a
large epoch only some steps, spread over it, are evaluated: numbers that need all steps are left out, bytes
are scaled, and the shards of a node follow from its lanes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from shardflow.sampling.blend import Mixture
from shardflow.sampling.budget_batches import BudgetMicroBatches
from shardflow.sampling.layout import SampleLayout
from shardflow.sampling.permutation import Int64Array
from shardflow.sampling.plan import EpochPlan, RankSchedule

_MOST_SAMPLES = 1_000_000
_BALANCED = 1.05
_FULL_SHUFFLE_PARTS = 3  # two random positions of an epoch are a third of it apart
_MOST_STEPS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMeasures:
    """Measures of one epoch."""

    walked_share: float
    """Evaluated steps, as a share of all."""
    num_nodes: int
    shards_per_node: float | None
    """Shards that a node reads in the epoch, mean over nodes. If only some steps were evaluated: those of its
    lanes, without the remainder; None if nodes have no lanes of their own."""
    num_shards: int
    bytes_per_node: float
    """Bytes of whole samples that a node reads in the epoch, mean over nodes; scaled from the steps."""
    most_bytes_per_node: int
    padding_share: float | None
    """Share of padding in the tokens of micro-batches; None without a token budget."""
    budget_used: float | None
    """Tokens of a micro-batch as a share of the budget, mean over the epoch."""
    imbalance: float | None
    """Largest cost divided by mean cost of the micro-batches of a step (ranks wait for the largest), mean
    over steps without the last one, which the tail fills."""
    imbalance_p99: float | None
    imbalance_max: float | None
    """Imbalance of the worst step."""
    balanced_share: float | None
    """Steps in which the largest cost is at most 1.05 times the mean, as a share of all."""
    neighbor_spread: float | None
    """Mean distance in the epoch of rows that are neighbors in the table, relative to a full shuffle: 1
    equals one, 0 is the order of the table."""

    def to_json(self) -> dict[str, float | int | None]:
        """Return the numbers as a JSON object; the spread keeps the key of older versions."""
        numbers = asdict(self)
        numbers["neighbour_spread"] = numbers.pop("neighbor_spread")
        return numbers


def measure_plan(
    plan: EpochPlan, layout: SampleLayout, schedule: RankSchedule, *, ranks_per_node: int
) -> PlanMeasures:
    """Measure an epoch.

    Args:
        plan: The epoch.
        layout: The layout of its samples.
        schedule: The assignment of micro-batches to ranks.
        ranks_per_node: Ranks of a node, at least 1.
    """
    num_nodes = -(-schedule.world_size // ranks_per_node)
    per_step, num_steps = plan.spec.micro_batches_per_step, plan.num_steps
    stride = -(-plan.num_samples // _MOST_SAMPLES)
    is_whole = stride == 1 or num_steps == 1
    steps = range(num_steps) if is_whole else range(0, num_steps, stride)
    node_of_micro = _nodes(schedule, per_step, ranks_per_node)
    seen = np.zeros((num_nodes, layout.num_shards), bool)
    num_bytes = np.zeros(num_nodes, np.int64)
    step_of_row = np.full(layout.num_samples if is_whole else 0, -1, np.int64)
    for step in steps:
        rows, _ = plan.numbered_step(step)
        nodes, places = np.broadcast_to(node_of_micro[:, None], rows.shape)[rows >= 0], rows[rows >= 0]
        np.add.at(num_bytes, nodes, layout.sample_bytes(places))
        if is_whole:
            seen[nodes, layout.shards_of(places)] = True
            step_of_row[places - layout.population.start] = step
    num_bytes = num_bytes * num_steps // len(steps)
    costs = _costs(plan, steps)
    return PlanMeasures(
        walked_share=len(steps) / num_steps,
        num_nodes=num_nodes,
        shards_per_node=float(seen.sum() / num_nodes) if is_whole else _lane_shards(plan, schedule),
        num_shards=layout.num_shards,
        bytes_per_node=float(num_bytes.mean()),
        most_bytes_per_node=int(num_bytes.max()),
        neighbor_spread=_spread(step_of_row, num_steps) if is_whole else None,
        **costs,
    )


def _nodes(schedule: RankSchedule, per_step: int, ranks_per_node: int) -> Int64Array:
    """Return the node that runs each micro-batch of a step, ``(M,)`` int64."""
    nodes = np.zeros(per_step, np.int64)
    for rank in range(schedule.world_size):
        for micro in schedule.micros(rank):
            if not schedule.is_padding(micro):
                nodes[micro] = rank // ranks_per_node
    return nodes


def _lane_shards(plan: EpochPlan, schedule: RankSchedule) -> float | None:
    """Return the shards of a node's lanes, mean over nodes; None if nodes have no lanes of their own."""
    if plan.lane_plan is None or not schedule.num_nodes:
        return None
    lanes, layout = plan.lane_plan.lanes, plan.lane_plan.layout
    shards: list[set[int]] = [set() for _ in range(schedule.num_nodes)]
    for lane in range(lanes.num_lanes):
        walk = lanes.walk(lane, seed=plan.seed, epoch=plan.epoch)
        shards[schedule.node_of_lane(lane)].update(layout.shards_of(walk.first_row).tolist())
    return sum(map(len, shards)) / schedule.num_nodes


def _spread(step_of_row: Int64Array, num_steps: int) -> float | None:
    """Return the mean distance of neighbors in steps, relative to a full shuffle."""
    both = (step_of_row[:-1] >= 0) & (step_of_row[1:] >= 0)
    if not both.any() or num_steps == 1:
        return None
    # Two steps drawn at random are (n * n - 1) / (3 n) apart.
    expected = (num_steps - 1 / num_steps) / _FULL_SHUFFLE_PARTS
    return float(np.abs(np.diff(step_of_row))[both].mean() / expected)


def _costs(plan: EpochPlan, steps: range) -> dict[str, float | None]:
    names = (
        "padding_share",
        "budget_used",
        "imbalance",
        "imbalance_p99",
        "imbalance_max",
        "balanced_share",
    )
    micros, budget = plan.lane_plan.micros if plan.lane_plan else None, plan.spec.budget
    if not isinstance(micros, BudgetMicroBatches) or budget is None:
        return dict.fromkeys(names)
    per_step = plan.spec.micro_batches_per_step
    found = np.array(
        [[micros.cost(step * per_step + micro) for micro in range(per_step)] for step in steps], np.float64
    )
    cost, tokens, used = found[..., 0], found[..., 1], found[..., 2]
    # The step that the tail fills is not representative.
    full = (np.array(steps) + 1) * per_step <= micros.num_micros
    ratios = cost[full].max(axis=1) / cost[full].mean(axis=1) if full.any() else np.ones(1)
    values = (
        1 - used.sum() / tokens.sum(),
        tokens[tokens > 0].mean() / budget.max_tokens,
        ratios.mean(),
        np.quantile(ratios, 0.99),
        ratios.max(),
        (ratios <= _BALANCED).mean(),
    )
    return {name: float(value) for name, value in zip(names, values, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendMix:
    """Mix of an epoch's steps, without the last one, which the tail fills or shortens."""

    shares: tuple[float, ...]
    """Share of each component in the epoch."""
    mean_deviation: float
    """Deviation of a component's share in a step from it, mean over steps and components."""
    max_deviation: float
    """Largest deviation in any step."""
    num_steps: int
    """Evaluated steps, spread over the epoch."""

    def to_json(self) -> dict[str, object]:
        """Return the numbers as a JSON object."""
        return {**asdict(self), "shares": list(self.shares)}


def measure_mix(plan: EpochPlan) -> BlendMix | None:
    """Measure the mix of steps spread over an epoch; None if the plan is of one dataset."""
    blend = plan.population
    if not isinstance(blend, Mixture) or len(blend.components) == 1:
        return None
    last = max(1, plan.num_steps - 1)
    shares = blend.shares(plan.epoch)
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
