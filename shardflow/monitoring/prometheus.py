"""Prometheus endpoint of a run, served by the run itself or from its folder, and the table of its metrics.

Names in the table are OpenTelemetry's; `Metric.prometheus_name` derives Prometheus' names: dots become
underscores, the unit is spelled out at the end, counters end in ``_total``. A label is a number, a name from
a fixed list, or a host: never a sample key, a path, or free text.

Each scrape reads what the run has written since the last one, in its own thread; the training loop is not
involved. The meter adds up the whole file of a run, across restarts, so a restarted exporter reports the same
totals. Steps that a restart repeats stay counted in counters; gauges report only those that count. Memory is
constant except for 24 bytes a step, for goodput. Only numbers are served, to those who have the token.
"""

from __future__ import annotations

import gzip
import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from shardflow._version import __version__
from shardflow.errors import ConfigError, StorageError
from shardflow.monitoring.goodput import GoodputMeter
from shardflow.monitoring.history import MetricsLine, MetricsTail, check_holds_metrics
from shardflow.telemetry import STAGES, Interval, Move, Verdict, metric_name
from shardflow.viewing.web import Answer, NoSuchPage, Request, WebServer

MetricKind = Literal["counter", "gauge", "histogram", "info"]
_SUFFIX: Final = {"": "", "s": "_seconds", "By": "_bytes", "1": "_ratio"}

