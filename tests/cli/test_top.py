"""``shardflow top``: pictures of runs of all kinds in terminals of all sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import cli
from pipelines.top_draw import (
    ASCII,
    UNICODE,
    Glyphs,
    bar,
    bytes_text,
    duration,
    number,
    percent,
    seconds_text,
    stacked,
)
from pipelines.top_frame import LEAST_HEIGHT, LEAST_WIDTH, frame
from shardflow.monitoring import read_history
from shardflow.monitoring.live import LiveRun, LiveView
from shardflow.telemetry import STAGES, Move
from tests.run_factory import Bound, write_run

pytestmark = pytest.mark.fast

SIZES = [(80, 24), (120, 40), (200, 60)]


def seen(folder: Path) -> LiveView:
    return LiveRun(folder).follow(read_history(folder).last_event_s + 0.4)


def drawn(view: LiveView, width: int, height: int | None, glyphs: Glyphs = UNICODE) -> list[str]:
    lines = frame(view, width=width, height=height, glyphs=glyphs, footer="q leave")
    assert {line.cell_len for line in lines} == {width}
    assert all("\n" not in line.plain for line in lines)
    if height is not None:
        assert len(lines) == height
        assert lines[-1].plain.startswith("q leave")
    return [line.plain for line in lines]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bound", ["data", "compute", "exchange", "straggler"])
def test_a_picture_has_all_that_matters(tmp_path: Path, bound: Bound, size: tuple[int, int]) -> None:
    folder = write_run(tmp_path / "run", bound=bound, num_steps=110, planned_steps=500, world_size=8)
    text = "\n".join(drawn(seen(folder), *size))
    verdict = {"data": "Storage-bound", "compute": "Compute-bound", "exchange": "Exchange-bound"}
    for part in (
        "step 110 of 500  22.0 %",
        " left",
        verdict.get(bound, "Straggler"),
        "steps/s",
        "data wait",
        "a step: ",
        "loader: ",
        "queues",
        "tiers: ",
        "memory",
        "ranks: ",
        " useful of ",
    ):
        assert part in text
    if size != SIZES[0]:
        for part in (
            "tokens/s",
            "evaluation",
            "checkpoint",
            "cache.read_ahead_bytes",
            "for a processor, GIL 2.0 %",
            "threads busy",
        ):
            assert part in text
        assert "…" not in text, "something was cut though there is room"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_of_a_thousand_ranks_the_slow_one_is_seen(tmp_path: Path, size: tuple[int, int]) -> None:
    view = seen(write_run(tmp_path / "run", bound="straggler", world_size=1000, num_steps=20))
    assert view.interval is not None
    # A line holds the 64 that compute and wait longest.
    slowest = sorted(view.interval.ranks, key=lambda one: -one.compute_s - one.data_wait_s)[:64]
    view = replace(view, interval=replace(view.interval, ranks=tuple(slowest)))
    lines = drawn(view, *size)
    title = next(at for at, line in enumerate(lines) if "slowest of 1,000 on 125 nodes" in line)
    assert re.search(r"\b999 node-124 +800 ms +10 ms +0 ms .*\+98%", lines[title + 2])
    assert any("mean of 1,000: compute 400 ms" in line and "exchange 400 ms" in line for line in lines)


def test_all_ranks_that_fit_stand_in_their_order(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run", bound="straggler", world_size=4, num_steps=20))
    lines = drawn(view, 120, 50)
    ranks = [int(found[1]) for line in lines if (found := re.match(r"[│ ]+(\d+) node-", line))]
    assert ranks == [0, 1, 2, 3]
    assert any("ranks: 4 on 1 node" in line for line in lines)


def test_quantiles_where_all_ranks_are_known(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run", bound="straggler", world_size=8, num_steps=20))
    text = "\n".join(drawn(view, 120, 50))
    # Seven ranks compute for 400 ms, the last one for 800.
    assert "p10, median, p90: compute 400 ms 400 ms 520 ms; data wait 10 ms 10 ms 10 ms" in text


@pytest.mark.parametrize(
    "size", [(LEAST_WIDTH, LEAST_HEIGHT), (60, 20), (79, 90), (149, 12), (320, 100)], ids=str
)
def test_odd_sizes(tmp_path: Path, size: tuple[int, int]) -> None:
    drawn(seen(write_run(tmp_path / "run", world_size=16, restart_at=45)), *size)


def test_a_run_that_has_written_nothing(tmp_path: Path) -> None:
    text = "\n".join(drawn(LiveRun(tmp_path).follow(1e9), 80, 24))
    assert "waits for the first line" in text


def test_steps_without_measurements(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "run") / "metrics.jsonl"
    lines = [line for line in whole.read_text().splitlines() if '"event":"interval"' not in line]
    whole.write_text("\n".join(lines) + "\n")
    text = "\n".join(drawn(seen(tmp_path / "run"), 80, 24))
    assert "interval_s is 0" in text
    assert "steps/s" in text
    assert "ranks:" not in text


def test_a_loader_that_had_nothing_to_do_keeps_its_place(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run"))
    assert view.interval is not None
    kept = {
        name: one for name, one in view.interval.stages.items() if STAGES[name].group in {"step", "device"}
    }
    still = replace(view, interval=replace(view.interval, stages=kept, is_warm_up=True))
    text = "\n".join(drawn(still, 120, 40))
    assert "loader: 0 of 2 threads busy" in text
    assert "tiers: 0 B/s read" in text
    assert "0/step" in text
    assert "a step: 970 ms, the first" in text


def test_a_restart_an_end_and_a_silence(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "again", restart_at=45))
    text = "\n".join(drawn(view, 120, 40))
    assert "start 2" in text
    assert "2 starts, 10 steps again" in text
    done = seen(write_run(tmp_path / "done", planned_steps=60, outcome="finished"))
    assert re.search(r"finished at \d\d:\d\d:\d\d", drawn(done, 80, 24)[0])
    assert re.search(r"finished on 2023-11-\d\d at", drawn(replace(done, now_s=1.8e9), 80, 24)[0])
    silent = LiveRun(tmp_path / "again").follow(view.now_s - 0.4 + 180)
    assert "nothing new for 3 min" in drawn(silent, 80, 24)[0]


def test_without_colours_and_in_ascii(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run", world_size=4))
    plain = drawn(view, 100, 40, replace(ASCII, is_coloured=False))
    assert all(line.isascii() for line in plain)
    assert any(re.search(r"w{10,}f+b+x+", line) for line in plain), "the parts of a step are told by letters"


def test_a_long_verdict_goes_on_the_next_line(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run"))
    text = "CPU oversubscribed: " + "threads that could run have no processor, " * 3 + "indeed."
    view = replace(view, verdicts=(replace(view.verdicts[0], text=text),))
    lines = drawn(view, 120, 40)
    assert lines[2].startswith("● CPU oversubscribed: ")
    assert lines[3].startswith("  ")
    assert lines[3].rstrip().endswith("indeed.  since step 10")
    one = replace(view, verdicts=(replace(view.verdicts[0], text="x" * 112),))
    assert drawn(one, 120, 40)[3].strip() == "since step 10"
    both = drawn(replace(view, verdicts=(replace(view.verdicts[0], text="long " * 90),)), 120, 40)
    assert both[3].rstrip().endswith("…  since step 10")


def test_a_move_of_the_tuner_is_read_by_people(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run"))
    move = Move(
        global_step=7, kind="keep", setting="loader.prefetch_bytes", old="268435456", new="402653184",
        rate_before=50.0, rate_after=60.0,
    )  # fmt: skip
    text = "\n".join(drawn(replace(view, moves=(move,)), 140, 40))
    assert "keep    loader.prefetch_bytes 256 MiB → 384 MiB (+20.0%)  step 8" in text


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("outcome", ["", "finished"])
def test_nothing_is_cut_in_usual_widths(tmp_path: Path, width: int, outcome: str) -> None:
    """A line says less where it has less room, and is never broken off in the middle."""
    folder = write_run(
        tmp_path / "first-run",
        num_steps=110,
        planned_steps=500,
        world_size=16,
        restart_at=75,
        outcome=outcome,
    )
    view = seen(folder)
    interval = view.interval
    assert interval is not None
    stages = {**interval.stages, "user_transform": interval.stage("decode")}
    ranks = tuple(replace(rank, device_bytes=70 << 30, pinned_bytes=3 << 30) for rank in interval.ranks)
    move = Move(
        global_step=12_345, kind="keep", setting="cache.read_ahead_bytes", old="268435456", new="536870912",
        rate_before=50.0, rate_after=60.0,
    )  # fmt: skip
    also = replace(
        view.verdicts[0], text="CPU oversubscribed: 31% of the step's threads " + "wait " * 9 + "so"
    )
    view = replace(
        view,
        interval=replace(interval, stages=stages, ranks=ranks),
        moves=(move,) * 3,
        verdicts=(*view.verdicts, also),
        step={**(view.step or {}), "num_skipped": 12},
    )
    text = "\n".join(drawn(view, width, None))
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for part in ("user transform", "2 starts", "10 steps again", "GIL", "GiB on disk", "stall 200 ms"):
        assert part in text
    assert "skipped 12" in text
    assert "read_ahead_bytes" in text
    assert "\N{RIGHTWARDS ARROW} 512 MiB" in text
    assert "p90" in text
    silent = drawn(replace(view, state="silent", age_s=3e4), width, None)[0]
    assert "nothing new for 8 h 20 min" in silent
    assert "\N{HORIZONTAL ELLIPSIS}" not in silent


def test_damaged_lines_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "damaged" not in "\n".join(drawn(seen(folder), 80, 24))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event":"step"}\n')
    assert drawn(seen(folder), 80, 24)[2].rstrip() == "1 damaged line was left out of metrics.jsonl."


def test_once_prints_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", num_steps=30, world_size=3, outcome="stopped")
    assert cli.main(["top", str(folder), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert "stopped on 2023-11-14" in printed or "stopped on 2023-11-15" in printed
    assert "ranks: 3 on 1 node" in printed
    # Where nobody sees a terminal, the same.
    assert cli.main(["top", str(folder)]) == 0
    assert capsys.readouterr().out == printed


def test_no_folder_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(tmp_path / "nothing"), "--once"]) == cli.EXIT_CONFIGURATION
    assert "must be the folder of a training run" in capsys.readouterr().err
    assert cli.main(["top", str(tmp_path), "--once"]) == 0
    assert "waits for the first line" in capsys.readouterr().out
    assert cli.main(["top", str(tmp_path), "--speed", "0"]) == cli.EXIT_CONFIGURATION


@pytest.mark.parametrize(
    ("render", "value", "text"),
    [
        (number, 0.0, "0"),
        (number, 0.012345, "0.012"),
        (number, 0.0012345, "0.0012"),
        (number, 0.0003, "<0.001"),
        (number, 4.9999999999, "5"),
        (number, 1.019, "1.02"),
        (number, 4223.0, "4.22 k"),
        (number, 999_960.0, "1.00 M"),
        (number, 1.3e6, "1.30 M"),
        (percent, 0.6186, "61.9 %"),
        (percent, 1.0, "100 %"),
        (bytes_text, 61 << 20, "61 MiB"),
        (bytes_text, 1.4 * 2**30, "1.4 GiB"),
        (bytes_text, 1000 << 20, "1.0 GiB"),
        (seconds_text, 0.612, "612 ms"),
        (seconds_text, 0.99996, "1.00 s"),
        (seconds_text, 0.00042, "0.42 ms"),
        (duration, 0.42, "0.4 s"),
        (duration, 59.7, "1 min 0 s"),
        (duration, 4320.0, "1 h 12 min"),
        (duration, 277_200.0, "3 d 5 h"),
    ],
)
def test_numbers_for_people(render: Callable[[float], str], value: float, text: str) -> None:
    assert render(value) == text


def test_bars_are_as_wide_as_asked() -> None:
    for share in (-1.0, 0.0, 0.01, 0.333, 0.999, 1.0, 7.0):
        assert bar(share, 11, "red", UNICODE).cell_len == 11
        assert bar(share, 11, "red", ASCII).cell_len == 11
    assert bar(0.5, 10, "red", ASCII).plain == "=====-----"
    parts = [("a", 0.5, "red"), ("b", 0.001, "red"), ("c", 0.26, "red"), ("d", 0.5, "red")]
    letters = replace(UNICODE, is_coloured=False)
    assert stacked(parts, 8, letters).plain == "aaaaccdd"
    assert stacked(parts[:1], 8, letters).plain == "aaaa    "
