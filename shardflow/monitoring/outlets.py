"""All that tells others of a run while it goes on, opened by its settings: Prometheus, and sinks.

None of it can end the run: a port that is taken is a warning. Only what is missing or misspelt is refused,
and before anything has started, see `check_outlets`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardflow.errors import ConfigError
from shardflow.monitoring.prometheus import MetricsServer, parse_address, require_prometheus
from shardflow.monitoring.sink_mlflow import MlflowSink
from shardflow.monitoring.sink_wandb import WandbSink
from shardflow.monitoring.sinks import Sink, SinkFollower, require_sinks

__all__ = ["check_outlets", "open_outlets"]

_LOGGER = logging.getLogger(__name__)

_ADDRESS = "monitor.prometheus"


def check_outlets(prometheus: str, sinks: Sequence[str]) -> None:
    """Refuse what cannot be told to; arguments as in `open_outlets`.

    Raises:
        ConfigError: The address is none, a sink is unknown, or a package is missing.
    """
    if prometheus:
        parse_address(prometheus, _ADDRESS)
        require_prometheus(_ADDRESS)
    require_sinks(sinks)


@contextmanager
def open_outlets(run: Path, prometheus: str, sinks: Sequence[str]) -> Iterator[None]:
    """Tell others of a run until the block ends; for rank 0.

    Args:
        run: The run folder, in which this start has begun to write.
        prometheus: Where to serve numbers; empty for nowhere.
        sinks: Names of `SINKS`.
    """
    with ExitStack() as stack:
        if prometheus:
            try:
                server = stack.enter_context(MetricsServer(run, prometheus, asked_by=_ADDRESS))
            except ConfigError as error:
                _LOGGER.warning("%s The run goes on without it.", error.message)
            else:
                _LOGGER.info("metrics for Prometheus at %s", server.url)
        if sinks:
            stack.enter_context(SinkFollower(run, {name: _sink(name) for name in sinks}))
        yield


def _sink(name: str) -> Sink:
    return WandbSink() if name == "wandb" else MlflowSink()
