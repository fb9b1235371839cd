"""Log-probabilities of the reference of ``dpo``, stored as columns of the dataset before training.

The model of the settings is run once over the pairs that a run of them would train and evaluate on, and what
it says of each is an attached table with the columns ``chosen`` and ``rejected``. Its name is a digest of the
model, its processor and the roles that are learned, so that a run finds the values of its own reference or
none. A run with ``task.reference = "stored"`` then holds and runs no second model.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from shardflow.errors import ConfigError
from shardflow.loading import Loader, World
from shardflow.loading.column_writer import ColumnWriter
from shardflow.training.config import TrainConfig
from shardflow.training.data import open_data
from shardflow.training.distributed import join_ranks, prefer_determinism, settle
from shardflow.training.models.weights import weights_later
from shardflow.training.run import open_loader, open_task, place_weights
from shardflow.training.step import COMPUTE_TYPES
from shardflow.training.tasks.conversations import ConversationTask
from shardflow.training.tasks.task import ArrayInputs


def store_reference(config: TrainConfig) -> dict[str, Any]:
    """Write the columns; every rank that torchrun started calls this once.

    Args:
        config: The settings of the run.

    Returns:
        Name, version and counts of the table on rank 0; what others return means nothing.

    Raises:
        ConfigError: The settings are not those of ``dpo`` on one local dataset with a model of a folder.
        WaitTimeoutError: Ranks are missing.
    """
    # Checked as those of the run that will read the columns.
    replace(config, task=replace(config.task, reference="stored"))
    config = replace(config, task=replace(config.task, reference="model"))
    if config.data.is_blend:
        raise ConfigError(
            "--store-reference writes into one dataset, and data.dataset is a blend file; run it for each of "
            "its datasets, with the same model and processor."
        )
    if config.run.deterministic:
        prefer_determinism()
    with join_ranks(config.run.device, config.timeouts) as ranks, ExitStack() as stack:
        task = open_task(config)
        assert isinstance(task, ConversationTask)  # noqa: S101 - of the type dpo
        task.leave_reference()
        data = open_data(config.data, None, cache=config.cache)
        selections = [one for one in (data.training, data.evaluation) if one is not None]
        loaders: list[Loader] = [
            stack.enter_context(open_loader(config, task, ranks, one, tail="mask")) for one in selections
        ]
        with weights_later():
            model = task.make_model(loaders[0], None)
        place_weights(config, ranks, model, ())
        model.eval()
        ranks.barrier("prepared", ranks.timeouts.startup_s)
        is_sharded = config.parallel.strategy == "fsdp2"  # which gathers its layers in the type itself
        compute = None if is_sharded else COMPUTE_TYPES[config.run.precision]
        autocast = torch.autocast(ranks.device.type, dtype=compute, enabled=compute is not None)
        writer = stack.enter_context(
            ColumnWriter(
                data.training.datasets[0],
                name=task.reference_table,
                columns={"chosen": "float", "rejected": "float"},
                resume=True,  # what an earlier job left is of the same model
                world=World(rank=ranks.rank, world_size=ranks.world_size),
                timeout_s=ranks.timeouts.control_s,
            )
        )
        for loader in loaders:
            inputs = task.open_inputs(loader, ranks.device, pinned_bytes=config.loader.pinned_bytes)
            with closing(iter(loader)) as batches, torch.no_grad(), autocast:
                for batch in batches:
                    made = inputs.for_evaluation()(batch)
                    assert isinstance(made, ArrayInputs)  # noqa: S101 - of the task
                    values = task.reference_values(model, batch, made)
                    writer.add(batch, chosen=values[:, 0], rejected=values[:, 1])
        settle(model)
        done = writer.finish(partial=True)
        if done is None:
            return {}
        num_selected = sum(int(one.population_of(0).sum()) for one in selections)
        return {
            "table": done.name,
            "version": done.number,
            "num_pairs": done.num_samples,
            "num_without": max(0, num_selected - done.num_samples),
        }
