"""Which samples a loader runs over: a split of a dataset, a subset of one, or a blend of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardflow.epochs import BatchSpec, EpochPlan, LoaderState, SampleLayout, choose_lanes
from shardflow.epochs.blend import BLEND_SPLIT, Blend
from shardflow.epochs.blend_lanes import blend_layout
from shardflow.epochs.rows import Rows
from shardflow.errors import ChecksumError, ConfigError
from shardflow.loading.layout import rows_layout
from shardflow.loading.subset import choose_rows
from shardflow.shards import Dataset
from shardflow.shards.entity_dataset import EntityDataset, EntityPlace
from shardflow.storage import LocalStore

__all__ = ["FULL_STUDY", "Selection", "open_view", "select"]

FULL_STUDY = "full_study"
"""The view whose samples are whole studies."""

Int64Array = NDArray[np.int64]
_MAX_ASCII = 127


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """Samples to run over, and the datasets that hold them. Crosses process boundaries.

    A *row* of a selection counts the rows of its datasets' samples tables one after another; of one dataset
    it is the row of the table.
    """

    datasets: tuple[Dataset, ...]
    """One, or that of each component of a blend; components may share one."""
    population: Rows | Blend
    split: str
    subset: str | None = None
    """Digest of the rows, where they are not all of the split."""

    @property
    def is_blend(self) -> bool:
        """Whether the samples are those of a blend."""
        return isinstance(self.population, Blend)

    @property
    def has_entities(self) -> bool:
        """Whether some of the samples are entities of reports."""
        return any(isinstance(dataset, EntityDataset) for dataset in self.datasets)

    @property
    def is_local(self) -> bool:
        """Whether all datasets lie in folders of this machine, with no cache between."""
        return all(isinstance(dataset.store, LocalStore) for dataset in self.datasets)

    # ---- plan and state --------------------------------------------------------------------------

    def layout(self, spec: BatchSpec) -> SampleLayout:
        """Return where the samples lie, with the facts that a batch spec needs.

        Raises:
            PlanError: A samples table is not ordered by shard and offset.
        """
        if not isinstance(self.population, Blend):
            return rows_layout(self.datasets[0], self.population, spec)
        components = self.population.components
        parts = [
            rows_layout(dataset, component.rows, spec)
            for dataset, component in zip(self.datasets, components, strict=True)
        ]
        return blend_layout(self.population, parts)

    def plan(self, spec: BatchSpec, *, seed: int, epoch: int, auto_lanes: bool = False) -> EpochPlan:
        """Plan an epoch.

        Args:
            spec: How steps are formed.
            seed: Run-level seed.
            epoch: The epoch.
            auto_lanes: Choose the number of lanes, see `choose_lanes`; the plan's spec holds it.

        Raises:
            PlanError: No step can be formed.
        """
        if not spec.lanes and not auto_lanes:
            return EpochPlan(self.population, spec, seed=seed, epoch=epoch)
        layout = self.layout(spec)
        if auto_lanes:
            spec = replace(spec, lanes=choose_lanes(layout, spec))
        return EpochPlan(self.population, spec, seed=seed, epoch=epoch, layout=layout)

    def state(self, spec: BatchSpec, *, seed: int) -> LoaderState:
        """Return the state of a run over these samples, at its start."""
        if isinstance(self.population, Blend):
            return LoaderState(
                dataset_id=self.population.digest,
                manifest_version=0,
                split=BLEND_SPLIT,
                components=self.population.states(),
                seed=seed,
                spec=spec,
            )
        return LoaderState(
            dataset_id=self.datasets[0].dataset_id,
            manifest_version=self.datasets[0].manifest_version,
            split=self.split,
            subset=self.subset,
            seed=seed,
            spec=spec,
        )

    def reopened(self) -> Selection:
        """Return the same samples with maps and locks of this process."""
        again = {id(dataset): dataset.reopened() for dataset in self.datasets}
        return replace(self, datasets=tuple(again[id(dataset)] for dataset in self.datasets))

    # ---- rows ------------------------------------------------------------------------------------

    def components_of(self, rows: Int64Array) -> Int64Array:
        """Return the component, from 0, that each row belongs to."""
        return np.searchsorted(self._row_bases(), rows, side="right") - 1

    def table_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of each sample in its own dataset's table."""
        return rows - self._row_bases()[self.components_of(rows)]

    def keys(self, rows: Int64Array) -> list[str]:
        """Return the keys of samples; raises what `key_bytes` raises."""
        found: list[str] = self.key_bytes(rows).astype("U").tolist()
        return found

    def study_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of each sample's study in its dataset's samples table; a cache counts in those."""
        found = np.zeros(len(rows), np.int64)
        components, inside = self.components_of(rows), self.table_rows(rows)
        for component, dataset in enumerate(self.datasets):
            here = components == component
            found[here] = dataset.study_rows(inside[here])
        return found

    def entity(self, row: int) -> EntityPlace | None:
        """Return where the entity of a row is; None for a whole study.

        Raises:
            FormatError: The view was sound when it was opened, and is not now.
        """
        if not self.has_entities:
            return None
        at = np.array([row], np.int64)
        dataset = self.datasets[int(self.components_of(at)[0])]
        if not isinstance(dataset, EntityDataset):
            return None
        return dataset.samples.place(int(self.table_rows(at)[0]))

    def key_bytes(self, rows: Int64Array) -> NDArray[np.bytes_]:
        """Return the keys of samples as byte strings.

        Raises:
            ChecksumError: The table was sound when it was opened, and is not now.
        """
        if not self.is_blend:
            keys = self.datasets[0].samples.gather("sample_key", rows)
        else:
            found = [
                (here, dataset.samples.gather("sample_key", inside))
                for dataset, here, inside in self._by_dataset(rows)
            ]
            keys = np.zeros(len(rows), f"S{max((part.itemsize for _, part in found), default=1)}")
            for here, part in found:
                keys[here] = part
        if keys.view(np.uint8).max(initial=0) > _MAX_ASCII:
            raise ChecksumError(
                "a key of the samples table must be letters and digits, got other bytes: the table was "
                "changed after it had been opened; start again, and look at the disk of the dataset or its "
                "cache."
            )
        return keys

    def modalities(self, rows: Int64Array) -> list[str]:
        """Return the DICOM modality of samples' primary series, such as ``CT``; empty if unknown."""
        names = np.empty(len(rows), object)
        for dataset, here, inside in self._by_dataset(rows):
            known = np.array(dataset.samples.modalities, object)
            names[here] = known[dataset.samples.gather("modality", inside)]
        found: list[str] = names.tolist()
        return found

    def column(self, name: str, rows: Int64Array) -> Int64Array:
        """Return a column of integers of the samples table; shards are counted over all datasets."""
        if not self.is_blend:
            return self.datasets[0].samples.gather(name, rows).astype(np.int64)
        values = np.zeros(len(rows), np.int64)
        for dataset, here, inside in self._by_dataset(rows):
            values[here] = dataset.samples.gather(name, inside)
        if name == "shard":
            values += self._shard_bases()[self.components_of(rows)]
        return values

    def shard(self, number: int) -> tuple[int, int]:
        """Return component and position in its manifest of a shard of `column`."""
        if not self.is_blend:
            return 0, number
        bases = self._shard_bases()
        component = int(np.searchsorted(bases, number, side="right")) - 1
        return component, number - int(bases[component])

    def _by_dataset(self, rows: Int64Array) -> list[tuple[Dataset, NDArray[np.bool_] | slice, Int64Array]]:
        if not self.is_blend:
            return [(self.datasets[0], slice(None), rows)]
        components, inside = self.components_of(rows), self.table_rows(rows)
        found = []
        for component in np.unique(components).tolist():
            here = components == component
            found.append((self.datasets[component], here, inside[here]))
        return found

    def _row_bases(self) -> Int64Array:
        return _bases([dataset.samples.num_samples for dataset in self.datasets])

    def _shard_bases(self) -> Int64Array:
        return _bases([len(dataset.manifest.shards) for dataset in self.datasets])


