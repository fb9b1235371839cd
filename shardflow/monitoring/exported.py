"""The metrics of a run that leave the process: names, kinds, units and labels, in one table.

Names are OpenTelemetry's; `Metric.prometheus_name` gives those that Prometheus wants: dots become
underscores, the unit is spelt out at the end, counters end in ``_total``. A label holds a number, a name out
of a list of ours, or a host: never a sample key, a path, or anything that somebody wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from shardflow.telemetry import metric_name

__all__ = ["METRICS", "STEP_BUCKETS_S", "Metric", "MetricKind", "metric_rows"]

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
    Metric(name="build", kind="info", text="Version of shardflow that tells this.", labels=("version",)),
    Metric(
        name="run",
        kind="info",
        text="Where the dataset lies, local or the scheme of its address.",
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
    _gauge("loss_scale", "Loss scale of the last step; 1 but under fp16."),
    # Checkpoints.
    _counter("checkpoints", "Checkpoints written."),
    _counter("checkpoint.stall", "Time that training stood still for checkpoints.", "s"),
    _gauge("checkpoint.write", "Time that the last checkpoint took beside the steps.", "s"),
    _gauge("checkpoint.size", "Bytes that rank 0 wrote for the last checkpoint.", "By"),
    _gauge("checkpoint.steps.done", "Steps that the last checkpoint counts."),
    _gauge("checkpoint.timestamp", "When the last checkpoint stood, since 1970.", "s"),
    # Where the time goes.
    _counter("stage.duration", "Time in a stage, over all ranks and their threads.", "s", "stage", "group"),
    _counter("stage.io", "Bytes that went through a stage, over all ranks.", "By", "stage", "group"),
    _counter("stage.items", "Things that went through a stage, over all ranks.", "", "stage", "group"),
    _counter("tier.io", "Bytes that came from a tier, over all ranks; origin also ahead.", "By", "tier"),
    _counter("tier.items", "Blocks or ranges that came from a tier, over all ranks.", "", "tier"),
    _counter("cache.events", "What befell the cache, over all ranks.", "", "event"),
    _gauge("cache.free", "Least room on a disk of the cache, over the nodes.", "By"),
    _gauge("loader.ready_batches", "Micro-batches that lie ready when the loop takes one.", "", _OVER),
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
    # What was made of it.
    _gauge("verdict", "Share of the step that a finding explains; 0 once it holds no more.", "1", "code"),
    _counter("tuner.moves", "What the tuner did.", "", "kind"),
    _gauge("setting", "Settings that are numbers, as they stand.", "", "name"),
)
METRICS: Final[dict[str, Metric]] = {metric.name: metric for metric in _ALL}
"""All metrics by name."""


def metric_rows() -> list[tuple[str, str, str, str, str]]:
    """Return the table of the documentation: names, kind, labels and text of each metric."""
    return [
        (
            metric.prometheus_name,
            metric_name(metric.name),
            metric.kind,
            ", ".join(metric.labels),
            metric.text,
        )
        for metric in METRICS.values()
    ]
