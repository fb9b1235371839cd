"""Verdicts: rules as data, and the judgment of the newest intervals by them.

A rule explains a share of the step and applies if the share reaches its threshold; the largest share is the
most important. `IntervalSummary` defines the shares such that no two rules explain the same time.

Verdicts have hysteresis: one that was given stays until its share is well below its threshold, and another
one ranks first only if it is clearly larger, so two causes of similar size do not alternate. During a run a
new first verdict must hold for two intervals before it is logged, except the very first.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardflow.logs import counted
from shardflow.monitoring.verdict import advice
from shardflow.monitoring.verdict.intervals import PARTS, IntervalSummary, Settings, pool
from shardflow.telemetry import Advice, Interval, Verdict

LEAST_WAIT: Final = 0.1
"""Share of the step from which a wait for data is reported."""
LEAST_EXCHANGE: Final = 0.2
"""A healthy job exchanges gradients too; beyond this it is worth a look."""
LEAST_SKEW: Final = 0.15
"""Share of the step that a rank is slower than the median of the others."""
LEAST_TRAINER: Final = 0.3
"""Python of the trainer that holds the interpreter; torch holds it a little in any step."""
LEAST_DELAY: Final = 0.25
"""Share of the step for which the loop's threads found no processor; a busy machine has some of it."""
LEAST_PAUSED: Final = 0.15
"""Share of the wall time that checkpoints and evaluations take."""
LEAST_MEMORY: Final = 0.06
"""Share of the memory of a node that must be free."""
_CRITICAL_MEMORY: Final = 0.02
_HEALTHY: Final = 0.9
_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that a run may be bound by."""

    code: str
    meaning: str
    """For the table of docs/verdicts.md."""
    least: float
    """Threshold of ``share``."""
    share: Callable[[IntervalSummary], float]
    """Of the step's time."""
    sentence: Callable[[IntervalSummary, float], str]
    """The sentence, from the summary and the share."""
    evidence: Callable[[IntervalSummary], Mapping[str, float]]
    advise: Callable[[IntervalSummary], list[Advice]]


def compute_share(summary: IntervalSummary) -> float:
    """Return the share of the step that is computing and nothing that another rule explains."""
    held = summary.held if summary.trainer >= LEAST_TRAINER else 0.0
    delay = summary.delay if summary.delay >= LEAST_DELAY else 0.0
    return max(0.0, summary.busy - held - delay)


def _of_parts(name: str) -> Callable[[IntervalSummary], float]:
    return lambda summary: summary.parts[name]


def _memory_share(summary: IntervalSummary) -> float:
    """Rate the free memory: no part of the step, but it comes first where the run is about to be killed."""
    if not summary.memory_bytes or not summary.available_bytes:
        return 0.0
    free = summary.available_bytes / summary.memory_bytes
    return 1.0 if free <= _CRITICAL_MEMORY else LEAST_MEMORY if free <= LEAST_MEMORY else 0.0


def _rate(summary: IntervalSummary, stage: str) -> float:
    return summary.num_bytes.get(stage, 0.0) / summary.step_s if summary.step_s else 0.0


def _of_threads(summary: IntervalSummary, part: str) -> float:
    """Return the share of the working time of the loader's threads that goes to this."""
    working = sum(summary.seconds.get(name, 0.0) for names in PARTS.values() for name in names)
    return sum(summary.seconds.get(name, 0.0) for name in PARTS[part]) / working if working else 0.0


def _hit_rate(summary: IntervalSummary) -> float:
    cached = summary.num_bytes.get("cache_ram", 0.0) + summary.num_bytes.get("cache_disk", 0.0)
    read = summary.num_bytes.get("read", 0.0)
    return min(1.0, cached / read) if read else 0.0


def _loader_evidence(part: str) -> Callable[[IntervalSummary], Mapping[str, float]]:
    def evidence(summary: IntervalSummary) -> Mapping[str, float]:
        found = {
            "data_wait_share": summary.wait,
            f"{part}_of_threads": _of_threads(summary, part),
            "idle_threads": summary.idle_threads,
            "cpus_free": summary.cpus_free,
        }
        if part == "storage":
            found |= {"read_mib_per_s": _rate(summary, "read") / _MIB, "cache_hit_rate": _hit_rate(summary)}
        return found

    return evidence


