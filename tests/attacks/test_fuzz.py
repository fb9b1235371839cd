"""Mutated inputs of every reader: a result, or an error of ours; `make fuzz` looks on with libFuzzer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.targets import TARGETS, found_inputs, make_target, mutations

pytestmark = pytest.mark.filterwarnings("ignore")  # of parsers, about what is wrong with an input


@pytest.mark.parametrize(
    "number", [pytest.param(40, id="few"), pytest.param(4000, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", TARGETS)
def test_reader_answers_whatever_the_bytes_are(name: str, number: int, tmp_path: Path) -> None:
    target = make_target(name, tmp_path)
    seeds = list(target.seeds())
    for data in (*seeds, *found_inputs(name), *mutations(seeds, number, name)):
        target.run(data)
