"""From settings to the batch spec, and from a mesh of processes to a data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardflow.epochs import BatchSpec, CostRule, TokenBudget, choose_lanes
from shardflow.epochs.elastic import data_parallel_rank
from shardflow.epochs.spec import Tail
from shardflow.errors import ConfigError
from shardflow.loading import World
from shardflow.loading.layout import split_layout
from shardflow.shards import Dataset
from shardflow.training.config import TrainConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["batch_spec", "mesh_world"]


def batch_spec(config: TrainConfig, dataset: Dataset, split: str, *, tail: Tail | None = None) -> BatchSpec:
    """Return how the steps of a split are formed.

    Args:
        config: All settings.
        dataset: The dataset; where lanes are to be chosen they follow from it, never from the world.
        split: One of its splits.
        tail: Instead of the tail of the settings.
    """
    batch = config.batch
    spec = BatchSpec(
        micro_batch_size=batch.micro_batch_size or 0,
        budget=_budget(config),
        micro_batches_per_step=batch.micro_batches_per_step,
        tail=tail or batch.tail,
        lanes=batch.lanes or (0 if batch.max_tokens is None else 1),
        window_bytes=batch.window_bytes,
    )
    if spec.budget is None or batch.lanes is not None:
        return spec
    return replace(spec, lanes=choose_lanes(split_layout(dataset, split, spec), spec))


def _budget(config: TrainConfig) -> TokenBudget | None:
    batch = config.batch
    if batch.max_tokens is None:
        return None
    return TokenBudget(
        max_tokens=batch.max_tokens,
        max_samples=batch.max_samples,
        over_budget=batch.over_budget,
        cost=CostRule(
            max_text_tokens=config.text.max_tokens,
            image_tokens_per_slice=batch.image_tokens_per_slice,
            max_slices=config.image.num_slices if batch.image_tokens_per_slice else 0,
            quadratic_tokens=batch.quadratic_tokens,
        ),
    )


def mesh_world(mesh: DeviceMesh, data_dimensions: Sequence[str]) -> World:
    """Return this process's place among the data-parallel ranks of a mesh.

    Processes of one tensor-, pipeline- or context-parallel group get the same place, and so the same
    micro-batches.

    Args:
        mesh: The mesh of all processes of the run.
        data_dimensions: Names of its data-parallel dimensions, such as ``("replicate", "shard")``.

    Raises:
        ConfigError: The mesh has no such dimension, or this process is not in it.
    """
    names = mesh.mesh_dim_names or ()
    missing = [name for name in data_dimensions if name not in names]
    if missing:
        raise ConfigError(f"data_dimensions must be of the mesh ({', '.join(names)}), got {missing}.")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            "this process must be in the mesh, got one outside it; build the mesh of all ranks."
        )
    shape = tuple(mesh.mesh.shape)
    place = 0
    for size, at in zip(shape, coordinate, strict=True):
        place = place * size + at
    rank, world_size = data_parallel_rank(place, shape, [names.index(name) for name in data_dimensions])
    return World(rank=rank, world_size=world_size)
