"""A loader and a model as numbers, for tests of the tuner: fluid queues, seeded noise, a known optimum."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from shardflow.monitoring.tuner_numbers import LoaderTotals, StepNumbers
from shardflow.telemetry import TunableLimit

__all__ = ["Job", "System"]

Settings = dict[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job costs; seconds are of one micro-batch, and a step is one."""

    compute_s: float = 0.02
    decode_s: float = 0.01
    fetch_s: float = 0.0
    """Latency of a fetch, of which ``cache.read_ahead_threads`` are under way at once."""
    link_s: float = 0.0
    """What a fetch takes of the link, whoever else fetches."""
    num_cpus: float = 4.0
    model_cpus: float = 0.0
    """Processors that the model keeps busy; what threads take of them it lacks."""
    python_share: float = 0.0
    """Of the model's time it holds the interpreter."""
    noise: float = 0.05

    def capacities(self, values: Mapping[str, int | str]) -> tuple[float, float, float]:
        """Return micro-batches a second that are fetched and decoded, and the loop's own seconds a step."""
        threads, ahead = int(values["loader.num_threads"]), int(values["cache.read_ahead_threads"])
        shares_python = values["loader.execution"] == "threads"
        free = max(0.3, self.num_cpus - (self.model_cpus if threads + self.model_cpus > self.num_cpus else 0))
        running = min(threads, free) * (1 / (1 + 0.06 * max(0.0, threads - self.num_cpus)))
        decoded = running / self.decode_s * ((1 - 0.8 * self.python_share) if shares_python else 0.97)
        fetched = math.inf
        if self.fetch_s:
            fetched = ahead / self.fetch_s
            if self.link_s:
                fetched = min(fetched, 1 / self.link_s)
        # Threads that decode take processors, or the interpreter, from the model: as much as they are busy.
        busy = min(threads, min(decoded, fetched, 1 / self.compute_s) * self.decode_s)
        crowded = max(0.0, self.model_cpus + max(busy, 0.35 * threads) - self.num_cpus) / self.num_cpus
        held = 0.5 * self.python_share * min(threads, 4) if shares_python else 0.0
        return fetched, decoded, self.compute_s * (1 + crowded) * (1 + held)

    def rate(self, values: Mapping[str, int | str]) -> float:
        """Return the steps a second that last."""
        fetched, decoded, own_s = self.capacities(values)
        return min(fetched, decoded, 1 / own_s)

    @property
    def limits(self) -> dict[str, TunableLimit]:
        return {
            "loader.num_threads": TunableLimit(least=1, most=int(4 * self.num_cpus)),
            "cache.read_ahead_threads": TunableLimit(least=1, most=32),
            "loader.execution": TunableLimit(choices=("threads", "process", "workers"), is_live=False),
        }

    def best_rate(self) -> float:
        """Return the rate of the best of all settings."""
        grid = itertools.product(range(1, int(4 * self.num_cpus) + 1), range(1, 33), ("threads", "process"))
        return max(
            self.rate(
                {"loader.num_threads": one, "cache.read_ahead_threads": ahead, "loader.execution": execution}
            )
            for one, ahead, execution in grid
        )


class System:
    """Runs a job step by step.

    Args:
        job: What it costs; may be replaced while it runs.
        values: Where it starts.
        seed: Of the noise.
        room: Micro-batches that may lie ready.
        ahead_room: Those that may be fetched and not begun.
        epoch: Those of an epoch, at whose end there is nothing more to make; 0 is one without an end.
    """

    def __init__(
        self,
        job: Job,
        values: Settings,
        *,
        seed: int,
        room: float = 16.0,
        ahead_room: float = 0.0,
        epoch: int = 0,
    ) -> None:
        self.job, self.values, self.room, self.ahead_room = job, dict(values), room, ahead_room
        self._epoch, self._num_taken = epoch, 0
        self.speed = 1.0
        self._random = random.Random(seed)
        self._ready = 0.0
        self._ahead = ahead_room
        self._fetch_s = self._make_s = self._origin_s = 0.0

    def set(self, setting: str, value: int | str) -> None:
        limit = self.job.limits[setting]
        assert value in limit.choices if limit.choices else limit.least <= int(value) <= limit.most
        self.values[setting] = value
        if setting == "loader.execution":
            self._ready = 0.0

    def step(self) -> StepNumbers:
        fetched, decoded, own_s = self.job.capacities(self.values)
        noise = [self._random.lognormvariate(0, self.job.noise) for _ in range(2)]
        is_fetched = self._ahead > 1
        capacity = (decoded if is_fetched else min(fetched, decoded)) * noise[0] * self.speed
        own_s *= noise[1] / self.speed
        wait_s = max(0.0, 1 - self._ready) / capacity
        step_s = wait_s + own_s
        before = self._ready
        left = self._epoch - self._num_taken - max(before, 1.0) if self._epoch else self.room
        produced = max(0.0, min(capacity * own_s, left))
        self._ready = max(0.0, min(self.room, max(before, 1.0) - 1 + produced))
        num_begun = self._ready - before + 1
        ahead = self._ahead - num_begun + fetched * noise[0] * self.speed * step_s
        self._ahead = max(0.0, min(self.ahead_room, ahead))
        threads = int(self.values["loader.num_threads"])
        decode_s = max(0.0, min(num_begun * self.job.decode_s, threads * step_s))
        # Threads wait for blocks that are under way.
        self._make_s += decode_s
        if not is_fetched and fetched < decoded and self._ready < self.room:
            self._fetch_s += 0.9 * (threads * step_s - decode_s)
        self._origin_s += min(1.0, capacity * step_s) * self.job.fetch_s
        self._num_taken += 1
        totals = LoaderTotals(
            fetch_s=self._fetch_s,
            make_s=self._make_s,
            origin_s=self._origin_s,
            num_ready=self._ready,
            num_ahead=self._ahead,
        )
        if self._num_taken == self._epoch:
            self._num_taken, self._ready = 0, 0.0
        shares_python = self.values["loader.execution"] == "threads"
        return StepNumbers(
            step_s=step_s,
            data_wait_s=wait_s,
            num_samples=4,
            loader=totals,
            gil_wait_share=0.6 * self.job.python_share if shares_python else 0.0,
        )
