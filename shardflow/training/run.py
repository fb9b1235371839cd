"""Training run: chooses where to start, prepares every part, runs the loop, and returns a summary.

Once the ranks have agreed on a start (`shardflow.training.checkpoint.start`), all of them read files, build
the model and load the checkpoint without exchanging anything, within ``timeouts.startup_s``; after a barrier
the model is wrapped and warmed up.
A checkpoint of another model is refused here, one of another seed, dataset or batch spec by the loader.
Nothing depends on the number of ranks: one process without torchrun runs the same code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardflow.config import dump_config
from shardflow.errors import (
    StateError,
)
from shardflow.fields.conversations.field import Conversation
from shardflow.fields.types.masks import Mask
from shardflow.loading import Loader, LoaderConfig, Selection, World
from shardflow.loading.rows.lock import encode_lock
from shardflow.monitoring import open_outlets, read_settings
from shardflow.monitoring.verdict.judging import VerdictReporter
from shardflow.storage import write_atomic
from shardflow.training.adoption import Adoption, check_meanings
from shardflow.training.checkpoint.files import (
    Checkpoint,
    CheckpointFolder,
    read_checkpoint,
)
from shardflow.training.checkpoint.saving import CheckpointSaver
from shardflow.training.checkpoint.start import StartDecision, agree_on_start, monitor_health
from shardflow.training.checkpoint.tensors import load_model, load_optimizer
from shardflow.training.config import TrainConfig
from shardflow.training.data import open_data
from shardflow.training.distributed import (
    Ranks,
    StopRequest,
    code_digest,
    compile_blocks,
    device_name,
    join_ranks,
    prefer_determinism,
    replicate,
    shard,
)
from shardflow.training.health.heartbeat import HEALTH_FOLDER
from shardflow.training.inputs import InputSource
from shardflow.training.interval import CacheUse, RunMeasures
from shardflow.training.ledger import LedgerWriter
from shardflow.training.loop import LoopProgress, Outcome, RunParts, TrainingLoop
from shardflow.training.metrics import MetricsWriter, StepMetrics
from shardflow.training.model_fields import CONVERSATION_FIELD, MASK_FIELD, AugmentConfig, segment_volumes
from shardflow.training.models.weights import hold_frozen, load_weights, weights_later
from shardflow.training.step import COMPUTE_TYPES, Updates, build_optimizer, warm_up
from shardflow.training.tasks.classify import ClassifyTask
from shardflow.training.tasks.report import ReportTask
from shardflow.training.tasks.segment import SegmentTask
from shardflow.training.tasks.task import ArrayTask, RunSettings, Task, make_own_task, write_first_sample
from shardflow.training.text import ReportTokenizer
from shardflow.training.tuning import Tuning, given_settings

_LOGGER = logging.getLogger(__name__)
_OPTIONAL = {"model.path digest", "model.frozen", "model.frozen_dtype", "model.quantize", "lora.rank"}
"""Bindings that exist only where the setting does; one that a checkpoint has must not be removed."""
_NEWER = {"model.path weights"}
"""Bindings that older checkpoints have not, which resume without."""


def open_task(config: TrainConfig) -> Task:
    """Make the task of the settings.

    Raises:
        ConfigError: The tokenizer cannot be read, or the task of a user cannot be made.
    """
    settings = config.task
    if settings.has_reports:
        return ReportTask(
            tokenizer=ReportTokenizer.load(config.text.folder),
            images=config.image_field,
            batch=config.batch,
            settings=config.fields,
            image=config.image,
            text=config.text,
            augment=config.augment,
            model=config.model,
            lora=config.lora,
            seed=config.run.seed,
        )
    if settings.target:
        task = make_own_task(settings)
        name = f"{settings.target} {json.dumps(settings.arguments, sort_keys=True, default=str)}"
    else:
        kinds = {"classify": _classify_task, "segment": _segment_task}
        make = kinds.get(settings.type, _conversation_task)
        task, name = make(config), settings.type
    run = config.run
    return task.open(
        RunSettings(
            name=name, batch=config.batch, fields=config.fields, seed=run.seed, precision=run.precision
        )
    )


def _classify_task(config: TrainConfig) -> ArrayTask:
    return ClassifyTask(
        config.task,
        config.model,
        config.image_field,
        config.image,
        config.augment,
        has_transform=bool(config.data.transform),
        seed=config.run.seed,
    )


def _conversation_task(config: TrainConfig) -> ArrayTask:
    from shardflow.training.tasks.conversations import ConversationTask  # imports transformers

    field = config.fields[CONVERSATION_FIELD]
    assert isinstance(field, Conversation)  # noqa: S101 - checked when the settings were read
    return ConversationTask(config.task, config.model, config.lora, field)


def _segment_task(config: TrainConfig) -> ArrayTask:
    mask = config.fields[MASK_FIELD]
    assert isinstance(mask, Mask)  # noqa: S101 - checked when the settings were read
    volumes = segment_volumes(config.fields)
    return SegmentTask(config.task, config.model, volumes, mask, config.augment_volumes)


def check_bindings(
    checkpoint: Checkpoint, bindings: Mapping[str, Any], *, accepts_content: bool = False
) -> None:
    """Refuse a checkpoint that was trained with another model or other images.

    Args:
        checkpoint: The checkpoint.
        bindings: Of this run.
        accepts_content: Whether its images may differ, if they are as many.

    Raises:
        StateError: naming the first setting that differs.
    """
    # Checkpoints from before a setting existed behaved as its default does.
    saved = {**_chosen_later(), **checkpoint.state["bindings"]}
    if "image.num_slices" in saved:  # as 0.1.0 recorded it
        saved.setdefault("places of fields.image", saved["image.num_slices"])
    for name in [*bindings, *sorted(_OPTIONAL & saved.keys() - bindings.keys())]:
        value = bindings.get(name)
        if accepts_content and name.startswith("fields."):
            continue
        if name in _NEWER and name not in saved:
            continue  # written before there was such a binding
        if name.startswith("fields.") and not any(known.startswith("fields.") for known in saved):
            raise StateError(
                f"checkpoint {checkpoint.name} was written by a version that recorded [image] in place of "
                "[fields]; write in [fields] what it was trained with, and go on with "
                "run.accept_content_change=true, once."
            )
        if saved.get(name) != value:
            raise StateError(
                f"{name} is {value!r}, but checkpoint {checkpoint.name} was trained with "
                f"{saved.get(name)!r}; set it back, or start a new run in another folder."
            )


def _chosen_later() -> dict[str, Any]:
    """Return the defaults of settings that are newer than the first checkpoints."""
    augment = asdict(AugmentConfig())
    defaults: dict[str, Any] = {"image.standardize": []}
    defaults |= {f"augment.{name}": value for name, value in augment.items()}
    defaults["batch.packed"] = False
    return defaults


def prepare_run(
    config: TrainConfig,
    ranks: Ranks,
    checkpoints: CheckpointFolder,
    decision: StartDecision,
    checkpoint: Checkpoint | None,
    stop: StopRequest,
    stack: ExitStack,
) -> RunParts:
    """Build all parts of a run.

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
    task = open_task(config)
    bindings = task.bindings()
    if checkpoint is not None:
        check_bindings(checkpoint, bindings, accepts_content=config.run.accept_content_change)
    saved, saved_lock = (checkpoint.state["loader"], checkpoint.lock) if checkpoint else (None, None)
    is_adopted = saved is not None and decision.version not in (None, saved["manifest_version"])
    data = open_data(
        config.data,
        saved,
        lock=None if is_adopted else saved_lock,  # it has tables of the version before
        cache=config.cache,
        version=decision.version,
    )
    data.check_modalities("image.standardize", config.image.standardize)
    evaluation = None if data.evaluation is None else task.evaluation_samples(data.evaluation)
    loader = stack.enter_context(open_loader(config, task, ranks, data.training))
    with weights_later():
        model = task.make_model(loader, data.evaluation)
    if config.monitor.first_sample and ranks.rank == 0:
        write_first_sample(config.run.output, task.first_sample(loader))
    compute = COMPUTE_TYPES[config.run.precision]
    is_sharded = config.parallel.strategy == "fsdp2"
    place_weights(config, ranks, model, task.references)
    optimizer = build_optimizer(model, config.optimizer)
    updates = Updates(model, optimizer, config.optimizer, is_scaled=compute is torch.float16)
    if checkpoint is not None:
        if is_adopted:
            _adopt(loader, checkpoint)
        else:
            loader.load_state_dict(checkpoint.state["loader"], lock=checkpoint.lock)
        loader.load_masks(checkpoint.state["masks"])
        load_model(model, checkpoint.model)
        load_optimizer(model, optimizer, checkpoint.optimizer)
        updates.average.forget_unused()
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

    ranks.barrier("prepared", ranks.timeouts.startup_s)
    wrapped = model if is_sharded else replicate(model, ranks)
    lock = encode_lock(loader.lock())
    saver = CheckpointSaver(checkpoints, ranks, model, optimizer, is_sharded=is_sharded, lock=lock)
    stack.callback(saver.close)
    inputs = task.open_inputs(loader, ranks.device, pinned_bytes=config.loader.pinned_bytes)
    warm_up(wrapped, task.padding(inputs, ranks.device), autocast=autocast)
    measures = _open_measures(config, ranks, loader, wrapped, inputs, metrics, stack)
    return RunParts(
        run=config.run,
        optimization=config.optimizer,
        micro_batches_per_step=config.batch.micro_batches_per_step,
        exchanges_each=config.parallel.accumulation == "sharded",
        agreement={
            "tune.mode": config.tune.mode,
            "monitor.interval_s": config.monitor.interval_s,
            "a cache": config.cache.is_on,
            "code": code_digest(),
        },
        ranks=ranks,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        updates=updates,
        loader=loader,
        open_evaluation=(
            None if evaluation is None else partial(open_loader, config, task, ranks, evaluation, tail="mask")
        ),
        open_tuning=None
        if config.tune.mode == "off"
        else partial(_open_tuning, config, ranks, loader, metrics),
        inputs=inputs,
        task=task,
        autocast=autocast,
        saver=saver,
        ledger=ledger,
        metrics=metrics,
        measures=measures,
        cache_use=CacheUse(loader.counters) if config.cache.is_on else None,
        stop=stop,
        adoption=None if decision.version is None else Adoption(config, loader.dataset),
        identity={
            "bindings": bindings,
            **({} if decision.version is None else {"meanings": loader.meanings()}),
            "config_digest": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        },
    )