def _sentence_of_storage(summary: IntervalSummary, share: float) -> str:
    place = "the local disk" if summary.tier == "local" else summary.tier
    return (
        f"Storage-bound: {share:.0%} of the step waits for reads from {place}; the loader's threads spend "
        f"{_of_threads(summary, 'storage'):.0%} of their work on them, "
        f"at {_rate(summary, 'read') / _MIB:.1f} MiB/s."
    )


def _sentence_of_decode(summary: IntervalSummary, share: float) -> str:
    return (
        f"Decode-bound: {share:.0%} of the step waits for slices to be decoded; the loader's threads spend "
        f"{_of_threads(summary, 'decode'):.0%} of their work on it, and {summary.cpus_free:.1f} of "
        f"{counted(summary.num_cpus, 'processor')} are free."
    )


def _sentence_of_transform(summary: IntervalSummary, share: float) -> str:
    own, user = summary.seconds.get("transform", 0.0), summary.seconds.get("user_transform", 0.0)
    what = "the user's transform" if user > own else "slices to be resized and placed"
    return (
        f"Transform-bound: {share:.0%} of the step waits for {what}; the loader's threads spend "
        f"{_of_threads(summary, 'transform'):.0%} of their work on it."
    )


def _sentence_of_service(summary: IntervalSummary, share: float) -> str:
    return (
        f"Data servers too slow: {share:.0%} of the step waits for their micro-batches, which wait "
        f"{advice.queued_share(summary):.0%} of the time for memory or a thread there."
    )


def _sentence_of_prefetch(summary: IntervalSummary, share: float) -> str:
    return (
        f"Starved by too little prefetch: {share:.0%} of the step waits for micro-batches, while the "
        f"loader's threads are idle {summary.idle_threads:.0%} of their time, at the bound on buffered bytes."
    )


def _sentence_of_transfer(summary: IntervalSummary, share: float) -> str:
    copied = max(summary.num_bytes.get("copy", 0.0), summary.num_bytes.get("pin", 0.0))
    return (
        f"Transfer-bound: {share:.0%} of the step waits for copies to the device, "
        f"{copied / _MIB:.1f} MiB a step; {summary.ready_batches:.1f} micro-batches are ready."
    )


def _sentence_of_tokens(_: IntervalSummary, share: float) -> str:
    return f"Tokenize-bound: the loop spends {share:.0%} of the step on tokenizing reports."


def _sentence_of_exchange(summary: IntervalSummary, share: float) -> str:
    return (
        f"Exchange-bound: {share:.0%} of the step waits for gradients to be exchanged over "
        f"{counted(summary.world_size, 'rank')}, though none is late."
    )


def _sentence_of_straggler(summary: IntervalSummary, share: float) -> str:
    slow, typical = summary.slow, summary.typical
    host = f" on host {slow.host}" if slow.host else ""
    if summary.is_slow_by_waiting:
        what = f"waits for data {slow.wait:.0%} of the step, the others {typical.wait:.0%}"
    else:
        what = f"computes {slow.compute:.0%} of the step, the others {typical.compute:.0%}"
    return f"Straggler: all wait for rank {slow.rank}{host}, {share:.0%} of the step: it {what}."


def _sentence_of_trainer(summary: IntervalSummary, share: float) -> str:
    return (
        f"Trainer busy: {share:.0%} of the step goes to Python of the trainer that holds the interpreter, "
        f"which any other thread waits for {summary.gil_wait:.0%} of the time."
    )


def _sentence_of_delay(summary: IntervalSummary, share: float) -> str:
    return (
        f"CPU oversubscribed: {share:.0%} of the step is lost because threads that could run have no "
        f"processor, {summary.delayed_threads:.0%} of their time; the run uses {summary.cpus_used:.1f} of "
        f"{summary.num_cpus}."
    )


