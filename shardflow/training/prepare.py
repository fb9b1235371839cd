"""Everything a run is made of, built in the order of a start.

Files are read, the model is built and the checkpoint is put in place without exchanging anything, in any
time up to ``timeouts.startup_s``; then the ranks meet, and only then is there a collective: the model is
wrapped and warmed up.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from shardflow.configs import dump_config
from shardflow.errors import ConfigError
from shardflow.loading import ImageView, Loader, LoaderConfig, World
from shardflow.shards import Dataset
from shardflow.storage import write_atomic
from shardflow.training.batching import batch_spec
from shardflow.training.checkpoint import Checkpoint, CheckpointFolder
from shardflow.training.config import TrainConfig
from shardflow.training.distributed import Ranks
from shardflow.training.inputs import MicroInputs, make_inputs
from shardflow.training.ledger import LedgerWriter
from shardflow.training.loop import RunParts
from shardflow.training.losses import IGNORED_LABEL
from shardflow.training.metrics import MetricsWriter
from shardflow.training.model import build_model
from shardflow.training.optimizer import build_optimizer
from shardflow.training.resume import StartDecision, check_bindings, model_bindings
from shardflow.training.signals import StopRequest
from shardflow.training.step import warm_up
from shardflow.training.tensors import load_model, load_optimizer
from shardflow.training.text import ReportTokenizer

__all__ = ["prepare_run"]

_LOGGER = logging.getLogger(__name__)


def prepare_run(
    config: TrainConfig,
    ranks: Ranks,
    checkpoints: CheckpointFolder,
    decision: StartDecision,
    checkpoint: Checkpoint | None,
    stop: StopRequest,
    stack: ExitStack,
) -> RunParts:
    """Build everything a run is made of.

    Args:
        config: All settings.
        ranks: The ranks of the run, joined.
        checkpoints: The run's checkpoints.
        decision: Where the run starts.
        checkpoint: The checkpoint that ``decision`` names, read.
        stop: Where stop signals arrive.
        stack: Closes what the run opens.

    Raises:
        ConfigError: the dataset has no such split, or the tokenizer cannot be read.
        StateError: the checkpoint belongs to another model, seed, dataset or batch spec.
        WaitTimeoutError: ranks are missing once this one is prepared.
    """
    tokenizer = ReportTokenizer.load(config.text.tokenizer)
    bindings = model_bindings(config, tokenizer)
    if checkpoint is not None:
        check_bindings(checkpoint, bindings)
    dataset = _open_dataset(config, checkpoint)
    loader = stack.enter_context(_open_loader(config, ranks, dataset, split=config.data.train_split))
    model = build_model(
        config.model,
        config.image,
        vocab_size=tokenizer.vocab_size,
        max_tokens=config.text.max_tokens,
        seed=config.run.seed,
    ).to(ranks.device)
    optimizer = build_optimizer(model, config.optimizer)
    if checkpoint is not None:
        loader.load_state_dict(checkpoint.state["loader"])
        loader.load_masks(checkpoint.state["masks"])
        load_model(model, checkpoint.model)
        load_optimizer(model, optimizer, checkpoint.optimizer)
        _LOGGER.info("resuming from %s at global step %d", checkpoint.name, checkpoint.state["global_step"])
    start = checkpoint.state["global_step"] if checkpoint else 0
    ledger = LedgerWriter(
        config.run.output,
        attempt=decision.attempt,
        rank=ranks.rank,
        world_size=ranks.world_size,
        start=start,
    )
    stack.callback(ledger.close)
    metrics = _open_metrics(config, ranks, decision.attempt, start, stack)
    autocast = torch.bfloat16 if config.run.precision == "bf16" else None

    ranks.meet("prepared", ranks.timeouts.startup)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        process_group=ranks.group,
        # No buffer of the model changes in training, so there is nothing to send around before every forward.
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )
    warm_up(wrapped, _empty_inputs(config, ranks.device), autocast=autocast)
    return RunParts(
        config=config,
        ranks=ranks,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        loader=loader,
        open_evaluation=(
            partial(_open_loader, config, ranks, dataset, split=config.data.eval_split, tail="mask")
            if config.data.eval_split
            else None
        ),
        make_inputs=partial(
            make_inputs, tokenizer=tokenizer, max_tokens=config.text.max_tokens, device=ranks.device
        ),
        autocast=autocast,
        checkpoints=checkpoints,
        ledger=ledger,
        metrics=metrics,
        stop=stop,
        bindings=bindings,
    )


def _open_dataset(config: TrainConfig, checkpoint: Checkpoint | None) -> Dataset:
    if not config.data.dataset.is_dir():
        raise ConfigError(
            "data.dataset must be an existing folder, got none; correct the path, "
            "or make one with: shardflow pack."
        )
    version = config.data.manifest_version
    if version is None and checkpoint is not None:
        # A newer manifest is adopted on purpose only: it has other samples, so another plan.
        version = checkpoint.state["loader"]["manifest_version"]
    dataset = Dataset.open(config.data.dataset, version=version)
    for key, split in (("train_split", config.data.train_split), ("eval_split", config.data.eval_split)):
        if split and split not in dataset.splits:
            known = ", ".join(sorted(dataset.splits))
            raise ConfigError(
                f"data.{key} must be a split of the dataset ({known}), got {split!r}; correct it."
            )
    return dataset


def _open_loader(
    config: TrainConfig, ranks: Ranks, dataset: Dataset, *, split: str, tail: Any = None
) -> Loader:
    settings = config.loader
    return Loader(
        dataset,
        split=split,
        spec=batch_spec(config, dataset, split, tail=tail),
        seed=config.run.seed,
        world=World(
            rank=ranks.rank,
            world_size=ranks.world_size,
            ranks_per_node=World.from_environment().ranks_per_node,
        ),
        config=LoaderConfig(
            view=ImageView(
                num_slices=config.image.num_slices,
                rows=config.image.rows,
                columns=config.image.columns,
                slice_choice="even" if tail else config.image.slice_choice,
                dtype=config.image.dtype,
            ),
            text=True,
            num_threads=settings.num_threads,
            prefetch_bytes=settings.prefetch_bytes,
            wait_timeout_s=settings.wait_timeout_s,
            on_bad_sample=settings.on_bad_sample,
            max_bad_samples=settings.max_bad_samples,
        ),
    )


def _open_metrics(
    config: TrainConfig, ranks: Ranks, attempt: int, start: int, stack: ExitStack
) -> MetricsWriter | None:
    if ranks.rank != 0:
        return None
    write_atomic(config.run.output / "resolved_config.toml", [dump_config(config).encode()], replace=True)
    metrics = MetricsWriter(
        config.run.output, attempt=attempt, start=start, tensorboard=config.run.tensorboard
    )
    stack.callback(metrics.close)
    return metrics


def _empty_inputs(config: TrainConfig, device: torch.device) -> MicroInputs:
    """One padding slot in the run's shapes, for the warm-up."""
    image, num_tokens = config.image, 2
    return MicroInputs(
        images_BKHW=torch.zeros(
            (1, image.num_slices, image.rows, image.columns), dtype=torch.int16, device=device
        ),
        slice_mask_BK=torch.zeros((1, image.num_slices), dtype=torch.bool, device=device),
        display_range_B2=torch.zeros((1, 2), device=device),
        token_ids_BT=torch.zeros((1, num_tokens), dtype=torch.int64, device=device),
        token_mask_BT=torch.zeros((1, num_tokens), dtype=torch.bool, device=device),
        labels_BT=torch.full((1, num_tokens), IGNORED_LABEL, dtype=torch.int64, device=device),
        weights_B=torch.zeros(1, device=device),
        num_tokens=0.0,
        num_samples=0.0,
    )
