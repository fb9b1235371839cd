"""The page about a run: its numbers are those of the events, and it lets nothing in or out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardflow.logs import EventLog
from shardflow.monitoring import read_history
from shardflow.monitoring.goodput import measure_goodput
from shardflow.monitoring.history import METRICS_FILE
from shardflow.monitoring.run_page.compare import render_comparison
from shardflow.monitoring.run_page.page import render_run_page
from shardflow.monitoring.run_page.reading import (
    MOST_POINTS,
    MOST_SUMMARIES,
    RunNumbers,
    StepColumns,
    Summaries,
    read_run,
    shown,
)
from shardflow.monitoring.run_page.svg import ticks
from shardflow.monitoring.units import compact, duration, show
from shardflow.monitoring.verdict.judging import judge_all
from shardflow.telemetry import STAGES, Advice, Interval, RankNumbers, Verdict
from tests.run_factory import Bound, write_run

pytestmark = pytest.mark.fast

BOUNDS: tuple[Bound, ...] = ("data", "compute", "exchange", "straggler")
_VOID = {"meta", "rect", "line", "path"}


def numbers_of(page: str) -> dict[str, Any]:
    """What the page says in numbers."""
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    numbers: dict[str, Any] = json.loads(found[1])
    return numbers


def series(page: str, chart: str, label: str) -> dict[str, Any]:
    numbers = numbers_of(page)
    found = [one for one in numbers["charts"][chart]["series"] if one["label"] == label]
    assert len(found) == 1, numbers["charts"][chart]
    return dict(found[0])


class _Checker(HTMLParser):
    """Whether what is opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("bound", BOUNDS)
def test_series_are_the_events(tmp_path: Path, bound: Bound) -> None:
    run = write_run(tmp_path / "run", bound=bound, num_steps=60, world_size=3, restart_at=45)
    page = render_run_page(read_run(run))
    history = read_history(run)
    steps = history.steps
    loss = series(page, "loss", "training")
    assert loss["steps"] == [line["global_step"] + 1 for line in steps]
    assert loss["values"] == pytest.approx([line["loss"] for line in steps], rel=1e-5)
    wait = series(page, "step_time", "waiting for data")["values"]
    rest = series(page, "step_time", "everything else")["values"]
    assert wait == pytest.approx([line["data_wait_s"] for line in steps])
    assert [a + b for a, b in zip(wait, rest, strict=True)] == pytest.approx(
        [line["step_s"] for line in steps]
    )
    assert series(page, "learning_rate", "Learning rate")["values"] == [
        line["learning_rate"] for line in steps
    ]
    rates = series(page, "throughput", "Throughput in steps")["values"]
    assert rates == pytest.approx([line["num_samples"] / line["step_s"] for line in steps], rel=1e-5)
    checks = series(page, "loss", "evaluation")
    assert checks["steps"] == [line["global_step"] for line in history.evaluations]
    assert checks["values"] == pytest.approx([line["loss"] for line in history.evaluations], rel=1e-5)


@pytest.mark.parametrize("bound", BOUNDS)
def test_intervals_are_shares_of_the_ranks_time(tmp_path: Path, bound: Bound) -> None:
    run = write_run(tmp_path / "run", bound=bound, world_size=3)
    page = render_run_page(read_run(run))
    intervals = [interval for _, interval in read_history(run).intervals]
    for name in ("forward", "exchange", *(["data_wait"] if bound == "data" else [])):
        found = series(page, "loop", name.replace("_", " "))
        wanted = [one.stage(name).seconds / (one.wall_s * one.world_size) for one in intervals]
        assert found["values"] == pytest.approx(wanted, rel=1e-5, abs=1e-9)
        assert found["steps"] == [one.global_step + 1 for one in intervals]
    busy = series(page, "loader", "decode")["values"]
    assert busy == pytest.approx(
        [one.stage("decode").seconds / (one.wall_s * one.world_size) for one in intervals], rel=1e-5
    )
    # What is part of another stage is not stacked on it.
    labels = [one["label"] for one in numbers_of(page)["charts"]["loader"]["series"]]
    assert "cache disk" not in labels
    assert STAGES["cache_disk"].is_part_of == "read"
    disk = series(page, "tier_bytes", "from node's disk")["values"]
    assert disk == pytest.approx(
        [one.stage("cache_disk").num_bytes / one.wall_s for one in intervals], rel=1e-4
    )
    ranks = numbers_of(page)["ranks"]
    assert list(ranks) == ["rank 0 \u00b7 node-0", "rank 1 \u00b7 node-0", "rank 2 \u00b7 node-0"]
    assert ranks["rank 2 \u00b7 node-0"][0] == pytest.approx(
        sum(one.ranks[2].compute_s for one in intervals) / sum(one.step_s for one in intervals)
    )
    memory = series(page, "memory", "processes (PSS)")["values"]
    assert memory == [900 << 20] * len(intervals)


