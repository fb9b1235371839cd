"""Several ranks in one start: what needs real processes and is too quick to be worth a start of its own.

``python -m tests.distributed.forked 4 tests.distributed.scenarios INPUT OUTPUT``: every rank runs every
scenario and writes its results to ``OUTPUT/rank-N.json``; the tests in ``test_scenarios.py`` judge them.
Smaller world sizes are groups of the first ranks; the others meanwhile wait at the end of the scenario.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from shardflow.errors import ConfigError, RanksDisagreeError, ShardflowError, WaitTimeoutError
from shardflow.training import run as prepare
from shardflow.training import step as step_module
from shardflow.training.config import BatchConfig, TimeoutConfig
from shardflow.training.distributed import Ranks, join_ranks
from shardflow.training.inputs import make_inputs
from shardflow.training.loop import evaluate
from shardflow.training.run import train_on
from shardflow.training.step import accumulate_gradients
from shardflow.training.text import ReportTokenizer
from tests.distributed.measured_scenarios import ceilings, tuned_starts, tuning, verdicts
from tests.distributed.sharded_scenarios import (
    chat_gradients,
    classifier_gradients,
    one_rank_fails_to_write,
    sharded_gradients,
    strategies,
)
from tests.distributed.stage import WAIT, WORLD_SIZES, Result, Stage, exact_model, open_loader
from tests.factories import make_dataset
from tests.tiny_runs import NUM_TRAIN, NUM_VAL, TinyInput


def step_gradients(stage: Stage) -> Result:
    """Gradients of every step of an epoch with a masked tail, on 1, 2, 3 (with fillers) and 4 ranks."""
    result: Result = {}
    for size in WORLD_SIZES:
        ranks = stage.first(size)
        if ranks is None:
            continue
        model = exact_model(stage)
        wrapped = DistributedDataParallel(model, process_group=ranks.group)
        tokenizer = ReportTokenizer.load(stage.tiny.tokenizer)
        tokens = []
        with open_loader(stage, ranks, "train", "mask") as loader:
            batches = iter(loader)
            for step in range(loader.num_steps):
                micros = [next(batches) for _ in range(loader.num_micro_batches_per_rank)]
                sums = accumulate_gradients(
                    wrapped,
                    [
                        (b.micro, make_inputs(b, tokenizer, max_tokens=24, device=ranks.device))
                        for b in micros
                    ],
                    num_micro_batches=len(micros),
                    world_size=size,
                    position=(11, 0, step),
                    autocast=None,
                )
                num_tokens = float(ranks.all_gather_numbers([sums.num_tokens], WAIT)[:, 0].sum())
                tokens.append(num_tokens)
                gradients = {
                    name: parameter.grad / num_tokens
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                }
                if ranks.rank == 0:
                    save_file(gradients, stage.output / f"gradients-{size}-{step}.safetensors")
                wrapped.zero_grad(set_to_none=True)
        result[str(size)] = tokens
    return result


def packed_sequences(stage: Stage) -> Result:
    """Two ranks: every step's loss and gradient with padded rows and in one sequence, then a run of each."""
    ranks = stage.first(2)
    if ranks is None:
        return {}
    tokenizer = ReportTokenizer.load(stage.tiny.tokenizer)
    losses: dict[bool, list[float]] = {False: [], True: []}
    differences = []
    models = {packed: exact_model(stage).eval() for packed in losses}  # dropout would draw other numbers
    with open_loader(stage, ranks, "train", "mask") as loader:
        batches = iter(loader)
        wrapped = {
            packed: DistributedDataParallel(model, process_group=ranks.group)
            for packed, model in models.items()
        }
        for step in range(loader.num_steps):
            micros = [next(batches) for _ in range(loader.num_micro_batches_per_rank)]
            for packed, found in losses.items():
                make = partial(
                    make_inputs, tokenizer=tokenizer, max_tokens=24, device=ranks.device, packed=packed
                )
                sums = accumulate_gradients(
                    wrapped[packed],
                    [(batch.micro, make(batch)) for batch in micros],
                    num_micro_batches=len(micros),
                    world_size=2,
                    position=(11, 0, step),
                    autocast=None,
                )
                found.append(float(ranks.all_gather_numbers([sums.loss], WAIT).sum()))
            pairs = zip(models[False].parameters(), models[True].parameters(), strict=True)
            gradients = [(one.grad, other.grad) for one, other in pairs]
            differences.append(
                max(
                    float((one - other).abs().max())
                    for one, other in gradients
                    if one is not None and other is not None
                )
            )
            for model in models.values():
                model.zero_grad(set_to_none=True)
    for name, value in (("rows", "false"), ("packed", "true")):
        stage.train(ranks, name, f"batch.packed={value}", "model.dropout=0.0", "batch.micro_batch_size=2")
    budget = BatchConfig(
        max_tokens=60, max_samples=4, image_tokens_per_slice=1, packed=True, micro_batches_per_step=4
    )
    train_on(ranks, replace(stage.config("packed-budget"), batch=budget))
    return {"rows": losses[False], "packed": losses[True], "gradients": differences}


