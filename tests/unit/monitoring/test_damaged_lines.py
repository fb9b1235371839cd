"""Lines that are not what they should be: every reader leaves the same ones out, counts them, and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardflow.cli.top import frame
from shardflow.errors import ConfigError, StorageError
from shardflow.monitoring import RunHistory, read_history, read_metrics_text
from shardflow.monitoring.goodput import goodput_of, measure_goodput
from shardflow.monitoring.history import METRICS_FILE, MOST_LINE_BYTES, MetricsTail, RunFile, parse_line
from shardflow.monitoring.live import LiveRun
from shardflow.monitoring.outlets import record_of
from shardflow.monitoring.run_page.compare import render_comparison
from shardflow.monitoring.run_page.page import render_run_page
from shardflow.monitoring.run_page.reading import read_run
from shardflow.monitoring.verdict.judging import judge_all
from shardflow.training.metrics import read_metrics
from tests.run_factory import write_run

pytestmark = pytest.mark.fast

_NOW_S = 1_700_001_000.0
_NEEDED = {
    "attempt": ("start",),
    "plan": ("num_steps",),
    "end": ("outcome",),
    "step": ("global_step", "step_s"),
    "interval": ("global_step", "num_steps"),
    "verdict": ("global_step", "code", "text"),
    "tune": ("global_step", "kind"),
    "checkpoint": ("global_step", "stall_s"),
    "evaluation": ("global_step", "evaluation_s"),
}
_ODD: tuple[Any, ...] = (None, "", "x", "\ud800", [], [1], {}, {"a": {}}, True, -1, 0, 2.5, 10**30, 1e17)
_NO_JSON = ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 100_000)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", restart_at=45, planned_steps=60, outcome="finished")


def _lines(run: Path) -> list[bytes]:
    return (run / METRICS_FILE).read_bytes().splitlines(keepends=True)


def _of_each_kind(lines: list[bytes]) -> dict[str, dict[str, Any]]:
    return {values["event"]: values for values in map(json.loads, lines)}


def _damaged(lines: list[bytes]) -> Iterator[bytes]:
    """Of each kind of line all that cannot be what it says."""
    for event, values in _of_each_kind(lines).items():
        for name in (*_NEEDED[event], "time_s"):
            without = {key: one for key, one in values.items() if key != name}
            others: tuple[Any, ...] = (None, [], {}, True)
            yield json.dumps(without).encode()
            yield from (json.dumps(values | {name: one}).encode() for one in others)
            for text in _NO_JSON:
                yield json.dumps(values | {name: "@"}).replace('"@"', text).encode()
        yield json.dumps(values).encode()[:-9]
    yield from (b"[]", b"7", b"null", b'"event"', b"{}", b'{"event":5,"time_s":1.0}', b"\x00" * 50, b"\xff{}")
    yield b'{"event":"interval","time_s":1.0,"global_step":9,"num_steps":1,"stages":5}'
    yield b'{"event":"interval","time_s":1.0,"global_step":9,"num_steps":1,"ranks":[{"host":"no rank"}]}'
    yield b'{"event":"interval","time_s":1.0,"global_step":9,"num_steps":1,"ranks":[{"rank":0,"cpu_s":"1"}]}'
    yield b'{"event":"verdict","time_s":1.0,"global_step":9,"code":"a","text":"b","advice":[{"gain":1}]}'
    yield b'{"event":"step","time_s":1.0,"global_step":999999999999,"step_s":"1"}'
    yield b'{"event":"step","time_s":1.0,"global_step":9,"step_s":1,"new":1e999}'
    yield b'{"event":"step","time_s":1e300,"global_step":9,"step_s":1}'
    yield b'{"event":"of another version","time_s":1.0,"new":NaN}'
    yield b'{"event":"of another version","time_s":1.0,"half a character":"\xed\xa0\x80"}'


def _spoilt(run: Path, folder: Path, bad: list[bytes]) -> Path:
    """The same run with damaged lines between its own."""
    lines = _lines(run)
    folder.mkdir()
    with (folder / METRICS_FILE).open("wb") as file:
        for number, line in enumerate(bad):
            file.write(line + b"\n")
            file.writelines(lines[number : number + 1])
        file.writelines(lines[len(bad) :])
    return folder


def test_every_damaged_line_is_left_out_and_counted_by_every_reader(run: Path, tmp_path: Path) -> None:
    bad = list(_damaged(_lines(run)))
    assert [line for line in bad if parse_line(line) is not None] == []
    spoilt = _spoilt(run, tmp_path / "spoilt", bad)

    tail = MetricsTail(spoilt)
    assert goodput_of(tail.read()) == measure_goodput(run)
    assert tail.num_damaged == len(bad)

    whole, history = read_history(run), read_history(spoilt)
    for name in ("steps", "intervals", "verdicts", "moves", "checkpoints", "evaluations", "attempts", "end"):
        assert getattr(history, name) == getattr(whole, name), name
    assert history.num_damaged == len(bad)

    file = RunFile(spoilt)
    assert list(file.intervals()) == [one for _, one in whole.intervals]
    assert (file.num_steps, file.num_damaged) == (60, len(bad))

    numbers = read_run(spoilt)
    assert numbers.num_damaged == len(bad)
    assert numbers.goodput == measure_goodput(run)
    assert f"{len(bad):,} damaged lines were left out" in render_run_page(numbers)

    view = LiveRun(spoilt).follow(_NOW_S)
    assert view.num_damaged == len(bad)
    assert view.goodput == measure_goodput(run)

    texts = [read_metrics_text(one).splitlines() for one in (run, spoilt)]
    (name,) = {line.split()[0] for line in texts[1] if line not in texts[0]}
    assert name == "shardflow_run_lines_damaged_total"

    wanted, found = (list(map(record_of, MetricsTail(one).read())) for one in (run, spoilt))
    assert found == wanted
    for event in ("step", "interval", "evaluation", "checkpoint"):
        assert read_metrics(spoilt, event) == read_metrics(run, event)


def test_what_is_odd_and_may_be_meant_stops_no_reader(run: Path, tmp_path: Path) -> None:
    """Every key of every kind of line with every odd value; which are damaged is not asked here."""
    odd = [json.dumps(one).encode() for one in _variants(_of_each_kind(_lines(run)))]
    spoilt = _spoilt(run, tmp_path / "spoilt", odd)
    sound = [line for line in odd if parse_line(line) is not None]
    assert len(odd) > 1000
    assert 100 < len(sound) < len(odd)
    _read_in_every_way(spoilt)


def _variants(kinds: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for values in kinds.values():
        yield from _changed(values)


def _changed(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, held in values.items():
        yield {key: one for key, one in values.items() if key != name}
        yield from (values | {name: odd} for odd in _ODD)
        yield values | {f"{name} of another version": 1}
        if isinstance(held, dict) and held:
            yield from (values | {name: one} for one in _changed(dict(list(held.items())[:1])))
        if isinstance(held, list) and held and isinstance(held[0], dict):
            yield from (values | {name: [one]} for one in _changed(held[0]))


def _read_in_every_way(run: Path) -> None:
    measure_goodput(run).to_json()
    history = read_history(run)
    judge_all([one for _, one in history.intervals])
    read_metrics_text(run)
    for line in MetricsTail(run).read():
        record_of(line)
    numbers = read_run(run)
    render_run_page(numbers).encode()
    render_comparison((numbers, numbers)).encode()
    live = LiveRun(run)
    for width, height in ((80, 24), (100, None), (160, 60)):
        lines = frame(live.follow(_NOW_S), width=width, height=height)
        "\n".join(line.plain for line in lines).encode()
    for event in ("step", "interval", "evaluation", "checkpoint"):
        read_metrics(run, event)


@pytest.mark.parametrize("event", sorted(_NEEDED))
def test_each_kind_of_line_alone_and_odd_stops_no_reader(event: str, run: Path, tmp_path: Path) -> None:
    """As the last of their kind, where no sound one makes up for them."""
    start = _lines(run)[0]
    folder = tmp_path / "one"
    folder.mkdir()
    for values in _changed(_of_each_kind(_lines(run))[event]):
        line = json.dumps(values).encode()
        if event not in ("step", "interval") and parse_line(line) is None:
            continue
        (folder / METRICS_FILE).write_bytes(b"".join([start, line, b"\n"]))
        _read_quickly(folder)


def _read_quickly(run: Path) -> None:
    measure_goodput(run).to_json()
    list(map(record_of, MetricsTail(run).read()))
    view = LiveRun(run).follow(_NOW_S)
    "\n".join(line.plain for line in frame(view, width=100, height=None)).encode()
    render_run_page(read_run(run)).encode()


def test_what_another_version_lacks_has_defaults(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text(
        '{"event":"attempt","time_s":1.0,"start":0}\n'
        '{"event":"step","time_s":2.0,"global_step":0,"step_s":1}\n'
        '{"event":"of another version","time_s":2.0,"ranks":7}\n'
    )
    history = RunHistory(tmp_path)
    history.follow()
    (step,) = history.steps
    assert (step["attempt"], step["epoch"], step["data_wait_s"], step["num_tokens"]) == (1, 0, 0.0, 0.0)
    assert history.num_damaged == 0
    _read_in_every_way(tmp_path)


def test_a_line_without_end_takes_no_memory_without_end(run: Path) -> None:
    with (run / METRICS_FILE).open("ab") as file:
        file.write(b"x" * (MOST_LINE_BYTES + (2 << 20)) + b"\n")
        file.write(b'{"event":"plan","time_s":1700009000.0,"num_steps":77}\n')
    history = read_history(run)
    assert history.num_planned_steps == 77
    # In pieces, each of which is given up before the next is read.
    assert history.num_damaged == 2


@pytest.mark.parametrize("read", [read_history, measure_goodput, read_run, RunFile, read_metrics_text])
def test_what_cannot_be_read_is_a_sentence(
    read: Callable[[Path], object], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        read(run / "not there")
    if read is read_metrics_text:  # a scrape has no numbers then
        return

    def refused(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied", "/secret/place")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(StorageError, match=r"cannot be read \(Permission denied\); correct") as found:
        read(run)
    assert "secret" not in found.value.message