def test_goodput_restarts_and_verdicts_are_those_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=60, restart_at=45)
    page = render_run_page(read_run(run))
    facts = numbers_of(page)["runs"][0]
    assert facts["goodput"] == measure_goodput(run).to_json()
    assert facts["restarts"] == [{"step": 35, "reached": 45, "num_lost_steps": 10}]
    assert facts["verdicts"] == [{"code": "storage-bound", "num_steps": 60, "number": 6}]
    assert facts["num_checkpoints"] == 2
    assert facts["num_moves"] == 3
    assert facts["total_samples"] == 60 * 32.0
    assert "restarted after 45 steps: 10 done again" in page
    assert "Raise cache.read_ahead_bytes from 256 MiB to 512 MiB." in page
    assert "+40% steps a second" in page
    assert "loader.num_threads" in page


@pytest.mark.parametrize("num_starts", [1, 3])
def test_a_run_without_intervals_and_one_without_steps(tmp_path: Path, num_starts: int) -> None:
    with EventLog(tmp_path / METRICS_FILE) as log:
        for start in range(num_starts):
            log.write("attempt", attempt=start + 1, start=0)
    page = render_run_page(read_run(tmp_path))
    _Checker(page)
    assert "No step was measured yet" in page
    with EventLog(tmp_path / METRICS_FILE) as log:
        # As runs of the first version wrote it: no tokens, no gradient norm, a loss that was not finite.
        log.write("step", attempt=1, global_step=0, epoch=0, step=0, loss=None, step_s=1.0, data_wait_s=0.5)
    page = render_run_page(read_run(tmp_path))
    _Checker(page)
    assert "wrote no intervals" in page
    assert numbers_of(page)["runs"][0]["num_steps"] == 1
    assert "loss" not in numbers_of(page)["charts"]
    assert "<h2>Ranks</h2>" not in page
    _Checker(render_comparison((read_run(tmp_path), read_run(tmp_path))))


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    """At any place that the writer may have come to, also in the middle of a line, or of a character."""
    whole = (write_run(tmp_path / "whole", restart_at=45) / METRICS_FILE).read_bytes()
    for end in [0, *range(1, len(whole), len(whole) // 12)]:
        (tmp_path / METRICS_FILE).write_bytes(whole[:end])
        _Checker(render_run_page(read_run(tmp_path)))


def test_nothing_comes_in_and_nothing_is_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for page in (
        render_run_page(read_run(run)),
        render_comparison((read_run(run), read_run(write_run(tmp_path / "other", bound="compute")))),
    ):
        tags = _Checker(page).seen
        assert not {"link", "iframe", "img", "base", "form", "object"} & {tag for tag, _ in tags}
        # Namespaces are no addresses; there is one, in the script.
        outside = page.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|innerHTML", outside)
        for _, attributes in tags:
            assert not any(name.startswith("on") or name in ("src", "href", "style") for name in attributes)
        policy = next(one["content"] or "" for _, one in tags if "http-equiv" in one)
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        for element in ("style", "script"):
            text = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text[0].encode()).digest()).decode()
            assert f"{element}-src 'sha256-{digest}'" in policy
            assert len(text) == 1


