"""Scenarios of two ranks that measure themselves: what a tuner changes, what a verdict says, and ceilings.

The random moves are told to rank 0's part of the loop in the tuner's place, so that they travel and act as
the tuner's own do.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from benchmarks.verdict.one import make_inputs
from shardflow.cli.bench import describe_job
from shardflow.errors import ConfigError, RanksDisagreeError
from shardflow.monitoring.tuner import Change, Tuner
from shardflow.monitoring.tuner_numbers import TUNED_FILE, StepNumbers
from shardflow.telemetry import Move, TunableLimit
from shardflow.training import tuning as tuning_module
from shardflow.training.distributed import Ranks
from shardflow.training.hooks import PendingFeed
from shardflow.training.jobs.headroom import HeadroomOptions, measure_headroom_on
from shardflow.training.tuning import Tuning
from tests.distributed.stage import WAIT, Result, Stage
from tests.verdict_scenarios import NUM_TRIES, is_right, try_scenario

SETTINGS = (
    "run.num_epochs=3",
    "run.checkpoint_every_steps=100",
    "loader.wait_timeout_s=90",
    "cache.ram_bytes=200kB",
    "batch.tail=mask",
)


class RandomTuner(Tuner):
    """Changes something after every second step, whatever was measured."""

    def __init__(
        self,
        values: Mapping[str, int | str],
        limits: Mapping[str, TunableLimit],
        *,
        report: Callable[[Move], None],
        **options: Any,
    ) -> None:
        super().__init__(values, limits, report=report, **options)
        self._random = random.Random(5)

    def step(self, numbers: StepNumbers, global_step: int) -> Change | None:
        self.num_steps += 1
        if self.num_steps % 2:
            return None
        # A process takes seconds to start: twice is enough.
        if self.num_steps in {6, 14}:
            return Change(setting="loader.execution", value="process" if self.num_steps == 6 else "threads")
        name = self._random.choice([name for name, limit in self._limits.items() if not limit.choices])
        limit = self._limits[name]
        return Change(setting=name, value=self._random.randint(limit.least, min(limit.most, 1 << 24)))


def _train_watched(ranks: Ranks, stage: Stage, name: str, mode: str) -> list[list[object]]:
    """Train, and return what this rank set, after how many steps of its own."""
    done: list[list[object]] = []
    carry_out, num_steps = Tuning.execute, 0

    def watched(self: Tuning, feed: PendingFeed, *, is_last: bool = False) -> None:
        nonlocal num_steps
        num_steps += 1
        due = self.due
        carry_out(self, feed, is_last=is_last)
        if due is not None and self.due is None:
            done.append([num_steps, due.setting, due.value, self._tunables.values()[due.setting]])

    with mock.patch.object(Tuning, "execute", watched):
        stage.train(ranks, f"tuned-{name}", f"tune.mode={mode}", *SETTINGS)
    return done


def tuning(stage: Stage) -> Result:
    """Two ranks train without a tuner, with it, and with settings changed at random."""
    ranks = stage.first(2)
    if ranks is None:
        return {}
    found = {mode: _train_watched(ranks, stage, mode, mode) for mode in ("off", "on")}
    with mock.patch.object(tuning_module, "Tuner", RandomTuner):
        found["random"] = _train_watched(ranks, stage, "random", "on")
    return {"moves": found}


def tuned_starts(stage: Stage) -> Result:
    """Two ranks begin with a damaged file of their own; with one that is asked for; and with two minds."""
    ranks = stage.first(2)
    if ranks is None:
        return {}
    run = stage.config("damaged").run.output
    if ranks.rank == 0:
        run.mkdir(parents=True)
        (run / TUNED_FILE).write_bytes(b"\x93\xf0\x00\xff" * 99)
    ranks.barrier("a damaged file", WAIT)
    summary = stage.train(ranks, "damaged", "tune.mode=on", "run.max_steps=2")
    said: list[str] = [summary.outcome if summary is not None else ""]
    for overrides in (
        ("tune.mode=on", f"tune.start_from={run / TUNED_FILE}"),
        (f"tune.mode={('on', 'observe')[ranks.rank]}",),
        (f"monitor.interval_s={ranks.rank}",),
    ):
        try:
            stage.train(ranks, f"refused-{len(said)}", "run.max_steps=2", *overrides)
        except (ConfigError, RanksDisagreeError) as error:
            said.append(f"{type(error).__name__}: {error.message}")
    return {"said": said}


def verdicts(stage: Stage) -> Result:
    """Two ranks, one of which is slow, and two with a slow exchange: what they are said to be bound by."""
    ranks = stage.first(2)
    if ranks is None:
        return {}
    inputs = stage.output / "verdicts"
    if ranks.rank == 0:
        make_inputs(inputs, ["small"], num_samples=96)
    ranks.barrier("inputs", WAIT)
    rows: Result = {}
    for cause in ("slow rank", "slow collective"):
        for number in range(NUM_TRIES):
            found = try_scenario(ranks, inputs, cause, number)
            rows[cause] = found.to_json()
            if ranks.broadcast(is_right(found)):
                break
    return rows


def ceilings(stage: Stage) -> Result:
    """The ceilings of a job of two ranks, and what is left of its temporary files."""
    ranks = stage.first(2)
    if ranks is None:
        return {}
    scratch = stage.output / f"scratch-{ranks.rank}"
    scratch.mkdir()
    config = stage.config("ceilings")
    with mock.patch.object(tempfile, "tempdir", str(scratch)):
        found = measure_headroom_on(ranks, config, HeadroomOptions(num_rounds=1, num_steps=2))
    return {
        "facts": describe_job(found, config, 0.0) if found is not None else None,
        "left": [path.name for path in (*scratch.iterdir(), config.run.output) if path.exists()],
    }
