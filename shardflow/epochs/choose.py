"""How many lanes a population bears: as many as leave little for the pool, and fill micro-batches well."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np

from shardflow.epochs.layout import SampleLayout
from shardflow.epochs.spec import BatchSpec

__all__ = ["MOST_LANES", "choose_lanes", "with_lanes"]

MOST_LANES = 64
"""Enough for 64 nodes to read shards of their own; more lanes only keep more windows open."""

_POOL_PARTS = 20  # at most one twentieth of the samples is pooled
# A lane of fewer micro-batches under a budget pads more than 1 % of report-like lengths, and its longest ones
# meet no equals.
_MICRO_BATCHES_PER_LANE = 128
_PROBED_ROWS = 2**16


def choose_lanes(layout: SampleLayout, spec: BatchSpec) -> int:
    """Return the largest power of two, at most ``MOST_LANES``, at which 5 % or less is pooled; else 1.

    Under a token budget a lane also has about 128 micro-batches or more: padding and balance need windows of
    that many. A function of the data and the sizes of a step, and never of the world; the size of a
    micro-batch under a budget is estimated from some of the lengths.

    Args:
        layout: The population.
        spec: How steps are formed; its lanes are not looked at.
    """
    size, per_step = _micro_batch_size(layout, spec), spec.micro_batches_per_step
    num_lanes = MOST_LANES
    if spec.budget is not None:
        most = max(1, layout.num_drawn // (size * _MICRO_BATCHES_PER_LANE))
        num_lanes = min(num_lanes, 2 ** (most.bit_length() - 1))
    while num_lanes > 1:
        unit = size * (per_step // gcd(per_step, num_lanes))
        num_pooled = layout.num_drawn - layout.num_drawn // num_lanes // unit * unit * num_lanes
        if num_pooled * _POOL_PARTS <= layout.num_drawn:
            break
        num_lanes //= 2
    return num_lanes


def with_lanes(spec: BatchSpec, layout: SampleLayout) -> BatchSpec:
    """Return a spec with as many lanes as :func:`choose_lanes` finds."""
    return replace(spec, lanes=choose_lanes(layout, spec))


def _micro_batch_size(layout: SampleLayout, spec: BatchSpec) -> int:
    if spec.budget is None:
        return spec.micro_batch_size
    rows = layout.population
    probed = np.unique(np.linspace(rows.start, rows.stop - 1, min(len(rows), _PROBED_ROWS), dtype=np.int64))
    facts = {name: column[probed] for name, column in layout.facts.items()}
    mean = max(1, int(spec.budget.cost.lengths(facts).sum()) // len(probed))
    return max(1, min(spec.budget.max_samples, spec.budget.max_tokens // mean))