def test_text_from_outside_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b onmouseover=x>&\"'"
    run = tmp_path / f"run {evil.replace('/', '')}"
    run.mkdir()
    (run / "resolved_config.toml").write_text(f"[run]\nname = {json.dumps(evil)}\n", encoding="utf-8")
    advice = Advice(text=evil, setting=evil, old=evil, new=evil, gain=0.1)
    with EventLog(run / METRICS_FILE) as log:
        log.write("attempt", attempt=1, start=0, versions={evil: evil}, device=evil)
        log.write("step", attempt=1, global_step=0, loss=1.0, step_s=1.0, data_wait_s=0.5)
        ranks = (RankNumbers(rank=0, host=evil, compute_s=1.0),)
        interval = Interval(
            global_step=0, num_steps=1, wall_s=1.0, step_s=1.0, ranks=ranks, tier=evil, settings={evil: evil}
        )
        log.write("interval", attempt=1, **interval.to_json())
        verdict = Verdict(global_step=0, code=evil, text=evil, advice=(advice,))
        log.write("verdict", attempt=1, **verdict.to_json())
        log.write("tune", attempt=1, global_step=0, kind="try", setting=evil, old=evil, new=evil, text=evil)
    numbers = read_run(run)
    for page in (render_run_page(numbers), render_comparison((numbers, numbers))):
        assert "alert(1)" in page
        assert page.count("<script") == 2
        assert not any(tag == "b" and "onmouseover" in one for tag, one in _Checker(page).seen)


def test_no_path_but_its_last_part(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "resolved_config.toml").write_text(
        '[data]\ndataset = "/home/jane doe/hospital/set-7"\n'
        'list = ["s3://bucket/a/b?X-Signature=abc", "plain"]\nsecret_key = "hunter2"\n'
        '[[blend]]\nfolder = "C:\\\\data\\\\inner"\nweight = 0.5\n',
        encoding="utf-8",
    )
    page = render_run_page(read_run(run))
    for hidden in ("jane", "hospital", "bucket", "Signature", "hunter2", "C:", str(tmp_path)):
        assert hidden not in page, hidden
    for visible in ("\u2026/set-7", "\u2026/b, plain", "(not shown)", "\u2026/inner", "0.5"):
        assert visible in page, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("threads", "threads"),
        ("/", "/"),
        ("a/", "\u2026/a"),
        (True, "true"),
        (3, "3"),
        (["/x/y", 2], "\u2026/y, 2"),
    ],
)
def test_values_as_they_are_shown(value: object, text: str) -> None:
    assert shown(value) == text


def test_comparison_says_what_differs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", bound="data", num_steps=60)
    b = write_run(tmp_path / "b", bound="compute", num_steps=90)
    (a / "resolved_config.toml").write_text("[loader]\nnum_threads = 2\n[run]\nseed = 1\n", encoding="utf-8")
    (b / "resolved_config.toml").write_text("[loader]\nnum_threads = 8\n[run]\nseed = 1\n", encoding="utf-8")
    page = render_comparison((read_run(a), read_run(b)))
    numbers = numbers_of(page)
    found = {one["key"]: one for one in numbers["differences"]}
    good = [measure_goodput(run) for run in (a, b)]
    assert found["useful_share"]["a"] == good[0].useful_share
    assert found["useful_share"]["change"] == pytest.approx(good[1].useful_share - good[0].useful_share)
    assert found["samples_per_s"]["a"] == pytest.approx(32 / 0.97)
    assert found["samples_per_s"]["change"] == pytest.approx(0.0, abs=1e-9)
    assert found["wait_share"]["a"] == pytest.approx(0.6 / 0.97)
    assert found["wait_share"]["b"] == 0.0
    # Around the last step that both have taken.
    last = [line["loss"] for line in read_history(b).steps][39:60]
    assert found["loss"]["b"] == pytest.approx(sum(last) / len(last))
    assert found["loss"]["a"] == pytest.approx(found["loss"]["b"])
    assert numbers["settings"] == {"loader.num_threads": ["2", "8"]}
    overlaid = numbers["charts"]["step_time"]["series"]
    assert [(one["color"], len(one["values"])) for one in overlaid] == [("a", 60), ("b", 90)]
    assert "storage-bound" in page
    assert "compute-bound" in page
    assert "hardly comparable" not in page


