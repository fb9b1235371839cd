"""Everything a run is made of, built in the order of a start.

Files are read, the model is built and the checkpoint is put in place without exchanging anything, in any
time up to ``timeouts.startup_s``; then the ranks meet, and only then is there a collective: the model is
wrapped and warmed up.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from shardflow.configs import dump_config
from shardflow.loading import Loader, LoaderConfig, Selection, StoredTokens, World
from shardflow.monitoring import open_outlets, read_settings
from shardflow.monitoring.verdict import VerdictWatch
from shardflow.storage import write_atomic
from shardflow.training.batching import batch_spec
from shardflow.training.building import build_report_model
from shardflow.training.cache_use import CacheUse
from shardflow.training.checkpoint import Checkpoint, CheckpointFolder
from shardflow.training.config import TrainConfig
from shardflow.training.data import open_data
from shardflow.training.devices import device_name
from shardflow.training.distributed import Ranks
from shardflow.training.ledger import LedgerWriter
from shardflow.training.loop import RunParts
from shardflow.training.measuring import open_measures
from shardflow.training.metrics import MetricsWriter
from shardflow.training.optimizer import build_optimizer
from shardflow.training.resume import StartDecision, check_bindings, model_bindings
from shardflow.training.saving import CheckpointSaver
from shardflow.training.sharding import compile_blocks, replicate, shard
from shardflow.training.signals import StopRequest
from shardflow.training.step import warm_up
from shardflow.training.tensors import load_model, load_optimizer
from shardflow.training.text import ReportTokenizer
from shardflow.training.tokenizing import tokenizer_digest
from shardflow.training.tuning import Tuning, given_settings
from shardflow.training.updates import Updates
from shardflow.training.views import image_view, open_inputs, sample_inputs

_LOGGER = logging.getLogger(__name__)
_COMPUTE = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    data = open_data(config.data, checkpoint.state["loader"] if checkpoint else None, cache=config.cache)
    data.check_modalities("image.standardise", config.image.standardise)
    loader = stack.enter_context(_open_loader(config, ranks, data.training))
    model, tokenizer = build_report_model(
        config.model,
        tokenizer,
        image=config.image,
        text=config.text,
        lora=config.lora,
        seed=config.run.seed,
    )
    compute = _COMPUTE[config.run.precision]
    is_sharded = config.parallel.strategy == "fsdp2"
    if config.run.compile:
        compile_blocks(model)
    if is_sharded:
        shard(model, ranks, config.parallel, compute=compute)
    else:
        model.to(ranks.device)
    optimizer = build_optimizer(model, config.optimizer)
    updates = Updates(model, optimizer, config.optimizer, is_scaled=compute is torch.float16)
    if checkpoint is not None:
        loader.load_state_dict(checkpoint.state["loader"])
        loader.load_masks(checkpoint.state["masks"])
        load_model(model, checkpoint.model)
        load_optimizer(model, optimizer, checkpoint.optimizer)
        updates.load_state_dict(checkpoint.state.get("updates", {}))
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
    autocast = None if is_sharded else compute  # a sharded model gathers its layers in that type

    ranks.meet("prepared", ranks.timeouts.startup)
    wrapped = model if is_sharded else replicate(model, ranks)
    saver = CheckpointSaver(checkpoints, ranks, model, optimizer, is_sharded=is_sharded)
    stack.callback(saver.close)
    padding = sample_inputs(config.image, config.augment, ranks.device, packed=config.batch.packed)
    warm_up(wrapped, padding, autocast=autocast)
    inputs = open_inputs(
        tokenizer,
        ranks.device,
        loader.counters,
        image=config.image,
        text=config.text,
        augment=config.augment,
        packed=config.batch.packed,
        pinned_bytes=config.loader.pinned_bytes,
        seed=config.run.seed,
    )
    measures, close_measures = open_measures(
        config.monitor.interval_s,
        ranks,
        loader,
        wrapped,
        inputs.transfer,
        metrics,
        pinned_bytes=config.loader.pinned_bytes,
    )
    stack.callback(close_measures)
    if metrics is not None:
        judge = VerdictWatch(metrics.write_verdict, config=read_settings(config.run.output))
        measures.listeners.append(judge)
    open_tuning = partial(
        Tuning,
        config.tune,
        ranks,
        loader,
        metrics,
        run=config.run.output,
        given=given_settings(config.loader, config.cache),
    )
    return RunParts(
        run=config.run,
        optimization=config.optimizer,
        micro_batches_per_step=config.batch.micro_batches_per_step,
        exchanges_each=config.parallel.accumulation == "sharded",
        agreement={
            "tune.mode": config.tune.mode,
            "monitor.interval_s": config.monitor.interval_s,
            "a cache": config.cache.is_on,
        },
        ranks=ranks,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        updates=updates,
        loader=loader,
        open_evaluation=(
            partial(_open_loader, config, ranks, data.evaluation, tail="mask") if data.evaluation else None
        ),
        open_tuning=None if config.tune.mode == "off" else open_tuning,
        inputs=inputs,
        autocast=autocast,
        saver=saver,
        ledger=ledger,
        metrics=metrics,
        measures=measures,
        cache_use=CacheUse(loader.counters) if config.cache.is_on else None,
        stop=stop,
        identity={
            "bindings": bindings,
            "config_digest": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        },
    )


def _open_loader(config: TrainConfig, ranks: Ranks, selection: Selection, *, tail: Any = None) -> Loader:
    settings = config.loader
    stored = None
    if config.text.tokens == "stored":
        digest = tokenizer_digest(config.text.tokenizer)
        stored = StoredTokens(tokenizer=digest, max_tokens=config.text.max_tokens)
    return Loader(
        selection,
        spec=batch_spec(config.batch, config.image, config.text, selection, tail=tail),
        seed=config.run.seed,
        world=World(
            rank=ranks.rank,
            world_size=ranks.world_size,
            ranks_per_node=World.from_environment().ranks_per_node,
        ),
        config=LoaderConfig(
            view=image_view(config.image, is_evaluation=tail is not None),
            # Turning an image asks whether its report names a side.
            text=stored is None or config.augment.is_active,
            tokens=stored,
            execution=settings.execution,
            transform="" if tail else config.image.transform,
            num_threads=settings.num_threads,
            prefetch_bytes=settings.prefetch_bytes,
            max_node_bytes=settings.max_node_bytes,
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
        config.run.output,
        attempt=attempt,
        start=start,
        tensorboard=config.run.tensorboard,
        device=device_name(ranks.device),
    )
    stack.callback(metrics.close)
    stack.enter_context(open_outlets(config.run.output, config.monitor.prometheus, config.monitor.sinks))
    return metrics
