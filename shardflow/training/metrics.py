"""Metrics of a run: one line a step in ``metrics.jsonl`` for tools, TensorBoard for people.

Rank 0 writes, with numbers of all ranks. A restart appends; lines of steps that it repeats are superseded by
their attempt number, and `read_metrics` returns each step once. Names hold no patient, file or path. Reading
needs no torch.

Invariant: once a start has begun, no failure of a measurement ends it. A line that cannot be written is
counted, logged once, and skipped; a failure of TensorBoard costs its curves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from shardflow.errors import StorageError
from shardflow.logs import EventLog
from shardflow.monitoring.history import METRICS_FILE, MetricsTail
from shardflow.storage.local import make_directories
from shardflow.telemetry import Interval, Move, Verdict

_LOGGER = logging.getLogger(__name__)

CLOSE_S: Final = 60.0
"""How long the end of a run waits for the files at most."""


class TensorBoardWriter:
    """Writes curves into a run folder, for rank 0.

    Args:
        run: The run folder.
        start: Global step of this start: what earlier ones drew from there on is hidden.
    """

    def __init__(self, run: Path, *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the tensorboard package

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=start)

    def add(self, name: str, value: float, step: int) -> None:
        """Draw a point."""
        if self._writer is not None:
            self._attempt(lambda: self._writer.add_scalar(name, value, step))

    def close(self) -> None:
        """Write the rest; files that take longer than `CLOSE_S`, or cannot be written, are left so."""
        if self._writer is None:
            return
        # A disk that hangs would hold the thread that flushes, and who waits for it.
        closing = threading.Thread(
            target=self._attempt, args=(self._writer.close,), name="shardflow-board", daemon=True
        )
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            _LOGGER.warning("TensorBoard did not take the last numbers within %.0f s", CLOSE_S)
        self._writer = None

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a failure costs the curves only
            _LOGGER.warning("TensorBoard failed (%s) and gets no more numbers", type(error).__name__)
            self._writer = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One training step over all ranks."""

    global_step: int
    epoch: int
    step: int
    loss: float | None
    """Mean negative log-likelihood of a token in nats; None for a step without tokens, or where it is not
    finite."""
    num_tokens: float
    num_samples: float
    learning_rate: float
    gradient_norm: float | None
    """Before clipping; None for a step that changed nothing: without tokens, or with a gradient that was not
    finite."""
    num_skipped: int
    """Steps of the run so far whose gradient was not finite."""
    loss_scale: float
    """1 but under fp16."""
    step_s: float
    """Wall time of the step on the slowest rank, waiting for data included."""
    data_wait_s: float
    """Time the slowest rank's loop waited for its next batch."""
    mean_data_wait_s: float
    """The same, averaged over ranks: far below ``data_wait_s`` where one rank lags."""
    cache: Mapping[str, float] | None = None
    """What the caches of all ranks did since the step before, by `CacheUse.names`; each is a key of the line.
    None without a cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics:
    """One pass over the evaluation split."""

    global_step: int
    """Training steps done before it."""
    epoch: int
    loss: float | None
    """Mean negative log-likelihood of a token or label in nats, each sample counted once."""
    num_tokens: float
    num_samples: float
    evaluation_s: float
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics of the task by name; each is a key of the line. None where one is not defined, as AUROC of a
    single class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMetrics:
    """One checkpoint, written once it is saved."""

    global_step: int
    """Steps that it counts."""
    stall_s: float
    """How long training stood still for it on rank 0: a checkpoint before it that was still being written,
    the ranks' agreement, the copy to host memory."""
    write_s: float
    """How long rank 0 wrote beside the steps."""
    num_bytes: int
    """Tensors that rank 0 wrote."""