def _sentence_of_memory(summary: IntervalSummary, _: float) -> str:
    free = summary.available_bytes / summary.memory_bytes
    return (
        f"Memory pressure: {free:.1%} of the node's {summary.memory_bytes / 1024**3:.1f} GiB are free; the "
        "run may be killed."
    )


def _sentence_of_paused(_: IntervalSummary, share: float) -> str:
    return f"Checkpoint-bound: training is paused for checkpoints and evaluations {share:.0%} of the time."


def _sentence_of_compute(summary: IntervalSummary, share: float) -> str:
    if share >= _HEALTHY:
        return f"Compute-bound: no finding, the run computes {share:.0%} of the time."
    others = {"waits for data": summary.wait, "exchanges gradients": summary.exchange}
    rest = ", ".join(f"{name} {one:.0%}" for name, one in others.items() if one >= 0.01)
    return f"Compute-bound: the run computes {share:.0%} of the time{f', {rest}' if rest else ''}."


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        code="storage-bound",
        meaning="the loop waits for bytes",
        least=LEAST_WAIT,
        share=_of_parts("storage"),
        sentence=_sentence_of_storage,
        evidence=_loader_evidence("storage"),
        advise=advice.for_storage,
    ),
    Rule(
        code="decode-bound",
        meaning="the loop waits for slices to be decoded",
        least=LEAST_WAIT,
        share=_of_parts("decode"),
        sentence=_sentence_of_decode,
        evidence=_loader_evidence("decode"),
        advise=advice.for_decode,
    ),
    Rule(
        code="transform-bound",
        meaning="the loop waits for slices to be resized, or for the user's transform",
        least=LEAST_WAIT,
        share=_of_parts("transform"),
        sentence=_sentence_of_transform,
        evidence=_loader_evidence("transform"),
        advise=advice.for_transform,
    ),
    Rule(
        code="service-bound",
        meaning="the loop waits for micro-batches of data servers",
        least=LEAST_WAIT,
        share=_of_parts("service"),
        sentence=_sentence_of_service,
        evidence=lambda summary: {
            "data_wait_share": summary.wait,
            "queued_share": advice.queued_share(summary),
            "received_mib_per_s": _rate(summary, "service") / _MIB,
        },
        advise=advice.for_service,
    ),
    Rule(
        code="prefetch-starved",
        meaning="the loop waits though the loader is quick enough on average: it may not work further ahead",
        least=LEAST_WAIT,
        share=_of_parts("prefetch"),
        sentence=_sentence_of_prefetch,
        evidence=lambda summary: {
            "data_wait_share": summary.wait,
            "idle_threads": summary.idle_threads,
            "ready_batches": summary.ready_batches,
            "batch_mib": summary.batch_bytes / _MIB,
        },
        advise=advice.for_prefetch,
    ),
    Rule(
        code="transfer-bound",
        meaning="the device waits for copies of micro-batches",
        least=LEAST_WAIT,
        share=_of_parts("transfer"),
        sentence=_sentence_of_transfer,
        evidence=lambda summary: {
            "data_wait_share": summary.wait,
            "copy_mib_per_s": _rate(summary, "copy") / _MIB,
            "ready_batches": summary.ready_batches,
        },
        advise=advice.for_transfer,
    ),
    Rule(
        code="tokenize-bound",
        meaning="the loop itself tokenizes reports",
        least=LEAST_WAIT,
        share=_of_parts("tokenize"),
        sentence=_sentence_of_tokens,
        evidence=lambda summary: {"tokenize_s_per_step": summary.seconds.get("tokenize", 0.0)},
        advise=advice.for_tokens,
    ),
    Rule(
        code="exchange-bound",
        meaning="all ranks wait for gradients, and none of them is late",
        least=LEAST_EXCHANGE,
        share=lambda summary: summary.exchange,
        sentence=_sentence_of_exchange,
        evidence=lambda summary: {
            "exchange_share": summary.exchange,
            "skew_share": summary.skew,
            "world_size": summary.world_size,
        },
        advise=advice.for_exchange,
    ),
    Rule(
        code="straggler",
        meaning="all ranks wait for one, which computes or waits for data longer",
        least=LEAST_SKEW,
        share=lambda summary: summary.skew,
        sentence=_sentence_of_straggler,
        evidence=lambda summary: {
            "rank": summary.slow.rank,
            "compute_share": summary.slow.compute,
            "compute_share_others": summary.typical.compute,
            "data_wait_share": summary.slow.wait,
            "data_wait_share_others": summary.typical.wait,
        },
        advise=advice.for_straggler,
    ),
    Rule(
        code="trainer-busy",
        meaning="Python of the trainer holds the interpreter",
        least=LEAST_TRAINER,
        share=lambda summary: summary.trainer,
        sentence=_sentence_of_trainer,
        evidence=lambda summary: {"gil_wait_share": summary.gil_wait, "data_wait_share": summary.wait},
        advise=advice.for_trainer,
    ),
    Rule(
        code="cpu-oversubscribed",
        meaning="threads that could run have no processor",
        least=LEAST_DELAY,
        share=lambda summary: summary.delay,
        sentence=_sentence_of_delay,
        evidence=lambda summary: {
            "delayed_threads": summary.delayed_threads,
            "cpus_used": summary.cpus_used,
            "num_cpus": summary.num_cpus,
        },
        advise=advice.for_delay,
    ),
    Rule(
        code="checkpoint-bound",
        meaning="training is paused for checkpoints or evaluations",
        least=LEAST_PAUSED,
        share=lambda summary: summary.paused,
        sentence=_sentence_of_paused,
        evidence=lambda summary: {
            "checkpoint_s_per_step": summary.seconds.get("checkpoint", 0.0),
            "evaluate_s_per_step": summary.seconds.get("evaluate", 0.0),
        },
        advise=advice.for_checkpoints,
    ),
    Rule(
        code="memory-pressure",
        meaning="hardly any memory of the node is free",
        least=LEAST_MEMORY,
        share=_memory_share,
        sentence=_sentence_of_memory,
        evidence=lambda summary: {
            "available_gib": summary.available_bytes / 1024**3,
            "memory_gib": summary.memory_bytes / 1024**3,
        },
        advise=advice.for_memory,
    ),
)
"""All rules but `COMPUTE`."""

