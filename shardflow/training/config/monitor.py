"""Settings of what a run measures of itself."""

from __future__ import annotations

from dataclasses import dataclass

from shardflow.configs import check_fields
from shardflow.errors import ConfigError
from shardflow.monitoring import SINKS, parse_address
from shardflow.training.config.ranges import SecondsOrZero

__all__ = ["MonitorSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSettings:
    """What a run measures of itself, see docs/monitoring.md; changes nothing that is trained."""

    interval_s: SecondsOrZero = 5.0
    """An interval ends with the first step after so many seconds, and is a line of ``metrics.jsonl``; the
    first step is one of its own. 0 measures no stages."""

    prometheus: str = ""
    """``ADDRESS:PORT`` where rank 0 serves its numbers to Prometheus while the run goes on, see
    docs/prometheus.md: ``127.0.0.1:9464``; port 0 is any free one, and logged. Empty serves none."""
    sinks: tuple[str, ...] = ()
    """Services that get steps, intervals, verdicts and evaluations: ``wandb``, ``mlflow``."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prometheus:
            parse_address(self.prometheus, "monitor.prometheus")
        if unknown := [name for name in self.sinks if name not in SINKS]:
            raise ConfigError(
                f"monitor.sinks must name some of {', '.join(SINKS)}, got {unknown[0]!r}; correct it."
            )
