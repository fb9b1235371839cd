"""Single samples by key, with the fields of a loader: ``dataset[key]`` in a notebook, or to look at one.

A sample is read by the machinery of a loader, as the only one of an epoch, so it equals what a loader of its
split delivers. What depends on the population, such as a dtype that holds every image, is that of the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.field import Field
from shardflow.fields.quarantine import Quarantine
from shardflow.fields.registry import FieldSet
from shardflow.format import Dataset
from shardflow.format.dataset import register_sample_reader
from shardflow.loading.binding import bind_fields
from shardflow.loading.config import LoaderConfig, World
from shardflow.loading.runtime import LoaderRuntime
from shardflow.loading.selection import Selection, select
from shardflow.sampling import BatchSpec, RankSchedule
from shardflow.sampling.blend import Mixture
from shardflow.sampling.layout import mask_of
from shardflow.telemetry import StageCounters

_ALONE: Final = BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
_MAX_BINDINGS: Final = 4

open_dataset = Dataset.open
"""`Dataset.open`; importing it from here lets ``dataset[key]`` read samples."""


class OneSampleReader:
    """Reader of single samples of a dataset, which keeps the fields that it bound last.

    Args:
        dataset: The dataset; its rows may be series, images or findings too.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._bindings: dict[str, tuple[Selection, FieldSet]] = {}

    def read(self, key: str | int, fields: Mapping[str, Field] | None, seed: int) -> dict[str, Any]:
        """Read a sample, see `Dataset.sample`."""
        row = self._row(key)
        split = next(name for name, rows in self._dataset.splits.items() if row in rows)
        selection, bound = self._bind(split, fields)
        if isinstance(selection.population, Mixture) or not mask_of(selection.population, row, row + 1)[0]:
            raise ConfigError(
                "This sample lacks a field with missing='drop', so a loader leaves it out; write "
                "missing='pad' to look at it."
            )
        alone = replace(selection, population=range(row, row + 1))
        config = LoaderConfig(num_threads=1, on_bad_sample="raise")
        schedule = RankSchedule(1, 1)
        runtime = LoaderRuntime(
            alone, schedule, World(), alone.state(_ALONE, seed=seed), config, StageCounters(), bound
        )
        with closing(runtime):
            batch = next(runtime.stream(alone.plan(_ALONE, seed=seed, epoch=0), range(1), Quarantine(0)))
        # Flat entries hold the values of all samples, here of one.
        flat = {name for name in batch if f"{name}_offsets" in batch}
        beside = {f"{name}_offsets" for name in flat}
        return {
            name: value if name in flat else value[0] for name, value in batch.items() if name not in beside
        }

    def _row(self, key: str | int) -> int:
        samples = self._dataset.samples
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise ConfigError(
                f"dataset[key] takes a sample key or a row, such as dataset[0], got {type(key).__name__}."
            )
        if isinstance(key, int):
            if not 0 <= key < samples.num_samples:
                raise IndexError(f"rows are from 0 to {samples.num_samples - 1}, got {key}")
            return key
        try:
            return samples.find(key)
        except FormatError:
            raise KeyError("the dataset has no sample of this key; batch.info.sample_keys has some") from None

    def _bind(self, split: str, fields: Mapping[str, Field] | None) -> tuple[Selection, FieldSet]:
        name = repr((split, None if fields is None else dict(fields)))
        if name not in self._bindings:
            found = bind_fields(select(self._dataset, split), fields, StageCounters())
            self._bindings = {**dict(list(self._bindings.items())[1 - _MAX_BINDINGS :]), name: found}
        return self._bindings[name]


register_sample_reader(lambda dataset: OneSampleReader(dataset).read)
