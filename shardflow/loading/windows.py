"""Windows of volumes as samples: rows (study, window), for inference and evaluation by sliding window."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import numpy as np

from shardflow.errors import ConfigError
from shardflow.fields.field import Field, FieldContext
from shardflow.fields.units import WindowDataset
from shardflow.format import Dataset
from shardflow.loading.selection import Selection, select
from shardflow.sampling import BatchSpec
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
