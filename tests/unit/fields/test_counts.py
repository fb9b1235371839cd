"""Counts over the rows of whole datasets, of which most are one value for 10^8 rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardflow.fields.field import FieldContext
from shardflow.telemetry import StageCounters

SOME = np.arange(10) % 3 > 0
ALL, NONE = (np.broadcast_to(np.bool_(value), 10) for value in (True, False))


@pytest.mark.parametrize("used", [SOME, ALL, NONE])
@pytest.mark.parametrize("has", [~SOME, SOME, ALL, NONE])
def test_one_value_for_all_rows_counts_as_each_of_them_would(used: Any, has: Any) -> None:
    samples: Any = None
    short, long = (
        FieldContext(samples, [used, change(used)], StageCounters()) for change in (np.asarray, np.array)
    )
    assert short.num_samples == long.num_samples == 2 * np.count_nonzero(used)
    missing = 2 * np.count_nonzero(np.array(used) & ~np.array(has))
    assert short.count_missing([has, has]) == long.count_missing([np.array(has), np.array(has)]) == missing