STEP_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper ends of the buckets of the time of a step; a last one has no end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric."""

    name: str
    """Without the namespace: ``stage.duration``."""
    kind: MetricKind
    text: str
    unit: Literal["", "s", "By", "1"] = ""
    """As OpenTelemetry writes it; ``1`` is a share from 0 to 1, and a count of things has none."""
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """Name of the family in Prometheus: without what its kind puts behind it."""
        return metric_name(self.name).replace(".", "_") + _SUFFIX[self.unit]

    @property
    def prometheus_name(self) -> str:
        """Name to query by; that of a histogram has ``_bucket``, ``_sum`` or ``_count`` behind it."""
        return self.family + {"counter": "_total", "info": "_info"}.get(self.kind, "")


def _counter(name: str, text: str, unit: Literal["", "s", "By"] = "", *labels: str) -> Metric:
    return Metric(name=name, kind="counter", text=text, unit=unit, labels=labels)


def _gauge(name: str, text: str, unit: Literal["", "s", "By", "1"] = "", *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", text=text, unit=unit, labels=labels)


_OVER: Final = "over"
_RANK: Final = ("rank", "host")
_ALL: Final = (
    Metric(name="build", kind="info", text="Version of shardflow that reports this.", labels=("version",)),
    Metric(
        name="run",
        kind="info",
        text="Where the dataset is stored: local, or the scheme of its address.",
        labels=("tier",),
    ),
    # The run.
    _counter("run.starts", "Starts of the run, the first one included."),
    _counter("run.lines.damaged", "Lines of the run's measurements that were left out."),
    _gauge("run.start.timestamp", "When the last start began, since 1970.", "s"),
    _gauge("run.running", "1 from a start to its orderly end; a start that was killed leaves it so."),
    _gauge("run.ranks", "Ranks that train."),
    _gauge("run.steps", "Steps of the whole run, where it is known."),
    _gauge("run.steps.done", "Steps done and kept: a restart goes back to its checkpoint."),
    _gauge("run.epoch", "Epoch of the last step, from 0."),
    _gauge("run.remaining", "Expected time to the last step, at the pace of the last interval.", "s"),
    _gauge("run.last_step.timestamp", "When the last step was done, since 1970.", "s"),
    _gauge("goodput.duration", "Time of the run by what became of it, over all starts.", "s", "part"),
    _gauge("goodput", "Share of the run's time in steps that count, without their wait for data.", "1"),
    # Steps: also those that a later start did again, so that counters never go back.
    Metric(name="step.duration", kind="histogram", text="Time of a step on the slowest rank.", unit="s"),
    _counter("steps", "Steps done."),
    _counter("steps.lost", "Steps that a later start did again."),
    _counter("steps.nonfinite", "Steps whose loss or gradient was not finite."),
    _counter("step.data_wait", "Time in steps that the slowest rank waited for data.", "s"),
    _counter("samples", "Samples trained on."),
    _counter("tokens", "Tokens trained on."),
    _counter("samples.masked", "Samples that could not be read, and were masked."),
    _gauge("loss", "Training loss of a token, in nats, of the last step that had one."),
    _gauge("evaluation.loss", "Loss of a token, in nats, of the last evaluation."),
    _counter("evaluations", "Evaluations done."),
    _counter("evaluation.duration", "Time of evaluations.", "s"),
    _gauge("learning_rate", "Learning rate of the last step."),
    _gauge("gradient.norm", "Norm of the gradient before clipping, of the last step that had one."),
    _gauge("loss_scale", "Loss scale of the last step; 1 except under fp16."),
    # Checkpoints.
    _counter("checkpoints", "Checkpoints written."),
    _counter("checkpoint.stall", "Time that training stood still for checkpoints.", "s"),
    _gauge("checkpoint.write", "Time that the last checkpoint took beside the steps.", "s"),
    _gauge("checkpoint.size", "Bytes that rank 0 wrote for the last checkpoint.", "By"),
    _gauge("checkpoint.steps.done", "Steps that the last checkpoint counts."),
    _gauge("checkpoint.timestamp", "When the last checkpoint was complete, since 1970.", "s"),
    # Where the time goes.
    _counter("stage.duration", "Time in a stage, over all ranks and their threads.", "s", "stage", "group"),
    _counter("stage.io", "Bytes that went through a stage, over all ranks.", "By", "stage", "group"),
    _counter("stage.items", "Things that went through a stage, over all ranks.", "", "stage", "group"),
    _counter("tier.io", "Bytes that came from a tier, over all ranks; origin also ahead.", "By", "tier"),
    _counter("tier.items", "Blocks or ranges that came from a tier, over all ranks.", "", "tier"),
    _counter("cache.events", "Faults and evictions of the cache, over all ranks.", "", "event"),
    _counter("service.events", "Micro-batches made here, and requests sent to another server.", "", "event"),
    _gauge("cache.free", "Least room on a disk of the cache, over the nodes.", "By"),
    _gauge("loader.ready_batches", "Micro-batches that are ready when the loop takes one.", "", _OVER),
    _gauge("loader.ahead_batches", "Micro-batches that are fetched ahead of the loader.", "", _OVER),
    _gauge("loader.buffered", "Bytes of micro-batches in the loader.", "By", _OVER),
    _gauge("loader.fetching", "Bytes being fetched.", "By", _OVER),
    _gauge("loader.pinned_regions", "Regions of pinned memory in use.", "", _OVER),
    _gauge("loader.threads_busy", "Threads of the loader at work.", "", _OVER),
    # Ranks and nodes, in the last interval.
    _gauge("rank.step.duration", "Time of a step that a rank spent so.", "s", *_RANK, "activity"),
    _gauge("rank.cpus_busy", "Processors that a rank and its loader keep busy.", "", *_RANK),
    _gauge("rank.cpu_wait", "Threads of a rank that could run and had no processor.", "", *_RANK),
    _gauge("rank.gil_wait", "Share of the time that a thread waits for the interpreter.", "1", *_RANK),
    _gauge("rank.memory", "Memory of a rank by what it is.", "By", *_RANK, "kind"),
    _gauge("node.cpus", "Processors that the processes of a node may use."),
    _gauge("node.memory", "Memory of a node, or of its cgroup.", "By"),
    _gauge("node.memory.available", "Least memory left on a node.", "By"),
    # Conclusions.
    _gauge("verdict", "Share of the step that a finding explains; 0 once it no longer applies.", "1", "code"),
    _counter("tuner.moves", "What the tuner did.", "", "kind"),
    _gauge("setting", "Settings that are numbers, as they are now.", "", "name"),
)
METRICS: Final[dict[str, Metric]] = {metric.name: metric for metric in _ALL}
"""All metrics by name."""


_TIERS: Final = ("ram", "disk", "origin")
_GAUGES: Final = {
    "ready_batches": "loader.ready_batches",
    "ahead_batches": "loader.ahead_batches",
    "buffered_bytes": "loader.buffered",
    "fetching_bytes": "loader.fetching",
    "pinned_regions": "loader.pinned_regions",
    "threads_busy": "loader.threads_busy",
}
"""Gauges of an interval, and the metrics that they become."""
_STEP_TOTALS: Final = {
    "step.duration": "step_s",
    "step.data_wait": "data_wait_s",
    "tokens": "num_tokens",
    "samples": "num_samples",
}
_LAST_STEP: Final = {
    "run.epoch": "epoch",
    "run.last_step.timestamp": "time_s",
    "learning_rate": "learning_rate",
    "loss_scale": "loss_scale",
}
_CHECKPOINT: Final = {
    "checkpoint.write": "write_s",
    "checkpoint.size": "num_bytes",
    "checkpoint.steps.done": "global_step",
    "checkpoint.timestamp": "time_s",
}
"""Metrics, and the keys of lines that they are made of."""
_SERVICE_EVENTS: Final = ("local", "resent")
_CACHE_EVENTS: Final = ("fault", "poisoned", "unsound", "ram_evicted", "disk_evicted")
_MOST_RANKS: Final = 64
_MOST_NAMES: Final = 64
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What a label may be that comes out of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricValues:
    """A metric with its values by labels, in the order of `Metric.labels`."""

    metric: Metric
    values: Mapping[tuple[str, ...], float]
    buckets: tuple[int, ...] = ()
    """Of a histogram: how many were at most so long, by `STEP_BUCKETS_S`, then all. Its value is the sum."""


class MetricsMeter:
    """Adds up a run's lines, in their order."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._buckets = [0] * (len(STEP_BUCKETS_S) + 1)
        self._goodput = GoodputMeter()
        self._step: Mapping[str, Any] | None = None
        self._interval: Interval | None = None
        self._total_steps = 0
        self._steps_done = 0
        self._verdict_step = -1
        for name, metric in METRICS.items():
            # Counters exist before their first event: what grows from nothing has no rate.
            if metric.kind == "counter" and not metric.labels:
                self._set(name, 0.0)

    def add(self, line: MetricsLine) -> None:
        """Take a line; one of an unknown event is left alone."""
        self._goodput.add(line)
        match line.record:
            case Interval():
                self._add_interval(line.record)
            case Verdict():
                self._add_verdict(line.record)
            case Move() if self._may_name("tuner.moves", line.record.kind):
                self._count("tuner.moves", 1, line.record.kind)
        values = line.values
        match line.event:
            case "attempt":
                self._add_start(values["start"], line.time_s)
            case "plan":
                self._total_steps = values["num_steps"]
            case "end":
                self._set("run.running", 0.0)
            case "step":
                self._add_step(values)
            case "evaluation":
                self._set_known("evaluation.loss", values.get("loss"))
                self._count("evaluations", 1)
                self._count("evaluation.duration", values["evaluation_s"])
            case "checkpoint":
                self._count("checkpoints", 1)
                self._count("checkpoint.stall", values["stall_s"])
                for name, key in _CHECKPOINT.items():
                    self._set(name, values[key])

    def values(self, num_damaged: int = 0) -> Iterator[MetricValues]:
        """Yield all that is known, in the order of `METRICS`.

        Args:
            num_damaged: Lines of the run that were left out.
        """
        self._set("run.lines.damaged", num_damaged)
        self._set_progress()
        self._set_goodput()
        if self._interval is not None:
            self._set_interval(self._interval)
        for name, metric in METRICS.items():
            if found := self._values.get(name):
                buckets = tuple(accumulate(self._buckets)) if metric.kind == "histogram" else ()
                yield MetricValues(metric=metric, values=dict(found), buckets=buckets)

    def _add_start(self, start: int, time_s: float) -> None:
        self._count("run.starts", 1)
        self._set("run.running", 1.0)
        self._set("run.start.timestamp", time_s)
        self._count("steps.lost", max(0, self._steps_done - start))
        self._steps_done = start

    def _add_step(self, line: Mapping[str, Any]) -> None:
        self._step = line
        self._steps_done = line["global_step"] + 1
        seconds = line["step_s"]
        self._buckets[bisect_left(STEP_BUCKETS_S, seconds)] += 1
        num_tokens, loss, norm = line["num_tokens"], line.get("loss"), line.get("gradient_norm")
        self._count("steps", 1)
        for name, key in _STEP_TOTALS.items():
            self._count(name, line[key])
        if num_tokens and (loss is None or norm is None):
            self._count("steps.nonfinite", 1)
        self._set_known("loss", loss)
        self._set_known("gradient.norm", norm)

    def _set_progress(self) -> None:
        if self._step is not None:
            for name, key in _LAST_STEP.items():
                self._set_known(name, self._step.get(key))
        if self._values["run.starts"][()]:
            self._set("run.steps.done", self._steps_done)
        if self._total_steps:
            self._set("run.steps", self._total_steps)

    def _add_interval(self, interval: Interval) -> None:
        self._interval = interval
        self._total_steps = interval.total_steps or self._total_steps
        self._count("samples.masked", interval.num_masked)
        self._add_stages(interval)
        for event in _SERVICE_EVENTS:
            self._count("service.events", interval.events.get(f"service_{event}", 0), event)
        for event in _CACHE_EVENTS:
            self._count("cache.events", interval.events.get(f"cache_{event}", 0), event)

    def _set_interval(self, interval: Interval) -> None:
        # Of ranks, settings and tiers others may be there than before.
        for name in METRICS:
            if name.startswith("rank.") or name in {"run", "setting"}:
                self._values.pop(name, None)
        self._set("run.ranks", interval.world_size)
        if _PLAIN.fullmatch(interval.tier):
            self._set("run", 1.0, interval.tier)
        if interval.cache_free_bytes >= 0:
            self._set("cache.free", interval.cache_free_bytes)
        for name, metric in _GAUGES.items():
            if gauge := interval.gauges.get(name):
                for over in ("mean", "least", "most"):
                    self._set(metric, getattr(gauge, over), over)
        self._set("node.cpus", interval.num_cpus)
        if interval.memory_bytes:
            self._set("node.memory", interval.memory_bytes)
            self._set("node.memory.available", interval.available_bytes)
        for name, value in interval.settings.items():
            if isinstance(value, int | float) and self._may_name("setting", name):
                self._set("setting", value, name)
        if interval.num_steps and self._total_steps and not interval.is_warm_up:
            left = max(0, self._total_steps - self._steps_done)
            self._set("run.remaining", left * interval.wall_s / interval.num_steps)
        self._set_ranks(interval)

    def _add_stages(self, interval: Interval) -> None:
        for name, stage in STAGES.items():
            if found := interval.stages.get(name):
                self._count("stage.duration", found.seconds, name, stage.group)
                self._count("stage.io", found.num_bytes, name, stage.group)
                self._count("stage.items", found.num_items, name, stage.group)
        # Without a cache all that is read comes from where the dataset is stored.
        has_cache = any(f"cache_{tier}" in interval.stages for tier in _TIERS)
        for tier in _TIERS:
            name = f"cache_{tier}" if has_cache or tier != "origin" else "read"
            found = interval.stage(name)
            self._count("tier.io", found.num_bytes, tier)
            self._count("tier.items", found.num_items, tier)

    def _set_ranks(self, interval: Interval) -> None:
        # The reported ranks may change, so their numbers are gauges, never sums.
        wall_s = interval.wall_s or 1.0
        for rank in interval.ranks[:_MOST_RANKS]:
            host = rank.host if _PLAIN.fullmatch(rank.host) else ""
            labels = (str(rank.rank), host)
            for activity in ("data_wait", "compute", "exchange", "optimizer"):
                seconds = float(getattr(rank, f"{activity}_s")) / max(1, interval.num_steps)
                self._set("rank.step.duration", seconds, *labels, activity)
            self._set("rank.cpus_busy", rank.cpu_s / wall_s, *labels)
            self._set("rank.cpu_wait", rank.runnable_s / wall_s, *labels)
            self._set("rank.gil_wait", rank.gil_wait_share, *labels)
            for kind in ("pss", "pinned", "device", "cache_ram", "cache_disk"):
                self._set("rank.memory", getattr(rank, f"{kind}_bytes"), *labels, kind)

    def _add_verdict(self, verdict: Verdict) -> None:
        known = self._values.setdefault("verdict", {})
        # Those of one step were found together; those of an earlier one hold no more.
        if verdict.global_step != self._verdict_step:
            self._verdict_step = verdict.global_step
            for labels in known:
                known[labels] = 0.0
        if self._may_name("verdict", verdict.code):
            known[verdict.code,] = verdict.share

    def _may_name(self, metric: str, label: str) -> bool:
        """Whether a text out of the file may be a label: a word, and one of not too many."""
        known = self._values.get(metric, {})
        return bool(_PLAIN.fullmatch(label)) and ((label,) in known or len(known) < _MOST_NAMES)

    def _set_goodput(self) -> None:
        goodput = self._goodput.measured()
        for part in ("useful", "data_wait", "checkpoint", "evaluation", "restart", "lost", "other"):
            self._set("goodput.duration", getattr(goodput, f"{part}_s"), part)
        self._set("goodput", goodput.useful_share)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        values = self._values.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + max(0.0, amount)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values.setdefault(name, {})[labels] = float(value)

    def _set_known(self, name: str, value: float | None) -> None:
        """Set it if it is known and finite; otherwise the last value remains."""
        if value is not None:
            self._set(name, value)


