"""``shardflow plan``: the lines another tool would check a training run with."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardflow.shards import Dataset
from tests.cli.conftest import Call, Called

pytestmark = pytest.mark.fast

NAMES = ("split", "seed", "epoch", "micro_batch_size", "micro_batches_per_step", "world_size")


def _plan(call: Call, dataset: Path, *more: object, **settings: object) -> Called:
    values = dict(zip(NAMES, ("train", 7, 0, 2, 3, 2), strict=True)) | settings
    options = itertools.chain(*((f"--{name.replace('_', '-')}", value) for name, value in values.items()))
    return call("plan", dataset, *options, *more)


def _steps(lines: list[dict[str, Any]]) -> dict[int, dict[int, tuple[list[str | None], list[int]]]]:
    """What each step holds, without who runs it and without fillers."""
    steps: dict[int, dict[int, tuple[list[str | None], list[int]]]] = {}
    for line in lines:
        if line["micro"] < 3:
            steps.setdefault(line["step"], {})[line["micro"]] = (line["keys"], line["weights"])
    return steps


def test_one_line_a_micro_batch_with_fillers_last(call: Call, dataset: Path) -> None:
    lines = _plan(call, dataset, "--json").lines
    assert [(line["step"], line["rank"], line["micro"]) for line in lines] == [
        (step, micro % 2, micro) for step in range(2) for micro in range(4)
    ]
    for line in lines:
        assert set(line) == {"step", "rank", "micro", "keys", "weights"}
        assert len(line["keys"]) == len(line["weights"]) == 2
        filler = line["micro"] >= 3
        assert all((key is None) == filler for key in line["keys"])
        assert line["weights"] == ([0, 0] if filler else [1, 1])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_do_not_depend_on_the_world_size(call: Call, dataset: Path, world_size: int) -> None:
    alone = _steps(_plan(call, dataset, "--tail", "mask", "--json", world_size=1).lines)
    assert _steps(_plan(call, dataset, "--tail", "mask", "--json", world_size=world_size).lines) == alone


def test_mask_gives_every_sample_once(call: Call, dataset: Path) -> None:
    lines = _plan(call, dataset, "--tail", "mask", "--json").lines
    pairs = [pair for line in lines for pair in zip(line["keys"], line["weights"], strict=True)]
    assert all((key is None) == (weight == 0) for key, weight in pairs)
    samples = Dataset.open(dataset).samples
    expected = {samples.sample_key(row) for row in samples.splits["train"]}
    assert Counter(key for key, _ in pairs if key) == Counter(expected)


def test_repeat_repeats_at_full_weight(call: Call, dataset: Path) -> None:
    lines = _plan(call, dataset, "--tail", "repeat", "--json", world_size=3).lines
    keys = Counter(key for line in lines for key in line["keys"])
    assert all(line["weights"] == [1, 1] for line in lines)
    assert len(keys) == 13
    assert keys.total() == 18


def test_part_of_an_epoch_is_a_part_of_its_lines(call: Call, dataset: Path) -> None:
    whole = _plan(call, dataset, "--json", micro_batches_per_step=2).lines
    part = _plan(call, dataset, "--json", "--from-step", 1, "--steps", 1, micro_batches_per_step=2).lines
    assert part == [line for line in whole if line["step"] == 1]
    assert _plan(call, dataset, "--json", "--from-step", 3, micro_batches_per_step=2).lines == []


def test_text_is_the_plan_in_numbers(call: Call, dataset: Path) -> None:
    called = _plan(call, dataset)
    assert called.code == 0
    for part in ("13 samples", "75.0%", "drop"):
        assert part in called.out


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({"split": "test"}, (), "--split must be one of train, val, got 'test'"),
        ({"world_size": 4}, (), "world_size must be at most"),
        ({"micro_batch_size": 0}, (), "--micro-batch-size: must be an integer of at least 1, got '0'"),
        ({"micro_batch_size": 100}, (), "step"),
        ({"seed": "x"}, (), "--seed: must be an integer of at least 0, got 'x'"),
        ({}, ("--from-step", 9), "--from-step must be at most 2"),
        ({}, ("--tail", "wrap"), "invalid choice: 'wrap'"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_settings_are_named(
    call: Call, dataset: Path, settings: dict[str, object], more: tuple[object, ...], said: str, as_json: bool
) -> None:
    called = _plan(call, dataset, *more, *(["--json"] if as_json else []), **settings)
    assert called.code == 2
    assert said in called.err
    assert called.err.count("\n") == 1
    if as_json:
        assert said in called.lines[0]["error"]
    else:
        assert called.out == ""
