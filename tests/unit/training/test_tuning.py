"""The tuner in a run of one rank: where it begins, what it leaves behind, and what refuses it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.monitoring.history import read_history
from shardflow.monitoring.tuner_file import TUNED_FILE, read_tuned, tuned_text
from shardflow.telemetry import KnobLimit
from shardflow.training.config import LoaderSettings, TuneSettings
from shardflow.training.run import train
from shardflow.training.tuning import capped, common_limits
from tests.tiny_runs import TinyInput, tiny_config


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
    assert LoaderSettings(**pasted["loader"]).prefetch_bytes == 3 << 20
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
    with pytest.raises(ConfigError, match="must be readable TOML, got FileNotFoundError"):
        train(tiny_config(tiny, tmp_path / "run", f"tune.start_from={tmp_path / 'none.toml'}"))


@pytest.mark.parametrize("text", ["loader = ", "[loader]\nnum_threads = 1.5", "[loader]\nnum_threads = true"])
def test_mistakes_in_a_file_of_settings_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / TUNED_FILE
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tuned\.toml"):
        read_tuned(path)


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
        "loader.num_threads": KnobLimit(least=1, most=16),
        "loader.prefetch_bytes": KnobLimit(least=1 << 20, most=1 << 30),
        "cache.max_bytes": KnobLimit(least=0, most=1 << 40),
        "loader.execution": KnobLimit(choices=("threads", "process"), is_live=False),
    }
    tune = TuneSettings(max_threads=4, max_bytes=1 << 34)
    found = capped(limits, {"cache.max_bytes": 1 << 35}, tune)
    assert found["loader.num_threads"] == KnobLimit(least=1, most=4)
    assert found["loader.prefetch_bytes"].most == 1 << 30
    assert found["cache.max_bytes"].most == 1 << 35  # the disk is somebody else's
    assert found["loader.execution"] == limits["loader.execution"]


def test_limits_are_those_that_all_ranks_have() -> None:
    one = {"a": KnobLimit(least=1, most=9), "b": KnobLimit(choices=("x", "y")), "c": KnobLimit(most=1)}
    other = {"a": KnobLimit(least=2, most=5), "b": KnobLimit(choices=("y", "z"))}
    assert common_limits([one, other]) == {"a": KnobLimit(least=2, most=5), "b": KnobLimit(choices=("y",))}
