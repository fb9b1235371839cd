"""Several ranks in one torchrun: what needs real processes and is too quick to be worth a start of its own.

``torchrun --nproc-per-node 4 -m tests.distributed.scenarios INPUT OUTPUT``: every rank runs every scenario
and writes its results to ``OUTPUT/rank-N.json``; the tests in ``test_scenarios.py`` judge them. Smaller
world sizes are groups of the first ranks; the others meanwhile wait at the end of the scenario.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from shardflow.epochs import BatchSpec
from shardflow.errors import ConfigError, RanksDisagreeError, ShardflowError, WaitTimeoutError
from shardflow.loading import ImageView, Loader, LoaderConfig, World
from shardflow.shards import Dataset
from shardflow.training import prepare
from shardflow.training.agreement import agree
from shardflow.training.config import TrainConfig
from shardflow.training.distributed import Ranks, Timeouts, join_ranks
from shardflow.training.evaluate import evaluate
from shardflow.training.inputs import make_inputs
from shardflow.training.metrics import StepMetrics
from shardflow.training.model import ReportModel, build_model
from shardflow.training.run import TrainSummary, train_on
from shardflow.training.signals import StopRequest
from shardflow.training.step import accumulate_gradients
from shardflow.training.text import ReportTokenizer
from tests.tiny_runs import TinyInput, tiny_config

Result = dict[str, Any]
WORLD_SIZES = (1, 2, 3, 4)
WAIT = timedelta(seconds=60)
NUM_EPOCHS = 4  # of 6 steps
SETTINGS = (f"run.num_epochs={NUM_EPOCHS}",)


class Stage:
    """What a scenario works with."""

    def __init__(self, ranks: Ranks, tiny: TinyInput, output: Path) -> None:
        self.ranks = ranks
        self.tiny = tiny
        self.output = output
        # Every rank must take part in making every group, in the same order.
        self._groups = {size: (self._group(size), self._group(size)) for size in WORLD_SIZES}

    def _group(self, size: int) -> dist.ProcessGroup:
        group = dist.new_group(list(range(size)), backend="gloo", timeout=WAIT)
        return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD  # type: ignore[return-value]

    def first(self, size: int) -> Ranks | None:
        """The first ranks as a world of their own; None on the others."""
        if self.ranks.rank >= size:
            return None
        group, control = self._groups[size]
        return replace(self.ranks, world_size=size, group=group, control=control)

    def config(self, name: str, *overrides: str) -> TrainConfig:
        return tiny_config(self.tiny, self.output / name, *SETTINGS, *overrides)

    def train(
        self,
        ranks: Ranks | None,
        name: str,
        *overrides: str,
        stop_after: int | None = None,
        stop_rank: int = 0,
    ) -> TrainSummary | None:
        """Train in the folder ``name``; a stop request reaches one rank only."""
        if ranks is None:
            return None
        stop = StopRequest()

        def ask(metrics: StepMetrics, num_steps: int) -> None:
            if metrics.global_step + 2 == stop_after and ranks.rank == stop_rank:
                stop.signal_name = "SIGTERM"

        return train_on(ranks, self.config(name, *overrides), on_step=ask, stop=stop)


def exact_model(stage: Stage) -> ReportModel:
    """The tiny model in double precision, with dropout."""
    config = stage.config("unused")
    tokenizer = ReportTokenizer.load(config.text.tokenizer)
    return build_model(
        config.model, config.image, vocab_size=tokenizer.vocab_size, max_tokens=config.text.max_tokens, seed=7
    ).double()


def open_loader(stage: Stage, ranks: Ranks, split: str, tail: Any) -> Loader:
    return Loader(
        Dataset.open(stage.tiny.dataset),
        split=split,
        spec=BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail=tail),
        seed=11,
        world=World(rank=ranks.rank, world_size=ranks.world_size),
        config=LoaderConfig(view=ImageView(num_slices=3, rows=16, columns=16)),
    )


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
                num_tokens = float(ranks.gather_numbers([sums.num_tokens], WAIT)[:, 0].sum())
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


def evaluation(stage: Stage) -> Result:
    """Loss of the validation split (11 samples in slots of 8) on 1, 2, 3 and 4 ranks."""
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
            metrics = evaluate(
                exact_model(stage), loader, ranks, make_inputs=make, autocast=None, global_step=0, epoch=0
            )
        result[str(size)] = [metrics.loss, metrics.num_tokens, metrics.num_samples]
    return result


def resumed_at_four(stage: Stage) -> Result:
    """A whole run and a stopped and resumed one."""
    whole = stage.train(stage.ranks, "whole")
    stopped = stage.train(stage.ranks, "parts", stop_after=5, stop_rank=2)
    resumed = stage.train(stage.ranks, "parts")
    return {"outcomes": [summary and summary.to_json() for summary in (whole, stopped, resumed)]}


def resumed_at_four_without_warm_up(stage: Stage) -> Result:
    """The same with the guard taken out: the tests want these two to differ."""
    with mock.patch.object(prepare, "warm_up"):
        stage.train(stage.ranks, "whole-cold")
        stage.train(stage.ranks, "parts-cold", stop_after=5)
        stage.train(stage.ranks, "parts-cold")
    return {}


def elastic(stage: Stage) -> Result:
    """One run on 4, 2, 3 and 1 ranks in turn."""
    resumed = []
    for size, stop_after in ((4, 5), (2, 11), (3, 14), (1, None)):
        summary = stage.train(stage.first(size), "elastic", stop_after=stop_after)
        resumed.append(summary and summary.to_json())
        stage.ranks.meet("next world size", WAIT)
    return {"starts": resumed}


def disagreement(stage: Stage) -> Result:
    """Rank 2 would run a step less."""
    try:
        num_steps = 11 if stage.ranks.rank == 2 else 12
        agree(stage.ranks, "epoch 0", {"num_steps": num_steps, "seed": 3})
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
        "json": stage.ranks.gather_json({"rank": rank, "text": "\u00e9" * rank * 100, "nothing": None}),
        "first": stage.ranks.from_first({"rank": rank}),
        "numbers": stage.ranks.gather_numbers([rank, 0.1], WAIT).tolist(),
    }


def slow_preparation(stage: Stage) -> Result:
    """A rank prepares three times as long as an exchange may take; nobody waits inside a collective."""
    wait = timedelta(seconds=1)
    group = dist.new_group(backend="gloo", timeout=wait)
    ranks = replace(stage.ranks, group=group, timeouts=replace(stage.ranks.timeouts, steady=wait))
    ranks.enter_steady_state()
    if ranks.rank == 1:
        time.sleep(3)
    ranks.meet("prepared", timedelta(seconds=30))
    numbers = torch.ones(1)
    dist.all_reduce(numbers, group=group)
    return {"sum": numbers.item()}


def silent_rank(stage: Stage) -> Result:
    """Rank 3 takes part in an exchange too late; leaves the groups broken."""
    late = timedelta(seconds=1)
    exchanges: dict[str, Callable[[Ranks], object]] = {
        "numbers": lambda ranks: ranks.gather_numbers([1.0], late),
        "json": lambda ranks: ranks.gather_json("facts"),
    }
    results: Result = {}
    for name, exchange in exchanges.items():
        ranks = replace(
            stage.ranks,
            control=dist.new_group(backend="gloo", timeout=WAIT),
            timeouts=replace(stage.ranks.timeouts, control=late),
        )
        started = time.perf_counter()
        if ranks.rank == 3:
            time.sleep(3)
        try:
            exchange(ranks)
        except WaitTimeoutError as error:
            results[name] = {"message": error.message, "wait_s": time.perf_counter() - started}
    return results


def missing_rank(stage: Stage) -> Result:
    """Rank 3 comes too late; last, because it leaves its group broken."""
    ranks = replace(stage.ranks, control=dist.new_group(backend="gloo", timeout=timedelta(seconds=30)))
    message = None
    if ranks.rank == 3:
        time.sleep(3)
    else:
        try:
            ranks.meet("checkpoint written", timedelta(seconds=1))
        except ShardflowError as error:
            message = f"{type(error).__name__}: {error.message}"
    return {"message": message}


SCENARIOS: tuple[Callable[[Stage], Result], ...] = (
    exchange,
    disagreement,
    step_gradients,
    evaluation,
    resumed_at_four,
    resumed_at_four_without_warm_up,
    elastic,
    disagreeing_runs,
    refused_start,
    slow_preparation,
    silent_rank,
    missing_rank,
)


def main() -> None:
    source, output = Path(sys.argv[1]), Path(sys.argv[2])
    with join_ranks("cpu", Timeouts(startup=WAIT, steady=WAIT, control=WAIT)) as ranks:
        stage = Stage(ranks, TinyInput(source), output)
        results: Result = {}
        for scenario in SCENARIOS:
            started = time.perf_counter()
            results[scenario.__name__] = scenario(stage)
            results[scenario.__name__]["elapsed_s"] = time.perf_counter() - started
            if scenario is not missing_rank:
                ranks.meet(f"end of {scenario.__name__}", WAIT)
        (output / f"rank-{ranks.rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
