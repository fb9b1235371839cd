"""Summary of a few intervals, in shares of the step: the input of the rules.

A step of several ranks is as long as that of the rank that all others wait for, so shares are that rank's:
its wait for data, its compute, and the rest of the exchange when nobody is late. The wait for data is divided
by what the loader's threads did meanwhile: idle at the prefetch bound, more room would have helped; busy, it
goes to the stages that they worked on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from shardflow.telemetry import Interval, RankNumbers

Settings = Mapping[str, object]
"""By dotted name, ``"loader.num_threads"``."""

PARTS: Final[dict[str, tuple[str, ...]]] = {
    "storage": ("read", "index"),
    "decode": ("decode", "check"),
    "transform": ("transform", "user_transform"),
    "service": ("service",),
    "other": ("plan", "collate", "tokens"),
}
"""Work of the loader's threads, by stages of `shardflow.telemetry.measures.STAGES`, which are disjoint."""

# A rank this much slower than the median of the others is looked at by itself.
_LEAST_SKEW: Final = 0.05
_NEAR_STEPS: Final = 8
"""Steps that work ahead could even out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShares:
    """One rank's parts of the step, as shares."""

    rank: int
    host: str
    wait: float
    compute: float
    exchange: float

    @property
    def own(self) -> float:
        """What others may have to wait for."""
        return self.wait + self.compute


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalSummary:
    """Steps of a few intervals; all but the last fields are shares of their time, 0 to 1."""

    global_step: int
    num_steps: int
    step_s: float
    """Mean seconds of a step."""
    world_size: int
    ranks_per_node: int

    wait: float
    """The loop waits for data, on any ordinary rank."""
    busy: float
    """Everything of a step on an ordinary rank that is no wait for data or for others: computing, mostly."""
    exchange: float
    """Gradients and numbers are exchanged, and no rank is late."""
    skew: float
    """The slowest rank needs so much longer than the median of the others."""
    slow: RankShares
    typical: RankShares
    """The median of the others; the same as ``slow`` on one rank."""
    paused: float
    """Of the wall time: checkpoints and evaluations."""

    parts: Mapping[str, float]
    """``wait`` by what would have to be faster: the keys of `PARTS`, and ``prefetch``, ``transfer``,
    ``tokenize``."""
    held: float
    """The loop holds the interpreter, and works."""
    trainer: float
    """The same, and what loader threads lose by it."""
    delay: float
    """Threads that could run have no processor, while the loop computes."""

    gil_wait: float
    """Share of the time that a thread which wants the interpreter waits for it."""
    delayed_threads: float
    """Share of the time of threads which could run that they have no processor."""
    cpus_used: float
    """Processors of a node that the run keeps busy."""
    num_cpus: int
    memory_bytes: int
    available_bytes: int
    seconds: Mapping[str, float]
    """Seconds of each stage in a step, summed over ranks and threads."""
    num_bytes: Mapping[str, float]
    """Bytes of each stage in a step."""
    idle_threads: float
    """Share of their time that the loader's threads have nothing to do."""
    ready_batches: float
    batch_bytes: float
    """Of a micro-batch; 0 where it is not known."""
    cache_disk_bytes: int
    """Of a node's folder."""
    tier: str
    settings: Settings

    @property
    def is_slow_by_waiting(self) -> bool:
        """Whether the slowest rank is behind the others for its waits for data rather than its compute."""
        return self.slow.wait - self.typical.wait > self.slow.compute - self.typical.compute

    @property
    def cpus_free(self) -> float:
        """Processors of a node that no process of the run keeps busy."""
        return max(0.0, self.num_cpus - self.cpus_used)

    def number(self, setting: str) -> int | None:
        """Return a setting that is a whole number; None where the run does not have it."""
        value = self.settings.get(setting)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def numbers(self, setting: str) -> list[int]:
        """Return a setting that is a list of whole numbers; an empty list where the run does not have it."""
        value = self.settings.get(setting)
        return list(value) if isinstance(value, list) and all(type(one) is int for one in value) else []

    def word(self, setting: str) -> str | None:
        """Return a setting that is a text; None where the run does not have it."""
        value = self.settings.get(setting)
        return value if isinstance(value, str) else None