_PATH: Final = "/metrics"
_MOST_PORT: Final = 65535


def require_prometheus(asked_by: str) -> None:
    """Refuse to continue without the client library.

    Args:
        asked_by: The setting or the command that asks for it.

    Raises:
        ConfigError: It is not installed.
    """
    if find_spec("prometheus_client") is None:
        raise ConfigError(
            f"{asked_by} needs the package prometheus-client, which is not installed; install "
            "'shardflow[prometheus]', or leave it out."
        )


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Split ``ADDRESS:PORT``; an IPv6 address is in brackets.

    Args:
        text: ``127.0.0.1:9464``, ``[::1]:9464``, ``0.0.0.0:0``; port 0 is any free one.
        name: What is parsed, for the error.

    Raises:
        ConfigError: It is none.
    """
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    # Digits of other scripts are digits to Python too.
    is_port = port.isascii() and port.isdigit() and int(port) <= _MOST_PORT
    if not host or (":" in host and not is_bracketed) or not is_port:
        raise ConfigError(
            f"{name} must be an address and a port, got {text!r}; write 127.0.0.1:9464, or port 0 for any "
            "free one."
        )
    return host, int(port)


class RunCollector:
    """Collector of a run's metrics for ``prometheus_client``; register it where metrics are served.

    Args:
        run: The run folder. An empty one gives counters of zero; one that was deleted or became unreadable
            gives no metrics until it is back; if another run begins in it, that run's metrics follow.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._tail = MetricsTail(self._run)
        self._meter = MetricsMeter()
        self._has_read = False

    def collect(self) -> Iterator[Any]:
        """Read what was written since the last call, and return all families."""
        with self._lock:
            if self._tail.is_of_another_run():
                self._begin()
            try:
                for line in self._tail.read():
                    self._has_read = True
                    self._meter.add(line)
            except (ConfigError, StorageError):
                # Old values would look like a running run, zeros like counters that were reset.
                is_reported = not self._has_read
            else:
                is_reported = True
            found = list(self._meter.values(self._tail.num_damaged)) if is_reported else []
        build = MetricValues(metric=METRICS["build"], values={(__version__,): 1.0})
        return iter([_family(one) for one in (build, *found)])


