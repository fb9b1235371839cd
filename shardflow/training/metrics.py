"""What a run measures, a line a step: ``metrics.jsonl`` for tools, TensorBoard for people.

Rank 0 writes, with numbers of all ranks. A restart appends; lines of steps that it does again are
superseded by their attempt number, and :func:`read_metrics` returns each step once. Names hold no patient,
file or path. Reading needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardflow.logs import EventLog, read_events
from shardflow.storage.atomic import make_directories

__all__ = ["EvaluationMetrics", "MetricsWriter", "StepMetrics", "read_metrics"]

_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One training step over all ranks."""

    global_step: int
    epoch: int
    step: int
    loss: float | None
    """Mean negative log-likelihood of a token in nats; None for a step without tokens."""
    num_tokens: float
    num_samples: float
    learning_rate: float
    gradient_norm: float | None
    """Before clipping; None for a step without tokens, which changed nothing."""
    step_s: float
    """Wall time of the step on the slowest rank, waiting for data included."""
    data_wait_s: float
    """Time the slowest rank's loop waited for its next batch."""
    mean_data_wait_s: float
    """The same, averaged over ranks: far below ``data_wait_s`` where one rank lags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics:
    """One pass over the evaluation split."""

    global_step: int
    """Training steps done before it."""
    epoch: int
    loss: float | None
    """Mean negative log-likelihood of a token in nats, each sample counted once."""
    num_tokens: float
    num_samples: float
    evaluation_s: float


class MetricsWriter:
    """Appends to ``metrics.jsonl`` and, where wanted, to a TensorBoard event file.

    Args:
        run: The run folder.
        attempt: Number of this start of the job.
        start: Global step at which it starts; TensorBoard hides what earlier attempts drew from there on.
        tensorboard: Write event files too.
    """

    def __init__(self, run: Path, *, attempt: int, start: int, tensorboard: bool) -> None:
        make_directories(run)
        self._log = EventLog(run / _FILE)
        self._log.write("attempt", attempt=attempt, start=start)
        self._attempt = attempt
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # needs the tensorboard package

            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=start)

    def write_step(self, metrics: StepMetrics) -> None:
        """Append one step."""
        self._write("step", asdict(metrics), metrics.global_step)

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Append one evaluation."""
        self._write("evaluation", asdict(metrics), metrics.global_step)

    def close(self) -> None:
        """Flush and close both."""
        self._log.close()
        if self._board is not None:
            self._board.close()

    def _write(self, event: str, values: Mapping[str, Any], global_step: int) -> None:
        self._log.write(event, attempt=self._attempt, **values)
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{event}/{name}", value, global_step)


def read_metrics(run: Path, event: str = "step") -> list[dict[str, Any]]:
    """Read the metrics of a run, each global step once, as its latest attempt measured it.

    Args:
        run: The run folder.
        event: ``"step"`` or ``"evaluation"``.
    """
    path = run / _FILE
    lines: dict[int, dict[str, Any]] = {}
    for line in read_events(path) if path.is_file() else ():
        if line["event"] == "attempt":
            # A step is named by its number, an evaluation by the number of steps done before it.
            last = int(line["start"]) - (event == "step")
            lines = {number: kept for number, kept in lines.items() if number <= last}
        elif line["event"] == event:
            lines[int(line["global_step"])] = line
    return [lines[number] for number in sorted(lines)]