def pool(intervals: Sequence[Interval], config: Settings | None = None) -> IntervalSummary:
    """Add up intervals, at least one, with steps that took time.

    Args:
        intervals: In order; settings and the world are those of the last one.
        config: Settings of the run that its measurements do not name; theirs come before.
    """
    last = intervals[-1]
    step_s = sum(one.step_s for one in intervals)
    wall_s = max(step_s, sum(one.wall_s for one in intervals))
    num_steps = sum(one.num_steps for one in intervals)
    seconds, num_bytes, num_items = _stages(intervals)
    ranks = _rank_shares(intervals)
    slow = max(ranks, key=lambda one: one.own)
    typical = _typical([one for one in ranks if one is not slow]) or slow
    skew = max(0.0, slow.own - typical.own)
    # If no rank is consistently slower, attribute the wait to all ranks; otherwise only to the slow one.
    wait = min(slow.wait, typical.wait) if skew > _LEAST_SKEW else slow.wait
    # Ranks that wait for data in turn make each other wait: an exchange only by its name.
    exchange = slow.exchange + sum(one.stage("agree").least_seconds for one in intervals) / step_s
    in_turn = sum(one.slowest_wait_s for one in intervals) / step_s - slow.wait
    in_turn = min(max(0.0, in_turn), exchange) if skew <= _LEAST_SKEW else 0.0
    wait, exchange = wait + in_turn, exchange - in_turn
    late = max(0.0, slow.compute - typical.compute) if skew > _LEAST_SKEW else 0.0
    busy = max(0.0, 1.0 - slow.wait - in_turn - exchange - late)
    settings: dict[str, object] = {**(config or {}), **last.settings}
    mean_wait = sum(one.wait for one in ranks) / len(ranks)
    for_loader = _ratio(seconds.get("wait", 0.0) / (step_s * last.world_size), mean_wait)
    parts = _wait_parts(
        wait,
        seconds,
        of_loader=min(1.0, for_loader),
        of_rest=_explained_by_rest(intervals),
        per=step_s * last.world_size,
    )
    cpu_s, runnable_s = _sum(intervals, lambda one: one.cpu_s), _sum(intervals, lambda one: one.runnable_s)
    delayed = _ratio(runnable_s, cpu_s + runnable_s)
    # Of what threads wait some may be no matter of the loop's, so this is the most that it loses.
    delay = min(delayed * busy, _ratio(runnable_s, wall_s * len(ranks)))
    gil_wait = _mean(intervals, lambda one: one.gil_wait_share)
    # Who holds the interpreter and has no processor keeps others waiting: the processors' matter.
    held = min(gil_wait, busy) * (1.0 - _ratio(delay, busy))
    is_in_threads = settings.get("loader.execution", "threads") == "threads"
    if is_in_threads:
        # Python of the user's transform holds it as well; nothing tells whose it was but the time in either.
        own = seconds.get("user_transform", 0.0) / (step_s * last.world_size)
        held *= _ratio(busy, busy + own)
    trainer = held
    if is_in_threads:
        # While the loop holds the interpreter, threads that make micro-batches lose as much.
        lost = _ratio(held, busy)
        for name in ("decode", "transform", "other"):
            trainer += parts[name] * lost
            parts[name] -= parts[name] * lost
    return IntervalSummary(
        global_step=last.global_step,
        num_steps=num_steps,
        step_s=step_s / num_steps,
        world_size=last.world_size,
        ranks_per_node=last.ranks_per_node,
        wait=wait,
        busy=busy,
        exchange=exchange,
        skew=skew,
        slow=slow,
        typical=typical,
        paused=_paused(intervals, wall_s),
        parts=parts,
        trainer=trainer,
        held=held,
        delay=delay,
        gil_wait=gil_wait,
        delayed_threads=delayed,
        cpus_used=_ratio(cpu_s, wall_s) / len(ranks) * last.ranks_per_node,
        num_cpus=last.num_cpus,
        memory_bytes=last.memory_bytes,
        available_bytes=last.available_bytes,
        seconds={name: value / num_steps for name, value in seconds.items()},
        num_bytes={name: value / num_steps for name, value in num_bytes.items()},
        idle_threads=_idle(seconds),
        ready_batches=last.gauges["ready_batches"].mean if "ready_batches" in last.gauges else 0.0,
        batch_bytes=_ratio(num_bytes.get("wait", 0.0), num_items.get("wait", 0.0)),
        cache_disk_bytes=max((one.cache_disk_bytes for one in last.ranks), default=0),
        tier=last.tier,
        settings=settings,
    )


def _stages(
    intervals: Sequence[Interval],
) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
    seconds: defaultdict[str, float] = defaultdict(float)
    num_bytes: defaultdict[str, float] = defaultdict(float)
    num_items: defaultdict[str, float] = defaultdict(float)
    for interval in intervals:
        for name, numbers in interval.stages.items():
            seconds[name] += numbers.seconds
            num_bytes[name] += numbers.num_bytes
            num_items[name] += numbers.num_items
    return seconds, num_bytes, num_items


