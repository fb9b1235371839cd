"""Sweeps over many like cases: some always, the others in the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Return the cases of a parameter; those that are not in ``always`` are slow tests.

    Args:
        cases: All, each a value or a tuple of values.
        always: Cases that `make test` runs; each must be one of all.
    """
    found = list(cases)
    unknown = [one for one in always if one not in found]
    assert not unknown, unknown
    return [
        one
        if one in always
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for one in found
    ]
