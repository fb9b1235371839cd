"""Items 13 to 16 of `order.md`, written a second time from it: subsets and blends in lanes.

Lists and whole numbers as in ``test_lanes_page.py``, which says what windows, rounds and budgets are; it is
compared with the library on random blends and with ``order-blends.json``. The full shuffle is in
``test_order_page.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.errors import PlanError
from shardflow.sampling import BatchSpec, EpochPlan, SampleLayout
from shardflow.sampling.blend import Blend, BlendComponent, blend_layout, draws_by_repeat
from tests.golden.test_lanes_page import Micro, Page, Sample, specs, tokens_of
from tests.golden.test_order_blends import PARTS, SPECS, made
from tests.golden.test_order_page import WORD, digest, recorded
from tests.properties.test_blend_plans import component_of

Piece = list[Sample]
Part = tuple[BlendComponent, SampleLayout]


@dataclass(frozen=True)
class BlendPage(Page):
    """An epoch of a blend by `order.md`; ``shards`` and ``dataset_id`` are not used."""

    components: list[Page]
    """The shards of each component, its samples in their blended rows."""
    draws: list[int]
    """d_c."""
    walk_label: ClassVar[str] = "blend-order"

    # ---- 15: lanes of a blend --------------------------------------------------------------------

    def lanes(self, targets: list[int] | None = None) -> list[list[Piece]]:
        """Return the pieces of each lane in this epoch, component after component, pass after pass."""
        assert targets is None
        num_lanes = self.batch["lanes"]
        weighs = "budget" in self.batch
        lengths = []
        for page, draws in zip(self.components, self.draws, strict=True):
            total = sum(sample.tokens if weighs else 1 for shard in page.shards for sample in shard)
            lengths.append(total * draws // page.num_samples)
        cuts = [lane * sum(lengths) // num_lanes for lane in range(1, num_lanes)]
        words = [(lane + 1) * 0x9E3779B97F4A7C15 & WORD for lane in range(num_lanes)]
        lane_at = sorted(range(num_lanes), key=words.__getitem__)
        found: list[list[Piece]] = [[] for _ in range(num_lanes)]
        start = 0
        for number, (page, draws, length) in enumerate(
            zip(self.components, self.draws, lengths, strict=True)
        ):
            inside = [cut - start for cut in cuts if start < cut < start + length]
            first = sum(cut <= start for cut in cuts)
            cut_at = [x * page.num_samples // draws for x in inside]
            parts = replace(page, batch={**self.batch, "lanes": len(inside) + 1}).lanes(cut_at)
            sizes = [sum(map(len, chunks)) for chunks in parts]
            for part, chunks in enumerate(parts):
                lane = lane_at[first + part]
                begin, end = (given_of(sizes, epoch * draws)[part] for epoch in (self.epoch, self.epoch + 1))
                found[lane] += self.drawn(chunks, begin, end, number, lane)
            start += length
        return found

    # ---- 16: walk --------------------------------------------------------------------------------

    def drawn(self, chunks: list[Piece], begin: int, end: int, component: int, lane: int) -> list[Piece]:
        """Return the draws ``[begin, end)`` of a part, cut from the lines of its passes."""
        size = sum(map(len, chunks))
        pieces = []
        for number in range(begin // size, -(-end // size)) if size else ():
            place = number * size
            for chunk in self.permuted(chunks, self.key("blend-chunks", component, lane, number)):
                piece = chunk[max(begin - place, 0) : max(end - place, 0)]
                pieces += [piece] if piece else []
                place += len(chunk)
        return pieces


def given_of(sizes: list[int], num_draws: int) -> list[int]:
    """Return how many of the first draws of a component each of its parts has given."""
    passes, rest = divmod(num_draws, sum(sizes))
    due = [(((2 * j + 1) << 31) // size, part) for part, size in enumerate(sizes) for j in range(size)]
    first = [part for _, part in sorted(due)[:rest]]
    return [passes * size + first.count(part) for part, size in enumerate(sizes)]


def shards_of(rows: list[int], layout: SampleLayout, batch: dict[str, Any]) -> list[Piece]:
    """Turn the layout of some rows into lists, with the bytes of item 13."""
    shards: list[Piece] = []
    bounds = (layout.shard_rows - layout.population.start).tolist()
    for shard, (first, last) in enumerate(pairwise(bounds)):
        at = layout.population.start + first
        b, n = int(layout.shard_end_bytes[shard]) - int(layout.offset_bytes[at]), last - first
        begins = [j * (b // n) + min(j, b % n) for j in range(n + 1)]
        facts = [layout.facts[name][at : at + n].tolist() for name in ("text_bytes", "num_slices")]
        shards.append(
            [
                Sample(
                    rows[first + j], begins[j], begins[j + 1] - begins[j], tokens_of(batch, *map(int, fact))
                )
                for j, fact in enumerate(zip(*facts, strict=True))
            ]
        )
    return shards


def steps_of(parts: list[Part], spec: BatchSpec, seed: int, epoch: int) -> list[list[Micro]]:
    """Return the steps of a blend by the page."""
    batch, base, pages = spec.to_json(), 0, []
    for component, layout in parts:
        shards = shards_of([base + row for row in component.rows], layout, batch)
        pages.append(Page(shards, component.dataset_id, batch, seed, epoch))
        base += component.num_table_rows
    draws = [component.count for component, _ in parts]
    return BlendPage([], "", batch, seed, epoch, components=pages, draws=draws).steps()


@st.composite
def blends(draw: st.DrawFn) -> list[Part]:
    parts = []
    for number in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 120))
        count = max(1, draws_by_repeat(size, draw(st.sampled_from([0.02, 0.3, 1.0, 2.5, 4.0]))))
        parts.append(component_of(number, size, count, draw(st.booleans()), draw(st.integers(1, 12))))
    return parts


@settings(max_examples=60, deadline=None)
@given(blends(), specs(), st.integers(0, 2**63 - 1), st.integers(0, 30))
def test_the_page_says_the_whole_order(parts: list[Part], spec: BatchSpec, seed: int, epoch: int) -> None:
    expected = steps_of(parts, spec, seed, epoch)
    blend = Blend([component for component, _ in parts])
    layout = blend_layout(blend, [found for _, found in parts])
    if not expected:
        with pytest.raises(PlanError, match="num_steps must be at least 1"):
            EpochPlan(blend, spec, seed=seed, epoch=epoch, layout=layout)
        return
    plan = EpochPlan(blend, spec, seed=seed, epoch=epoch, layout=layout)
    assert plan.num_steps == len(expected)
    for step, micros in enumerate(expected):
        found = [plan.micro_batch(step, micro).rows.tolist() for micro in range(len(micros))]
        assert found == micros, f"step {step}"


def padded_digest(steps: list[list[Micro]]) -> str:
    rows = []
    for step in steps:
        longest = max(map(len, step))
        rows += [row for micro in step for row in (*micro, *[-1] * (longest - len(micro)))]
    return f"{len(steps)} steps {digest(rows)}"


@pytest.mark.parametrize("name", ["lanes", "budget"])
def test_the_recorded_orders_follow_from_the_page(name: str) -> None:
    parts, values = [made(*part) for part in PARTS], recorded("order-blends")
    for epoch in (0, 1, 2, 17):
        steps = steps_of(parts, SPECS[name], 7, epoch)
        assert padded_digest(steps) == values["blends"][f"{name}, epoch {epoch}"]
    component, layout = parts[1]
    batch = SPECS[name].to_json()
    for epoch in (0, 3):
        shards = shards_of(list(component.rows), layout, batch)
        steps = Page(shards, component.dataset_id, batch, 7, epoch).steps()
        assert padded_digest(steps) == values["subsets"][f"{name}, epoch {epoch}"]