def _family(found: MetricValues) -> Any:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    metric = found.metric
    if metric.kind == "histogram":
        ends = (*map(str, STEP_BUCKETS_S), "+Inf")
        buckets = list(zip(ends, found.buckets, strict=True))
        return HistogramMetricFamily(metric.family, metric.text, buckets=buckets, sum_value=found.values[()])
    if metric.kind == "info":
        family = InfoMetricFamily(metric.family, metric.text, labels=())
        for labels in found.values:
            family.add_metric((), dict(zip(metric.labels, labels, strict=True)))
        return family
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.family, metric.text, labels=metric.labels)
    for labels, value in found.values.items():
        family.add_metric(labels, value)
    return family


def read_metrics_text(run: Path) -> str:
    """Return the text that a scrape of a run returns now.

    Raises:
        ConfigError: The library is missing, or the folder holds no metrics.
    """
    require_prometheus("reading metrics")
    from prometheus_client import CollectorRegistry, generate_latest

    check_holds_metrics(run)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(run))
    return str(generate_latest(registry).decode())


def _scrape(registry: Any, request: Request) -> Answer:
    from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
    from prometheus_client.openmetrics import exposition as openmetrics

    if request.path != _PATH:
        raise NoSuchPage
    if request.values:
        raise ConfigError(f"{_PATH} takes no parameters but the token; leave them out.")
    accepted = {name.lower(): value for name, value in request.headers.items()}
    if "application/openmetrics-text" in accepted.get("accept", ""):
        body, kind = openmetrics.generate_latest(registry), openmetrics.CONTENT_TYPE_LATEST
    else:
        body, kind = generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    if "gzip" not in accepted.get("accept-encoding", ""):
        return Answer(body=body, content_type=kind)
    return Answer(body=gzip.compress(body, 1), content_type=kind, headers={"Content-Encoding": "gzip"})


