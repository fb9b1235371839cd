"""Crops of volumes that a step of the plan takes: where they are, from tables alone; no voxel is read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import Field, SlotRequest, Slots
from shardflow.fields.quarantine import BadSample
from shardflow.fields.reader import FieldReader, Shard
from shardflow.fields.volumes.field import BoundVolume
from shardflow.fields.volumes.geometry import ONE
from shardflow.fields.volumes.stored import Crop
from shardflow.format import Dataset
from shardflow.loading.binding import batch_of_samples, bind_fields
from shardflow.loading.rows.selection import select
from shardflow.sampling import BatchSpec
from shardflow.telemetry import StageCounters

_READ_BYTES: Final = 1 << 20


class StepCrops:
    """Samples of any step of a dataset with the crops that volumes among some fields take.

    They are those of a `Loader` with the same fields, split, seed and batch spec, without weights, lanes or
    budget.

    Args:
        dataset: The dataset.
        fields: What a batch holds.

    Attributes:
        fields: Names of the volumes.

    Raises:
        ConfigError: There is no volume among the fields.
    """

    def __init__(self, dataset: Dataset, fields: Mapping[str, Field]) -> None:
        self._dataset = dataset
        self._specs = dict(fields)
        self.fields: Sequence[str] = [name for name, one in fields.items() if one.type_name == "volume"]
        if not self.fields:
            raise ConfigError(
                "The fields hold no volume, so a step takes no crops; add one such as [fields.ct] with "
                'type = "volume".'
            )

    def __call__(self, *, split: str, seed: int, epoch: int, step: int, batch: BatchSpec) -> dict[str, Any]:
        """Return the samples of a step by micro-batch, as JSON; None for padding.

        Each has ``row``, ``key``, ``weight`` and ``crops``: of each volume ``field``, ``series`` and
        ``corners``, eight times the slice, row and column of a corner of the outermost voxels (voxel centers
        are integers). The corners are in the order of ``itertools.product`` of both ends of each axis.

        Args:
            split: Of the dataset.
            seed: Of the run.
            epoch: The epoch.
            step: Its step.
            batch: How steps are formed; B counts crops.

        Raises:
            ConfigError: There is no such split, or the fields do not fit it.
            PlanError: The settings make no plan, or it has no such step.
        """
        selection, fields = bind_fields(select(self._dataset, split), self._specs, StageCounters())
        reader = FieldReader(selection, read_bytes=_READ_BYTES, counters=StageCounters())
        plan = selection.plan(batch_of_samples(batch, fields.num_crops), seed=seed, epoch=epoch)
        volumes = [
            one
            for one in fields.bound
            if isinstance(one, BoundVolume) and fields.specs[one.name].study == "own"
        ]
        rows, weights = plan.step(step)

        def describe(slots: Slots, slot: int, weight: float) -> dict[str, Any]:
            row = slots.rows[slot : slot + 1]
            shard = reader.open_shard(int(selection.column("shard", row)[0]), ThreadState())
            key = selection.keys(row)[0]
            request = SlotRequest(
                slot=slot,
                draw=slots.draw(slot),
                row_in_shard=int(selection.column("row_in_shard", row)[0]),
                key=key,
                study_row=int(slots.study_rows[slot]),
                table_row=int(slots.table_rows[slot]),
                study_key=key,
            )
            crops = [found for one in volumes if (found := _describe(one, shard, request)) is not None]
            return {"row": int(row[0]), "key": key, "weight": int(weight), "crops": crops}

        micro_batches = []
        for planned, shares in zip(rows, weights, strict=True):
            slots = _slots(np.repeat(planned, fields.num_crops), seed, epoch, fields.num_crops)
            each = np.repeat(shares, fields.num_crops).tolist()
            micro_batches.append(
                [
                    describe(slots, slot, weight) if slots.rows[slot] >= 0 else None
                    for slot, weight in enumerate(each)
                ]
            )
        return {"num_steps": plan.num_steps, "micro_batches": micro_batches}


def _slots(rows: NDArray[np.int64], seed: int, epoch: int, num_crops: int) -> Slots:
    """Return the slots of samples that are studies of one dataset."""
    inside = np.maximum(rows, 0)
    return Slots(rows, inside, np.zeros_like(rows), inside, seed, epoch, None, num_crops)


def _describe(field: BoundVolume, shard: Shard, request: SlotRequest) -> dict[str, Any] | None:
    try:
        crop = field.crop(shard, request)
    except BadSample:  # it would be a masked slot
        return None
    if crop is None:
        return None
    return {"field": field.name, "series": crop.stored.series, "corners": _corners(crop, field.margin)}


def _corners(crop: Crop, margin: Sequence[int]) -> list[list[float]]:
    """Return slice, row and column of the corners of a crop without its margin."""
    ends = [(more - 0.5, side - more - 0.5) for more, side in zip(margin, crop.grid.shape, strict=True)]
    found = []
    for d, h, w in itertools.product(*ends):
        slices, row, column = crop.grid.stored((d, h, w))
        place = int(crop.grid.places(np.array([round(slices * ONE)]), 0)[0]) / ONE
        found.append([round(place, 3), round(row, 3), round(column, 3)])
    return found
