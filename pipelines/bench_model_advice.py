"""From the two ceilings of a job to plain sentences: what limits it, and how much there is to gain.

Every rule names the numbers that it rests on. Pure: facts in, sentences out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["advise_job", "short"]

_WIDE_SPREAD = 0.25
# Ceilings nearer to each other than this are equal: after the next gain on one side the other one limits.
_EQUAL = 1.15
# Below this share of the lower ceiling the two are in each other's way.
_GOOD_OVERLAP = 0.85
_MUCH_WAITING = 0.1
_LEAST_GAIN = 0.01
_WHOLE_FROM = 100
_REMEDIES = {
    "read": "more of them, or a cache on the node's disk, where the store is behind a network",
    "cache_origin": "a store that is nearer, or more cache.read_ahead_bytes",
    "decode": "more of them up to the processors, or small versions of the slices ([variants] of pack)",
    "transform": "more of them up to the processors, or less work in image.transform",
    "user_transform": "less work in image.transform, or more of them up to the processors",
}
_OTHER_REMEDY = "more of them, up to the processors"


def advise_job(facts: Mapping[str, Any]) -> list[str]:
    """Say what limits a job, and by how much it could be faster at most.

    Args:
        facts: What ``shardflow bench --with-model CONFIG --json`` prints, without its ``advice``.
    """
    return [
        *_about_trust(facts),
        *(_about_data(facts) if facts["lower_ceiling"] == "loader" else _about_compute(facts)),
        *_about_equals(facts),
        *_about_overlap(facts),
    ]


def _rates(facts: Mapping[str, Any], name: str) -> str:
    one = facts["results"][name]
    return f"{short(one['steps_per_s'])} steps/s ({short(one['samples_per_s'])} samples/s)"


def short(number: float) -> str:
    """Render a rate or a factor in three digits at least: ``0.0123``, ``1,234``."""
    return f"{number:,.3g}" if number < _WHOLE_FROM else f"{number:,.0f}"


def _reached(facts: Mapping[str, Any]) -> str:
    share = min(1.0, facts["share_of_lower"])  # above it is noise
    return (
        f"Together they make {_rates(facts, 'together')}, {share:.0%} of the lower ceiling, and wait for "
        f"data {facts['data_wait_share']:.0%} of the time."
    )


def _about_trust(facts: Mapping[str, Any]) -> Iterator[str]:
    if max(one["spread"] for one in facts["results"].values()) > _WIDE_SPREAD:
        yield "The rounds differ widely: something else used this machine; measure again when it is idle."
    elif facts["load_before"] > (facts["processors"] or 1) / 2:
        yield "The machine was busy before the first round; measure again when it is idle."


def _about_data(facts: Mapping[str, Any]) -> Iterator[str]:
    times = facts["headspace"]["with_free_data"]
    yield (
        f"Data limits this job: without the model, data comes at {_rates(facts, 'loader')}; with data at "
        f"hand, the model makes {_rates(facts, 'compute')}. {_reached(facts)} If data cost nothing, the job "
        f"would be {short(times)} times as fast; no change to the loader brings more."
    )
    stages = facts["stages"]
    if total := sum(stages.values()):
        slowest = max(stages, key=lambda name: float(stages[name]))
        yield (
            f"Without the model the loader's {facts['threads']} threads were at work in {slowest} for "
            f"{stages[slowest] / total:.0%} of their time: {_REMEDIES.get(slowest, _OTHER_REMEDY)}."
        )
    need = facts["results"]["compute"]["samples_per_s"]
    yield (
        "What storage and processors give at most, and what to buy: shardflow bench DATASET --need "
        f"{max(1, round(need))}"
    )


def _about_compute(facts: Mapping[str, Any]) -> Iterator[str]:
    gain = facts["headspace"]["with_free_data"] - 1
    spare = facts["results"]["loader"]["steps_per_s"] / facts["results"]["compute"]["steps_per_s"]
    most = f"at most {gain:.0%}" if gain >= _LEAST_GAIN else f"less than {_LEAST_GAIN:.0%}"
    yield (
        f"The model limits this job: with data at hand, it makes {_rates(facts, 'compute')}; without the "
        f"model, data comes at {_rates(facts, 'loader')}, {short(spare)} times as much. {_reached(facts)} If "
        f"data cost nothing, the job would be {most} faster. What makes it faster is in the model: "
        "precision, compile, larger micro-batches, more devices."
    )


def _about_equals(facts: Mapping[str, Any]) -> Iterator[str]:
    rates = [facts["results"][name]["steps_per_s"] for name in ("loader", "compute")]
    if max(rates) < _EQUAL * min(rates):
        yield "The two ceilings are nearly equal: after any gain on one side, the other side limits."


def _about_overlap(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["share_of_lower"] >= _GOOD_OVERLAP:
        return
    text = (
        f"The job reaches {facts['share_of_lower']:.0%} of the lower ceiling: loading and computing are in "
        "each other's way"
    )
    if facts["device"] == "cpu":
        yield (
            f"{text}, for they share {facts['processors']} processors. Fewer loader.num_threads may be "
            "faster here; with the model on a GPU they share less."
        )
    elif facts["execution"] == "threads":
        yield (
            f"{text}, for the loader's threads and the loop share one interpreter. Try --set "
            "loader.execution=process."
        )
    else:
        yield (
            f"{text}. Try fewer loader.num_threads, so that the loop and the driver have processors to "
            "themselves."
        )
    if facts["data_wait_share"] > _MUCH_WAITING and facts["lower_ceiling"] == "compute":
        yield (
            f"The loop waits for data {facts['data_wait_share']:.0%} of the time, though data alone comes "
            "fast enough: it comes unevenly. Raise loader.prefetch_bytes."
        )
