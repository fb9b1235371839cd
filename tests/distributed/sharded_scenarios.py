"""Scenarios of models that ranks hold in shares: gradients, runs, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

from shardflow.errors import CheckpointError
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, World, select
from shardflow.training.checkpoint.files import CheckpointFolder
from shardflow.training.config import ParallelConfig, TrainConfig
from shardflow.training.distributed import Ranks, gather_whole, replicate, shard, unwrap
from shardflow.training.inputs import MicroInputs, make_inputs
from shardflow.training.run import open_task
from shardflow.training.step import accumulate_gradients
from shardflow.training.text import ReportTokenizer
from tests.distributed.stage import WAIT, WORLD_SIZES, Result, Stage, exact_model, open_loader
from tests.tiny_models import make_llava, model_of
from tests.tiny_runs import CLASSIFY, tiny_config

__all__ = [
    "chat_gradients",
    "classifier_gradients",
    "one_rank_fails_to_write",
    "sharded_gradients",
    "strategies",
]


def held_gradients(
    stage: Stage, ranks: Ranks, model: torch.nn.Module, make: Callable[[Batch], MicroInputs], **options: Any
) -> dict[str, torch.Tensor]:
    """Whole gradients of the first step over its tokens, of a model that is wrapped or sharded."""
    with open_loader(stage, ranks, "train", "mask") as loader:
        batches = iter(loader)
        micros = [next(batches) for _ in range(loader.num_micro_batches_per_rank)]
        sums = accumulate_gradients(
            model,
            [(batch.micro, make(batch)) for batch in micros],
            num_micro_batches=len(micros),
            world_size=ranks.world_size,
            position=(11, 0, 0),
            autocast=None,
            **options,
        )
    num_tokens = float(ranks.all_gather_numbers([sums.num_tokens], WAIT)[:, 0].sum())
    return {
        name: gather_whole(parameter.grad) / num_tokens
        for name, parameter in unwrap(model).named_parameters()
        if parameter.grad is not None
    }


def sharded_model(stage: Stage, ranks: Ranks) -> torch.nn.Module:
    return shard(exact_model(stage), ranks, ParallelConfig(), compute=None)


def without_slices_in(micros: set[int], batch: Batch, **arguments: Any) -> MicroInputs:
    """The micro-batch, without any image if it is one of some."""
    inputs = make_inputs(batch, **arguments)
    if batch.micro not in micros:
        return inputs
    return replace(inputs, slice_mask_BK=torch.zeros_like(inputs.slice_mask_BK))


def sharded_gradients(stage: Stage) -> Result:
    """The first step with whole and with sharded models, with and without text-only micro-batches."""
    arguments: dict[str, Any] = {
        "tokenizer": ReportTokenizer.load(stage.tiny.tokenizer),
        "max_tokens": 24,
        "device": stage.ranks.device,
    }
    result: Result = {}
    for size in WORLD_SIZES:
        ranks = stage.first(size)
        if ranks is None:
            continue
        all_text = ((0, 1, 2, 3),) if size <= 2 else ()
        for text_only in ((), (0, 2), *all_text):  # all of rank 0's at two ranks, then everybody's
            make = partial(without_slices_in, set(text_only), **arguments)
            held = partial(held_gradients, stage, ranks, make=make)
            gradients = {
                "ddp": held(model=replicate(exact_model(stage), ranks)),
                "fsdp2": held(model=sharded_model(stage, ranks)),
            }
            if size == 2:
                gradients["fsdp2-each"] = held(model=sharded_model(stage, ranks), exchange_each=True)
            if ranks.rank == 0:
                for name, tensors in gradients.items():
                    case = f"{name}-{len(text_only)}-{size}"
                    save_file(tensors, stage.output / f"held-{case}.safetensors")
        result[str(size)] = True
    return result


def chat_gradients(stage: Stage) -> Result:
    """The same of a LLaVA-style model on one and two ranks, where rank 0 of two has no image."""
    folder = stage.output / "llava"
    if stage.ranks.rank == 0:
        make_llava(folder, stage.tiny.tokenizer)
    stage.ranks.barrier("model saved", WAIT)
    config = stage.config("unused", f"model.path={folder}", f"text.tokenizer={folder}")
    for size in (1, 2):
        ranks = stage.first(size)
        if ranks is None:
            continue
        for strategy in ("ddp", "fsdp2"):
            model, tokenizer = model_of(config)
            model.double()
            make = partial(without_slices_in, {0, 2}, tokenizer=tokenizer, max_tokens=24, device=ranks.device)
            held = (
                replicate(model, ranks)
                if strategy == "ddp"
                else shard(model, ranks, ParallelConfig(), compute=None)
            )
            gradients = held_gradients(stage, ranks, held, make)
            if ranks.rank == 0:
                save_file(gradients, stage.output / f"chat-{strategy}-{size}.safetensors")
    return {}


class BatchNormNet(nn.Sequential):
    """A classifier whose samples depend on their micro-batch."""

    def __init__(self, num_channels: int, num_outputs: int) -> None:
        super().__init__(
            nn.Conv2d(num_channels, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, num_outputs),
        )


def _exact(inputs: Any) -> Any:
    """Return a micro-batch of a classifier with images in float64."""
    return replace(inputs, tensors={**inputs.tensors, "image": inputs.tensors["image"].double()})


def classifier_gradients(stage: Stage) -> Result:
    """Every step of a classifier's epoch with a masked tail, whole and sharded, also with BatchNorm."""
    own = (
        "model.target=tests.distributed.sharded_scenarios:BatchNormNet",
        "model.arguments={num_channels=2, num_outputs=5}",
    )
    result: Result = {}
    for size in (1, 2, 4):
        ranks = stage.first(size)
        if ranks is None:
            continue
        for case, strategy, model in (("small", "ddp", ()), ("small", "fsdp2", ()), ("norm", "ddp", own)):
            settings = ("batch.micro_batch_size=2", "batch.tail=mask", *model)
            config = tiny_config(stage.tiny, stage.output / "unused", *settings, file=CLASSIFY)
            for step, gradients in enumerate(_classifier_steps(ranks, config, strategy)):
                result[f"{case}-{strategy}-{size}"] = step + 1
                if ranks.rank == 0:
                    save_file(
                        gradients, stage.output / f"classify-{case}-{strategy}-{size}-{step}.safetensors"
                    )
    return result


