"""Items 8 to 12 of `order.md`, written a second time from that page alone: lanes, windows, budgets.

Lists and whole numbers, nothing of shardflow and no NumPy in what is compared; slow, and therefore easy to
check by eye. What it plans is compared with the library on random epochs and with ``order-lanes.json``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from shardflow.errors import PlanError
from shardflow.sampling import BatchSpec, CostRule, EpochPlan, RankSchedule, SampleLayout, TokenBudget
from shardflow.sampling.budget import OVER_BUDGET
from shardflow.sampling.spec import TAILS
from tests.golden.test_order import LANE_SPECS, plain_layout
from tests.golden.test_order_page import WORD, derive, digest, permutation, recorded
from tests.layouts import DATASET_ID, layout_of

Micro = list[int]
"""Rows of a micro-batch; -1 in padding slots."""


@dataclass(frozen=True)
class Sample:
    """A row of the table, as the page speaks of it."""

    row: int
    first_byte: int
    num_bytes: int
    tokens: int


@dataclass(frozen=True)
class Page:
    """An epoch with lanes by `order.md`."""

    shards: list[list[Sample]]
    dataset_id: str
    batch: dict[str, Any]
    seed: int
    epoch: int
    walk_label: ClassVar[str] = "chunk-order"

    def key(self, label: str, *counters: int) -> int:
        return derive(self.seed, label, *counters)

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.shards))

    def permuted(self, values: list[Any], key: int) -> list[Any]:
        at = permutation(len(values), key)
        return [values[at(position)] for position in range(len(values))]

    # ---- 8: chunks -------------------------------------------------------------------------------

    def lanes(self, targets: list[int] | None = None) -> list[list[list[Sample]]]:
        """Return the chunks of each lane, in the order of the line; ``targets`` are the cuts of item 15."""
        num_lanes, n = self.batch["lanes"], self.num_samples
        line = self.permuted(self.shards, derive(self.seed, "lane-shards", int(self.dataset_id, 16)))
        if "budget" in self.batch:
            sums = list(accumulate(sample.tokens for shard in line for sample in shard))
            if targets is None:
                targets = [lane * sums[-1] // num_lanes for lane in range(1, num_lanes)]
            cuts = [sum(s < target for s in sums) for target in targets]
        else:
            cuts = [lane * n // num_lanes for lane in range(1, num_lanes)] if targets is None else targets
        found: list[list[list[Sample]]] = [[] for _ in range(num_lanes)]
        place = 0
        for shard in line:
            lane_of = [sum(cut <= place + i for cut in cuts) for i in range(len(shard))]
            for lane in sorted(set(lane_of)):
                piece = [sample for sample, of in zip(shard, lane_of, strict=True) if of == lane]
                s = len(piece)
                p = min(s, -(-32 * num_lanes * s // n))
                found[lane] += [piece[i * s // p : (i + 1) * s // p] for i in range(p)]
            place += len(shard)
        return found

    # ---- 9: windows ------------------------------------------------------------------------------

    def windows(self, lane: int, chunks: list[list[Sample]]) -> list[list[Sample]]:
        """Return the windows of a lane, each in its order of the epoch."""
        samples = [
            sample
            for chunk in self.permuted(chunks, self.key(self.walk_label, self.epoch, lane))
            for sample in chunk
        ]
        if not samples:
            return []
        begins = [0, *accumulate(sample.num_bytes for sample in samples)]
        b, w = begins.pop(), self.batch["window_bytes"]
        k = min(len(samples), max(1, (2 * b + w) // (2 * w)))
        firsts = [next((j for j, at in enumerate(begins) if at >= i * b // k), len(begins)) for i in range(k)]
        bounds = sorted({*firsts, len(samples)})
        return [
            self.permuted(samples[start:stop], self.key("window-order", self.epoch, lane, number))
            for number, (start, stop) in enumerate(pairwise(bounds))
        ]

    # ---- 10: fixed size --------------------------------------------------------------------------

    def steps(self) -> list[list[Micro]]:
        """Return the micro-batches of each step."""
        lanes = [self.windows(lane, chunks) for lane, chunks in enumerate(self.lanes())]
        if "budget" in self.batch:
            return self.budget_steps(lanes)
        size, per_step, num_lanes = (
            self.batch[name] for name in ("micro_batch_size", "micro_batches_per_step", "lanes")
        )
        rows = [[sample.row for window in lane for sample in window] for lane in lanes]
        unit = per_step // math.gcd(per_step, num_lanes)
        common = min(len(lane) // size for lane in rows) // unit * unit
        order = [
            row for g in range(common) for lane in rows for row in lane[g * size : (g + 1) * size]
        ]  # micro-batch g of each lane in turn
        pool = [row for lane in rows for row in lane[common * size :]]
        order += self.permuted(pool, self.key("pool-order", self.epoch))
        n, tail = len(order), self.batch["tail"]
        num_steps = n // (size * per_step) if tail == "drop" else -(-n // (size * per_step))
        slots = [
            -1 if s >= n and tail == "mask" else order[s % n] for s in range(num_steps * size * per_step)
        ]
        micros = [slots[i : i + size] for i in range(0, len(slots), size)]
        return [micros[i : i + per_step] for i in range(0, len(micros), per_step)]

    # ---- 11: budgets -----------------------------------------------------------------------------

    def budget_steps(self, lanes: list[list[list[Sample]]]) -> list[list[Micro]]:
        per_step, num_lanes, tail = (self.batch[name] for name in ("micro_batches_per_step", "lanes", "tail"))
        walks = [
            [micro for number, window in enumerate(lane) for micro in self.walk(place, number, window)]
            for place, lane in enumerate(lanes)
        ]
        total = sum(map(len, walks))
        mean = max(1, total // sum(map(len, lanes)))
        unit = per_step // math.gcd(per_step, num_lanes)
        units = min(map(len, walks)) // unit
        num_rounds = max(1, min(units, units * unit // mean))
        order: list[list[Sample]] = []
        for r in range(num_rounds):
            start, stop = unit * (r * units // num_rounds), unit * ((r + 1) * units // num_rounds)
            ranked = [sorted(walk[start:stop], key=self.micro_cost) for walk in walks]
            places = [ranked[p % num_lanes][p // num_lanes] for p in range((stop - start) * num_lanes)]
            steps = [places[i : i + per_step] for i in range(0, len(places), per_step)]
            if steps:
                key = self.key("round-steps", self.epoch, r)
                order += [micro for step in self.permuted(steps, key) for micro in step]
        left = [walk[units * unit :] for walk in walks]
        deepest = max(map(len, left))
        pool = [walk[depth] for depth in range(deepest) for walk in left if depth < len(walk)]
        num_steps = len(pool) // per_step
        num_rounds = max(1, num_steps * per_step // (mean * num_lanes))
        cuts = [*(q * num_steps // num_rounds * per_step for q in range(num_rounds)), len(pool)]
        for q in range(num_rounds):
            mixed = pool[cuts[q] : cuts[q + 1]]
            if not mixed:
                continue
            mixed = self.permuted(mixed, self.key("pool-order", self.epoch, q))
            whole = len(mixed) // per_step * per_step
            best = sorted(mixed[:whole], key=self.micro_cost)
            steps = [best[i : i + per_step] for i in range(0, whole, per_step)]
            if steps:
                steps = self.permuted(steps, self.key("pool-steps", self.epoch, q))
            order += [micro for step in steps for micro in step] + mixed[whole:]
        num_steps = total // per_step if tail == "drop" else -(-total // per_step)
        rows = [[sample.row for sample in micro] for micro in order]
        micros = [
            [-1] if g >= total and tail == "mask" else rows[g % total] for g in range(num_steps * per_step)
        ]
        return [micros[i : i + per_step] for i in range(0, len(micros), per_step)]

    def walk(self, lane: int, number: int, window: list[Sample]) -> list[list[Sample]]:
        """Return the micro-batches of a window in the order in which its lane walks them."""
        budget = self.batch["budget"]
        most, policy = budget["max_tokens"], budget["over_budget"]
        if policy == "skip":
            window = [sample for sample in window if sample.tokens <= most]
        if policy == "truncate":
            window = [replace(sample, tokens=min(sample.tokens, most)) for sample in window]
        window = sorted(window, key=lambda sample: -sample.tokens)
        if not window:
            return []
        micros = self.evenly(window)
        start = self.key("window-walk", self.epoch, lane, number)
        words = [((i + 1) * 0x9E3779B97F4A7C15 + start) & WORD for i in range(len(micros))]
        return [micros[i] for i in sorted(range(len(micros)), key=lambda i: words[i])]

    def evenly(self, window: list[Sample]) -> list[list[Sample]]:
        budget = self.batch["budget"]
        tokens, samples = budget["max_tokens"], budget["max_samples"]
        full = self.fill(window, tokens, samples)
        last, c = full[-1], len(full)
        if budget["padded"]:
            h, r = len(last), max(1, min(samples, tokens // last[0].tokens))
        else:
            held = min(tokens, sum(sample.tokens for sample in last))
            by_samples = len(last) * tokens >= held * samples
            h, r = (len(last), samples) if by_samples else (held, tokens)
        whole, part = c * r, (c - 1) * r + h
        for j in range(4):
            share = part + (whole - part) * j // 4
            found = self.fill(window, -(-tokens * share // whole), -(-samples * share // whole))
            if len(found) == c:
                return found
        return full

    def fill(self, window: list[Sample], tokens: int, samples: int) -> list[list[Sample]]:
        micros: list[list[Sample]] = []
        for sample in window:
            if micros:
                held = [*micros[-1], sample]
                sums = sum(one.tokens for one in held)
                taken = len(held) * held[0].tokens if self.batch["budget"]["padded"] else sums
                if len(held) <= samples and taken <= tokens:
                    micros[-1] = held
                    continue
            micros.append([sample])
        return micros

    def micro_cost(self, micro: list[Sample]) -> int:
        q = self.batch["budget"]["cost"]["quadratic_tokens"]
        costs = [sample.tokens + (sample.tokens**2 // q if q else 0) for sample in micro]
        return len(costs) * costs[0] if self.batch["budget"]["padded"] else sum(costs)


def tokens_of(batch: dict[str, Any], text_bytes: int, num_slices: int) -> int:
    """Item 8 names the rule's numbers by their names in the batch spec."""
    if "budget" not in batch:
        return 1
    cost = batch["budget"]["cost"]
    text = -(-text_bytes * cost["text_tokens_per_1000_bytes"] // 1000)
    if cost["max_text_tokens"]:
        text = min(text, cost["max_text_tokens"])
    image = min(num_slices, cost["max_slices"]) * cost["image_tokens_per_slice"]
    tokens: int = cost["tokens_per_sample"] + text + image
    return tokens


def page_of(layout: SampleLayout, spec: BatchSpec, seed: int, epoch: int) -> Page:
    """Turn a layout into lists."""
    batch = spec.to_json()
    shards: list[list[Sample]] = []
    for shard in range(layout.num_shards):
        first, last = layout.shard_rows[shard : shard + 2].tolist()
        begins = [*layout.offset_bytes[first:last].tolist(), int(layout.shard_end_bytes[shard])]
        facts = [layout.facts[name][first:last].tolist() for name in ("text_bytes", "num_slices")]
        shards.append(
            [
                Sample(first + i, begins[i], begins[i + 1] - begins[i], tokens_of(batch, *map(int, fact)))
                for i, fact in enumerate(zip(*facts, strict=True))
            ]
        )
    return Page(shards, layout.dataset_id, batch, seed, epoch)


@st.composite
def specs(draw: st.DrawFn) -> BatchSpec:
    budget = None
    if draw(st.integers(0, 2)):
        budget = TokenBudget(
            max_tokens=draw(st.sampled_from([150, 700, 2048, 16_384, 2**31 - 2])),
            max_samples=draw(st.sampled_from([1, 5, 40, 2**24])),
            padded=draw(st.booleans()),
            over_budget=draw(st.sampled_from(OVER_BUDGET)),
            cost=CostRule(
                max_text_tokens=draw(st.sampled_from([0, 500])),
                image_tokens_per_slice=draw(st.sampled_from([0, 16])),
                max_slices=8,
                quadratic_tokens=draw(st.sampled_from([0, 1024])),
            ),
        )
    return BatchSpec(
        micro_batch_size=draw(st.integers(1, 4)) if budget is None else 0,
        budget=budget,
        micro_batches_per_step=draw(st.integers(1, 9)),
        tail=draw(st.sampled_from(TAILS)),
        lanes=draw(st.integers(1, 9)),
        window_bytes=draw(st.sampled_from([1, 4000, 20_000, 100_000, 2**40])),
    )


def compare(layout: SampleLayout, spec: BatchSpec, seed: int, epoch: int) -> None:
    expected = page_of(layout, spec, seed, epoch).steps()
    if not expected:
        with pytest.raises(PlanError, match="num_steps must be at least 1"):
            EpochPlan(layout.population, spec, seed=seed, epoch=epoch, layout=layout)
        return
    plan = EpochPlan(layout.population, spec, seed=seed, epoch=epoch, layout=layout)
    assert plan.lane_plan is not None
    rounds = plan.lane_plan.micros.interleave
    event(f"{spec.kind}: {min(2, len(rounds.bounds) - 1) if rounds.num_lane_steps else 'no'} rounds")
    assert plan.num_steps == len(expected)
    for step, micros in enumerate(expected):
        found = [plan.micro_batch(step, micro).rows.tolist() for micro in range(len(micros))]
        assert found == micros, f"step {step}"


@settings(max_examples=150)
@given(
    specs(),
    st.integers(1, 400),
    st.integers(1, 60),
    st.integers(0, 2**63 - 1),
    st.integers(0, 9),
)
def test_the_page_says_the_whole_order(
    spec: BatchSpec, num_samples: int, num_shards: int, seed: int, epoch: int
) -> None:
    layout = layout_of(num_samples, num_shards, start=seed % 3, seed=seed % 1000)
    assert layout.dataset_id == DATASET_ID
    compare(layout, spec, seed, epoch)


def test_the_recorded_orders_follow_from_the_page() -> None:
    for name, expected in recorded("order-lanes")["epochs"].items():
        kind, shards, tail = name.rsplit(", ", 2)
        spec = replace(LANE_SPECS[kind], tail=tail.removeprefix("tail "))
        steps = page_of(plain_layout(3001, int(shards.split()[0])), spec, 7, 2).steps()
        rows = [row for step in steps for micro in step for row in (*micro, -2)]
        assert f"{len(steps)} steps {digest(rows)}" == expected, name


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_nodes_run_the_micro_batches_of_their_lanes(per_step: int, lanes: int, data: st.DataObject) -> None:
    """Item 12."""
    group = math.gcd(per_step, lanes)
    num_nodes = data.draw(st.sampled_from([d for d in range(1, group + 1) if group % d == 0]))
    ranks_per_node = data.draw(st.integers(1, per_step // num_nodes))
    world_size = num_nodes * ranks_per_node
    schedule = RankSchedule(per_step, world_size, lanes=lanes, ranks_per_node=ranks_per_node)
    for rank in range(world_size):
        node, place = divmod(rank, ranks_per_node)
        cards = [m for m in range(per_step) if m % group // (group // num_nodes) == node]
        mine = [m for m in schedule.micros(rank) if not schedule.is_padding(m)]
        assert mine == cards[place::ranks_per_node]
