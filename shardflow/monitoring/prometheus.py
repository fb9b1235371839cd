"""Prometheus endpoint of a run: served by the run itself, or from its folder by anyone who can read it.

Every scrape reads what the run wrote since the last one, in its own thread: the training loop is never
involved. Only numbers are served, under the names of `shardflow.monitoring.meter`: without a token on a
loopback address, where a collector of the same machine asks, and for a token on any other.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from shardflow._version import __version__
from shardflow.errors import ConfigError, StorageError
from shardflow.monitoring.lines import MetricsTail, check_holds_metrics
from shardflow.monitoring.meter import METRICS, STEP_BUCKETS_S, MetricsMeter, MetricValues
from shardflow.viewing.web import Answer, NoSuchPage, Request, WebServer

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
