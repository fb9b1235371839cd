"""Headroom of a job: its speed without the model, without the data, and with both.

Three contestants take turns in rounds, and use the parts of a run (`prepare_run`), so only what
training does is measured:

- ``loader``: the loader, and the transfer of its micro-batches to the device; no model;
- ``compute``: whole training steps on micro-batches that stay on the device, the job's first ones, repeated;
  the loader is idle;
- ``together``: whole training steps on what the loader delivers.

Weights, ledger and metrics go into a temporary folder that is deleted at the end. A cache that the settings
name is read and filled, as in training.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch

from shardflow.telemetry import STAGES
from shardflow.training.checkpoint.files import CheckpointFolder
from shardflow.training.checkpoint.start import StartDecision
from shardflow.training.config import MonitorConfig, TrainConfig
from shardflow.training.distributed import Ranks, StopRequest, join_ranks, prefer_determinism
from shardflow.training.inputs import DeviceFeed, FedMicroBatch, StepInputs, map_tensors
from shardflow.training.loop import LoopProgress, RunParts, TrainingLoop
from shardflow.training.metrics import StepMetrics
from shardflow.training.run import prepare_run

Contestant = Literal["loader", "compute", "together"]
_CONTESTANTS: Final[tuple[Contestant, ...]] = ("loader", "compute", "together")
# Steps before the clock starts: threads or processes of the loader begin, its first micro-batch is made.
_RUN_IN_STEPS: Final[dict[Contestant, int]] = {"loader": 2, "compute": 1, "together": 2}
_HELD_STEPS: Final = 4
_HELD_BYTES: Final = 1 << 30
_TIERS: Final = ("ram", "disk", "origin")
_LOADER_STAGES: Final = tuple(
    name for name, stage in STAGES.items() if stage.group in {"fetch", "make"} and not stage.is_part_of
)
_FEWEST_STEPS, _MOST_STEPS = 2, 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadroomOptions:
    """Length of the measurement."""

    num_rounds: int = 5
    num_steps: int | None = None
    """Measured steps of each contestant in a round; None: as many as take ``round_s``, two at least."""
    round_s: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadroomRound:
    """Measurements of one contestant in one round, over all ranks."""

    num_steps: int
    seconds: float
    """Of the slowest rank."""
    num_samples: float
    """Samples of all ranks."""
    data_wait_s: float
    """Of ``together``: seconds that the slowest rank of each step waited for data; else 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """The rounds of each contestant, and what they were run on."""

    world_size: int
    device: str
    """Type of the device: ``cpu``, ``cuda``, ``npu``."""
    rounds: dict[Contestant, list[HeadroomRound]]
    stages: dict[str, float]
    """Seconds of all threads of rank 0's loader in the rounds of ``loader``, by stage."""
    tier_bytes: dict[str, float]
    """Bytes that rank 0's loader read in those rounds: ``read``, all of them; ``ram`` and ``disk``, found in
    its caches; ``origin``, fetched into them, ahead or not."""
    num_replayed: int
    """Micro-batches that ``compute`` of rank 0 repeats."""
    replayed_bytes: int


