"""From a dataset to what the plan asks for: columns of the samples table, as they are mapped."""

from __future__ import annotations

from dataclasses import replace

from shardflow.epochs import BatchSpec, EpochPlan, SampleLayout, choose_lanes
from shardflow.errors import ConfigError
from shardflow.shards import Dataset

__all__ = ["open_plan", "split_layout", "split_rows"]


def split_rows(dataset: Dataset, split: str) -> range:
    """Return the rows of a split.

    Raises:
        ConfigError: The dataset has no such split, or it is empty.
    """
    rows = dataset.splits.get(split)
    if not rows:
        known = ", ".join(sorted(dataset.splits)) or "none"
        raise ConfigError(f"split must be one that holds samples ({known}), got {split!r}; correct it.")
    return rows


def split_layout(dataset: Dataset, split: str, spec: BatchSpec) -> SampleLayout:
    """Return where the samples of a split lie, with the facts that a batch spec needs.

    Raises:
        ConfigError: The dataset has no such split.
        PlanError: The samples table is not ordered by shard and offset.
    """
    column = dataset.samples.column
    facts = () if spec.budget is None else spec.budget.cost.used_facts()
    return SampleLayout.of_columns(
        split_rows(dataset, split),
        dataset_id=dataset.dataset_id,
        shard=column("shard"),
        offset_bytes=column("offset_bytes"),
        num_bytes=column("num_bytes"),
        facts={name: column(name) for name in facts},
    )


def open_plan(
    dataset: Dataset, split: str, spec: BatchSpec, *, seed: int, epoch: int, auto_lanes: bool = False
) -> EpochPlan:
    """Plan an epoch of a split.

    Args:
        dataset: The dataset.
        split: One of its splits.
        spec: How steps are formed.
        seed: Run-level seed.
        epoch: The epoch.
        auto_lanes: Choose the number of lanes, see `choose_lanes`; the plan's spec holds it.

    Raises:
        ConfigError: The dataset has no such split.
        PlanError: No step can be formed.
    """
    rows = split_rows(dataset, split)
    if not spec.lanes and not auto_lanes:
        return EpochPlan(rows, spec, seed=seed, epoch=epoch)
    layout = split_layout(dataset, split, spec)
    if auto_lanes:
        spec = replace(spec, lanes=choose_lanes(layout, spec))
    return EpochPlan(rows, spec, seed=seed, epoch=epoch, layout=layout)
