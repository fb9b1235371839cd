"""What the ranks left behind, in numbers: batches, samples, repetitions, losses, order."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers.task import NUM_SAMPLES

__all__ = ["Run", "judge_epoch", "judge_resume"]

Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """What the ranks of one task wrote, a list of events each."""

    ranks: list[Events]

    @property
    def batches(self) -> list[list[list[str]]]:
        """The keys of each batch of each rank."""
        return [[event["keys"] for event in events if event["event"] == "batch"] for events in self.ranks]

    @property
    def counts(self) -> list[int]:
        """The batches that each rank received."""
        return [len(rank) for rank in self.batches]

    @property
    def samples(self) -> Counter[str]:
        """How often each sample came, over all ranks."""
        return Counter(key for rank in self.batches for batch in rank for key in batch)

    @property
    def steps(self) -> list[list[str]]:
        """The samples of each step, over all ranks, sorted."""
        most = max((len(rank) for rank in self.batches), default=0)
        return [
            sorted(key for rank in self.batches for batch in rank[step : step + 1] for key in batch)
            for step in range(most)
        ]

    @property
    def end(self) -> str:
        """``end``, ``not offered``, ``hang``, ``crash``, or what an error said."""
        last = [events[-1] if events else {"event": "crash"} for events in self.ranks]
        for kind in ("error", "not offered", "crash", "hang"):
            for event in last:
                if event["event"] == kind:
                    return str(event["text"]) if kind == "error" else kind
        return "end"


def judge_epoch(run: Run, alone: Run | None) -> dict[str, Any]:
    """Judge an epoch that nobody stopped.

    Args:
        run: The epoch.
        alone: The same setting on one rank without workers, to compare the steps with.
    """
    counts = run.counts
    lengths = [event["batches"] for events in run.ranks for event in events if event["event"] == "length"]
    samples = run.samples
    return {
        "end": run.end,
        "batches_per_rank": counts,
        "lengths_told": lengths,
        "samples_per_rank": [sum(map(len, rank)) for rank in run.batches],
        "is_equal": len(set(counts)) == 1,
        "num_distinct": len(samples),
        "num_repeated": samples.total() - len(samples),
        "num_dropped": NUM_SAMPLES - len(samples),
        "num_steps": len(run.steps),
        "num_same_steps": _num_same(run.steps, alone.steps) if alone is not None else None,
    }


def judge_resume(first: Run, rest: Run, whole: Run) -> dict[str, Any]:
    """Judge a run that was stopped and went on, by one that nobody stopped.

    Args:
        first: What was consumed before the state was saved.
        rest: What came after the state was loaded, to the end of the epoch.
        whole: The same epoch undisturbed, in the world that was stopped.
    """
    if first.end != "end" or rest.end != "end":
        return {"end": first.end if first.end != "end" else rest.end}
    seen, wanted = first.samples + rest.samples, whole.samples
    is_repeatable = first.steps == whole.steps[: len(first.steps)]
    result = _Resumed(
        end="end",
        is_repeatable=is_repeatable,
        is_exact=is_repeatable and first.steps + rest.steps == whole.steps,
        num_repeated=(seen - wanted).total(),
        num_lost=sum(not seen[key] for key in wanted),
        batches_per_rank=rest.counts,
        num_wanted_steps=len(whole.steps),
        num_same_steps=_num_same(first.steps + rest.steps, whole.steps),
    )
    return asdict(result)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resumed:
    end: str
    is_repeatable: bool
    """Whether the first part was the beginning of the undisturbed epoch at all."""
    is_exact: bool
    """Whether every step of both parts together holds the samples of the undisturbed epoch's step."""
    num_repeated: int
    """Samples that came more often than undisturbed."""
    num_lost: int
    """Samples that never came, and do undisturbed."""
    batches_per_rank: list[int]
    num_wanted_steps: int
    num_same_steps: int


def _num_same(steps: list[list[str]], others: list[list[str]]) -> int:
    return sum(one == other for one, other in zip(steps, others, strict=False))