class MetricsServer:
    """Serves ``/metrics`` of a run, in threads of its own, until it is closed.

    Args:
        run: The run folder.
        address: Where to listen, see `parse_address`.
        asked_by: The setting or the option that names the address.
        token: What scrapers must send, as bearer token or as parameter ``token``; empty asks for none.

    Raises:
        ConfigError: The library is missing, or the address is none that can be listened on.

    Example:
        >>> from pathlib import Path
        >>> with MetricsServer(Path("run"), "127.0.0.1:0") as server:  # doctest: +SKIP
        ...     print(server.url)
    """

    def __init__(
        self, run: Path, address: str, *, asked_by: str = "the address to listen on", token: str = ""
    ) -> None:
        require_prometheus(asked_by)
        host, port = parse_address(address, asked_by)
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunCollector(run))
        try:
            self._server = WebServer(
                partial(_scrape, registry), host=host, port=port, token=token, name="shardflow-metrics"
            )
        except OSError as error:
            raise ConfigError(
                f"{asked_by} must be an address of this machine with a free port, got {error.strerror} "
                f"({host}, port {port}); choose another address or port."
            ) from None

    @property
    def url(self) -> str:
        """Where to scrape, with the port that was chosen, and the token if one is required."""
        return f"{self._server.address}{_PATH}{self._server.query}"

    def close(self) -> None:
        """Stop serving; closing twice is harmless."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