def place_weights(
    config: TrainConfig, ranks: Ranks, model: nn.Module, references: Sequence[nn.Module]
) -> None:
    """Bring a model, and those that it is compared with, onto the device; in shares for FSDP2."""
    if config.run.compile:
        compile_blocks(model)
    is_sharded = config.parallel.strategy == "fsdp2"
    for one in (model, *references):
        hold_frozen(one, config.model.frozen_dtype, config.model.quantize)
        if is_sharded:
            shard(one, ranks, config.parallel, compute=COMPUTE_TYPES[config.run.precision])
        load_weights(one, ranks.device)
        if not is_sharded:
            one.to(ranks.device)


def _open_measures(
    config: TrainConfig,
    ranks: Ranks,
    loader: Loader,
    wrapped: nn.Module,
    inputs: InputSource,
    metrics: MetricsWriter | None,
    stack: ExitStack,
) -> RunMeasures:
    """Begin to measure; on rank 0 the verdicts on it too."""
    measures = RunMeasures(
        config.monitor.interval_s,
        ranks,
        loader,
        wrapped,
        inputs.transfer,
        metrics,
        pinned_bytes=config.loader.pinned_bytes,
    )
    stack.callback(measures.close)
    if metrics is not None:
        judge = VerdictReporter(metrics.write_verdict, config=read_settings(config.run.output))
        measures.listeners.append(judge)
    return measures


