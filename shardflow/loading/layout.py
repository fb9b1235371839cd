"""From a dataset to what the plan asks for: columns of the samples table, as they are mapped."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardflow.epochs import BatchSpec, CostRule, SampleLayout
from shardflow.epochs.chosen import chosen_layout
from shardflow.epochs.rows import Rows
from shardflow.shards import Dataset
from shardflow.shards.tokens import COUNT_COLUMN, open_counts

__all__ = ["RowNumbers", "rows_layout"]


def rows_layout(dataset: Dataset, rows: Rows, spec: BatchSpec) -> SampleLayout:
    """Return where some samples lie, with the facts that a batch spec needs.

    Raises:
        ConfigError: The cost rule names a tokenizer whose counts do not lie beside the dataset.
        PlanError: The samples table is not ordered by shard and offset.
    """
    column = dataset.samples.column
    facts = {} if spec.budget is None else _facts(dataset, spec.budget.cost)
    shard, num_bytes = column("shard"), column("num_bytes")
    if not isinstance(rows, range):
        return chosen_layout(
            rows, dataset_id=dataset.dataset_id, shard=shard, num_bytes=num_bytes, facts=facts
        )
    return SampleLayout.of_columns(
        rows,
        dataset_id=dataset.dataset_id,
        shard=shard,
        offset_bytes=column("offset_bytes"),
        num_bytes=num_bytes,
        facts=facts,
    )


class RowNumbers:
    """The number of each row as a column of the samples table: what a keyed choice of the plan hangs on.

    Args:
        num_rows: Rows of the table.
    """

    __slots__ = ("dtype", "ndim", "shape")

    def __init__(self, num_rows: int) -> None:
        self.dtype, self.ndim, self.shape = np.dtype(np.int64), 1, (num_rows,)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return np.arange(*key.indices(len(self)), dtype=np.int64)
        return np.asarray(key, np.int64)


def _facts(dataset: Dataset, rule: CostRule) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in rule.used_facts():
        if name == COUNT_COLUMN:
            facts[name] = open_counts(dataset, rule.tokenizer)
        elif name == "row":
            facts[name] = RowNumbers(dataset.samples.num_samples)
        else:
            facts[name] = dataset.samples.column(name)
    return facts
