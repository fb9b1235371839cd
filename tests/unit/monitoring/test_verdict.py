"""The rules of verdicts, each on intervals made by hand: where it holds, where it just does not, and its
opposite.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardflow.monitoring.verdict.judging import COMPUTE, RULES, judge
from shardflow.telemetry import Interval, Verdict
from tests.interval_factory import make_interval, make_run

pytestmark = pytest.mark.fast

_BUSY: dict[str, float] = {"idle": 0.0}
Arguments = dict[str, Any]
_CONFIG = {
    "fields.image.resolution": "full",
    "image.rows": 224,
    "image.columns": 224,
    "fields.image.size": [224, 224],
    "fields.image.dtype": "float32",
    "fields.report.type": "text",
    "batch.micro_batches_per_step": 8,
    "parallel.accumulation": "whole",
    "run.checkpoint_every_steps": 10,
    "run.evaluate_every_steps": 0,
    "cache.max_bytes": 0,
    "cache.ram_bytes": 0,
}


def _verdicts(interval: Interval, **config: Any) -> list[Verdict]:
    return judge(make_run(interval), config={**_CONFIG, **config})


def _codes(**arguments: Any) -> list[str]:
    return [one.code for one in _verdicts(make_interval(**arguments))]


def _advised(verdict: Verdict) -> dict[str, tuple[str, str]]:
    return {one.setting: (one.old, one.new) for one in verdict.advice if one.setting}


@pytest.mark.parametrize(
    ("queued_s", "settings"), [(1.0, ["loader.servers"]), (0.1, ["loader.num_threads", "loader.servers"])]
)
def test_data_servers_are_added_where_requests_queue(queued_s: float, settings: list[str]) -> None:
    stages = _BUSY | {"service": 1.6, "service_queue": queued_s}
    verdict = _verdicts(make_interval(wait=0.30, stages=stages))[0]
    assert verdict.code == "service-bound"
    assert [one.setting for one in verdict.advice] == settings
    assert verdict.advice[-1].text.startswith("Add servers: ")


def test_a_healthy_run_is_no_finding() -> None:
    (verdict,) = _verdicts(make_interval())
    assert verdict.code == "compute-bound"
    assert "no finding, the run computes 97%" in verdict.text
    assert verdict.share == pytest.approx(0.97)


@pytest.mark.parametrize(
    ("code", "holds", "just_not"),
    [
        ("storage-bound", {"wait": 0.30, "stages": _BUSY | {"read": 1.6}}, {"wait": 0.09}),
        ("decode-bound", {"wait": 0.30, "stages": _BUSY | {"decode": 1.8}}, {"wait": 0.09}),
        ("decode-bound", {"wait": 0.30, "stages": _BUSY | {"check": 1.8}}, {"wait": 0.09}),
        ("transform-bound", {"wait": 0.30, "stages": _BUSY | {"transform": 1.6}}, {"wait": 0.09}),
        ("transform-bound", {"wait": 0.30, "stages": _BUSY | {"user_transform": 1.6}}, {"wait": 0.09}),
        ("service-bound", {"wait": 0.30, "stages": _BUSY | {"service": 1.6}}, {"wait": 0.09}),
        ("prefetch-starved", {"wait": 0.30}, {"wait": 0.09}),
        (
            "transfer-bound",
            {"wait": 0.30, "for_loader": 0.0, "stages": {"pin": 0.1, "copy": 0.3}},
            {"wait": 0.09, "for_loader": 0.0},
        ),
        (
            "tokenize-bound",
            {"wait": 0.30, "for_loader": 0.0, "stages": {"tokenize": 0.3}},
            {"wait": 0.09, "for_loader": 0.0},
        ),
        ("exchange-bound", {"wait": (0.0, 0.0), "exchange": (0.3, 0.32)}, {"exchange": (0.19, 0.3)}),
        ("straggler", {"wait": (0.0, 0.0), "exchange": (0.02, 0.3)}, {"exchange": (0.02, 0.16)}),
        (
            "straggler",
            {"wait": (0.4, 0.0), "exchange": (0.0, 0.4), "stages": _BUSY},
            {"wait": (0.1, 0.0), "exchange": 0.0},
        ),
        ("trainer-busy", {"gil_wait": 0.6}, {"gil_wait": 0.29}),
        ("cpu-oversubscribed", {"delayed": 0.5}, {"delayed": 0.24}),
        ("checkpoint-bound", {"stages": {"checkpoint": 0.3}}, {"stages": {"checkpoint": 0.16}}),
        ("memory-pressure", {"free": 0.05}, {"free": 0.07}),
    ],
)
def test_a_rule_holds_from_its_threshold_on(
    code: str, holds: dict[str, Any], just_not: dict[str, Any]
) -> None:
    assert _codes(**holds)[0] == code
    assert code not in _codes(**{**holds, **just_not})
    assert code not in _codes()


def test_every_rule_is_in_the_table_of_the_page() -> None:
    lines = (Path(__file__).parents[3] / "docs" / "verdicts.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines if line.startswith("| `")]
    assert rows == [[f"`{rule.code}`", rule.meaning] for rule in (*RULES, COMPUTE)]


def test_what_threads_do_shares_out_the_waits() -> None:
    stages = {"idle": 0.0, "read": 1.2, "decode": 0.8, "transform": 0.0, "collate": 0.0, "tokenize": 0.0}
    verdicts = _verdicts(make_interval(wait=0.5, exchange=0.0, gil_wait=0.0, stages=stages))
    assert [one.code for one in verdicts] == ["storage-bound", "decode-bound", "compute-bound"]
    assert [one.share for one in verdicts] == pytest.approx([0.3, 0.2, 0.5])


def test_threads_that_rest_had_no_room() -> None:
    """They would keep up if they might work ahead, so the stages that they work at are not to blame."""
    verdict, *_ = _verdicts(make_interval(wait=0.3, stages={"idle": 1.0, "decode": 0.8}))
    assert verdict.code == "prefetch-starved"
    assert _advised(verdict) == {"loader.prefetch_bytes": ("256MiB", "512MiB")}
    assert verdict.advice[0].gain == pytest.approx(1 / 0.7 - 1, abs=0.01)
    verdict, *_ = _verdicts(make_interval(wait=0.6, stages={"idle": 0.1, "decode": 1.7}))
    assert verdict.code == "decode-bound"


def test_ranks_that_wait_in_turn_wait_for_data_and_not_for_gradients() -> None:
    """Each waits for data half of the time, and for the other one, that waits for data, the other half."""
    stages = {**_BUSY, "read": 1.9}
    in_turn = make_interval(wait=(0.3, 0.3), exchange=(0.3, 0.3), slowest_wait=0.6, stages=stages)
    verdicts = _verdicts(in_turn)
    assert [one.code for one in verdicts] == ["storage-bound"]
    together = make_interval(wait=(0.3, 0.3), exchange=(0.3, 0.3), slowest_wait=0.3, stages=stages)
    assert {one.code for one in _verdicts(together)} == {"storage-bound", "exchange-bound"}


def test_a_straggler_is_named_with_what_it_does() -> None:
    verdict, *_ = _verdicts(make_interval(wait=(0.0,) * 9, exchange=(0.5,) * 8 + (0.0,)))
    assert verdict.code == "straggler"
    assert "rank 8 on host node1" in verdict.text
    assert "computes 100% of the step, the others 50%" in verdict.text
    assert verdict.evidence["rank"] == 8
    assert verdict.advice[0].gain == pytest.approx(1.0)
    verdict, *_ = _verdicts(make_interval(wait=(0.0, 0.5), exchange=(0.5, 0.0), stages=_BUSY))
    assert "rank 1" in verdict.text
    assert "waits for data 50% of the step, the others 0%" in verdict.text


def test_one_slow_rank_makes_no_exchange_slow() -> None:
    assert "exchange-bound" not in _codes(wait=(0.0,) * 4, exchange=(0.4, 0.4, 0.4, 0.02))
    assert "straggler" not in _codes(wait=(0.0,) * 4, exchange=0.4)


def test_advice_takes_processors_that_are_free() -> None:
    slow: Arguments = {
        "wait": 0.5,
        "stages": _BUSY | {"decode": 1.8, "read": 0.0, "transform": 0.0, "collate": 0.0},
    }
    verdict, *_ = _verdicts(make_interval(**slow, cpu=3.0, num_cpus=16))
    assert _advised(verdict)["loader.num_threads"] == ("2", "4")
    assert verdict.advice[0].gain == pytest.approx(1.0, abs=0.1)
    verdict, *_ = _verdicts(make_interval(**slow, cpu=3.0, num_cpus=3))
    assert "loader.num_threads" not in _advised(verdict)
    assert "about 2 more are wanted for loader.num_threads 2 -> 4" in verdict.advice[0].text


def test_advice_for_storage_depends_on_the_tier() -> None:
    slow: Arguments = {"wait": 0.6, "stages": _BUSY | {"read": 1.7}}
    remote, *_ = _verdicts(make_interval(**slow, tier="s3"))
    assert "cache.directory" in _advised(remote)
    local, *_ = _verdicts(make_interval(**slow))
    assert "cache.directory" not in _advised(local)
    cached = {"cache.max_bytes": 100 << 20, "cache.read_ahead_bytes": 64 << 20, "cache.read_ahead_threads": 8}
    full, *_ = _verdicts(make_interval(**slow, tier="s3", settings=cached, cache_disk_bytes=95 << 20))
    assert _advised(full)["cache.read_ahead_bytes"] == ("64MiB", "128MiB")
    assert _advised(full)["cache.read_ahead_threads"] == ("8", "16")
    assert _advised(full)["cache.max_bytes"] == ("100MiB", "200MiB")
    roomy, *_ = _verdicts(make_interval(**slow, tier="s3", settings=cached, cache_disk_bytes=5 << 20))
    assert "cache.max_bytes" not in _advised(roomy)


@pytest.mark.parametrize(
    ("arguments", "config", "setting", "change"),
    [
        ({"gil_wait": 0.7}, {}, "loader.execution", ("threads", "process")),
        (
            {"wait": 0.5, "stages": _BUSY | {"user_transform": 1.8}},
            {},
            "loader.execution",
            ("threads", "workers"),
        ),
        (
            {"wait": 0.5, "stages": _BUSY | {"transform": 1.8}},
            {},
            "fields.image.size",
            ("[224, 224]", "as stored"),
        ),
        ({"wait": 0.5, "stages": _BUSY | {"decode": 1.8}}, {}, "fields.image.resolution", ("full", "small")),
        (
            {"wait": 0.5, "for_loader": 0.0, "stages": {"copy": 0.5}},
            {},
            "fields.image.dtype",
            ("float32", "int16"),
        ),
        (
            {"wait": 0.5, "for_loader": 0.0, "stages": {"copy": 0.5}},
            {"fields.image.size": [512, 448]},
            "fields.image.size",
            ("[512, 448]", "[224, 224]"),
        ),
        (
            {"wait": 0.5, "for_loader": 0.0, "stages": {"tokenize": 0.5}},
            {},
            "fields.report.type",
            ("text", "tokens"),
        ),
        (
            {"wait": (0.0, 0.0), "exchange": 0.5},
            {"parallel.accumulation": "sharded"},
            "parallel.accumulation",
            ("sharded", "whole"),
        ),
        ({"wait": (0.0, 0.0), "exchange": 0.5}, {}, "batch.micro_batches_per_step", ("8", "16")),
        (
            {"delayed": 0.6, "num_cpus": 4, "stages": _BUSY, "settings": {"loader.num_threads": 8}},
            {},
            "loader.num_threads",
            ("8", "3"),
        ),
        ({"stages": {"checkpoint": 0.4}}, {}, "run.checkpoint_every_steps", ("10", "20")),
        ({"free": 0.05}, {}, "loader.prefetch_bytes", ("256MiB", "128MiB")),
    ],
)
def test_advice_names_the_setting_and_only_one_that_the_run_has(
    arguments: dict[str, Any], config: dict[str, Any], setting: str, change: tuple[str, str]
) -> None:
    interval = make_interval(**arguments)
    verdict, *_ = _verdicts(interval, **config)
    assert _advised(verdict)[setting] == change
    known = {**_CONFIG, **config, **interval.settings}
    assert set(_advised(verdict)) <= set(known) | {"cache.directory"}
    bare, *_ = judge(make_run(replace(interval, settings={})))
    assert bare.code == verdict.code
    assert not _advised(bare)
    assert all(one.gain >= 0 for one in (*verdict.advice, *bare.advice))


def test_idle_loader_threads_are_not_blamed_for_busy_processors() -> None:
    crowded: Arguments = {"delayed": 0.6, "num_cpus": 2, "settings": {"loader.num_threads": 2}}
    idle, *_ = _verdicts(make_interval(**crowded, stages={"idle": 40.0}))
    assert idle.code == "cpu-oversubscribed"
    assert "loader.num_threads" not in _advised(idle)
    busy, *_ = _verdicts(make_interval(**crowded, stages=_BUSY))
    assert _advised(busy)["loader.num_threads"] == ("2", "1")


def test_one_rank_is_written_in_the_singular() -> None:
    arguments: Arguments = {"delayed": 0.6, "stages": _BUSY, "settings": {"loader.num_threads": 8}}
    verdict, *_ = _verdicts(make_interval(**arguments, num_cpus=4))
    assert "1 rank has 4 processors" in verdict.advice[0].text
    several, *_ = _verdicts(make_interval(**arguments, num_cpus=4, wait=(0.01, 0.01)))
    assert "2 ranks share 4 processors" in several.advice[0].text
    alone, *_ = _verdicts(make_interval(wait=0.0, exchange=0.5))
    assert "over 1 rank," in alone.text


def test_a_transform_in_python_is_not_taken_for_the_trainer() -> None:
    """Two threads of a rank run Python all the time, beside a loop that computes a half of it."""
    numbers: Arguments = {"wait": 0.45, "gil_wait": 0.63}
    by_transform = _BUSY | {"user_transform": 1.35, "decode": 0.05}
    assert _codes(**numbers, stages=by_transform)[0] == "transform-bound"
    assert "trainer-busy" not in _codes(**numbers, stages=by_transform)
    assert _codes(**numbers, stages=_BUSY | {"user_transform": 0.05, "decode": 1.35})[0] == "trainer-busy"


def test_advice_about_the_exchange_is_for_the_ranks_device() -> None:
    interval = make_interval(wait=(0.0, 0.0), exchange=(0.3, 0.32))
    for device, word in (("cpu", "GLOO"), ("auto", "GLOO"), ("cuda", "NCCL")):
        (verdict, *_) = _verdicts(interval, **{"run.device": device})
        assert word in verdict.advice[-1].text
    on_gpus = make_interval(wait=(0.0, 0.0), exchange=(0.3, 0.32), stages={"copy": 0.01})
    assert "NCCL" in _verdicts(on_gpus, **{"run.device": "auto"})[0].advice[-1].text


def test_memory_that_is_all_but_gone_comes_first() -> None:
    slow: Arguments = {"wait": 0.6, "stages": _BUSY | {"read": 1.7}}
    assert _codes(**slow, free=0.05)[0] == "storage-bound"
    assert "memory-pressure" in _codes(**slow, free=0.05)
    assert _codes(**slow, free=0.01)[0] == "memory-pressure"


def test_nothing_is_said_before_enough_was_measured() -> None:
    healthy = make_interval()
    assert judge([]) == []
    assert judge(make_run(healthy)[:1]) == []
    assert judge(make_run(healthy)[:2]) != []
    one_step = replace(healthy, num_steps=1, step_s=0.1, wall_s=0.1)
    short = [replace(one_step, global_step=step, is_warm_up=step == 0) for step in range(5)]
    assert judge(short[:3]) == []
    assert judge(short[:4]) != []
    slow = [replace(one, step_s=20.0, wall_s=20.0) for one in short]
    assert judge(slow[:2]) != []


def test_a_loop_of_ones_own_has_stages_and_no_ranks() -> None:
    stages = {**_BUSY, "read": 1.7, "data_wait": 0.6, "forward": 0.2, "backward": 0.2}
    alone = replace(make_interval(wait=0.6, stages=stages), ranks=())
    verdicts = _verdicts(alone)
    assert [one.code for one in verdicts] == ["storage-bound"]
    assert verdicts[0].share > 0.5


def test_two_causes_of_one_size_do_not_take_turns() -> None:
    reads = make_interval(wait=0.5, stages=_BUSY | {"read": 1.0, "decode": 0.95})
    decodes = make_interval(wait=0.5, stages=_BUSY | {"read": 0.95, "decode": 1.0})
    before = judge(make_run(reads))
    assert before[0].code == "storage-bound"
    assert judge(make_run(decodes))[0].code == "decode-bound"
    assert judge(make_run(decodes), before=before)[0].code == "storage-bound"
    far = make_interval(wait=0.5, stages=_BUSY | {"read": 0.5, "decode": 1.5})
    assert judge(make_run(far), before=before)[0].code == "decode-bound"


def test_a_verdict_holds_on_below_its_threshold() -> None:
    stages = {"idle": 0.0, "read": 2.0, "decode": 0.0, "transform": 0.0, "collate": 0.0}
    before = judge(make_run(make_interval(wait=0.15, stages=stages)))
    assert before[0].code == "storage-bound"
    below = make_run(make_interval(wait=0.09, stages=stages))
    assert judge(below)[0].code == "compute-bound"
    assert judge(below, before=before)[0].code == "storage-bound"


def test_json_and_back() -> None:
    verdict, *_ = _verdicts(make_interval(wait=0.6, stages=_BUSY | {"read": 1.7}))
    assert Verdict.from_json(verdict.to_json()) == verdict
