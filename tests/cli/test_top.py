"""``shardflow top``: pictures of runs of all kinds in terminals of all sizes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shardflow.cli import main as cli
from shardflow.cli.top import _encodable, frame, resampled
from shardflow.monitoring import read_history
from shardflow.monitoring.live import LiveRun, LiveView
from shardflow.telemetry import STAGES, Move
from tests.run_factory import Bound, write_run

pytestmark = pytest.mark.fast

SIZES = [(80, 24), (120, 40), (200, 60)]


def seen(folder: Path) -> LiveView:
    return LiveRun(folder).follow(read_history(folder).last_event_s + 0.4)


def drawn(view: LiveView, width: int, height: int | None) -> list[str]:
    lines = frame(view, width=width, height=height, footer="q leave")
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
            "for a CPU, GIL 2.0 %",
            "threads busy",
        ):
            assert part in text


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_of_a_thousand_ranks_the_slow_one_is_seen(tmp_path: Path, size: tuple[int, int]) -> None:
    view = seen(write_run(tmp_path / "run", bound="straggler", world_size=1000, num_steps=20))
    assert view.interval is not None
    # A line holds the 64 that compute and wait longest.
    slowest = sorted(view.interval.ranks, key=lambda one: -one.compute_s - one.data_wait_s)[:64]
    view = replace(view, interval=replace(view.interval, ranks=tuple(slowest)))
    lines = drawn(view, *size)
    title = next(at for at, line in enumerate(lines) if "slowest of 1,000 on 125 nodes" in line)
    assert re.search(r"\b999 node-124 +800 ms +10 ms +0 s .*\+98%", lines[title + 2])
    assert any("mean of 1,000: forward 133 ms" in line and "exchange 400 ms" in line for line in lines)


def test_all_ranks_that_fit_stand_in_their_order(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run", bound="straggler", world_size=4, num_steps=20))
    lines = drawn(view, 120, 50)
    ranks = [int(found[1]) for line in lines if (found := re.match(r"[│ ]+(\d+) node-", line))]
    assert ranks == [0, 1, 2, 3]
    assert any("ranks: 4 on 1 node" in line for line in lines)


@pytest.mark.parametrize("size", [(10, 2), (40, 8), (60, 20), (79, 90), (149, 12), (320, 100)], ids=str)
def test_odd_sizes(tmp_path: Path, size: tuple[int, int]) -> None:
    drawn(seen(write_run(tmp_path / "run", world_size=16, restart_at=45)), *size)


def test_a_run_that_has_written_nothing(tmp_path: Path) -> None:
    text = "\n".join(drawn(LiveRun(tmp_path).follow(1e9), 80, 24))
    assert "waiting for the first line" in text


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


def test_a_terminal_without_unicode_gets_ascii(tmp_path: Path) -> None:
    class _Ascii(Console):
        @property
        def encoding(self) -> str:
            return "ascii"

    lines = frame(seen(write_run(tmp_path / "run", world_size=4)), width=100)
    assert not all(line.plain.isascii() for line in lines)
    assert all(line.plain.isascii() for line in _encodable(lines, _Ascii()))


def test_a_long_verdict_is_wrapped_and_cut(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run"))
    text = "CPU oversubscribed: " + "threads that could run have no CPU, " * 3 + "indeed."
    lines = drawn(replace(view, verdicts=(replace(view.verdicts[0], text=text),)), 120, 40)
    assert lines[2].startswith("● CPU oversubscribed: ")
    assert lines[3].strip().endswith("indeed. (since step 10)")
    lines = drawn(replace(view, verdicts=(replace(view.verdicts[0], text="long " * 90),)), 120, 40)
    assert lines[3].rstrip().endswith("… (since step 10)")


def test_a_move_of_the_tuner_is_read_by_people(tmp_path: Path) -> None:
    view = seen(write_run(tmp_path / "run"))
    move = Move(
        global_step=7, kind="keep", setting="loader.prefetch_bytes", old="268435456", new="402653184",
        rate_before=50.0, rate_after=60.0,
    )  # fmt: skip
    text = "\n".join(drawn(replace(view, moves=(move,)), 140, 40))
    assert "prefetch_bytes 256MiB → 384MiB (+20.0%), step 8" in text


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
    assert "waiting for the first line" in capsys.readouterr().out


def test_curves_are_means_of_neighbors() -> None:
    assert resampled((1.0, 2.0, 3.0, 4.0, 5.0), 2) == [1.5, 4.0]
    assert resampled((1.0, 2.0), 5) == (1.0, 2.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("top", "--once"),
        ("metrics", "--once"),
        ("verdict",),
        ("ledger", "show"),
        ("ledger", "where", "--step", "1"),
    ],
    ids=" ".join,
)
def test_a_dataset_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """Nothing will ever write the first line of a run there."""
    (tmp_path / "manifest-000001.json").write_bytes(b"{}")
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    words = [word for word in arguments if not word.startswith("--") and not word.isdigit()]
    assert cli.main([*words, str(tmp_path), *arguments[len(words) :]]) == 2
    assert "RUN must be the folder of a training run" in capsys.readouterr().err
