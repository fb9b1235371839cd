"""The tuner in a run of one rank: where it begins, what it leaves behind, and what refuses it."""

from __future__ import annotations

import gc
import json
import os
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Loader, LoaderConfig
from shardflow.loading.process import LoaderProcess
from shardflow.monitoring.history import read_history
from shardflow.monitoring.tuner import Change, Tuner
from shardflow.monitoring.tuner_numbers import TUNED_FILE, StepNumbers, read_tuned, tuned_text
from shardflow.sampling import BatchSpec
from shardflow.storage.local import is_temporary_name
from shardflow.telemetry import Move, TunableLimit
from shardflow.training.config import DataLoadingConfig, TuneConfig
from shardflow.training.run import train
from shardflow.training.tuning import Tuning, capped, common_limits
from tests.distributed.moving_tuner import MovingTuner
from tests.distributed.runs import committed_samples
from tests.forks import SERVERS
from tests.tiny_runs import TinyInput, tiny_config

DAMAGED = [
    pytest.param(b"", id="empty"),
    pytest.param(b"\x93\xf0\x00\xff" * 99, id="binary"),
    pytest.param(b"[loader]\nnum_threads = 2\nprefetch_byt", id="cut"),
    pytest.param(b"[loader]\nnum_threads = 1.5", id="fraction"),
    pytest.param(b"[loader]\nnum_threads = true", id="truth"),
    pytest.param(b"[loader.num_threads]\nmost = 3", id="nested"),
    pytest.param(b"num_threads = 3", id="no table"),
    pytest.param(b"[loader]\nnum_threads = " + b"[" * 5000, id="deep"),
    pytest.param(b"[loader]\nnum_threads = " + b"9" * 5000, id="long number"),
]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Collect no garbage: finalizers of other tests' objects would fail at the depth of a deep file."""
    gc.disable()
    yield
    gc.enable()


def test_a_run_writes_what_it_found_and_its_next_start_begins_there(
    tiny: TinyInput, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    found = {"loader.num_threads": 1, "loader.prefetch_bytes": 3 << 20}
    start = tmp_path / "of-another-run.toml"
    start.write_text(tuned_text(found), encoding="utf-8")
    overrides = ["tune.mode=on", "tune.settle_steps=50", "tune.max_threads=1", f"tune.start_from={start}"]
    # One thread and caps on bytes: nothing is left to try, and it settles with its first window.
    overrides += ["tune.max_bytes=3MiB", "loader.execution=threads", "run.num_epochs=4"]
    assert train(tiny_config(tiny, output, *overrides)).outcome == "finished"
    written = read_tuned(output / TUNED_FILE)
    assert written.items() >= found.items()
    pasted = tomllib.loads((output / TUNED_FILE).read_text(encoding="utf-8"))
    assert DataLoadingConfig(**pasted["loader"]).prefetch_bytes == 3 << 20
    kinds = [move.kind for _, move in read_history(output).moves]
    assert kinds[-1] == "settle"

    start.unlink()  # its own file comes first
    assert train(tiny_config(tiny, output, *overrides, "run.num_epochs=5")).outcome == "finished"
    assert read_tuned(output / TUNED_FILE) == written


def test_observing_writes_no_file_and_changes_nothing(tiny: TinyInput, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path / "run", "run.num_epochs=2"))
    assert not (tmp_path / "run" / TUNED_FILE).exists()
    assert all(move.kind == "propose" for _, move in read_history(tmp_path / "run").moves)