def _rank_shares(intervals: Sequence[Interval]) -> list[RankShares]:
    """Return each rank's shares of the intervals that name it; of a lone loop, those of its stages."""
    by_rank: defaultdict[int, list[tuple[float, RankNumbers]]] = defaultdict(list)
    for interval in intervals:
        for numbers in interval.ranks or (_lone(interval),):
            by_rank[numbers.rank].append((interval.step_s, numbers))
    found = []
    for rank, seen in sorted(by_rank.items()):
        total_s = sum(step_s for step_s, _ in seen)
        found.append(
            RankShares(
                rank=rank,
                host=seen[-1][1].host,
                wait=sum(one.data_wait_s for _, one in seen) / total_s,
                compute=sum(one.compute_s + one.optimizer_s for _, one in seen) / total_s,
                exchange=sum(one.exchange_s for _, one in seen) / total_s,
            )
        )
    return found


def _lone(interval: Interval) -> RankNumbers:
    return RankNumbers(
        rank=0,
        data_wait_s=interval.stage("data_wait").most_seconds,
        compute_s=interval.stage("forward").most_seconds + interval.stage("backward").most_seconds,
        exchange_s=interval.stage("exchange").least_seconds,
        optimizer_s=interval.stage("optimizer").most_seconds,
    )


def _typical(others: Sequence[RankShares]) -> RankShares | None:
    if not others:
        return None
    return RankShares(
        rank=-1,
        host="",
        wait=median(one.wait for one in others),
        compute=median(one.compute for one in others),
        exchange=median(one.exchange for one in others),
    )


def _wait_parts(
    wait: float, seconds: Mapping[str, float], *, of_loader: float, of_rest: float, per: float
) -> dict[str, float]:
    """Share out the waits for data.

    Args:
        wait: Share of the step.
        seconds: Of all stages.
        of_loader: Share of ``wait`` for which the loader had nothing ready.
        of_rest: Share of that which the rest of its threads explains.
        per: Seconds of all steps, summed over ranks.
    """
    moving = {
        "transfer": seconds.get("pin", 0.0) + seconds.get("copy", 0.0),
        "tokenize": seconds.get("tokenize", 0.0),
    }
    for_loader = wait * of_loader if any(moving.values()) else wait
    left = wait - for_loader
    parts = {name: min(left * _ratio(one, sum(moving.values())), one / per) for name, one in moving.items()}
    parts["prefetch"] = for_loader * of_rest
    working = {name: sum(seconds.get(one, 0.0) for one in stages) for name, stages in PARTS.items()}
    for name, one in working.items():
        parts[name] = (for_loader - parts["prefetch"]) * _ratio(one, sum(working.values()))
    return parts


def _explained_by_rest(intervals: Sequence[Interval]) -> float:
    """Return the share of the waits for data that room to work ahead would have saved, 0 to 1.

    With room without end the step would take what its other parts take, or what the loader's threads need
    for it if they never rest, whichever is more: so rest explains at most as much of the step as it is of
    the threads' time. That holds for steps near each other, which work ahead of one could have filled; not
    for two stretches of a run of which one waited and the other did not.
    """
    waited = explained = 0.0
    near: list[Interval] = []
    for interval in intervals:
        near.append(interval)
        if sum(one.num_steps for one in near) < _NEAR_STEPS and interval is not intervals[-1]:
            continue
        wait_s = sum(one.stage("data_wait").seconds for one in near)
        total_s = sum(one.step_s * one.world_size for one in near)
        waited += wait_s
        explained += min(wait_s, _idle(_stages(near)[0]) * total_s)
        near = []
    return _ratio(explained, waited)


def _idle(seconds: Mapping[str, float]) -> float:
    """Return the share of their time that the loader's threads have nothing to do."""
    working = sum(seconds.get(name, 0.0) for names in PARTS.values() for name in names)
    return _ratio(seconds.get("idle", 0.0), seconds.get("idle", 0.0) + working)


def _paused(intervals: Sequence[Interval], wall_s: float) -> float:
    stands_s = sum(one.stage(name).most_seconds for one in intervals for name in ("checkpoint", "evaluate"))
    return min(1.0, _ratio(stands_s, wall_s))


def _sum(intervals: Sequence[Interval], number: Callable[[RankNumbers], float]) -> float:
    return sum(number(rank) for interval in intervals for rank in interval.ranks)


def _mean(intervals: Sequence[Interval], number: Callable[[RankNumbers], float]) -> float:
    """Return the mean over ranks, each interval by its length."""
    found = [(interval.step_s, number(rank)) for interval in intervals for rank in interval.ranks]
    return _ratio(sum(weight * value for weight, value in found), sum(weight for weight, _ in found))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