def slow_rank(stage: Stage) -> Result:
    """Two ranks measure a run, the second of which computes slowly; and the same run measures nothing."""
    ranks = stage.first(2)
    forward = step_module.compute_loss

    def slowly(*arguments: Any) -> torch.Tensor:
        if ranks is not None and ranks.rank == 1:
            time.sleep(0.25)
        return forward(*arguments)

    with mock.patch.object(step_module, "compute_loss", slowly):
        stage.train(ranks, "slow-rank", "run.max_steps=4", "monitor.interval_s=0.01")
    stage.train(ranks, "unmeasured", "run.max_steps=4", "monitor.interval_s=0")
    return {}


def evaluation(stage: Stage) -> Result:
    """Loss of the validation split (11 samples in slots of 8) on 1, 2, 3 and 4 ranks; one that is stopped."""
    result: Result = {}
    for size in WORLD_SIZES:
        ranks = stage.first(size)
        if ranks is None:
            continue
        make = partial(
            make_inputs,
            tokenizer=ReportTokenizer.load(stage.tiny.tokenizer),
            max_tokens=24,
            device=ranks.device,
        )
        with open_loader(stage, ranks, "val", "mask") as loader:
            measure = partial(
                evaluate, exact_model(stage), loader, ranks, make_inputs=make, autocast=None, global_step=0
            )
            metrics = measure(epoch=0)
            assert metrics is not None
            stopped = measure(epoch=1, is_stopping=partial(eq, ranks.rank, size - 1))
        result[str(size)] = [metrics.loss, metrics.num_tokens, metrics.num_samples]
        result[f"{size}, stopped"] = stopped
    return result


RARELY = "run.checkpoint_every_steps=12"
"""What is stopped writes one besides."""


def resumed_at_four(stage: Stage) -> Result:
    """A whole run and a stopped and resumed one."""
    whole = stage.train(stage.ranks, "whole", RARELY)
    stopped = stage.train(stage.ranks, "parts", RARELY, stop_after=5, stop_rank=2)
    resumed = stage.train(stage.ranks, "parts", RARELY)
    return {"outcomes": [summary and summary.to_json() for summary in (whole, stopped, resumed)]}


def resumed_at_four_without_warm_up(stage: Stage) -> Result:
    """An epoch with the guard taken out: the tests want these two to differ."""
    few = "run.num_epochs=1"
    with mock.patch.object(prepare, "warm_up"):
        stage.train(stage.ranks, "whole-cold", few)
        stage.train(stage.ranks, "parts-cold", few, stop_after=3)
        stage.train(stage.ranks, "parts-cold", few)
    return {}


def elastic(stage: Stage) -> Result:
    """One run on 4, 2, 3 and 1 ranks in turn."""
    resumed = []
    for size, stop_after in ((4, 5), (2, 11), (3, 14), (1, None)):
        summary = stage.train(stage.first(size), "elastic", RARELY, stop_after=stop_after)
        resumed.append(summary and summary.to_json())
        stage.ranks.barrier("next world size", WAIT)
    return {"starts": resumed}


def disagreement(stage: Stage) -> Result:
    """Rank 2 would run a step less."""
    try:
        num_steps = 11 if stage.ranks.rank == 2 else 12
        stage.ranks.agree("epoch 0", {"num_steps": num_steps, "seed": 3})
    except RanksDisagreeError as error:
        return {"message": error.message}
    return {"message": None}


def disagreeing_runs(stage: Stage) -> Result:
    """Rank 1 was started with another length."""
    try:
        stage.train(stage.ranks, "disagreeing", f"run.max_steps={9 if stage.ranks.rank == 1 else 10}")
    except RanksDisagreeError as error:
        return {"message": error.message}
    return {"message": None}


