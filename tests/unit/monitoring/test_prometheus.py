"""A run's numbers as Prometheus gets them."""

from __future__ import annotations

import contextlib
import gzip
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from shardflow.errors import ConfigError
from shardflow.logs import EventLog
from shardflow.monitoring import MetricsServer, RunCollector, parse_address, read_metrics_text
from shardflow.monitoring.history import METRICS_FILE, MetricsLine, MetricsTail
from shardflow.monitoring.prometheus import METRICS, MetricsMeter
from shardflow.telemetry import Interval, RankNumbers
from tests.run_factory import write_run

pytestmark = pytest.mark.fast


def _values(numbers: MetricsMeter) -> dict[str, dict[tuple[str, ...], float]]:
    return {found.metric.name: dict(found.values) for found in numbers.values()}


def _read(run: Path) -> dict[str, dict[tuple[str, ...], float]]:
    numbers = MetricsMeter()
    for event in MetricsTail(run).read():
        numbers.add(event)
    return _values(numbers)


def test_what_was_done_stays_counted_and_what_counts_goes_back(tmp_path: Path) -> None:
    values = _read(write_run(tmp_path, num_steps=60, restart_at=45, planned_steps=100))
    assert values["steps"][()] == 70
    assert values["steps.lost"][()] == 10
    assert values["run.starts"][()] == 2
    assert values["run.steps.done"][()] == 60
    assert values["samples"][()] == 70 * 32
    # 40 steps to go, of 0.97 s.
    assert values["run.remaining"][()] == pytest.approx(40 * 0.97)
    parts = values["goodput.duration"]
    assert parts["lost",] == pytest.approx(10 * 0.97)
    assert values["goodput"][()] == pytest.approx(parts["useful",] / sum(parts.values()))


def test_counters_never_go_back_whatever_a_run_goes_through(tmp_path: Path) -> None:
    numbers = MetricsMeter()
    before: dict[tuple[str, tuple[str, ...]], float] = {}
    for event in MetricsTail(write_run(tmp_path, num_steps=60, restart_at=45, outcome="finished")).read():
        numbers.add(event)
        now = {
            (name, labels): value
            for name, found in _values(numbers).items()
            if METRICS[name].kind == "counter"
            for labels, value in found.items()
        }
        assert all(now[key] >= value for key, value in before.items())
        before = now
    assert _values(numbers)["run.running"][()] == 0