class MetricsWriter:
    """Appends to ``metrics.jsonl`` and, where wanted, to a TensorBoard event file.

    Args:
        run: The run folder.
        attempt: Number of this start of the job.
        start: Global step at which it starts; TensorBoard hides what earlier attempts drew from there on.
        tensorboard: Write event files too.
        device: What rank 0 computes on, for readers; empty where it is not known.

    Attributes:
        num_lost: Lines that could not be written.

    Raises:
        StorageError: The first line of this start could not be written. Later ones are left out.
    """

    def __init__(self, run: Path, *, attempt: int, start: int, tensorboard: bool, device: str = "") -> None:
        make_directories(run)
        self._log = EventLog(run / METRICS_FILE)
        versions = {name: version(name) for name in ("shardflow", "torch")}
        self._log.write("attempt", attempt=attempt, start=start, versions=versions, device=device)
        self._attempt = attempt
        self.num_lost = 0
        self._is_losing = False
        self._tensorboard = TensorBoardWriter(run, start=start) if tensorboard else None

    def write_step(self, metrics: StepMetrics) -> None:
        """Append one step."""
        values = asdict(metrics)
        self._write("step", values | (values.pop("cache") or {}), metrics.global_step)

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Append one evaluation."""
        values = asdict(metrics)
        self._write("evaluation", values | values.pop("scores"), metrics.global_step)

    def write_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Append one checkpoint."""
        self._write("checkpoint", asdict(metrics), metrics.global_step)

    def write_interval(self, interval: Interval) -> None:
        """Append what was measured over some steps; for people, seconds of each stage a step and rank."""
        self._append("interval", interval.to_json())
        if self._tensorboard is not None:
            share = interval.num_steps * interval.world_size
            for name, stage in interval.stages.items():
                self._tensorboard.add(f"stage/{name}_s", stage.seconds / share, interval.global_step)

    def write_move(self, move: Move) -> None:
        """Append something that the tuner did."""
        self._append("tune", move.to_json())

    def write_verdict(self, verdict: Verdict) -> None:
        """Append what the newest intervals were bound by."""
        self._append("verdict", verdict.to_json())

    def write_plan(self, num_steps: int) -> None:
        """Append how many steps the whole run has, so that readers know how far it is."""
        self._append("plan", {"num_steps": num_steps})

    def write_end(self, outcome: str, *, global_step: int) -> None:
        """Append that this start ended as it should: ``finished`` or ``stopped``, after so many steps."""
        self._append("end", {"outcome": outcome, "global_step": global_step})

    def close(self) -> None:
        """Flush and close both."""
        with suppress(OSError):  # some file systems say only here what they could not keep
            self._log.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write(self, event: str, values: Mapping[str, Any], global_step: int) -> None:
        self._append(event, values)
        if self._tensorboard is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self._tensorboard.add(f"{event}/{name}", value, global_step)

    def _append(self, event: str, values: Mapping[str, Any]) -> None:
        """Write a line, or skip it if it cannot be written."""
        try:
            self._log.write(event, attempt=self._attempt, **values)
        except StorageError as error:
            if not self._is_losing:
                found = error.message.partition(";")[0]
                _LOGGER.warning("%s: %s; free up space. These lines are lost.", METRICS_FILE, found)
            self._is_losing = True
            self.num_lost += 1
            return
        if self._is_losing:
            _LOGGER.warning("%s is written again; %d lines of it are lost", METRICS_FILE, self.num_lost)
            self._is_losing = False


def read_metrics(run: Path, event: str = "step") -> list[dict[str, Any]]:
    """Read the metrics of a run, each global step once, as its latest attempt measured it.

    Damaged lines are left out, and one that is not written whole yet.

    Args:
        run: The run folder.
        event: ``"step"``, ``"interval"``, ``"evaluation"`` or ``"checkpoint"``.
    """
    lines: dict[int, dict[str, Any]] = {}
    for line in MetricsTail(run).read() if (run / METRICS_FILE).is_file() else ():
        if line.event == "attempt":
            # Steps are named by their number, intervals by that of their last one; all else by the number of
            # steps done before it.
            last = line.values["start"] - (event in {"step", "interval"})
            lines = {number: kept for number, kept in lines.items() if number <= last}
        elif line.event == event:
            lines[int(line.values["global_step"])] = line.values
    return [lines[number] for number in sorted(lines)]
