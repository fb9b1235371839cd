"""Where the samples of a population lie: shards as row ranges, and their bytes, all as arrays.

The plan reads no file. Whoever opens a dataset hands in columns of its samples table, memory-mapped ones as
they are; nothing here makes a copy that grows with the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardflow.errors import PlanError

__all__ = ["Column", "SampleLayout"]

Int64Array = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


class Column(Protocol):
    """Numbers by sample: an array, or what is asked for like one."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the numbers."""

    @property
    def ndim(self) -> int:
        """Always 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleLayout:
    """The shards and bytes behind a population of rows.

    Raises:
        PlanError: The arrays do not fit each other or the population.
    """

    dataset_id: str
    """Digest of the manifest, 64 hexadecimal digits; which lane a sample belongs to hangs on it."""
    population: range
    """Rows of the samples table, without gaps; of a subset or a blend, the numbers of its samples from 0."""
    shard_rows: Int64Array
    """``(S + 1,)`` int64, ascending: shard s holds the rows ``[shard_rows[s], shard_rows[s + 1])``."""
    shard_end_bytes: Int64Array
    """``(S,)`` int64, where the last sample of each shard that belongs to the population ends."""
    offset_bytes: Column
    """Integers by row of the table (not of the population): where each sample begins in its shard."""
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further integers by row of the table, such as ``text_bytes``, each a `Column`; a cost rule asks for
    them."""

    def __post_init__(self) -> None:
        rows, population = self.shard_rows, self.population
        if population.step != 1 or not population:
            raise PlanError(
                f"population must be rows without gaps, at least one, got {population} (sample layout)."
            )
        if (
            rows.ndim != 1
            or len(rows) != len(self.shard_end_bytes) + 1
            or len(rows) < 2
            or (int(rows[0]), int(rows[-1])) != (population.start, population.stop)
            or bool((np.diff(rows) <= 0).any())
        ):
            raise PlanError(
                f"shard_rows must ascend from {population.start} to {population.stop}, with one number more "
                f"than shard_end_bytes has ({len(self.shard_end_bytes)}), got another array (sample layout); "
                f"run `shardflow verify` on the dataset."
            )
        for name, column in {"offset_bytes": self.offset_bytes, **self.facts}.items():
            if column.ndim != 1 or len(column) < population.stop or column.dtype.kind not in "iu":
                raise PlanError(
                    f"{name} must be integers for {population.stop} rows, got {column.dtype} of shape "
                    f"{column.shape} (sample layout); run `shardflow verify` on the dataset."
                )

    @classmethod
    def of_columns(
        cls,
        population: range,
        *,
        dataset_id: str,
        shard: AnyArray,
        offset_bytes: AnyArray,
        num_bytes: AnyArray,
        facts: Mapping[str, AnyArray] | None = None,
    ) -> SampleLayout:
        """Take the layout from columns of the samples table, whose rows are ordered by shard and offset.

        Costs a look at a few rows a shard, so that 200 million rows are opened at once.

        Args:
            population: Rows, without gaps.
            dataset_id: Digest of the manifest.
            shard: Number of each row's shard, ascending over the population.
            offset_bytes: Where each row's sample begins.
            num_bytes: Size of each row's sample.
            facts: Further columns.

        Raises:
            PlanError: The rows are not ordered, or empty.
        """
        if population.step != 1 or not population or population.stop > len(shard):
            raise PlanError(
                f"population must be rows of the table ({len(shard)}) without gaps, at least one, got "
                f"{population} (sample layout)."
            )
        inside = shard[population.start : population.stop]
        first, last = int(inside[0]), int(inside[-1])
        if last < first:
            raise PlanError(
                "shard must ascend over the population, got a table in another order (sample layout); run "
                "`shardflow verify` on the dataset."
            )
        # Asked in the column's own type: NumPy would copy the whole column to another one.
        numbers = np.arange(first, last + 1, dtype=np.int64).astype(shard.dtype)
        starts = np.unique(np.searchsorted(inside, numbers)).astype(np.int64)
        rows = np.append(starts, len(inside)) + population.start
        ends = rows[1:] - 1
        return cls(
            dataset_id=dataset_id,
            population=population,
            shard_rows=rows,
            shard_end_bytes=offset_bytes[ends].astype(np.int64) + num_bytes[ends].astype(np.int64),
            offset_bytes=offset_bytes,
            facts=dict(facts or {}),
        )

    @property
    def num_samples(self) -> int:
        """Rows of the population."""
        return len(self.population)

    @property
    def num_drawn(self) -> int:
        """Samples of an epoch: those of the population, but for a blend, which draws some more often."""
        return self.num_samples

    @property
    def num_shards(self) -> int:
        """Shards that hold rows of the population."""
        return len(self.shard_end_bytes)

    def shards_of(self, rows: Int64Array) -> Int64Array:
        """Return the number of each row's shard among ``num_shards``."""
        return np.searchsorted(self.shard_rows, rows, side="right") - 1

    def sample_bytes(self, rows: Int64Array) -> Int64Array:
        """Return the size of each row's sample, with what lies between it and the next one."""
        shards = self.shards_of(rows)
        sizes: Int64Array = self.ends_of(rows + 1, shards) - self.offset_bytes[rows].astype(np.int64)
        return sizes

    def ends_of(self, stops: Int64Array, shards: Int64Array) -> Int64Array:
        """Return where the rows before ``stops``, in ``shards``, end: int64 bytes."""
        is_last = stops == self.shard_rows[shards + 1]
        inside = self.offset_bytes[np.where(is_last, stops - 1, stops)].astype(np.int64)
        return np.where(is_last, self.shard_end_bytes[shards], inside)