def test_a_start_that_is_no_file_of_settings_is_refused(tiny: TinyInput, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml is not \(No such file or directory\)"):
        train(tiny_config(tiny, tmp_path / "run", f"tune.start_from={tmp_path / 'none.toml'}"))


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("content", DAMAGED)
def test_mistakes_in_a_file_of_settings_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / TUNED_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tuned\.toml"):
        read_tuned(path)


# ---- a start from a file ------------------------------------------------------------------------


class OneRank:
    """What a `Tuning` asks of its ranks, of one."""

    rank = 0

    def broadcast(self, value: Any) -> Any:
        return json.loads(json.dumps(value))

    def all_gather_json(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]


def started(tiny: TinyInput, output: Path, *overrides: str) -> dict[str, int | str]:
    """Settings of a loader once a tuner has begun with what lies in the run folder."""
    config = tiny_config(tiny, output, "tune.mode=on", *overrides)
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=4)
    running = LoaderConfig(num_threads=1, prefetch_bytes=1 << 20)
    with Loader(Dataset.open(tiny.dataset), split="train", batch=spec, seed=3, config=running) as loader:
        Tuning(config.tune, OneRank(), loader, None, run=output)  # type: ignore[arg-type]
        return loader.tunables.values()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_of_its_own_costs_a_run_a_warning(
    tiny: TinyInput, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / TUNED_FILE).write_bytes(content)
    assert started(tiny, tmp_path) == started(tiny, tmp_path / "fresh")
    (line,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "tuned.toml" in line
    assert "begins as if it were not there" in line
    # The next one in the order of starts, not the last, takes its place.
    (tmp_path / "other.toml").write_text("[loader]\nprefetch_bytes = 3000000\n", encoding="utf-8")
    found = started(tiny, tmp_path, f"tune.start_from={tmp_path / 'other.toml'}")
    assert found["loader.prefetch_bytes"] == 3_000_000
    (tmp_path / "other.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^tune.start_from: .*other.toml"):
        started(tiny, tmp_path, f"tune.start_from={tmp_path / 'other.toml'}")


def test_what_another_machine_found_comes_down_to_what_this_one_has(
    tiny: TinyInput, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    values: dict[str, int | str] = {
        "cache.read_ahead_threads": 16,  # this run has no cache
        "loader.execution": "workers",
        "loader.num_thread": 2,
        "loader.num_threads": 5000,
        "loader.prefetch_bytes": 1 << 80,
        "loader.read_bytes": -1,
    }
    (tmp_path / TUNED_FILE).write_text(tuned_text(values), encoding="utf-8")
    found = started(tiny, tmp_path, "tune.max_bytes=5MiB", "tune.max_threads=2")
    assert found["loader.execution"] == "workers"
    assert (found["loader.num_threads"], found["loader.prefetch_bytes"]) == (2, 5 << 20)
    assert found["loader.read_bytes"] == 64 << 10
    left_out = [record.message for record in caplog.records if "left out" in record.message]
    assert [line.rpartition(" ")[2] for line in left_out] == ["cache.read_ahead_threads", "loader.num_thread"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_words_and_numbers_in_each_others_place_are_left_out(tiny: TinyInput, tmp_path: Path) -> None:
    text = '[loader]\nexecution = 3\nnum_threads = "many"\nprefetch_bytes = 3000000\n'
    (tmp_path / TUNED_FILE).write_text(text, encoding="utf-8")
    found = started(tiny, tmp_path)
    assert (found["loader.execution"], found["loader.num_threads"]) == ("threads", 1)
    assert found["loader.prefetch_bytes"] == 3_000_000


# ---- what goes wrong while a run goes on --------------------------------------------------------


class Scripted(Tuner):
    """Does what a test says after so many steps."""

    script: ClassVar[dict[int, Callable[[Scripted], Change | None]]] = {}

    def __init__(self, *arguments: Any, report: Callable[[Move], None], **options: Any) -> None:
        super().__init__(*arguments, report=report, **options)
        self.report = report

    def step(self, numbers: StepNumbers, global_step: int) -> Change | None:
        self.num_steps += 1
        act = self.script.get(self.num_steps)
        change = None if act is None else act(self)
        if change is not None:
            self.values[change.setting] = change.value
        return change


def scripted(monkeypatch: pytest.MonkeyPatch, script: dict[int, Callable[[Scripted], Change | None]]) -> None:
    monkeypatch.setattr(Scripted, "script", script)
    monkeypatch.setattr("shardflow.training.tuning.Tuner", Scripted)


def test_a_file_that_cannot_be_written_costs_a_warning(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settle = Move(global_step=1, kind="settle", text="settled")
    scripted(monkeypatch, {2: lambda tuner: tuner.report(settle)})
    (tmp_path / TUNED_FILE / "in the way").mkdir(parents=True)
    summary = train(tiny_config(tiny, tmp_path, "tune.mode=on", "run.num_epochs=1"))
    assert (summary.outcome, summary.global_step) == ("finished", 6)
    assert [move.kind for _, move in read_history(tmp_path).moves] == ["settle"]
    assert any("publishing tuned.toml failed" in record.message for record in caplog.records)
    assert not [path.name for path in tmp_path.iterdir() if is_temporary_name(path.name)]


def test_what_is_kept_is_written_before_the_search_is_over(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(tuner: Scripted) -> None:
        tuner.values["loader.num_threads"] = 3
        tuner.report(Move(global_step=1, kind="keep", text="3 threads"))

    scripted(monkeypatch, {2: keep})
    train(tiny_config(tiny, tmp_path, "tune.mode=on", "run.num_epochs=1"))
    assert read_tuned(tmp_path / TUNED_FILE)["loader.num_threads"] == 3


def test_a_tuner_that_fails_ends_nothing_but_itself(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(tuner: Scripted) -> NoReturn:
        raise ZeroDivisionError

    scripted(monkeypatch, {2: fail, 3: lambda _: pytest.fail("it was asked again")})
    summary = train(tiny_config(tiny, tmp_path, "tune.mode=on", "run.num_epochs=1"))
    assert (summary.outcome, summary.global_step) == ("finished", 6)
    assert [record.message for record in caplog.records if "tuner failed" in record.message]


@pytest.mark.parametrize(
    ("decided_at", "error"),
    [(2, BlockingIOError(11, "no process")), (5, TypeError("cannot pickle"))],
    ids=["amid an epoch", "at its end"],
)
def test_processes_that_cannot_start_leave_the_run_as_it_is(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decided_at: int, error: Exception
) -> None:
    def fail(*arguments: Any, **named: Any) -> NoReturn:
        raise error

    kept: list[Tuning] = []
    begin = Tuning.__init__

    def begun(self: Tuning, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        kept.append(self)

    monkeypatch.setattr(Tuning, "__init__", begun)
    monkeypatch.setattr(LoaderProcess, "__init__", fail)
    change = Change(setting="loader.execution", value="process")
    scripted(monkeypatch, {decided_at: lambda _: change})
    summary = train(tiny_config(tiny, tmp_path, "tune.mode=on", "run.num_epochs=2"))
    assert (summary.outcome, summary.global_step) == ("finished", 12)
    (tuning,) = kept
    assert tuning.tuner is not None
    # What would be written into the file is what came about.
    assert (
        tuning.tuner.values["loader.execution"] == tuning._tunables.values()["loader.execution"] == "threads"
    )


def test_a_run_that_is_tuned_leaves_no_more_behind_than_another(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardflow.training.tuning.Tuner", MovingTuner)

    def left(name: str, mode: str) -> Counter[str]:
        overrides = ("run.num_epochs=2", "cache.ram_bytes=200kB", f"tune.mode={mode}")
        assert train(tiny_config(tiny, tmp_path / name, *overrides)).outcome == "finished"
        for _ in range(2):  # the first one ends generators, the second one frees what they held
            gc.collect()
        threads = Counter(f"thread {thread.name}" for thread in threading.enumerate())
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        processes = Counter(f"process {pid}" for pid in children.split() if int(pid) not in SERVERS)
        num_open = len(list(Path("/proc/self/fd").iterdir())) - 2 * len(SERVERS)  # two pipes to each
        return threads + processes + Counter(descriptor=num_open)

    left("first", "off")  # opens what stays
    before = left("off", "off")
    assert not left("on", "on") - before
    assert committed_samples(tmp_path / "on") == committed_samples(tmp_path / "off")


# ---- limits ---------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    values: dict[str, int | str] = {
        "cache.read_ahead_threads": 16,
        "loader.execution": "process",
        "loader.num_threads": 3,
        "store.max_concurrency": 64,
    }
    path = tmp_path / TUNED_FILE
    path.write_text(tuned_text(values), encoding="utf-8")
    assert read_tuned(path) == values


def test_caps_of_the_configuration_lie_within_those_of_the_machine() -> None:
    limits = {
        "loader.num_threads": TunableLimit(least=1, most=16),
        "loader.prefetch_bytes": TunableLimit(least=1 << 20, most=1 << 30),
        "cache.max_bytes": TunableLimit(least=0, most=1 << 40),
        "loader.execution": TunableLimit(choices=("threads", "process"), is_live=False),
    }
    tune = TuneConfig(max_threads=4, max_bytes=1 << 34)
    found = capped(limits, {"cache.max_bytes": 1 << 35}, tune)
    assert found["loader.num_threads"] == TunableLimit(least=1, most=4)
    assert found["loader.prefetch_bytes"].most == 1 << 30
    assert found["cache.max_bytes"].most == 1 << 35  # the disk is somebody else's
    assert found["loader.execution"] == limits["loader.execution"]


def test_limits_are_those_that_all_ranks_have() -> None:
    one = {
        "a": TunableLimit(least=1, most=9),
        "b": TunableLimit(choices=("x", "y")),
        "c": TunableLimit(most=1),
    }
    other = {"a": TunableLimit(least=2, most=5), "b": TunableLimit(choices=("y", "z"))}
    assert common_limits([one, other]) == {
        "a": TunableLimit(least=2, most=5),
        "b": TunableLimit(choices=("y",)),
    }
