"""Alerts and the dashboard: what promtool says, and a real Prometheus that scrapes a real exporter."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardflow.monitoring import MetricsServer
from shardflow.monitoring.history import METRICS_FILE
from shardflow.monitoring.prometheus import METRICS
from tests.deploy.prometheus_server import Prometheus, prometheus_programs, run_prometheus
from tests.run_factory import write_run

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "docs" / "deploy" / "monitoring"
ALERTS = FOLDER / "alerts.yaml"
DASHBOARD = FOLDER / "grafana-dashboard.json"
CASES = Path(__file__).parent / "alerts_test.yaml"
PAGE = REPOSITORY / "docs" / "monitoring.md"
_NUM_PORTIONS = 3
# What Grafana puts into a query.
_VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "5m"}


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def _panels() -> list[dict[str, Any]]:
    return list(json.loads(DASHBOARD.read_text())["panels"])


def _dashboard_queries() -> list[str]:
    texts = [target["expr"] for panel in _panels() for target in panel.get("targets", ())]
    texts += [one["expr"] for one in json.loads(DASHBOARD.read_text())["annotations"]["list"]]
    for name, value in _VARIABLES.items():
        texts = [text.replace(name, value) for text in texts]
    return texts


def _promtool(*arguments: str | Path) -> None:
    _, tool = prometheus_programs()
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong() -> None:
    _promtool("check", "rules", ALERTS)
    _promtool("check", "config", FOLDER / "prometheus.yml")


def test_alerts_fire_on_what_they_are_for_and_keep_quiet_beside_it(tmp_path: Path) -> None:
    # As text: a series of sixty zeros, 0x60, is a number to YAML.
    (tmp_path / "cases.yaml").write_text(CASES.read_text().replace("- ALERTS", f"- {ALERTS}"))
    _promtool("test", "rules", tmp_path / "cases.yaml")


@pytest.mark.fast
def test_each_alert_is_seen_to_fire_and_to_keep_quiet_and_has_its_runbook() -> None:
    fires: set[str] = set()
    waits: set[str] = set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        runs = {re.findall(r'run="(\w+)"', one["series"])[0] for one in case["input_series"]}
        assert "bad" in runs
        assert len(runs) > 1, f"{case['name']}: a run beside it that nothing befalls"
        for check in case["alert_rule_test"]:
            (fires if check.get("exp_alerts") else waits).add(check["alertname"])
    names = {rule["alert"] for rule in _rules()}
    assert fires == waits == names
    page = PAGE.read_text()
    for rule in _rules():
        assert rule["annotations"]["runbook_url"] == f"docs/monitoring.md#{rule['alert'].lower()}"
        assert f"### {rule['alert']}\n" in page


@pytest.mark.fast
def test_alerts_and_dashboard_name_metrics_that_exist() -> None:
    ends = ("", "_bucket", "_sum", "_count")
    known = {one.prometheus_name + end for one in METRICS.values() for end in ends}
    texts = [*_dashboard_queries(), *(rule["expr"] for rule in _rules())]
    named = {name for text in texts for name in re.findall(r"shardflow_\w+", text)}
    assert len(named) > 30
    assert named <= known


@pytest.mark.fast
def test_panels_of_the_dashboard_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    panels = _panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(0 <= column < 24 for column, _ in cells), panel["title"]
        taken |= cells


def _portions(folder: Path) -> Iterator[tuple[bytes, int]]:
    """The lines of a run in parts, each with the steps in them: with only one part nothing has a rate."""
    run = write_run(folder, bound="data", num_steps=90, restart_at=45, planned_steps=200)
    lines = (run / METRICS_FILE).read_bytes().splitlines(keepends=True)
    size = -(-len(lines) // _NUM_PORTIONS)
    for start in range(0, len(lines), size):
        part = lines[start : start + size]
        yield b"".join(part), sum(json.loads(line)["event"] == "step" for line in part)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped a run which went on meanwhile, with the alerts loaded."""
    folder = tmp_path_factory.mktemp("prometheus")
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    settings["global"] = {
        "scrape_interval": "300ms",
        "scrape_timeout": "300ms",
        "evaluation_interval": "1s",
    }
    settings["rule_files"] = [str(ALERTS)]
    run = folder / "run"
    run.mkdir()
    (folder / "token").write_text("0123456789abcdef")
    settings["scrape_configs"][0]["authorization"] = {"credentials_file": str(folder / "token")}
    with MetricsServer(run, "127.0.0.1:0", token="0123456789abcdef") as server:
        target = server.url.removeprefix("http://").partition("/")[0]
        settings["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        with run_prometheus(folder / "server", settings) as found:
            num_steps = 0
            for part, steps_in_part in _portions(folder / "generated"):
                with (run / METRICS_FILE).open("ab") as file:
                    file.write(part)
                num_steps += steps_in_part
                text = f"shardflow_steps_total == {num_steps}"
                found.wait_for(text, lambda text=text: bool(found.query(text)))  # type: ignore[misc]
            yield found


def test_every_query_of_the_dashboard_gets_data(prometheus: Prometheus) -> None:
    for text in _dashboard_queries():
        assert prometheus.data(text)
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["definition"].replace("$job", ".*")
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
            assert found
            assert prometheus.ask(f"label/{found[2]}/values", **{"match[]": found[1]})


def test_every_metric_of_an_alert_gets_data_and_every_alert_is_evaluated(prometheus: Prometheus) -> None:
    names = {name for rule in _rules() for name in re.findall(r"shardflow_\w+", rule["expr"])}
    for name in names:
        assert prometheus.data(name)

    def health() -> set[str]:
        (group,) = prometheus.ask("rules")["groups"]
        return {rule["health"] for rule in group["rules"]}

    prometheus.wait_for("an evaluation", lambda: "unknown" not in health())
    assert health() == {"ok"}

    def pending() -> set[str]:
        return {alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]}

    # The run waits for data in 60 % of its steps, and its last step was years ago.
    expected = {"ShardflowDataWaitHigh", "ShardflowNoStep", "ShardflowCheckpointTooOld"}
    prometheus.wait_for("what holds for this run", lambda: expected <= pending())
    assert not pending() & {"ShardflowStraggler", "ShardflowMemoryPressure", "ShardflowCacheDiskFull"}


def test_numbers_arrive_as_they_were_written(prometheus: Prometheus) -> None:
    values = {
        name: float(prometheus.data(name)[0]["value"][1])
        for name in ("shardflow_steps_total", "shardflow_steps_lost_total", "shardflow_run_steps_done")
    }
    assert values == {
        "shardflow_steps_total": 100.0,
        "shardflow_steps_lost_total": 10.0,
        "shardflow_run_steps_done": 90.0,
    }
    (ranks,) = prometheus.data("count(count by (rank, host) (shardflow_rank_step_duration_seconds))")
    assert ranks["value"][1] == "2"
    (waiting,) = prometheus.data("shardflow_verdict_ratio")
    assert waiting["metric"]["code"] == "storage-bound"
    assert waiting["metric"]["run"] == "my-run"
