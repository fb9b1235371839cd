"""MLflow: a server that the environment names, else files in the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardflow.monitoring.sinks import Record, Scalar

__all__ = ["MlflowSink"]

_MOST_METRICS: Final = 1000
_MOST_SETTINGS: Final = 100
"""What its servers take in a request."""
_MOST_LETTERS: Final = 500


class MlflowSink:
    """Writes to MLflow.

    The variables of its own library hold: ``MLFLOW_TRACKING_URI`` (the folder ``mlflow`` of the run where it
    is not set), ``MLFLOW_EXPERIMENT_NAME`` (``shardflow``), ``MLFLOW_TRACKING_TOKEN``.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def open(self, run: Path, name: str, settings: Mapping[str, Scalar]) -> str:
        """Begin, or go on; see `Sink`."""
        # Read as the library is imported; it tells its makers what is used.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        address = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not address:
            # Newer versions ask for this before they write files, which need no server and no database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            address = (run / "mlflow").resolve().as_uri()
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=address)
        if name:
            self._id = name
            self._client.update_run(name, status="RUNNING")
            return name
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shardflow")
        found = self._client.get_experiment_by_name(title)
        experiment = found.experiment_id if found else self._client.create_experiment(title)
        self._id = str(self._client.create_run(experiment).info.run_id)
        rows = [Param(key, str(value)[:_MOST_LETTERS]) for key, value in settings.items()]
        for start in range(0, len(rows), _MOST_SETTINGS):
            self._client.log_batch(self._id, params=rows[start : start + _MOST_SETTINGS])
        return self._id

    def write(self, records: Sequence[Record]) -> None:
        """Take numbers; see `Sink`."""
        from mlflow.entities import Metric

        rows = [
            Metric(name, value, int(1000 * record.time_s), record.global_step)
            for record in records
            for name, value in record.values.items()
        ]
        for start in range(0, len(rows), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=rows[start : start + _MOST_METRICS])

    def close(self) -> None:
        """End."""
        self._client.set_terminated(self._id)
