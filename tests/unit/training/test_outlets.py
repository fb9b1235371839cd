"""A real run tells others of itself: Prometheus while it goes on, TensorBoard, and nobody where it cannot."""

from __future__ import annotations

import logging
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardflow.errors import ConfigError
from shardflow.monitoring import MetricsServer
from shardflow.monitoring.outlets import SINKS, TOKEN_NAME
from shardflow.training.metrics import StepMetrics
from shardflow.training.run import train
from tests.tiny_runs import TinyInput, tiny_config


class _Scrapes:
    """Scrapes after every step what the run serves."""

    def __init__(self, run: Path, log: pytest.LogCaptureFixture) -> None:
        self._run, self._log = run, log
        self.pages: list[str] = []

    @property
    def url(self) -> str:
        url = re.findall(r"metrics for Prometheus at (\S+)", self._log.text)[-1]
        return f"{url}?token={(self._run / TOKEN_NAME).read_text().strip()}"

    def __call__(self, metrics: StepMetrics, num_steps: int) -> None:
        with urllib.request.urlopen(self.url, timeout=300) as answer:
            self.pages.append(answer.read().decode())

    def values(self, name: str) -> list[float]:
        found = [re.search(rf"^{name} (\S+)$", page, re.MULTILINE) for page in self.pages]
        return [float(one[1]) for one in found if one]


def test_a_run_serves_its_numbers_from_start_to_end_and_goes_on_with_them(
    tiny: TinyInput, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = ("monitor.prometheus=127.0.0.1:0", "monitor.interval_s=0.01", "run.tensorboard=true")
    scrapes = _Scrapes(tmp_path / "run", caplog)
    train(tiny_config(tiny, tmp_path / "run", *settings, "run.max_steps=4"), on_step=scrapes)
    train(tiny_config(tiny, tmp_path / "run", *settings, "run.max_steps=7"), on_step=scrapes)
    assert scrapes.values("shardflow_steps_total") == [1, 2, 3, 4, 5, 6, 7]
    assert scrapes.values("shardflow_run_starts_total") == [1] * 4 + [2] * 3
    assert scrapes.values("shardflow_run_steps") == [4] * 4 + [7] * 3
    # The interval of a step is written after its line: the last scrape saw all but one.
    last = scrapes.pages[-1]
    for stage in ("read", "decode", "data_wait", "forward", "backward", "optimizer"):
        assert re.search(rf'stage_duration_seconds_total{{.*stage="{stage}"}} [0-9.e-]+$', last, re.MULTILINE)
    assert re.search(r'^shardflow_rank_memory_bytes{.*kind="pss".*} [1-9]', last, re.MULTILINE)
    # Folder names, and those of shards and samples, begin so.
    assert not re.search(r"dataset/|/tmp|train-0|sample", last.replace("shardflow_samples", ""))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(scrapes.url, timeout=300)

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert {"step/loss", "stage/forward_s", "stage/data_wait_s"} <= set(board.Tags()["scalars"])
    assert [event.step for event in board.Scalars("step/loss")] == list(range(7))
    assert all(event.value > 0 for event in board.Scalars("stage/forward_s"))


def test_a_port_in_use_costs_a_warning_and_not_the_run(
    tiny: TinyInput, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsServer(tmp_path, "127.0.0.1:0") as other:
        address = other.url.removeprefix("http://").removesuffix("/metrics")
        config = tiny_config(tiny, tmp_path / "run", f"monitor.prometheus={address}", "run.max_steps=1")
        assert train(config).outcome == "finished"
    assert "The run continues without it." in caplog.text


def test_a_package_that_is_missing_is_refused_before_the_run_writes(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"monitor\.sinks must name some of wandb, mlflow"):
        tiny_config(tiny, tmp_path / "run", 'monitor.sinks=["neptune"]')
    with pytest.raises(ConfigError, match=r"monitor\.prometheus must be an address and a port"):
        tiny_config(tiny, tmp_path / "run", "monitor.prometheus=9464")
    with pytest.raises(ConfigError, match=r"needs monitor\.prometheus_token_file"):
        tiny_config(tiny, tmp_path / "run", "monitor.prometheus=0.0.0.0:9464")
    monkeypatch.setitem(SINKS, "wandb", "no_such_module")
    with pytest.raises(ConfigError, match=r"install 'shardflow\[wandb\]'"):
        train(tiny_config(tiny, tmp_path / "run", 'monitor.sinks=["wandb"]'))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
