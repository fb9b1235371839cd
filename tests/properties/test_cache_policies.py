"""Eviction by the plan: with equal sizes no rule does better, and the simulation does what the cache does."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stream.cache_simulation import Outcome, next_uses, simulate
from shardflow.storage.cache.config import EvictionPolicy
from shardflow.storage.cache.forecast import NEVER, decayed, eviction_order, is_worth_keeping

pytestmark = pytest.mark.fast

POLICIES: tuple[EvictionPolicy, ...] = ("belady", "lru", "lfu-decay")
reads_of = st.lists(st.integers(0, 5), min_size=1, max_size=14)
long_reads = st.lists(st.integers(0, 12), min_size=1, max_size=80)


def fewest_misses(reads: list[int], num_kept: int) -> int:
    """Try every way to keep blocks, not keeping one that was read among them."""

    @cache
    def best(place: int, kept: frozenset[int]) -> int:
        if place == len(reads):
            return 0
        block = reads[place]
        if block in kept:
            return best(place + 1, kept)
        choices = [kept]
        if len(kept) < num_kept:
            choices.append(kept | {block})
        choices += [kept - {other} | {block} for other in kept]
        return 1 + min(best(place + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


@given(reads=reads_of, num_kept=st.integers(1, 4))
def test_with_equal_sizes_nothing_fetches_less(reads: list[int], num_kept: int) -> None:
    sizes = np.full(6, 10, np.int64)
    found = simulate("belady", reads, sizes, 10 * num_kept)
    assert found.num_reads - found.num_hits == fewest_misses(reads, num_kept)
    assert found.fetched_bytes == 10 * fewest_misses(reads, num_kept)


@given(reads=long_reads, num_kept=st.integers(1, 12))
def test_with_equal_sizes_it_wins_against_the_other_rules(reads: list[int], num_kept: int) -> None:
    sizes = np.full(13, 7, np.int64)
    hits = {policy: simulate(policy, reads, sizes, 7 * num_kept).num_hits for policy in POLICIES}
    assert hits["belady"] == max(hits.values())


def by_the_rules(policy: EvictionPolicy, reads: list[int], sizes: list[int], capacity: int) -> Outcome:
    """Sort everything anew whenever room is needed, as the tiers do with a batch of one."""
    future = next_uses(reads)
    half_life = max(1.0, capacity / max(1.0, float(np.mean(sizes))))
    kept: dict[int, list[float]] = {}
    hits = fetched = clock = 0
    for place, block in enumerate(reads):
        next_use = future[place] if policy == "belady" else NEVER
        if block in kept:
            hits += 1
            _, last_use, frequency, _ = kept[block]
            kept[block] = [next_use, clock, decayed(frequency, clock - last_use, half_life) + 1, place]
            continue
        fetched += sizes[block]
        if sizes[block] > capacity:
            continue
        fits = True
        while sum(sizes[other] for other in kept) + sizes[block] > capacity:
            values = np.array(list(kept.values()))
            order = eviction_order(
                policy,
                next_use=values[:, 0],
                # The clock stands still between misses; ties are settled by the reads.
                last_use=values[:, 1] + values[:, 3] * 1e-9,
                frequency=values[:, 2],
                clock=clock,
                half_life=half_life,
            )
            victim = list(kept)[int(order[0])]
            if not is_worth_keeping(policy, next_use, kept[victim][0]):
                fits = False
                break
            del kept[victim]
        if fits:
            clock += 1
            kept[block] = [next_use, clock, 1.0, place]
    return Outcome(len(reads), hits, fetched)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    reads=long_reads, sizes=st.lists(st.integers(1, 9), min_size=13, max_size=13), capacity=st.integers(1, 60)
)
def test_the_simulation_follows_the_rules(
    policy: EvictionPolicy, reads: list[int], sizes: list[int], capacity: int
) -> None:
    found = simulate(policy, reads, np.array(sizes, np.int64), capacity)
    assert found == by_the_rules(policy, reads, sizes, capacity)


def test_next_uses_end_at_the_horizon() -> None:
    reads = [0, 1, 0, 1, 0]
    assert next_uses(reads) == [2, 3, 4, NEVER, NEVER]
    assert next_uses(reads, horizon=[3, 3, 3, 5, 5]) == [2, NEVER, NEVER, NEVER, NEVER]


def test_a_count_halves_in_a_half_life() -> None:
    assert decayed(8.0, 20, 10) == pytest.approx(2.0)


def test_what_no_plan_speaks_of_goes_first_and_the_least_used_of_it() -> None:
    order = eviction_order(
        "belady",
        next_use=np.array([5, NEVER, 2, NEVER]),
        last_use=np.array([1, 9, 1, 3.0]),
        frequency=np.array([1, 1, 1, 2.0]),
        clock=10,
        half_life=1,
    )
    assert order.tolist() == [3, 1, 0, 2]


def test_only_who_knows_the_future_refuses() -> None:
    for new, kept in itertools.product([1.0, 5.0, NEVER], repeat=2):
        assert is_worth_keeping("lru", new, kept)
        assert is_worth_keeping("belady", new, kept) == (new < kept or new == kept == NEVER)
