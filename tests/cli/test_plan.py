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
    options = itertools.chain(
        *((f"--{name.replace('_', '-')}", value) for name, value in values.items() if value is not None)
    )
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


# ---- lanes, budgets, summary ---------------------------------------------------------------------


def _keys(lines: list[dict[str, Any]]) -> Counter[str]:
    return Counter(key for line in lines for key in line["keys"] if key is not None)


@pytest.mark.parametrize(
    "more",
    [
        ("--lanes", 2, "--window", "64KiB"),
        ("--lanes", "auto"),
        ("--max-tokens", 60, "--max-samples", 4),
        ("--max-tokens", 60, "--packed", "--lanes", 2, "--over-budget", "truncate"),
    ],
)
def test_lanes_and_budgets_give_every_sample_once(
    call: Call, dataset: Path, more: tuple[object, ...]
) -> None:
    settings = {"micro_batch_size": None} if "--max-tokens" in more else {}
    lines = _plan(call, dataset, "--tail", "mask", "--json", *more, **settings).lines
    samples = Dataset.open(dataset).samples
    assert _keys(lines) == Counter(samples.sample_key(row) for row in samples.splits["train"])
    alone = _plan(call, dataset, "--tail", "mask", "--json", *more, **settings, world_size=1).lines
    assert _steps(alone) == _steps(lines)


def test_summary_compares_two_settings(call: Call, dataset: Path) -> None:
    more = ("--summary", "--compare", "max-tokens=60,lanes=2 world-size=3 packed")
    this, other = _plan(call, dataset, "--json", *more).lines
    assert (this["settings"], other["settings"]) == ("this", "other")
    assert this["plan"]["micro_batch_size"] == 2
    assert this["measured"]["padding_share"] is None
    assert (other["plan"]["max_tokens"], other["plan"]["lanes"]["lanes"]) == (60, 2)
    assert other["plan"]["world_size"] == 3
    assert 0 <= other["measured"]["padding_share"] < 1
    for line in (this, other):
        measured = line["measured"]
        assert measured["walked_share"] == 1
        assert measured["num_nodes"] == 1
        assert 0 < measured["shards_per_node"] <= measured["num_shards"]
        assert measured["bytes_per_node"] > 0
    text = _plan(call, dataset, *more).out
    for word in ("this", "other", "dropped", "shards a node reads", "imbalance", "efficiency"):
        assert word in text


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({}, ("--max-tokens", 60), "must be given, got both"),
        ({"micro_batch_size": None}, (), "must be given, got neither"),
        ({}, ("--window", "0"), "--window: must be a size"),
        ({}, ("--lanes", "many"), "--lanes: must be an integer"),
        ({}, ("--compare", "lanes=2"), "--compare must come with --summary"),
        ({}, ("--summary", "--compare", "colour=red"), "got 'colour=red'"),
        ({}, ("--summary", "--compare", "lanes=red"), "--compare: lanes must be"),
        ({}, ("--summary", "--compare", "tail=red"), "--compare: tail must be one of"),
        ({}, ("--summary", "--compare", "world-size=5"), "world_size must be at most"),
    ],
)
def test_wrong_settings_of_lanes_and_budgets_are_named(
    call: Call, dataset: Path, settings: dict[str, object], more: tuple[object, ...], said: str
) -> None:
    called = _plan(call, dataset, *more, **settings)
    assert called.code == 2
    assert said in called.err
    assert called.err.count("\n") == 1