def open_view(dataset: Dataset, view: str = FULL_STUDY) -> Dataset:
    """Return what is drawn from: a dataset's studies, or the entities of a view beside it.

    Args:
        dataset: The dataset.
        view: ``full_study``, or the name of an entity view.

    Raises:
        ConfigError: There is no view of this name beside this version of the dataset.
        FormatError: The view cannot be trusted.
    """
    return dataset if view == FULL_STUDY else EntityDataset.beside(dataset, view)


def select(source: Dataset | Selection, split: str = "", subset: Sequence[str] = ()) -> Selection:
    """Return the samples of a split or a subset; a selection, such as a blend, is one already.

    Args:
        source: A dataset, or a selection.
        split: Of a dataset: its split, or several joined by ``+``.
        subset: Of a dataset: terms that all samples must meet, see `shardflow.loading.subset`.

    Raises:
        ConfigError: There is no such split, a term cannot be read, no sample is left, or a selection is
            narrowed down again.
    """
    if isinstance(source, Selection):
        if split or subset:
            raise ConfigError(
                "split and subset must be left out where a blend is given, got "
                f"{'a subset' if subset else f'split {split!r}'}; say them for each component of its file."
            )
        return source
    chosen = choose_rows(source, split, subset)
    return Selection(datasets=(source,), population=chosen.rows, split=chosen.split, subset=chosen.digest)


def _bases(sizes: list[int]) -> Int64Array:
    """Return what lies before each; the last size is left out."""
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64)
