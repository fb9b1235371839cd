"""Blend files: strict TOML files that combine several datasets, or parts of them, into one.

::

    [[component]]
    dataset = "general"          # a folder beside the file, or an address
    split = "train"
    repeat = 1.0                 # passes per epoch; fractions such as 0.3 and 2.5 are allowed

    [[component]]
    dataset = "records"
    where = "facts.text_bytes > 0"
    repeat = 2.5

With ``epoch_samples`` at the top, components have a ``weight`` instead of a ``repeat``, which may change from
epoch to epoch: ``weight = {0 = 3.0, 10 = 1.0}``. A table ``[component.sampling]`` weighs the samples of a
component, see `shardflow.Sampling`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from shardflow.config import Bounds, check_fields, load_config
from shardflow.errors import ConfigError, PlanError, ShardflowError
from shardflow.fields.units import open_unit
from shardflow.format import Dataset
from shardflow.loading.rows.lock import with_tables
from shardflow.loading.rows.selection import (
    FULL_STUDY,
    Selection,
    SplitRows,
    choose_rows,
    open_view,
)
from shardflow.loading.rows.weighting import sampled_rows
from shardflow.sampling.blend import (
    BLEND_SPLIT,
    MAX_COMPONENTS,
    Blend,
    BlendComponent,
    draws_by_repeat,
    draws_by_weight,
)
from shardflow.sampling.layout import rows_digest
from shardflow.sampling.spec import Sampling
from shardflow.sampling.weights import WeightClasses
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.store import Cache

_MAX_REPEAT = 10_000
"""Most draws of a sample in an epoch: more is a mistake in a weight, and each pass costs time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentSettings:
    """Settings of one ``[[component]]`` of a blend file."""

    dataset: str
    """Folder, relative to the folder of the blend file, or an address."""
    version: Annotated[int, Bounds(1)] | None = None
    """Manifest version; by default the newest, or the one that a resumed run began with."""
    view: str = FULL_STUDY
    """``full_study``, or the name of an entity view beside the dataset."""
    unit: str = "study"
    """Unit of the samples: ``study``, ``series`` or ``image``."""
    where: str | None = None
    """Expression that selects samples, such as ``facts.modality == 'CT'``."""
    keys: str | None = None
    """File of sample keys, one a line, relative to the folder of the blend file."""
    split: str = "train"
    """Split, or several joined by ``+``."""
    repeat: Annotated[float, Bounds(0.0, float(_MAX_REPEAT))] | None = None
    """Passes over the samples per epoch; 1 by default."""
    weight: Annotated[float, Bounds(0.0)] | dict[int, float] | None = None
    """Share of ``epoch_samples``, relative to the other components' weights; or a table of first epochs and
    weights, such as ``{0 = 3.0, 10 = 1.0}``."""
    sampling: Sampling | None = None
    """How often each of its samples is drawn; by default all equally often."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sampling is not None and self.sampling.epoch_samples is not None:
            raise ConfigError(
                "epoch_samples must be left out of [component.sampling]; the repeat or weight of the "
                "component decides it."
            )
        if isinstance(self.weight, dict):
            epochs = [str(epoch) for epoch in self.weight]
            is_right = all(map(str.isdecimal, epochs)) and "0" in epochs
            if not is_right or any(weight < 0 for weight in self.weight.values()):
                raise ConfigError(
                    "weight by epoch must begin with epoch 0 and have numbers of at least 0, such as "
                    f"{{0 = 3.0, 10 = 1.0}}, got epochs {', '.join(epochs) or 'none'}."
                )
            by_epoch = {
                int(epoch): weight for epoch, weight in zip(epochs, self.weight.values(), strict=True)
            }
            object.__setattr__(self, "weight", dict(sorted(by_epoch.items())))

    def weight_in(self, epoch: int) -> float:
        """Return the weight in an epoch; 0 without one."""
        if not isinstance(self.weight, dict):
            return self.weight or 0.0
        return self.weight[max(start for start in self.weight if start <= epoch)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendFile:
    """Content of a blend file."""

    component: tuple[ComponentSettings, ...]
    epoch_samples: Annotated[int, Bounds(1)] | None = None
    """Samples per epoch; with it components have weights, without it repeats."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= len(self.component) <= MAX_COMPONENTS:
            raise ConfigError(
                f"a blend must have 1 to {MAX_COMPONENTS} [[component]], got {len(self.component)}; pack "
                "small ones into one dataset."
            )
        for number, component in enumerate(self.component, start=1):
            if self.epoch_samples is None and component.weight is not None:
                raise ConfigError(
                    f"component {number} must have a repeat where epoch_samples is not set, got a weight; "
                    "set epoch_samples, which turns weights into counts."
                )
            has_weight = any(component.weight_in(epoch) > 0 for epoch in self.starts)
            if self.epoch_samples is not None and (component.repeat is not None or not has_weight):
                found = "a repeat" if component.repeat is not None else "no weight above 0"
                raise ConfigError(
                    f"component {number} must have a weight where epoch_samples is set, got {found}; give "
                    "all components one, or remove epoch_samples."
                )

    @property
    def starts(self) -> tuple[int, ...]:
        """Epochs in which a weight changes, ascending, the first 0."""
        weights = [part.weight for part in self.component]
        return tuple(sorted({0, *(epoch for one in weights if isinstance(one, dict) for epoch in one)}))

    def counts(self, sizes: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
        """Return the draws of each component per epoch, given the numbers of samples.

        Returns:
            For each component first epochs, ascending from 0, and the draws of an epoch from there on.

        Raises:
            ConfigError: A component would be drawn from never, or far too often.
        """
        by_start = []
        for start in self.starts:
            weights = [part.weight_in(start) for part in self.component]
            if self.epoch_samples is None:
                repeats = [1.0 if part.repeat is None else part.repeat for part in self.component]
                counts = [draws_by_repeat(size, repeat) for size, repeat in zip(sizes, repeats, strict=True)]
            elif not any(weights):
                raise ConfigError(f"a component must have a weight above 0 in epoch {start}, got none.")
            else:
                counts = draws_by_weight(weights, self.epoch_samples)
            by_start.append(counts)
            for number, (count, size) in enumerate(zip(counts, sizes, strict=True), start=1):
                if not count and (self.epoch_samples is None or weights[number - 1] > 0):
                    raise ConfigError(
                        f"component {number} of the blend must be drawn from at least once an epoch, got 0 "
                        f"of its {size:,} samples; raise its repeat or weight, or remove it."
                    )
                if count > size * _MAX_REPEAT:
                    raise ConfigError(
                        f"component {number} of the blend must be drawn from at most {_MAX_REPEAT:,} times "
                        f"its {size:,} samples an epoch, got {count:,} times; lower its weight or "
                        "epoch_samples."
                    )
        found = []
        for number in range(len(sizes)):
            changes: list[tuple[int, int]] = []
            for start, counts in zip(self.starts, by_start, strict=True):
                if not changes or changes[-1][1] != counts[number]:
                    changes.append((start, counts[number]))
            found.append(tuple(changes))
        return found


def read_blend(path: str | Path) -> BlendFile:
    """Read a blend file; folders and key lists are resolved from its own folder.

    Raises:
        ConfigError: The file is missing or not TOML, or a setting is unknown, missing or out of range.
    """
    file = load_config(BlendFile, path)
    folder = Path(path).expanduser().resolve().parent
    parts = []
    for part in file.component:
        url = part.dataset if "://" in part.dataset else str(folder / Path(part.dataset).expanduser())
        keys = None if part.keys is None else str(folder / Path(part.keys).expanduser())
        parts.append(replace(part, dataset=url, keys=keys))
    return replace(file, component=tuple(parts))


def open_blend(
    path: str | Path,
    *,
    versions: Sequence[int] | None = None,
    lock: Mapping[str, Any] | None = None,
    cache: Cache | CacheConfig | None = None,
    signed_by: str | os.PathLike[str] | None = None,
) -> Selection:
    """Open the datasets of a blend file.

    Args:
        path: The file.
        versions: Manifest version of each component's dataset, for example from a loader state, for
            components whose version the file does not set.
        lock: Lock of a run to resume, instead of ``versions``: versions of datasets and of their tables.
        cache: Cache shared by all components.
        signed_by: File of public keys, one of which must have signed each dataset, see `Dataset.open`.

    Returns:
        The selection, which a `Loader` takes instead of a dataset.

    Raises:
        ConfigError: The file is wrong, or a dataset cannot be opened or lacks the split or samples; the
            message names the component.
    """
    file = read_blend(path)
    if isinstance(cache, CacheConfig):
        cache = Cache(cache) if cache.is_on else None
    listed: Sequence[Mapping[str, Any]] = [{}] * len(file.component)
    if lock is not None and len(lock["datasets"]) == len(file.component):
        listed = lock["datasets"]
    elif versions is not None and len(versions) == len(file.component):
        listed = [{"manifest_version": version} for version in versions]
    opened: dict[tuple[str, int | None, str, str, str | None], Dataset] = {}
    datasets, chosen = [], []
    for number, (part, saved) in enumerate(zip(file.component, listed, strict=True), start=1):
        try:
            version = part.version or saved.get("manifest_version")
            # Series and images are rows that `where` makes; studies and findings it chooses from all.
            of_series = part.where if part.unit in ("series", "image") else None
            place = (part.dataset, version, part.view, part.unit, of_series)
            if place not in opened:
                dataset = Dataset.open(part.dataset, version=version, cache=cache, signed_by=signed_by)
                dataset = with_tables(dataset, saved)
                opened[place] = open_unit(open_view(dataset, part.view), part.unit, of_series)
            datasets.append(opened[place])
            where = part.where if of_series is None else None
            found_rows = choose_rows(datasets[-1], part.split, where, part.keys)
            chosen.append(_sampled(datasets[-1], found_rows, part.sampling or Sampling()))
        except ConfigError as error:
            raise ConfigError(f"component {number} of the blend: {error.message}") from None
        except ShardflowError as error:
            raise ConfigError(
                f"component {number} of the blend must be a dataset that can be opened, got: {error.message}"
            ) from None
    counts = file.counts([len(part.rows) for part, _ in chosen])
    components = [
        BlendComponent(
            dataset_id=dataset.dataset_id,
            manifest_version=dataset.manifest_version,
            split=part.split,
            rows=part.rows,
            subset=part.digest,
            count=first[1],
            num_table_rows=dataset.samples.num_samples,
            changes=tuple(changes),
            classes=classes,
        )
        for dataset, (part, classes), (first, *changes) in zip(datasets, chosen, counts, strict=True)
    ]
    tables = {name for part in file.component if part.sampling is not None for name in part.sampling.tables}
    tables |= {name for part, _ in chosen for name in part.tables}
    return Selection(
        datasets=tuple(datasets),
        population=Blend(components),
        split=BLEND_SPLIT,
        tables=tuple(sorted(tables)),
        given=file,
    )


def _sampled(dataset: Dataset, part: SplitRows, sampling: Sampling) -> tuple[SplitRows, WeightClasses | None]:
    rows, classes = sampled_rows(dataset, part.rows, sampling)
    if rows is not part.rows:
        part = replace(part, rows=rows, digest=rows_digest(rows))
    return part, classes


def evaluation_blend(blend: Selection, split: str) -> Selection:
    """Return a split of all datasets of a blend, with every sample once.

    Args:
        blend: The blend.
        split: The split; datasets without it are skipped.

    Raises:
        ConfigError: None of the datasets has the split.
    """
    datasets: dict[str, Dataset] = {}
    for dataset in blend.datasets:
        if dataset.splits.get(split):
            datasets.setdefault(dataset.dataset_id, dataset)
    components = []
    for dataset in datasets.values():
        rows = choose_rows(dataset, split)
        components.append(
            BlendComponent(
                dataset_id=dataset.dataset_id,
                manifest_version=dataset.manifest_version,
                split=rows.split,
                rows=rows.rows,
                subset=None,
                count=len(rows.rows),
                num_table_rows=dataset.samples.num_samples,
            )
        )
    try:
        population = Blend(components)
    except PlanError:
        raise ConfigError(
            f"a dataset of the blend must have split {split!r}, got none; correct it."
        ) from None
    parts = tuple(ComponentSettings(dataset=one, split=split) for one in datasets)
    return Selection(
        datasets=tuple(datasets.values()),
        population=population,
        split=BLEND_SPLIT,
        given=BlendFile(component=parts),
    )
