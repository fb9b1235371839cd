"""Samples that fields cut out of studies: windows of volumes, and parts of long conversations.

Rows are (study, window), for inference and evaluation by sliding window, or (study, part), of which short
conversations have one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardflow.errors import ConfigError
from shardflow.fields.conversations.field import Conversation
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.field import Field, FieldContext
from shardflow.fields.units import PartDataset, WindowDataset
from shardflow.format import Dataset
from shardflow.loading.rows.blend_file import BlendFile
from shardflow.loading.rows.selection import Selection, select
from shardflow.sampling import BatchSpec
from shardflow.sampling.blend import Blend, Mixture
from shardflow.sampling.layout import Rows, mask_of, rows_digest, select_rows
from shardflow.sampling.spec import Sampling
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)


def select_samples(
    source: Dataset | Selection,
    split: str = "",
    *,
    unit: str = "study",
    where: str | None = None,
    keys: str | os.PathLike[str] | None = None,
    fields: Mapping[str, Field] | None = None,
) -> Selection:
    """Return the samples of a loader: those of `select`, or with ``unit="window"`` the windows of fields.

    Args:
        source: See `select`.
        split: See `select`.
        unit: What a sample is.
        where: See `select`; of windows it selects studies.
        keys: See `select`; of windows those of studies.
        fields: What a batch holds.

    Raises:
        ConfigError: As of `select` and `select_windows`.
    """
    if unit != "window":
        return select(source, split, unit=unit, where=where, keys=keys)
    return select_windows(select(source, split, where=where, keys=keys), fields)


def select_windows(selection: Selection, fields: Mapping[str, Field] | None) -> Selection:
    """Return the windows of the volumes of some studies, in the order of studies and windows.

    Studies without a volume have none. Nothing is opened but tables.

    Args:
        selection: Studies of one dataset.
        fields: What a batch holds; those with ``center="grid"`` decide the windows.

    Raises:
        ConfigError: No field makes windows, two of them make different ones, or samples are no studies.
    """
    grids = {name: one for name, one in (fields or {}).items() if one.has_windows}
    if not grids:
        raise ConfigError(
            "unit='window' needs a field that cuts volumes into windows; write for example "
            "sf.Volume(roi_size=(96, 96, 96), center='grid', overlap=0.5)."
        )
    if selection.is_blend or selection.units != ("study",):
        raise ConfigError(
            "unit='window' needs the studies of one dataset, as sf.open returns it; make a loader for each "
            "dataset of a blend."
        )
    dataset, population = selection.datasets[0], selection.population_of(0)
    context = FieldContext(selection, [population], StageCounters())
    counts = None
    for name, one in grids.items():
        found = one.bind(name, context).num_windows(0)
        if found is None:
            raise ConfigError(
                f"The field {name!r} has windows, and its type counts none; implement num_windows."
            )
        if counts is not None and (counts != found).any():
            differing = int(np.count_nonzero(counts != found))
            raise ConfigError(
                f"The fields {next(iter(grids))!r} and {name!r} cut {differing:,} studies into different "
                "numbers of windows; write the same roi_size, spacing_mm, orientation and overlap for series "
                "of one shape, or deliver one of them alone."
            )
        counts = found
    assert counts is not None  # noqa: S101 - there is a grid
    if not counts.any():
        raise ConfigError("No sample has a volume to cut into windows; select others with series= or where=.")
    num_studies = int(np.count_nonzero(counts))
    _LOGGER.info(
        "unit='window': %d windows of %d studies; %d studies have no volume to cut",
        counts.sum(),
        num_studies,
        np.count_nonzero(population) - num_studies,
    )
    windows = WindowDataset(dataset.store, dataset.manifest, counts, dataset.tables)
    return Selection(
        datasets=(windows,),
        population=range(windows.samples.num_samples),
        split=selection.split,
        num_missing=selection.num_missing,
        tables=selection.tables,
        given=selection.given,
    )


def check_window_fields(selection: Selection, fields: Mapping[str, Field]) -> None:
    """Refuse fields of windows where samples are none.

    Raises:
        ConfigError: There is such a field.
    """
    grid = next((name for name, one in fields.items() if one.has_windows), None)
    if grid is not None and "window" not in selection.units:
        raise ConfigError(
            f"The field {grid!r} with center='grid' delivers one window of a volume as a sample; write "
            "unit='window' for the loader, or another center."
        )


def check_windows(selection: Selection, batch: BatchSpec, sampling: Sampling | None) -> None:
    """Refuse what would leave windows out, or draw some twice.

    Raises:
        ConfigError: It is such.
    """
    if "window" not in selection.units:
        return
    if batch.tail != "mask":
        raise ConfigError(
            f"unit='window' delivers every window once, and tail={batch.tail!r} does not; write tail='mask' "
            "for BatchSpec."
        )
    if sampling is not None and sampling.is_used:
        raise ConfigError("unit='window' delivers every window once; leave sampling= out.")


def select_parts(selection: Selection, fields: Mapping[str, Field] | None) -> Selection:
    """Return the parts of the conversations of some samples, where a field has ``split_long``.

    Args:
        selection: Studies, or parts already.
        fields: What a batch holds.

    Raises:
        ConfigError: Two fields split, samples are no studies or have weights, or tokens were not counted.
    """
    given = (fields or {}).items()
    split = {name: one for name, one in given if isinstance(one, Conversation) and one.split_long}
    if not split or {*selection.units} == {"part"}:
        return selection
    (name, spec), *others = split.items()
    if others:
        raise ConfigError(
            f"The fields {name!r} and {others[0][0]!r} both have split_long; leave it out of one."
        )
    population = selection.population
    drawn = population.components if isinstance(population, Mixture) else ()
    is_weighted = any(one.classes is not None for one in drawn) or (bool(drawn) and not selection.is_blend)
    if {*selection.units} != {"study"} or is_weighted:
        raise ConfigError(
            f"split_long of the field {name!r} needs whole studies, and in a blend components without "
            "weights of samples; leave out unit=, view= and sampling, or split_long."
        )
    digest, max_tokens = Renderer.load(spec.processor).digest, spec.max_tokens
    opened = {
        id(one): PartDataset(one.store, one.manifest, digest, max_tokens, one.tables)
        for one in selection.datasets
    }
    parts = tuple(opened[id(one)] for one in selection.datasets)
    found = replace(selection, datasets=parts)
    if isinstance(population, Mixture):
        found = replace(found, population=_blend_of_parts(selection, population, parts))
    else:
        rows = _rows_of_parts(parts[0], population)
        found = replace(found, population=rows, subset=selection.subset and rows_digest(rows))
    for place, dataset in enumerate(parts):
        counts = dataset.samples.counts(np.flatnonzero(selection.population_of(place)))
        _LOGGER.info(
            "field %r splits %d of %d conversations into %d parts of up to %d tokens",
            name,
            int((counts > 1).sum()),
            len(counts),
            int(counts[counts > 1].sum()),
            max_tokens,
        )
    return found


def _rows_of_parts(parts: PartDataset, rows: Rows) -> Rows:
    """Return the rows of the parts of some studies."""
    first = parts.samples.first_rows()
    if isinstance(rows, range):
        return range(int(first[rows.start]), int(first[rows.stop]))
    is_used = np.repeat(mask_of(rows, 0, len(first) - 1), np.diff(first))
    return select_rows(range(len(is_used)), lambda start, stop: is_used[start:stop])


def _blend_of_parts(selection: Selection, blend: Mixture, parts: tuple[PartDataset, ...]) -> Blend:
    """Return a blend whose components have the parts of their studies, drawn as its file says of samples."""
    assert isinstance(selection.given, BlendFile)  # noqa: S101 - a mixture without weights is one of a file
    rows = [_rows_of_parts(one, part.rows) for one, part in zip(parts, blend.components, strict=True)]
    draws = selection.given.counts([len(one) for one in rows])
    return Blend(
        [
            replace(
                component,
                dataset_id=dataset.dataset_id,
                rows=own,
                subset=component.subset and rows_digest(own),
                count=first[1],
                num_table_rows=dataset.samples.num_samples,
                changes=tuple(changes),
            )
            for component, dataset, own, (first, *changes) in zip(
                blend.components, parts, rows, draws, strict=True
            )
        ]
    )