def _open_tuning(config: TrainConfig, ranks: Ranks, loader: Loader, metrics: MetricsWriter | None) -> Tuning:
    given = given_settings(config.loader, config.cache)
    return Tuning(config.tune, ranks, loader, metrics, run=config.run.output, given=given)


def _adopt(loader: Loader, checkpoint: Checkpoint) -> None:
    """Continue with another version of the dataset; a `ConfigError` if its fields mean something else."""
    dataset = loader.dataset
    check_meanings(checkpoint.state["meanings"], loader.meanings(), dataset.manifest)
    loader.adopt_position(checkpoint.state["loader"])
    _LOGGER.info("epoch %d is trained on version %d", loader.epoch, dataset.manifest_version)


def open_loader(
    config: TrainConfig, task: Task, ranks: Ranks, selection: Selection, *, tail: Any = None
) -> Loader:
    """Open the loader of some samples.

    Args:
        config: All settings.
        task: Says what a batch holds.
        ranks: The ranks of the run.
        selection: The samples.
        tail: ``mask`` for one pass of an evaluation; None for the settings' own.
    """
    settings = config.loader
    is_evaluation = tail is not None
    return Loader(
        selection,
        batch=task.batch_spec(selection, tail),
        seed=config.run.seed,
        accept_content_change=config.run.accept_content_change,
        fields=task.fields(selection, is_evaluation=is_evaluation),
        sampling=None if is_evaluation else config.sampling,
        transform=None if is_evaluation else list(config.data.transform) or None,
        world=World(
            rank=ranks.rank,
            world_size=ranks.world_size,
            ranks_per_node=World.from_environment().ranks_per_node,
        ),
        config=LoaderConfig(
            execution=settings.execution,
            num_threads=settings.num_threads,
            prefetch_bytes=settings.prefetch_bytes,
            max_node_bytes=settings.max_node_bytes,
            wait_timeout_s=settings.wait_timeout_s,
            on_bad_sample=settings.on_bad_sample,
            max_bad_samples=settings.max_bad_samples,
            max_bad_share=settings.max_bad_share,
            servers=settings.servers,
            server_token_file=settings.server_token_file,
            server_tls_ca=settings.server_tls_ca,
            server_timeout_s=settings.server_timeout_s,
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
    monitor = config.monitor
    stack.enter_context(
        open_outlets(config.run.output, monitor.prometheus, monitor.sinks, monitor.prometheus_token_file)
    )
    return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """Summary of a run; plain JSON values, equal on all ranks except ``rank``."""

    outcome: Outcome
    """``stopped``: a signal asked for it, a checkpoint is saved, start again to resume."""
    stop_signal: str | None
    """The signal that this rank got, if any."""
    rank: int
    world_size: int
    attempt: int
    resumed_from: str | None
    """Name of the checkpoint that this start resumed from."""
    damaged_checkpoints: int
    """Number of newer checkpoints that were skipped."""
    global_step: int
    """Steps done over all starts of the run."""
    num_steps: int
    """Steps of the whole run."""
    loss: float | None
    """Training loss of the last step of this start."""
    evaluation_loss: float | None
    """Newest evaluation of this start."""
    evaluation_scores: Mapping[str, float | None]
    """Its metrics, of a task that has any."""
    num_masked_samples: int
    """Samples that were masked because they could not be read, as far as this rank knows."""
    elapsed_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        return asdict(self)


def train(
    config: TrainConfig,
    *,
    on_step: Callable[[StepMetrics, int], None] | None = None,
    stop: StopRequest | None = None,
) -> TrainSummary:
    """Run or resume a training job; every rank that torchrun started calls this once.

    Args:
        config: All settings.
        on_step: Called on every rank after every step, with its metrics and the steps of the whole run.
        stop: Where stop signals arrive; a caller that listens passes its own.

    Returns:
        The summary of this start.

    Raises:
        ShardflowError: settings, dataset, checkpoint or data are wrong, ranks are missing, or a step cannot
            be taken.
    """
    if config.run.deterministic:
        prefer_determinism()
    with (
        join_ranks(config.run.device, config.timeouts, traces=config.run.output / HEALTH_FOLDER) as joined,
        monitor_health(joined, config.run.output) as ranks,
    ):
        return train_on(ranks, config, on_step=on_step, stop=stop)


def train_on(
    ranks: Ranks,
    config: TrainConfig,
    *,
    on_step: Callable[[StepMetrics, int], None] | None = None,
    stop: StopRequest | None = None,
) -> TrainSummary:
    """Run :func:`train` on ranks that have joined already; same arguments and errors."""
    started = time.perf_counter()
    stop = stop or StopRequest()
    with ExitStack() as lock:
        is_locked = False
        while True:
            summary = _train_once(ranks, config, on_step, stop, lock, started, is_locked=is_locked)
            if summary is not None:
                return summary
            is_locked = True


def _train_once(
    ranks: Ranks,
    config: TrainConfig,
    on_step: Callable[[StepMetrics, int], None] | None,
    stop: StopRequest,
    lock: ExitStack,
    started: float,
    *,
    is_locked: bool,
) -> TrainSummary | None:
    """Run a job until it ends, or until a newer version of the dataset is to be adopted: then return None."""
    with ExitStack() as stack:
        checkpoints = CheckpointFolder(config.run.output / "checkpoints", keep_last=config.run.keep_last)
        ranks.health.enter("choosing a checkpoint", ranks.timeouts.startup_s)
        decision = agree_on_start(config, ranks, checkpoints, stack, None if is_locked else lock)
        ranks.health.enter("preparing", ranks.timeouts.startup_s)
        checkpoint = read_checkpoint(Path(decision.checkpoint)) if decision.checkpoint else None
        progress = _progress(checkpoint)
        parts = prepare_run(config, ranks, checkpoints, decision, checkpoint, stop, stack)
        # Of its own checkpoints a run needs no second copy; another run's is not in its folder yet.
        is_saved = checkpoint is not None and checkpoint.name in checkpoints.names()
        loop = TrainingLoop(parts, progress, on_step, is_saved=is_saved)
        resumed_from = checkpoint.name if checkpoint else None
        del checkpoint  # the model and the optimizer hold its tensors now
        outcome = loop.run()
        if outcome == "renewed":
            return None
        return TrainSummary(
            outcome=outcome,
            stop_signal=stop.signal_name,
            rank=ranks.rank,
            world_size=ranks.world_size,
            attempt=decision.attempt,
            resumed_from=resumed_from,
            damaged_checkpoints=len(decision.damaged),
            global_step=progress.global_step,
            num_steps=loop.num_steps,
            loss=loop.last_step.loss if loop.last_step else None,
            evaluation_loss=loop.evaluation.newest.loss if loop.evaluation.newest else None,
            evaluation_scores=loop.evaluation.newest.scores if loop.evaluation.newest else {},
            num_masked_samples=len(parts.loader.masks()),
            elapsed_s=time.perf_counter() - started,
        )


def _progress(checkpoint: Checkpoint | None) -> LoopProgress:
    if checkpoint is None:
        return LoopProgress()
    return LoopProgress(
        global_step=checkpoint.state["global_step"],
        last_evaluation_step=checkpoint.state["last_evaluation_step"],
    )