COMPUTE: Final = Rule(
    code="compute-bound",
    meaning="the run computes; nothing else takes enough of the step to be reported",
    least=0.5,
    share=compute_share,
    sentence=_sentence_of_compute,
    evidence=lambda summary: {
        "compute_share": compute_share(summary),
        "data_wait_share": summary.wait,
        "exchange_share": summary.exchange,
    },
    advise=advice.for_compute,
)
"""Rule that applies where no other does."""


WINDOW: Final = 6
"""Intervals that are judged together, the newest."""
_LEAST_STEPS: Final = 3
_LEAST_S: Final = 15.0
"""One long step is as conclusive as a few short ones."""
_KEPT_AT: Final = 0.8
"""Share of a rule's threshold at which it still holds, if it held before."""
_AHEAD: Final = 1.2
"""The first verdict stays first until another one's share is so many times its own."""


def newest(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the intervals that are judged: the last few, without those of first steps of a start.

    Nothing is returned before enough was measured.
    """
    steady = [one for one in intervals if one.num_steps > 0 and one.step_s > 0 and not one.is_warm_up]
    steady = [one for one in steady[-WINDOW:] if one.world_size == steady[-1].world_size]
    num_steps, step_s = sum(one.num_steps for one in steady), sum(one.step_s for one in steady)
    return steady if num_steps >= _LEAST_STEPS or step_s >= _LEAST_S else []


def judge(
    intervals: Sequence[Interval], *, config: Settings | None = None, before: Sequence[Verdict] = ()
) -> list[Verdict]:
    """Judge what the newest intervals were bound by.

    Args:
        intervals: Of one run, in order; all of them, or at least the newest `WINDOW` and one.
        config: Settings that the intervals do not name, by dotted name: advice names only what the run has.
        before: The last verdicts, for hysteresis.

    Returns:
        The most important first; one at least, but none before enough was measured.
    """
    chosen = newest(intervals)
    if not chosen:
        return []
    summary = pool(chosen, config)
    held = {one.code for one in before}
    first = before[0].code if before else ""
    found = [(rule, share) for rule in RULES if (share := rule.share(summary)) >= _threshold(rule, held)]
    found.sort(key=lambda one: -one[1] * (_AHEAD if one[0].code == first else 1.0))
    computing = COMPUTE.share(summary)
    if not found or computing >= COMPUTE.least:
        # Computing is the purpose of the run: it comes first only if no other rule applies.
        found.append((COMPUTE, computing))
    return [_verdict(rule, share, summary) for rule, share in found]


def judge_each(intervals: Iterable[Interval], *, config: Settings | None = None) -> Iterator[list[Verdict]]:
    """Judge a run from its start, interval by interval, as it would have been judged while running.

    Yields:
        The verdicts after each interval, from the first one that gives any.
    """
    held: deque[Interval] = deque(maxlen=WINDOW + 1)
    before: list[Verdict] = []
    for interval in intervals:
        held.append(interval)
        if verdicts := judge(tuple(held), config=config, before=before):
            before = verdicts
            yield verdicts


def judge_all(intervals: Iterable[Interval], *, config: Settings | None = None) -> list[list[Verdict]]:
    """Return all verdicts of `judge_each`."""
    return list(judge_each(intervals, config=config))


def _threshold(rule: Rule, held: Collection[str]) -> float:
    return rule.least * (_KEPT_AT if rule.code in held else 1.0)


def _verdict(rule: Rule, share: float, summary: IntervalSummary) -> Verdict:
    share = min(1.0, share)
    return Verdict(
        global_step=summary.global_step,
        code=rule.code,
        text=rule.sentence(summary, share),
        share=round(share, 3),
        evidence={name: round(float(value), 4) for name, value in rule.evidence(summary).items()},
        advice=tuple(rule.advise(summary)),
    )


_LOGGER = logging.getLogger(__name__)

_NEEDED: Final = 2
"""Intervals in a row that a new first verdict must hold for."""
_WRITTEN_EVERY: Final = 12
"""Intervals after which an unchanged verdict is written again, with its current numbers."""
_QUIET_S: Final = 60.0
"""Least time between two log lines; changes in between are only written."""


class VerdictReporter:
    """Judges the intervals of a run while it runs, on rank 0.

    Args:
        write: Called with each verdict to write, as the event ``"verdict"``.
        config: Settings of the run by dotted name, see `judge`.
        clock: Seconds that only grow.

    Attributes:
        verdicts: The current verdicts, the most important first.
    """

    def __init__(
        self,
        write: Callable[[Verdict], object],
        *,
        config: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verdicts: list[Verdict] = []
        self._write = write
        self._config = config
        self._clock = clock
        self._intervals: deque[Interval] = deque(maxlen=WINDOW)
        self._num_differing = 0
        self._num_since_written = 0
        self._logged = ""
        self._logged_s = -_QUIET_S

    def measured(self, interval: Interval) -> None:
        """Judge the next interval."""
        self._intervals.append(interval)
        found = judge(tuple(self._intervals), config=self._config, before=self.verdicts)
        if not found:
            return
        self._num_since_written += 1
        is_changed = [one.code for one in found] != [one.code for one in self.verdicts]
        if self.verdicts and found[0].code != self.verdicts[0].code:
            self._num_differing += 1
            if self._num_differing < _NEEDED:
                return
        self._num_differing = 0
        self.verdicts = found
        if is_changed or self._num_since_written >= _WRITTEN_EVERY:
            self._num_since_written = 0
            for verdict in found:
                self._write(verdict)
        self._log(found[0])

    def _log(self, verdict: Verdict) -> None:
        now_s = self._clock()
        if verdict.code == self._logged or now_s - self._logged_s < _QUIET_S:
            return
        self._logged, self._logged_s = verdict.code, now_s
        _LOGGER.info("%s", " ".join([verdict.text, *(one.text for one in verdict.advice[:1])]))