def _learn(folder: Path, *, planned: int, num_steps: int, loss: float, rate: float) -> RunNumbers:
    folder.mkdir()
    with EventLog(folder / METRICS_FILE) as log:
        log.write("attempt", attempt=1, start=0)
        log.write("plan", num_steps=planned)
        for step in range(num_steps):
            log.write(
                "step", global_step=step, step_s=1.0, loss=loss, learning_rate=rate * (1 - step / planned)
            )
    return read_run(folder)


def test_losses_of_other_schedules_are_compared_with_a_warning(tmp_path: Path) -> None:
    short = _learn(tmp_path / "short", planned=60, num_steps=60, loss=1.0, rate=1e-3)
    long = _learn(tmp_path / "long", planned=300, num_steps=90, loss=2.0, rate=1e-3)
    page = render_comparison((short, long))
    assert "A is planned for 60 steps and B for 300" in page
    assert "at step 59 their learning rates are 1.67e-05 and 8.03e-04" in page
    assert "loss, mean of steps 39 to 59, which both have taken" in page
    assert not re.search(r'class="(better|worse)">\+100', page)
    same = _learn(tmp_path / "same", planned=60, num_steps=40, loss=2.0, rate=1e-3)
    page = render_comparison((short, same))
    assert "hardly comparable" not in page
    assert 'class="worse">+100.0 %' in page
    faster = _learn(tmp_path / "faster", planned=60, num_steps=40, loss=2.0, rate=2e-3)
    page = render_comparison((short, faster))
    assert "hardly comparable here: at step 39 their learning rates" in page


def test_losses_of_a_short_and_a_long_run_are_of_the_same_steps(tmp_path: Path) -> None:
    """Of the long one only places of several steps are known: none that reaches beyond the short one."""
    long = tmp_path / "long"
    long.mkdir()
    with EventLog(long / METRICS_FILE) as log:
        log.write("attempt", attempt=1, start=0)
        for step in range(6000):
            log.write("step", global_step=step, step_s=1.0, loss=float(step))
    for num_steps, wanted in ((33, ("5 to 29", 17.0)), (4, None)):
        short = _learn(tmp_path / f"{num_steps}", planned=6000, num_steps=num_steps, loss=1.0, rate=0.0)
        page = render_comparison((short, read_run(long)))
        found = {one["key"]: one for one in numbers_of(page)["differences"]}
        if wanted is None:
            assert "loss" not in found
        else:
            assert f"loss, mean of steps {wanted[0]}, which both have taken" in page
            assert found["loss"]["b"] == wanted[1]


def test_long_runs_keep_their_outliers() -> None:
    columns = StepColumns(10 * MOST_POINTS)
    for step in range(10 * MOST_POINTS):
        seconds = 9.0 if step == 5005 else 1.0 + 0.01 * (step % 10)
        columns.add({"global_step": step, "step_s": seconds, "loss": float(step)})
    columns.finish()
    rows = columns.columns
    assert len(rows["last"]) == MOST_POINTS
    assert (rows["first"][500], rows["last"][500]) == (5000.0, 5009.0)
    assert (rows["step_s_least"][500], rows["step_s_most"][500]) == (1.0, 9.0)
    assert rows["step_s_median"][500] == pytest.approx(1.05)
    assert rows["loss_median"][7] == 74.5
    assert rows["data_wait_s_mean"] == [None] * MOST_POINTS


def _write_long(path: Path, num_steps: int, num_ranks: int) -> None:
    """Steps of a second, an interval each ten, without the writer's cost of a million calls."""
    ranks = [
        {"rank": rank * 7, "host": f"node-{rank}", "compute_s": 6.0 + rank / 100, "data_wait_s": 1.0}
        for rank in range(num_ranks)
    ]
    interval = json.dumps(
        {"num_steps": 500, "wall_s": 500.0, "step_s": 500.0, "world_size": 512, "ranks": ranks}
    )
    with path.open("w", encoding="utf-8") as file:
        file.write('{"event":"attempt","time_s":0.0,"attempt":1,"start":0}\n')
        for step in range(num_steps):
            file.write(
                f'{{"event":"step","time_s":{step + 1}.0,"attempt":1,"global_step":{step},"loss":2.5,'
                '"num_samples":32.0,"num_tokens":4096.0,"learning_rate":0.0003,"gradient_norm":1.0,'
                '"step_s":1.0,"data_wait_s":0.25}\n'
            )
            if step % 500 == 499:
                file.write(
                    f'{{"event":"interval","time_s":{step + 1}.0,"global_step":{step},{interval[1:]}\n'
                )


