"""Loaders that are told nothing of their rank; ``torchrun --nproc-per-node 4 -m ... DATASET OUTPUT``.

Every rank writes what its loaders delivered, made before and after the process group was joined, over a mesh,
by a loader process and by a DataLoader, for the test to put together. Workers that start new interpreters are
those of the last rank alone.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, LoaderConfig
from shardflow.loading.torch_dataset import ShardIterableDataset
from shardflow.sampling import BatchSpec

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")


def main() -> None:
    """Write ``rank-N.json``."""
    dataset, output = Dataset.open(sys.argv[1]), Path(sys.argv[2])
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardflow.loading.loader").addHandler(handler)
    logging.getLogger("shardflow.loading.loader").setLevel(logging.INFO)

    def loader(world: Any = None, **settings: Any) -> Loader:
        config = LoaderConfig(num_threads=1, **settings)
        return Loader(dataset, split="train", batch=SPEC, seed=3, fields={}, world=world, config=config)

    early = loader()
    found = {"environment": _keys(early)}
    dist.init_process_group("gloo")
    rank, subgroup = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found["joined since"] = _keys(early)
    found["torch.distributed"] = _keys(loader())
    with loader(execution="process") as beside:
        found["process"] = _keys(beside)
    is_last = rank == dist.get_world_size() - 1
    if is_last:
        with loader(execution="workers") as beside:
            found["workers"] = _keys(beside)
    shards = ShardIterableDataset(dataset, split="train", batch=SPEC, seed=3, fields={})
    for context in ("fork", "spawn") if is_last else ("fork",):
        shards.set_epoch(0)
        workers: Any = DataLoader(shards, batch_size=None, num_workers=1, multiprocessing_context=context)
        found[context] = _keys(workers)
    found["single"] = _keys(loader("single"))
    found["mesh"] = _keys(loader((subgroup, "dp")))
    found["submesh"] = _keys(loader(subgroup["dp"]))
    try:
        loader(subgroup)
    except ConfigError as error:
        found["refusal"] = [error.message]
    found["log"] = logged
    output.mkdir(exist_ok=True)
    (output / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _keys(batches: Iterable[Batch]) -> list[str]:
    return [key for batch in batches for key in batch.sample_keys if key is not None]


if __name__ == "__main__":
    main()
