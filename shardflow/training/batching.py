"""From settings to the batch spec, and from a mesh of processes to a data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardflow.epochs import BatchSpec, CostRule, ImageBucket, TileRule, TokenBudget, choose_lanes
from shardflow.epochs.elastic import data_parallel_rank
from shardflow.epochs.spec import Tail
from shardflow.errors import ConfigError
from shardflow.loading import World
from shardflow.loading.selection import Selection
from shardflow.training.config import BatchSettings, ImageSettings, TextSettings
from shardflow.training.tokenizing import tokenizer_digest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["batch_spec", "mesh_world"]


def batch_spec(
    batch: BatchSettings,
    image: ImageSettings,
    text: TextSettings,
    selection: Selection,
    *,
    tail: Tail | None = None,
) -> BatchSpec:
    """Return how steps are formed.

    Args:
        batch: The table ``[batch]``.
        image: Decides what images cost.
        text: Decides what text costs.
        selection: The samples; where lanes are to be chosen they follow from them, never from the world.
        tail: Instead of the tail of the settings.
    """
    spec = BatchSpec(
        micro_batch_size=batch.micro_batch_size or 0,
        budget=_budget(batch, image, text),
        micro_batches_per_step=batch.micro_batches_per_step,
        tail=tail or batch.tail,
        lanes=batch.lanes or (0 if batch.max_tokens is None else 1),
        window_bytes=batch.window_bytes,
    )
    if spec.budget is None or batch.lanes is not None:
        return spec
    return replace(spec, lanes=choose_lanes(selection.layout(spec), spec))


def _budget(batch: BatchSettings, image: ImageSettings, text: TextSettings) -> TokenBudget | None:
    if batch.max_tokens is None:
        return None
    return TokenBudget(
        max_tokens=batch.max_tokens,
        max_samples=batch.max_samples,
        padded=not batch.packed,
        over_budget=batch.over_budget,
        cost=CostRule(
            # Begin and end of the text, and in a packed sequence the start of the sample.
            tokens_per_sample=2 + batch.packed,
            max_text_tokens=text.max_tokens,
            **_image_cost(image, batch.image_tokens_per_slice),
            quadratic_tokens=batch.quadratic_tokens,
            tokenizer=tokenizer_digest(text.tokenizer) if batch.text_tokens == "counted" else "",
        ),
    )


def _image_cost(image: ImageSettings, tokens: int) -> dict[str, Any]:
    """Return what a sample's images cost, as the view takes them."""
    if not tokens:
        return {}
    if image.sizes:
        return {
            "buckets": tuple(
                ImageBucket(weight=weight, max_slices=num_slices, tokens_per_slice=tokens)
                for num_slices, _, _, weight in image.size_table
            )
        }
    tiles = (
        TileRule(rows=image.rows, columns=image.columns, max_tiles=image.max_tiles)
        if image.max_tiles
        else None
    )
    return {"image_tokens_per_slice": tokens, "max_slices": image.num_slices, "tiles": tiles}


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