_MEASURE = """
import sys
from pathlib import Path
from shardflow.monitoring.run_page.page import render_run_page
from shardflow.monitoring.run_page.reading import read_run
from shardflow.packing.engines.worker import peak_memory_bytes
before = peak_memory_bytes()
page = render_run_page(read_run(Path(sys.argv[1])))
print(peak_memory_bytes() - before, len(page))
"""


def test_a_long_run_is_read_into_a_bounded_number_of_rows(tmp_path: Path) -> None:
    _write_long(tmp_path / METRICS_FILE, 9_000, 64)
    run = read_run(tmp_path)
    assert len(run.steps["last"]) <= MOST_POINTS
    assert run.num_steps == 9_000
    assert run.goodput.data_wait_s == 0.25 * 9_000
    page = render_run_page(run)
    assert "The 32 of 512 ranks that computed and waited for data most." in page
    assert "holds up to 8 steps" in page
    summaries = Summaries(10_000)
    for place in range(5_000):
        ranks = tuple(RankNumbers(rank=(place + number) % 300, compute_s=1.0) for number in range(3))
        summaries.add(Interval(global_step=2 * place + 1, num_steps=2, step_s=2.0, ranks=ranks))
    summaries.finish()
    rows = summaries.rows
    assert len(rows) == MOST_SUMMARIES
    assert sum(row.num_steps for row in rows) == 10_000


@pytest.mark.slow
def test_a_million_steps_give_a_small_page_in_little_memory(tmp_path: Path) -> None:
    _write_long(tmp_path / METRICS_FILE, 1_000_000, 64)
    ran = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    more_bytes, num_bytes = map(int, ran.stdout.split())
    assert num_bytes < 5_000_000
    # Of it 24 bytes a step are the goodput's, which may have to take them back.
    assert more_bytes < 200 << 20


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "\u2013"),
        (0.0125, "s", "12.5 ms"),
        (250.0, "s", "4 min 10 s"),
        (3600.0, "s", "1 h"),
        (90_061.0, "s", "1 d 1 h"),
        (0.1234, "share", "12.3 %"),
        (1.0, "share", "100 %"),
        (1000 * (1 << 20), "bytes", "1000 MiB"),
        (3 << 30, "bytes/s", "3 GiB/s"),
        (12_345, "", "12,345"),
        (2_500_000, "", "2.5M"),
        (0.0003, "", "3.00e-04"),
        (33.333, "samples/s", "33.3 samples/s"),
    ],
)
def test_numbers_as_people_read_them(value: float | None, unit: str, text: str) -> None:
    assert show(value, unit) == text


def test_round_numbers_along_an_axis() -> None:
    assert ticks(0.0, 200.0, 10, "steps") == [place * 20.0 for place in range(11)]
    assert ticks(0.0, 7200.0, 10, "s")[1] == 900.0
    assert ticks(0.0, 3.0, 10, "steps") == [0.0, 1.0, 2.0, 3.0]
    assert ticks(2.0, 2.0, 4, "") == [2.0]
    # A clock that began in 1970 makes a run of decades.
    assert 3 <= len(ticks(0.0, 1.7e9, 10, "s")) <= 11
    assert duration(-1.5) == "-1.5 s"
    assert compact(0.0) == "0"


def test_a_run_without_verdicts_is_judged_by_its_intervals(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", bound="data")
    path = run / METRICS_FILE
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if b'"event":"verdict"' not in line]
    path.write_bytes(b"".join(lines))
    page = render_run_page(read_run(run))
    assert "The run wrote no verdicts" in page
    intervals = [interval for _, interval in read_history(run).intervals]
    wanted = {verdicts[0].code for verdicts in judge_all(intervals)}
    found = {one["code"] for one in numbers_of(page)["runs"][0]["verdicts"] if one["num_steps"]}
    assert found == wanted
    assert wanted