def _classifier_steps(ranks: Ranks, config: TrainConfig, strategy: str) -> Iterator[dict[str, torch.Tensor]]:
    selection = select(Dataset.open(config.data.dataset), "train")
    task = open_task(config)
    with Loader(
        selection,
        batch=task.batch_spec(selection, None),
        seed=11,
        world=World(rank=ranks.rank, world_size=ranks.world_size),
        fields=task.fields(selection, is_evaluation=False),
    ) as loader:
        model = task.make_model(loader, None).double()
        held = (
            replicate(model, ranks)
            if strategy == "ddp"
            else shard(model, ranks, ParallelConfig(), compute=None)
        )
        inputs = task.open_inputs(loader, ranks.device, pinned_bytes=0)
        batches = iter(loader)
        for step in range(loader.num_steps):
            micros = [next(batches) for _ in range(loader.num_micro_batches_per_rank)]
            sums = accumulate_gradients(
                held,
                [(batch.micro, _exact(inputs(batch))) for batch in micros],
                num_micro_batches=len(micros),
                world_size=ranks.world_size,
                position=(11, 0, step),
                autocast=None,
            )
            num_labels = float(ranks.all_gather_numbers([sums.num_tokens], WAIT)[:, 0].sum())
            yield {
                name: gather_whole(parameter.grad) / num_labels
                for name, parameter in unwrap(held).named_parameters()
                if parameter.grad is not None
            }
            held.zero_grad(set_to_none=True)


WHOLE = ("run.max_steps=8", "data.eval_split=val")
SHARDED = ("parallel.strategy=fsdp2", *WHOLE)
OFTEN = "run.evaluate_every_steps=2"
RARELY = ("run.evaluate_every_steps=4", "run.checkpoint_every_steps=8")
"""What is stopped, before an evaluation that is due, writes a checkpoint besides."""


def strategies(stage: Stage) -> Result:
    """A sharded run, a stopped and resumed one, and one that starts in turn with whole and sharded models."""
    outcomes = [
        stage.train(stage.ranks, "sharded", *SHARDED, *RARELY),
        stage.train(stage.ranks, "sharded-parts", *SHARDED, *RARELY, stop_after=5, stop_rank=1),
        stage.train(stage.ranks, "sharded-parts", *SHARDED, *RARELY),
        stage.train(stage.ranks, "unsharded", *WHOLE, *RARELY),
    ]
    resumed = []
    for size, stop_after, settings in ((4, 3, SHARDED), (2, 4, WHOLE), (3, 7, SHARDED), (2, None, SHARDED)):
        summary = stage.train(stage.first(size), "strategies", *settings, OFTEN, stop_after=stop_after)
        resumed.append(summary and summary.to_json())
        stage.ranks.barrier("next strategy", WAIT)
    return {"outcomes": [summary and summary.to_json() for summary in outcomes], "starts": resumed}


def one_rank_fails_to_write(stage: Stage) -> Result:
    """Rank 2 cannot write its part of a checkpoint: an error with the reason, on every rank."""
    real = CheckpointFolder.write_part

    def full(folder: CheckpointFolder, unfinished: Path, global_step: int, **parts: Any) -> dict[str, Any]:
        if stage.ranks.rank == 2 and global_step == 4:
            raise CheckpointError("checkpoint step-00000004 could not be written: a full disk on rank 2.")
        return real(folder, unfinished, global_step, **parts)

    try:
        with mock.patch.object(CheckpointFolder, "write_part", full):
            stage.train(stage.ranks, "unwritten", *SHARDED)
    except CheckpointError as error:
        return {"message": error.message}
    return {"message": None}