class ReplayFeed:
    """Replay of micro-batches that are on the device already, in place of a `DeviceFeed`.

    Args:
        held: At least one.
    """

    looks_ahead = False

    def __init__(self, held: Sequence[FedMicroBatch]) -> None:
        self._held: Iterator[FedMicroBatch] = itertools.cycle(held)

    def take(self) -> FedMicroBatch | None:
        """Return the next one; never None."""
        return next(self._held)

    def look_ahead(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def drain(self) -> float:
        """Return 0 seconds."""
        return 0.0


def measure_headroom(
    config: TrainConfig,
    options: HeadroomOptions,
    progress: Callable[[int, int], None] | None = None,
) -> Headroom | None:
    """Measure the highest speed of a job; every rank that torchrun started calls this once.

    Args:
        config: The job's settings. Its run folder is neither read nor written.
        options: How long to measure.
        progress: Called on rank 0 with the turns that are done, and of all.

    Returns:
        The numbers on rank 0, None on the others.

    Raises:
        ShardflowError: as `train` does.
    """
    if config.run.deterministic:
        prefer_determinism()
    with join_ranks(config.run.device, config.timeouts) as ranks:
        return measure_headroom_on(ranks, config, options, progress)


def measure_headroom_on(
    ranks: Ranks,
    config: TrainConfig,
    options: HeadroomOptions,
    progress: Callable[[int, int], None] | None = None,
) -> Headroom | None:
    """Run `measure_headroom` on ranks that have joined already; same arguments and errors."""
    with tempfile.TemporaryDirectory(prefix="shardflow-bench-") as folder, ExitStack() as stack:
        output = Path(folder)
        aside = replace(
            config,
            run=replace(config.run, output=output, tensorboard=False),
            monitor=MonitorConfig(interval_s=0),
        )
        parts = prepare_run(
            aside,
            ranks,
            CheckpointFolder(output / "checkpoints", keep_last=1),
            StartDecision(attempt=1, checkpoint=None, damaged=()),
            None,
            StopRequest(),
            stack,
        )
        return _Turns(parts, options).run(progress if ranks.rank == 0 else None)


class _Turns:
    """Rounds of the contestants, which take turns."""

    def __init__(self, parts: RunParts, options: HeadroomOptions) -> None:
        self._parts = parts
        self._ranks: Ranks = parts.ranks
        self._options = options
        self._steps: list[StepMetrics] = []
        self._progress = LoopProgress()
        self._loop = TrainingLoop(parts, self._progress, lambda metrics, _: self._steps.append(metrics))
        self._held: list[FedMicroBatch] = []
        self._replay = ReplayFeed([])
        self._stages: Counter[str] = Counter()

    def run(self, progress: Callable[[int, int], None] | None) -> Headroom | None:
        self._held = self._hold()
        self._replay = ReplayFeed(self._held)
        num_steps = {name: self._choose_steps(name) for name in _CONTESTANTS}
        rounds: dict[Contestant, list[HeadroomRound]] = {name: [] for name in _CONTESTANTS}
        for turn in range(self._options.num_rounds):
            for place in range(len(_CONTESTANTS)):
                # Another one begins in each round, so that none always comes after the same.
                name = _CONTESTANTS[(place + turn) % len(_CONTESTANTS)]
                before = self._loader_totals()
                rounds[name].append(self._round(name, num_steps[name]))
                if name == "loader":
                    self._stages.update(self._loader_totals() - before)
                if progress is not None:
                    progress(
                        turn * len(_CONTESTANTS) + place + 1, self._options.num_rounds * len(_CONTESTANTS)
                    )
        if self._ranks.rank != 0:
            return None
        return Headroom(
            world_size=self._ranks.world_size,
            device=self._ranks.device.type,
            rounds=rounds,
            stages={name: self._stages[name] for name in _LOADER_STAGES},
            tier_bytes={tier: self._stages[f"bytes of {tier}"] for tier in ("read", *_TIERS)},
            num_replayed=len(self._held),
            replayed_bytes=sum(_num_bytes(fed.inputs) for fed in self._held),
        )

    def _hold(self) -> list[FedMicroBatch]:
        """Copy the first steps' micro-batches of this rank, since a loader's memory is lent."""
        loader = self._parts.loader
        start = loader.state_dict()
        feed = DeviceFeed(loader, self._parts.inputs, looks_ahead=False)
        held: list[FedMicroBatch] = []
        num_bytes = 0
        try:
            for _ in range(min(_HELD_STEPS, loader.num_steps) * loader.num_micro_batches_per_rank):
                fed = feed.take()
                if fed is None or (held and num_bytes + _num_bytes(fed.inputs) > _HELD_BYTES):
                    break
                held.append(replace(fed, inputs=map_tensors(fed.inputs, torch.clone)))
                num_bytes += _num_bytes(fed.inputs)
            feed.drain()
        finally:
            feed.close()
        loader.load_state_dict(start)
        return held

    def _loader_totals(self) -> Counter[str]:
        counters = self._parts.loader.counters
        totals = Counter({name: counters.totals(name).seconds for name in _LOADER_STAGES})
        totals.update({f"bytes of {tier}": counters.totals(f"cache_{tier}").num_bytes for tier in _TIERS})
        totals["bytes of read"] = counters.totals("read").num_bytes
        return totals

    def _choose_steps(self, name: Contestant) -> int:
        """Run a contestant in, and find how many of its steps make a round; equal on all ranks."""
        if self._options.num_steps is not None:
            self._round(name, 1)
            return self._options.num_steps
        trial = self._round(name, _FEWEST_STEPS)
        wanted = self._options.round_s * trial.num_steps / max(trial.seconds, 1e-9)
        return int(min(max(wanted, _FEWEST_STEPS), _MOST_STEPS))

    def _round(self, name: Contestant, num_steps: int) -> HeadroomRound:
        self._ranks.barrier(f"a round of {name}", self._ranks.timeouts.startup_s)
        steps = {"loader": self._load, "compute": self._compute, "together": self._train}[name]()
        num_samples = 0.0
        try:
            for _ in range(_RUN_IN_STEPS[name]):
                next(steps)
            self._settle()
            self._steps.clear()
            started = time.perf_counter()
            for _ in range(num_steps):
                num_samples += next(steps)
            self._settle()
            seconds = time.perf_counter() - started
        finally:
            steps.close()
        waits_s = sum(metrics.data_wait_s for metrics in self._steps)
        by_rank = self._ranks.all_gather_numbers([seconds, num_samples], self._ranks.timeouts.startup_s)
        return HeadroomRound(
            num_steps=num_steps,
            # Without steps that all take together nobody waits for the slowest rank, but a job would.
            seconds=float(by_rank[:, 0].max()),
            num_samples=float(by_rank[:, 1].sum()),
            data_wait_s=waits_s,
        )

    # ---- the contestants: generators of steps, each yields the samples of this rank -----------------

    def _load(self) -> Generator[float, None, None]:
        loader = self._parts.loader
        with closing(self._epoch_feeds()) as feeds:
            for feed in feeds:
                num_samples = 0.0
                for _ in range(loader.num_micro_batches_per_rank):
                    fed = feed.take()
                    num_samples += fed.inputs.num_samples if fed is not None else 0.0
                feed.drain()
                yield num_samples

    def _compute(self) -> Generator[float, None, None]:
        while True:
            yield self._step(self._replay)

    def _train(self) -> Generator[float, None, None]:
        with closing(self._epoch_feeds()) as feeds:
            for feed in feeds:
                yield self._step(feed)

    def _epoch_feeds(self) -> Generator[DeviceFeed, None, None]:
        """Yield the feed of each step: one after the other, as the epochs of the loader end."""
        loader, looks_ahead = self._parts.loader, self._ranks.device.type != "cpu"
        while True:
            feed = DeviceFeed(loader, self._parts.inputs, looks_ahead=looks_ahead)
            try:
                yield feed
                while loader.position.step:
                    yield feed
            finally:
                feed.close()

    def _step(self, feed: DeviceFeed | ReplayFeed) -> float:
        position = self._parts.loader.position
        self._loop.run_step(feed, position.epoch, position.step)
        self._progress.global_step += 1
        # A step reports the samples of all ranks, and its caller adds up the ranks.
        return self._steps[-1].num_samples / self._ranks.world_size

    def _settle(self) -> None:
        """Wait until the device has finished its work."""
        device = self._ranks.device
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)


def _num_bytes(inputs: StepInputs) -> int:
    sizes = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(inputs, count)
    return sum(sizes)
