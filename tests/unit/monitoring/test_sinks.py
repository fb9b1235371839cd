"""A run's numbers in W&B and MLflow: their real libraries, offline, and what they wrote read back."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import ConfigError
from shardflow.logs import EventLog
from shardflow.monitoring import outlets as sinks
from shardflow.monitoring.history import METRICS_FILE, MetricsLine
from shardflow.monitoring.outlets import Record, Scalar, Sink, SinkFollower, record_of, require_sinks
from tests.run_factory import write_run

CANARY = "Mueller-Hans-19481224"


class _Kept:
    """Keeps what it gets."""

    def __init__(self, fails_at: str = "") -> None:
        self.settings: dict[str, Scalar] = {}
        self.records: list[Record] = []
        self.name = ""
        self.is_closed = False
        self._fails_at = fails_at

    def open(self, run: Path, name: str, settings: Mapping[str, Scalar]) -> str:
        self._fail("open")
        self.name, self.settings = name, dict(settings)
        return "known-as"

    def write(self, records: Sequence[Record]) -> None:
        self._fail("write")
        self.records += records

    def close(self) -> None:
        self._fail("close")
        self.is_closed = True

    def _fail(self, where: str) -> None:
        if self._fails_at == where:
            raise RuntimeError(CANARY)


def _begin(run: Path) -> None:
    """What a run writes before a sink is there."""
    run.mkdir(exist_ok=True)
    (run / "resolved_config.toml").write_text(
        f'[data]\ndataset = "{CANARY}"\ntrain_split = "train"\n[run]\noutput = "/data/{CANARY}"\nseed = 7\n'
        '[text]\nprompt = "Dr. Hans wrote:"\n[loader]\nnum_threads = 2\n[model]\nsizes = [1, 2]\n'
    )
    with EventLog(run / METRICS_FILE) as log:
        log.write("step", global_step=0, loss=9.0, step_s=1.0)


def _go_on(run: Path, generated: Path, num_steps: int = 30) -> None:
    """What it writes then."""
    lines = (write_run(generated, num_steps=num_steps) / METRICS_FILE).read_bytes()
    with (run / METRICS_FILE).open("ab") as file:
        file.write(lines)


def _follow(run: Path, found: Mapping[str, Sink], generated: Path) -> None:
    with SinkFollower(run, found):
        _go_on(run, generated)


@pytest.mark.fast
def test_all_that_is_written_from_now_on_is_handed_on_and_places_are_not(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", _Kept()
    _begin(run)
    _follow(run, {"kept": kept}, tmp_path / "generated")
    steps = [record for record in kept.records if "step/loss" in record.values]
    assert [record.global_step for record in steps] == list(range(30))
    names = {name for record in kept.records for name in record.values}
    assert names >= {"step/step_s", "evaluation/loss", "checkpoint/stall_s", "stage_s/decode"}
    assert names >= {"interval/samples_per_s", "verdict/storage-bound", "setting/loader.num_threads"}
    assert kept.settings == {
        "data.train_split": "train",
        "run.seed": 7,
        "loader.num_threads": 2,
        "model.sizes": "1, 2",
    }
    assert kept.is_closed
    assert kept.name == ""
    again = _Kept()
    _follow(run, {"kept": again}, tmp_path / "more")
    assert again.name == "known-as"
    assert not [thread for thread in threading.enumerate() if "sinks" in thread.name]


@pytest.mark.fast
@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_fails_is_left_alone_with_one_warning(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, fails, kept = tmp_path / "run", _Kept(where), _Kept()
    _begin(run)
    with caplog.at_level(logging.WARNING):
        _follow(run, {"bad": fails, "good": kept}, tmp_path / "generated")
    assert [record.getMessage() for record in caplog.records] == [
        "bad failed (RuntimeError) and gets no more numbers"
    ]
    assert len(kept.records) > 30


@pytest.mark.fast
def test_a_sink_that_hangs_does_not_hold_up_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class _Hangs(_Kept):
        def close(self) -> None:
            release.wait()

    _begin(tmp_path / "run")
    follower = SinkFollower(tmp_path / "run", {"slow": _Hangs()})
    with caplog.at_level(logging.WARNING):
        follower.close(wait_s=0.1)
    release.set()
    assert "slow did not take the last numbers" in caplog.text
    assert follower.failed == ["slow"]


@pytest.mark.fast
@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_hangs_takes_no_numbers_from_the_others(where: str, tmp_path: Path) -> None:
    release = threading.Event()

    class _Hangs(_Kept):
        def _fail(self, at: str) -> None:
            if at == where:
                release.wait()

    run, kept = tmp_path / "run", _Kept()
    _begin(run)
    follower = SinkFollower(run, {"slow": _Hangs(), "slow too": _Hangs(), "good": kept})
    _go_on(run, tmp_path / "generated")
    # One bound for all, and what the good one takes is not waited for behind the others.
    follower.close(wait_s=0.5)
    assert kept.is_closed
    assert len(kept.records) > 30
    assert follower.failed == ["slow", "slow too"]
    release.set()


@pytest.mark.fast
def test_a_sink_that_would_end_the_process_ends_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class _Exits(_Kept):
        def write(self, records: Sequence[Record]) -> None:
            raise SystemExit(3)

    run = tmp_path / "run"
    _begin(run)
    with caplog.at_level(logging.WARNING):
        _follow(run, {"bad": _Exits()}, tmp_path / "generated")
    assert [record.getMessage() for record in caplog.records] == [
        "bad failed (SystemExit) and gets no more numbers"
    ]


@pytest.mark.fast
def test_damaged_lines_and_a_folder_that_is_gone_end_no_sink_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, kept = tmp_path / "run", _Kept()
    _begin(run)
    with SinkFollower(run, {"kept": kept}):
        with (run / METRICS_FILE).open("ab") as file:
            file.write(b'{"event":"interval","time_s":1.0}\n{"event":"step"}\n')
        _go_on(run, tmp_path / "generated")
    assert len(kept.records) > 30
    with caplog.at_level(logging.WARNING), SinkFollower(run, {"kept": _Kept()}):
        (run / METRICS_FILE).unlink()
    assert [record.getMessage() for record in caplog.records] == [
        "kept failed (ConfigError) and gets no more numbers"
    ]


@pytest.mark.fast
def test_numbers_that_are_not_finite_and_texts_stay_here() -> None:
    values: dict[str, Any] = {"global_step": 3, "loss": None, "gradient_norm": float("inf"), "x": CANARY}
    assert record_of(MetricsLine("step", 5.0, values)) is None
    assert record_of(MetricsLine("attempt", 5.0, {"start": 0})) is None
    found = record_of(MetricsLine("step", 5.0, values | {"step_s": 2}))
    assert found == Record(global_step=3, time_s=5.0, values={"step/step_s": 2.0})


@pytest.mark.fast
def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    require_sinks(["wandb", "mlflow"])
    with pytest.raises(ConfigError, match="unknown service 'wandbb'; choose from mlflow, wandb"):
        require_sinks(["wandbb"])
    monkeypatch.setitem(sinks.SINKS, "wandb", "no_such_module")
    with pytest.raises(ConfigError, match=r"install 'shardflow\[wandb\]'"):
        require_sinks(["wandb"])


def _in_a_process_of_its_own(target: Any, *arguments: Any) -> None:
    # Both libraries leave settings, threads and handlers in the process that imports them.
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0


def _two_starts(run: Path, kind: str, generated: Path) -> None:
    for number in range(2):
        if kind == "wandb":
            from shardflow.monitoring.outlets import WandbSink

            sink: Sink = WandbSink()
        else:
            from shardflow.monitoring.outlets import MlflowSink

            sink = MlflowSink()
        follower = SinkFollower(run, {kind: sink})
        _go_on(run, generated / str(number), num_steps=10)
        follower.close(wait_s=240)
        assert not follower.failed


@pytest.fixture
def no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_services")
def test_wandb_keeps_a_run_offline_over_restarts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _begin(run)
    _in_a_process_of_its_own(_two_starts, run, "wandb", tmp_path)
    found = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(found) == 2
    assert len({path.name for path in found}) == 1  # the same run to the service
    for path in found:
        written = path.read_bytes()
        for name in (b"step/loss", b"stage_s/decode", b"verdict/storage-bound"):
            assert name in written
        assert b"loader.num_threads" in written
        assert CANARY.encode() not in written


@pytest.mark.usefixtures("no_services")
def test_mlflow_keeps_a_run_in_its_folder_over_restarts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _begin(run)
    _in_a_process_of_its_own(_two_starts, run, "mlflow", tmp_path)
    (losses,) = (run / "mlflow").glob("*/*/metrics/step/loss")
    steps = [int(line.split()[2]) for line in losses.read_text().splitlines()]
    assert steps == [*range(10), *range(10)]
    (settings,) = (run / "mlflow").glob("*/*/params")
    assert (settings / "loader.num_threads").read_text() == "2"
    written = b"".join(path.read_bytes() for path in (run / "mlflow").rglob("*") if path.is_file())
    assert CANARY.encode() not in written