def another_dataset(stage: Stage) -> Result:
    """Rank 2 reads a dataset of the same size with other samples, as of a copy that is out of date."""
    other = stage.output / "other-data"
    if stage.ranks.rank == 2:
        make_dataset(
            other,
            samples_per_shard=8,
            slices=(1, 5),
            splits={"train": NUM_TRAIN, "val": NUM_VAL},
            seed=1,
            facts=True,
        )
    try:
        overrides = [f"data.dataset={other}"] if stage.ranks.rank == 2 else []
        stage.train(stage.ranks, "another-dataset", *overrides)
    except RanksDisagreeError as error:
        return {"message": error.message}
    return {"message": None}


def refused_start(stage: Stage) -> Result:
    """Rank 0 alone looks at the run folder; what it finds wrong, all say."""
    try:
        stage.train(stage.ranks, "whole", "run.resume=never")
    except ConfigError as error:
        return {"message": error.message}
    return {"message": None}


def exchange(stage: Stage) -> Result:
    """JSON of unequal sizes, and numbers, from every rank to every rank."""
    rank = stage.ranks.rank
    return {
        "json": stage.ranks.all_gather_json({"rank": rank, "text": "\u00e9" * rank * 100, "nothing": None}),
        "first": stage.ranks.broadcast({"rank": rank}),
        "numbers": stage.ranks.all_gather_numbers([rank, 0.1], WAIT).tolist(),
    }


def silent_rank(stage: Stage) -> Result:
    """Rank 3 takes part in an exchange too late; leaves the groups broken."""
    late = 1.0
    exchanges: dict[str, Callable[[Ranks], object]] = {
        "numbers": lambda ranks: ranks.all_gather_numbers([1.0], late),
        "json": lambda ranks: ranks.all_gather_json("facts"),
    }
    results: Result = {}
    for name, exchange in exchanges.items():
        ranks = replace(
            stage.ranks,
            control=dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT)),
            timeouts=replace(stage.ranks.timeouts, control_s=late),
        )
        if ranks.rank == 3:
            until_others_gave_up(stage, name)
        try:
            exchange(ranks)
        except WaitTimeoutError as error:
            results[name] = error.message
        (stage.output / f"gave-up-{name}-{ranks.rank}").touch()
    return results


def until_others_gave_up(stage: Stage, name: str) -> None:
    """Wait, in rank 3, until the other ranks have."""
    while not all((stage.output / f"gave-up-{name}-{rank}").exists() for rank in range(3)):
        time.sleep(0.01)


def missing_rank(stage: Stage) -> Result:
    """Rank 3 comes too late; last, because it leaves its group broken."""
    ranks = replace(stage.ranks, control=dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT)))
    message = None
    if ranks.rank == 3:
        until_others_gave_up(stage, "meet")
    else:
        try:
            ranks.barrier("checkpoint written", 1.0)
        except ShardflowError as error:
            message = f"{type(error).__name__}: {error.message}"
        (stage.output / f"gave-up-meet-{ranks.rank}").touch()
    return {"message": message}


SCENARIOS: tuple[Callable[[Stage], Result], ...] = (
    exchange,
    disagreement,
    step_gradients,
    packed_sequences,
    slow_rank,
    tuning,
    tuned_starts,
    verdicts,
    ceilings,
    sharded_gradients,
    chat_gradients,
    classifier_gradients,
    strategies,
    one_rank_fails_to_write,
    evaluation,
    resumed_at_four,
    resumed_at_four_without_warm_up,
    elastic,
    disagreeing_runs,
    another_dataset,
    refused_start,
    silent_rank,
    missing_rank,
)


def main() -> None:
    source, output = Path(sys.argv[1]), Path(sys.argv[2])
    with join_ranks("cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)) as ranks:
        stage = Stage(ranks, TinyInput(source), output)
        results: Result = {}
        for scenario in SCENARIOS:
            started = time.perf_counter()
            results[scenario.__name__] = scenario(stage)
            results[scenario.__name__]["elapsed_s"] = time.perf_counter() - started
            if scenario is not missing_rank:
                # Those that had nothing to do wait for all that the others do.
                ranks.barrier(f"end of {scenario.__name__}", 2 * WAIT)
        (output / f"rank-{ranks.rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