def test_an_exporter_started_anew_tells_the_same_totals(tmp_path: Path) -> None:
    run = write_run(tmp_path / "whole", restart_at=45)
    lines = (run / METRICS_FILE).read_bytes().splitlines(keepends=True)
    other = tmp_path / "bit by bit"
    other.mkdir()
    numbers, tail = MetricsMeter(), MetricsTail(other)
    for line in lines:
        # Torn in the middle: the first half is left for later.
        for half in (line[: len(line) // 2], line[len(line) // 2 :]):
            with (other / METRICS_FILE).open("ab") as file:
                file.write(half)
            for event in tail.read():
                numbers.add(event)
    assert _values(numbers) == _read(run)


def test_steps_that_are_not_finite_are_counted_and_leave_the_last_loss(tmp_path: Path) -> None:
    with EventLog(tmp_path / METRICS_FILE) as log:
        log.write("attempt", attempt=1, start=0)
        log.write("step", global_step=0, step_s=1.0, num_tokens=5, loss=2.5, gradient_norm=1.0)
        log.write("step", global_step=1, step_s=1.0, num_tokens=5, loss=float("nan"), gradient_norm=None)
        log.write("step", global_step=2, step_s=1.0, num_tokens=0, loss=None, gradient_norm=None)
    values = _read(tmp_path)
    assert values["steps.nonfinite"][()] == 1
    assert values["loss"][()] == 2.5


def test_a_finding_that_holds_no_more_is_zero(tmp_path: Path) -> None:
    with EventLog(tmp_path / METRICS_FILE) as log:
        log.write("verdict", global_step=9, code="storage-bound", text="a", share=0.5)
        log.write("verdict", global_step=9, code="straggler", text="b", share=0.2)
        log.write("verdict", global_step=19, code="compute-bound", text="c", share=0.9)
    assert _read(tmp_path)["verdict"] == {
        ("storage-bound",): 0.0,
        ("straggler",): 0.0,
        ("compute-bound",): 0.9,
    }


def test_labels_are_numbers_and_names_of_ours(tmp_path: Path) -> None:
    """Whatever stands in the file: no path, no key, no sentence gets into a label, and labels are bounded."""
    canary = "/data/Müller, Hans 19481224"
    interval = Interval(
        global_step=9,
        num_steps=10,
        tier=canary,
        stages={},
        settings={"data.dataset": canary, canary: 3, "loader.num_threads": 2},
        ranks=tuple(RankNumbers(rank=rank, host=canary) for rank in range(200)),
        events={canary: 3, "cache_fault": 1},
    )
    with EventLog(tmp_path / METRICS_FILE) as log:
        log.write("attempt", attempt=1, start=0)
        log.write("interval", **(interval.to_json() | {"stages": {canary: {"seconds": 1.0}}}))
        log.write("verdict", global_step=9, code=canary, text=canary, share=0.5)
        log.write("tune", global_step=9, kind=canary, text=canary)
        for number in range(500):
            log.write("verdict", global_step=9, code=f"code-{number}", text=canary, share=0.5)
    text = read_metrics_text(tmp_path)
    assert "Müller" not in text
    assert "1948" not in text
    labels = set(re.findall(r'(\w+)="', text))
    assert labels <= {"le", *(label for metric in METRICS.values() for label in metric.labels)}
    values = _read(tmp_path)
    assert len(values["rank.cpus_busy"]) == 64
    assert len(values["verdict"]) == 64
    assert values["setting"] == {("loader.num_threads",): 2.0}


def test_without_a_cache_all_comes_from_where_the_dataset_lies(tmp_path: Path) -> None:
    interval = Interval.from_json(
        {"global_step": 9, "num_steps": 10, "stages": {"read": {"num_bytes": 7, "num_items": 2}}}
    )
    with EventLog(tmp_path / METRICS_FILE) as log:
        log.write("interval", **interval.to_json())
    assert _read(tmp_path)["tier.io"] == {("ram",): 0.0, ("disk",): 0.0, ("origin",): 7.0}


def test_a_scrape_gets_what_was_written_since_the_last_one(tmp_path: Path) -> None:
    run, num_threads = tmp_path / "run", threading.active_count()
    run.mkdir()
    with MetricsServer(run, "127.0.0.1:0") as server:
        assert "shardflow_steps_total 0.0\n" in _get(server.url)
        write_run(run, num_steps=10)
        assert "shardflow_steps_total 10.0\n" in _get(server.url)
        with EventLog(run / METRICS_FILE) as log:
            log.write("step", global_step=10, step_s=1.0)
        assert "shardflow_steps_total 11.0\n" in _get(server.url)
        url = server.url
    with pytest.raises(urllib.error.URLError):
        _get(url)
    assert threading.active_count() == num_threads


def test_openmetrics_is_told_to_who_asks_for_it(tmp_path: Path) -> None:
    with MetricsServer(write_run(tmp_path, planned_steps=90), "127.0.0.1:0") as server:
        text = _get(server.url, accept="application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    told = {metric.family for metric in METRICS.values()}
    assert set(families) <= told
    assert len(told - set(families)) <= 6  # what a run without masks, pinned memory, ... does not have
    (total,) = families["shardflow_steps"].samples
    assert (total.name, total.value) == ("shardflow_steps_total", 60.0)


def _status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=300) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        is_strict = "default-src 'none'" in error.headers["Content-Security-Policy"]
        return error.code if is_strict else 0


def test_a_token_is_asked_for_as_a_bearer_or_in_the_address(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    with MetricsServer(write_run(tmp_path), "0.0.0.0:0", token=token) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        bare = url.partition("?")[0]
        assert url == f"{bare}?token={token}"
        assert (_status(bare), _status(url), _status(f"{bare}?token={token}x")) == (403, 200, 403)
        # What `authorization: credentials_file` of Prometheus sends.
        assert _status(bare, Authorization=f"Bearer {token}") == 200
        assert _status(bare, Authorization="Bearer other") == 403


def test_other_pages_names_and_parameters_are_refused(tmp_path: Path) -> None:
    with MetricsServer(write_run(tmp_path), "127.0.0.1:0") as server:
        base = server.url.removesuffix("/metrics")
        assert _status(server.url, Host="evil.example") == 403
        for path in ("/", "/metrics/", "/../metrics", "/%2e%2e/etc/passwd", "/metrics.json", "/favicon.ico"):
            assert _status(base + path) == 404, path
        for query in ("a=1", "name[]=" + "x" * 9000, "%00", "&".join(f"a{n}=1" for n in range(21))):
            assert _status(f"{server.url}?{query}") == 400, query[:20]
        for accept in (
            "application/openmetrics-text; version=x",
            ";;,,q=",
            "\xff",
            "text/plain; version=1e9",
        ):
            assert _status(server.url, Accept=accept) == 200


def test_an_answer_is_compressed_for_who_asks(tmp_path: Path) -> None:
    with MetricsServer(write_run(tmp_path), "127.0.0.1:0") as server:
        asked = urllib.request.Request(server.url, headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(asked, timeout=300) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert "shardflow_steps_total 60.0\n" in gzip.decompress(answer.read()).decode()


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardflow.viewing.web._MAX_CONNECTIONS", 3)
    num_threads = threading.active_count()
    with MetricsServer(write_run(tmp_path), "127.0.0.1:0") as server, contextlib.ExitStack() as stack:
        host, port = server.url.removeprefix("http://").removesuffix("/metrics").split(":")
        strangers = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=300)) for _ in range(9)
        ]
        assert not any(stranger.recv(1) for stranger in strangers[:6])  # closed by the server
        assert _status(server.url) == 200
    assert threading.active_count() == num_threads


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    with MetricsServer(write_run(tmp_path), "127.0.0.1:0") as server:
        host, port = server.url.removeprefix("http://").removesuffix("/metrics").split(":")
        with socket.create_connection((host, int(port))):
            assert "shardflow_steps_total" in _get(server.url, timeout_s=300)


def test_a_stranger_who_never_reads_keeps_nobody_waiting(tmp_path: Path) -> None:
    with MetricsServer(write_run(tmp_path, world_size=64), "127.0.0.1:0") as server:
        host, port = server.url.removeprefix("http://").removesuffix("/metrics").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stranger = stack.enter_context(socket.socket())
                # Less than an answer fits into what is on its way.
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                stranger.connect((host, int(port)))
                stranger.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert "shardflow_steps_total 60.0" in _get(server.url, timeout_s=300)


def test_scrapes_at_once_count_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_half_read, go_on = threading.Event(), threading.Event()

    class _Slow(MetricsTail):
        def read(self) -> Iterator[MetricsLine]:
            for number, line in enumerate(super().read()):
                if number == 30:
                    is_half_read.set()
                    go_on.wait(300)
                yield line

    monkeypatch.setattr("shardflow.monitoring.prometheus.MetricsTail", _Slow)
    with MetricsServer(write_run(tmp_path), "127.0.0.1:0") as server, ThreadPoolExecutor(2) as threads:
        first = threads.submit(_get, server.url)
        assert is_half_read.wait(300)
        second = threads.submit(_get, server.url)
        # It may come no further than to wait for the first one.
        assert not wait([second], timeout=0.3).done
        go_on.set()
        for scrape in (first, second):
            assert "shardflow_steps_total 60.0\n" in scrape.result(300)


def test_a_folder_comes_goes_and_gets_another_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    collector = RunCollector(run)

    def told(name: str) -> float | None:
        samples = {one.name: one.value for family in collector.collect() for one in family.samples}
        return samples.get(f"shardflow_{name}")

    assert told("steps_total") == 0.0
    write_run(run, num_steps=20, planned_steps=90)
    assert (told("steps_total"), told("run_steps")) == (20.0, 90.0)
    away = run.rename(tmp_path / "away")
    # A run that is gone does not go on.
    assert (told("steps_total"), told("run_running")) == (None, None)
    away.rename(run)
    assert (told("steps_total"), told("run_running")) == (20.0, 1.0)
    # Another one, longer than what was read of the first.
    (run / METRICS_FILE).unlink()
    with EventLog(run / METRICS_FILE) as log:
        log.write("attempt", attempt=1, start=0)
        for number in range(200):
            log.write("step", global_step=number, step_s=1.0)
    assert (told("steps_total"), told("run_steps"), told("run_starts_total")) == (200.0, None, 1.0)
    # And a shorter one that begins with the same bytes.
    lines = (run / METRICS_FILE).read_bytes().splitlines(keepends=True)
    (run / METRICS_FILE).write_bytes(b"".join(lines[:31]))
    assert told("steps_total") == 30.0


def test_a_port_in_use_is_a_sentence(tmp_path: Path) -> None:
    with MetricsServer(tmp_path, "127.0.0.1:0") as server:
        address = server.url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(ConfigError, match="with a free port, got"):
            MetricsServer(tmp_path, address)


def test_addresses() -> None:
    assert parse_address("127.0.0.1:9464", "x") == ("127.0.0.1", 9464)
    assert parse_address("[::1]:0", "x") == ("::1", 0)
    assert parse_address("node-3:80", "x") == ("node-3", 80)
    for text in ("", ":9464", "9464", "localhost", "localhost:", "::1:80", "a:65536", "a:-1", "a:٣"):
        with pytest.raises(ConfigError, match=r"monitor\.prometheus must be an address and a port"):
            parse_address(text, "monitor.prometheus")


def test_names_are_those_that_prometheus_wants() -> None:
    names = {metric.prometheus_name: metric.kind for metric in METRICS.values()}
    assert len(names) == len(METRICS)
    for name, kind in names.items():
        assert re.fullmatch(r"shardflow(_[a-z]+)+", name)
        assert name.endswith("_total") == (kind == "counter")


def _get(url: str, accept: str = "", timeout_s: float = 300) -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return str(answer.read().decode())
