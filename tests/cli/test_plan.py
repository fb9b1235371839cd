"""``shardflow plan``: the lines another tool would check a training run with."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardflow.format import Dataset
from tests.cli.conftest import Call, Called
from tests.factories import make_dataset

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
        ({}, ("--packed",), "--packed must come with --max-tokens, got it without"),
        ({}, ("--tokenizer", "none.json"), "--tokenizer must come with --max-tokens"),
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


# Every quantity that lanes, budgets and worlds are chosen by.
SUMMARY_ROWS = (
    "steps",
    "dropped",
    "of them skipped by rule",
    "repeated",
    "padding slots of the tail",
    "over the budget",
    "tokens of the text",
    "estimated",
    "padding among tokens",
    "budget used",
    "imbalance, mean",
    "imbalance, 99 %",
    "imbalance, worst step",
    "steps of at most 1.05",
    "efficiency",
    "pooled",
    "shards open",
    "shards a node reads",
    "bytes a node reads",
    "shuffle, 1 is full",
)


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
    assert (this["text_tokens"], other["text_tokens"]) == (None, "estimated")
    for word in ("this", "other", *SUMMARY_ROWS):
        assert word in text


def test_a_size_is_compared_with_a_budget(call: Call, dataset: Path) -> None:
    """What only a budget knows does not go over to a size, and settings of the other side stay."""
    more = ("--max-tokens", 60, "--packed", "--summary", "--json")
    this, other = _plan(
        call, dataset, *more, "--compare", "micro-batch-size=2 lanes=1", micro_batch_size=None
    ).lines
    assert (this["plan"]["max_tokens"], other["plan"]["micro_batch_size"]) == (60, 2)
    for wrong, said in (
        ("micro-batch-size=2 max-samples=4", "max-samples must come"),
        ("max-tokens=9 micro-batch-size=2", "both"),
    ):
        called = _plan(call, dataset, *more, "--compare", wrong, micro_batch_size=None)
        assert called.code == 2
        assert said in called.err


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({}, ("--max-tokens", 60), "must be given, got both"),
        ({"micro_batch_size": None}, (), "must be given, got neither"),
        ({}, ("--window", "0"), "--window: must be a size"),
        ({}, ("--lanes", "many"), "--lanes: must be an integer"),
        ({}, ("--compare", "lanes=2"), "--compare must come with --summary"),
        ({}, ("--summary", "--compare", "colour=red"), "unrecognized arguments: --colour=red"),
        ({}, ("--summary", "--compare", "lanes=red"), "argument --lanes: must be"),
        ({}, ("--summary", "--compare", "tail=red"), "argument --tail: invalid choice"),
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


# ---- ugly input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        ("--lanes", 64),
        ("--lanes", 5, "--window", "1B"),
        ("--max-tokens", 1, "--lanes", 64),
        ("--max-tokens", 1, "--over-budget", "truncate"),
        ("--max-tokens", 1, "--packed"),
        ("--max-tokens", 10**6, "--max-samples", 10**6),
        ("--max-tokens", 60, "--image-tokens-per-slice", 10**5, "--max-slices", 10**5),
    ],
)
@pytest.mark.parametrize("samples_per_shard", [1, 100])
def test_few_samples_in_many_lanes_or_over_any_budget_come_once(
    call: Call, tmp_path: Path, more: tuple[object, ...], samples_per_shard: int
) -> None:
    dataset = tmp_path / "a"
    make_dataset(dataset, num_samples=7, samples_per_shard=samples_per_shard)
    settings = {"micro_batch_size": None} if "--max-tokens" in more else {}
    called = _plan(call, dataset, "--tail", "mask", "--json", *more, **settings)
    assert called.code == 0, called.err
    samples = Dataset.open(dataset).samples
    assert _keys(called.lines) == Counter(samples.sample_key(row) for row in range(7))
    assert _plan(call, dataset, "--tail", "mask", "--summary", *more, **settings).code == 0


def test_a_budget_that_skips_every_sample_leaves_no_step(call: Call, dataset: Path) -> None:
    more = ("--max-tokens", 1, "--over-budget", "skip")
    called = _plan(call, dataset, *more, micro_batch_size=None)
    assert called.code == 2
    assert "num_steps must be at least 1, got 0" in called.err


@pytest.mark.parametrize("damage", ["cut", "other", "flipped"])
def test_a_samples_table_that_does_not_fit_its_manifest(
    call: Call, dataset: Path, tmp_path: Path, damage: str
) -> None:
    (table,) = (dataset / "samples").glob("*.tbl")
    content = bytearray(table.read_bytes())
    table.chmod(0o644)
    if damage == "cut":
        table.write_bytes(content[:-8])
    elif damage == "other":
        make_dataset(tmp_path / "other", num_samples=99)
        table.write_bytes((tmp_path / "other" / "samples" / table.name).read_bytes())
    else:
        at = content.index(Dataset.open(dataset).samples.sample_key(0).encode())
        content[at] ^= 1
        table.write_bytes(content)
    called = _plan(call, dataset, "--json")
    assert called.code == 1
    assert "samples-000001.tbl" in called.err
    assert called.err.count("\n") == 1


def test_a_part_of_a_split_is_planned_and_named(call: Call, dataset: Path) -> None:
    lines = _plan(call, dataset, "--tail", "mask", "--json", "--where", "facts.num_slices >= 3").lines
    samples = Dataset.open(dataset).samples
    wanted = [row for row in samples.splits["train"] if samples.column("num_slices")[row] >= 3]
    held = sorted(key for line in lines for key in line["keys"] if key)
    assert held == sorted(samples.sample_key(row) for row in wanted)
    shown = _plan(call, dataset, "--where", "facts.num_slices >= 3", "--tail", "mask", "--summary")
    assert ", subset " in shown.out
    assert "is missing" not in shown.out
    assert _plan(call, dataset, "--where", "facts.num_slices >= 99").code == 2
    # Packing knows no day of these studies, so the first condition is neither true nor false.
    assert call("attach", dataset, "--facts").code == 0
    text = "facts.study_day > 5 or facts.num_slices >= 3"
    shown = _plan(call, dataset, "--where", text, "--tail", "mask", "--summary")
    num_missing = len(samples.splits["train"]) - len(wanted)
    assert f"; {num_missing} samples left out because a value is missing" in shown.out


def test_a_blend_is_planned_with_its_components(call: Call, dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "blend.toml"
    file.write_text(
        f'[[component]]\ndataset = "{dataset}"\nrepeat = 2.5\n'
        f'[[component]]\ndataset = "{dataset}"\nsplit = "val"\n',
        encoding="utf-8",
    )
    sizes = ("--micro-batch-size", 2, "--micro-batches-per-step", 3, "--world-size", 2)
    options = (*sizes, "--seed", 7, "--tail", "mask", "--epoch", 1)
    lines = call("plan", "--blend", file, *options, "--json").lines
    assert all(set(line) == {"step", "rank", "micro", "keys", "weights", "components"} for line in lines)
    held = Counter(place for line in lines for place in line["components"] if place >= 0)
    assert held == {0: 33, 1: 3}
    shown = call("plan", "--blend", file, *options, "--summary", "--lanes", 2, "--window", "1KiB").out
    assert "mix of a step off by, most" in shown
    for head in ("samples", "draws", "share", "repeat", "whole passes", "rest of one", "start of one"):
        assert head in shown  # not cut where no terminal says how wide it is
    numbers = call("plan", "--blend", file, *options, "--summary", "--json").lines[0]["components"]
    assert [found["num_draws"] for found in numbers] == [33, 3]
    # Draws 33 to 65 of 13 samples: 6 finish the third pass, one whole pass, a start of 1.
    first = numbers[0]
    assert (first["num_finished"], first["num_whole_passes"], first["num_begun"]) == (6, 2, 1)
    for more in ((dataset,), ("--split", "train"), ("--where", "facts.rows > 1"), ("--keys", "wanted.txt")):
        assert call("plan", "--blend", file, *options, *more).code == 2
    assert call("plan", *options).code == 2
    assert "--blend" in call("plan", file, "--split", "train", *options).err


# ---- tokens that are counted ---------------------------------------------------------------------


def test_budgets_are_filled_by_counts_where_a_tokenizer_is_named(
    call: Call, dataset: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    # Whole words: what a report has as tokens is easily counted.
    words: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
    }
    words |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    words |= {"model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}
    tokenizer.write_text(json.dumps(words), encoding="utf-8")
    more = ("--max-tokens", 60, "--tail", "mask", "--lanes", 2, "--tokenizer", tokenizer)

    called = _plan(call, dataset, *more, micro_batch_size=None)
    assert called.code == 2
    assert "run: shardflow tokenize" in called.err

    counted = call("tokenize", dataset, "--tokenizer", tokenizer, "--json").last_line
    opened = Dataset.open(dataset)
    texts = [opened.read_fields(row, ["report.txt"])["report.txt"].decode() for row in range(16)]
    lengths = [len(re.findall(r"\w+|[^\w\s]+", text)) for text in texts]
    assert (counted["num_samples"], counted["num_tokens"], counted["num_shards_kept"]) == (
        16,
        sum(lengths),
        0,
    )
    again = call("tokenize", dataset, "--tokenizer", tokenizer)
    assert again.code == 0
    assert "done before" in again.out

    lines = _plan(call, dataset, *more, "--json", micro_batch_size=None).lines
    by_key = {opened.samples.sample_key(row): lengths[row] + 2 for row in range(16)}
    assert sorted(_keys(lines)) == sorted(opened.samples.sample_key(row) for row in opened.splits["train"])
    for line in lines:
        held = [by_key[key] for key in line["keys"] if key is not None]
        assert len(held) <= 1 or len(held) * max(held) <= 60
    (summary,) = _plan(call, dataset, *more, "--summary", "--json", micro_batch_size=None).lines
    assert summary["text_tokens"] == "counted"


def test_a_tokenizer_that_is_not_there(call: Call, dataset: Path, tmp_path: Path) -> None:
    missing = ("--tokenizer", tmp_path / "none")
    for called in (
        call("tokenize", dataset, *missing),
        _plan(call, dataset, "--max-tokens", 9, *missing, micro_batch_size=None),
    ):
        assert called.code == 2
        assert "is not a tokenizer.json or a folder with one" in called.err
