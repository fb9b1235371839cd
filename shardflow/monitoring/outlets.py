"""Exporters of a running run, opened by its settings: Prometheus, Weights & Biases, MLflow.

The loop writes ``metrics.jsonl`` and knows nothing of exporters. Each service has a thread that reads what
was appended and forwards it; a service that fails or does not answer costs a warning and its own numbers,
never a step, and a port in use is a warning. Only missing packages and misspelled names are refused, before
anything starts, see `check_outlets`. Only numbers leave, and settings that name no places: no path, no
address, no free text.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeGuard

from shardflow.errors import ConfigError
from shardflow.monitoring.history import MetricsLine, MetricsTail, read_settings
from shardflow.monitoring.prometheus import MetricsServer, parse_address, require_prometheus
from shardflow.storage import write_atomic
from shardflow.telemetry import Interval, Verdict
from shardflow.viewing.web import is_loopback, kept_token, read_token

_LOGGER = logging.getLogger(__name__)

SINKS: Final = {"wandb": "wandb", "mlflow": "mlflow"}
"""Names of sinks, and the module that each needs."""
_POLL_S: Final = 2.0
_CLOSE_S: Final = 60.0
"""How long the end of a run waits for sinks at most."""
_NUMBERED: Final = frozenset({"step", "evaluation", "checkpoint"})
"""Events whose keys are numbers themselves."""
_NO_NUMBERS: Final = frozenset({"event", "time_s", "attempt", "global_step"})
_WORD: Final = re.compile(r"[A-Za-z0-9_.+-]{0,64}")
_PLACES: Final = frozenset(
    {
        "cache.directory",
        "data.dataset",
        "model.path",
        "monitor.prometheus",
        "run.output",
        "run.resume",
        "text.tokenizer",
    }
)
"""Settings whose value may be a path or an address even if it looks like a word."""
_NAMES_FILE: Final = "sinks.json"
"""File in the run folder with the name of the run at each service, so that a restart continues it."""

Scalar = int | float | str | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Numbers of a run at one moment."""

    global_step: int
    time_s: float
    """Seconds since 1970."""
    values: Mapping[str, float]
    """By name, ``step/loss``; all finite."""


class Sink(Protocol):
    """An experiment tracking service. All calls come from one thread, which is abandoned if they hang."""

    def open(self, run: Path, name: str, settings: Mapping[str, Scalar]) -> str:
        """Begin a run, or continue the one known under a name.

        Args:
            run: The run folder, where a service that keeps files may keep them.
            name: Name that `open` returned at an earlier start of the run; empty at the first.
            settings: Of the run, by dotted name.

        Returns:
            The name under which the service knows the run.
        """

    def write(self, records: Sequence[Record]) -> None:
        """Write numbers, in the order in which they were measured."""

    def close(self) -> None:
        """End the run."""


def require_sinks(names: Iterable[str]) -> None:
    """Refuse sinks that are unknown, or whose package is missing.

    Raises:
        ConfigError: One is.
    """
    for name in names:
        if name not in SINKS:
            known = ", ".join(sorted(SINKS))
            raise ConfigError(f"monitor.sinks names the unknown service {name!r}; choose from {known}.")
        if find_spec(SINKS[name]) is None:
            raise ConfigError(
                f"monitor.sinks needs the package {SINKS[name]}, which is not installed; install "
                f"'shardflow[{name}]', or leave {name!r} out."
            )


def shareable_settings(run: Path) -> dict[str, Scalar]:
    """Return a run's settings by dotted name: numbers and single words, no paths or addresses."""
    settings: dict[str, Scalar] = {}
    for name, value in read_settings(run).items():
        if name in _PLACES:
            continue
        if _is_plain(value):
            settings[name] = value
        elif isinstance(value, list) and all(map(_is_plain, value)):
            settings[name] = ", ".join(map(str, value))
    return settings


def _is_plain(value: object) -> TypeGuard[Scalar]:
    return isinstance(value, int | float) or (isinstance(value, str) and bool(_WORD.fullmatch(value)))


def record_of(line: MetricsLine) -> Record | None:
    """Return the numbers of a line; None for one that has none."""
    record, kind = line.record, line.event
    if kind in _NUMBERED:
        named = {f"{kind}/{name}": value for name, value in line.values.items() if name not in _NO_NUMBERS}
        step = line.values["global_step"]
    elif isinstance(record, Interval):
        named, step = dict(_numbers_of(record)), record.global_step
    elif isinstance(record, Verdict):
        named, step = {f"verdict/{record.code}": record.share}, record.global_step
    else:
        return None
    values = {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Record(global_step=step, time_s=line.time_s, values=values) if values else None


def _numbers_of(interval: Interval) -> Iterator[tuple[str, object]]:
    num_steps, wall_s = max(1, interval.num_steps), interval.wall_s
    if wall_s:
        yield "interval/steps_per_s", interval.num_steps / wall_s
        yield "interval/samples_per_s", interval.num_samples / wall_s
        yield "interval/tokens_per_s", interval.num_tokens / wall_s
    for name, stage in interval.stages.items():
        yield f"stage_s/{name}", stage.seconds / num_steps / max(1, interval.world_size)
    for name, gauge in interval.gauges.items():
        yield f"loader/{name}", gauge.mean
    for name, value in interval.settings.items():
        yield f"setting/{name}", value
    yield "memory/available_bytes", interval.available_bytes or None
    yield "memory/ranks_bytes", sum(rank.pss_bytes for rank in interval.ranks)
    yield "interval/num_masked", interval.num_masked


class SinkFollower:
    """Forwards what a run writes from now on to sinks, until it is closed.

    Each sink has a thread of its own: one that fails or hangs costs its own numbers and nobody else's.

    Args:
        run: The run folder, in which this start has begun to write.
        sinks: By name.
    """

    def __init__(self, run: Path, sinks: Mapping[str, Sink]) -> None:
        self._ending = threading.Event()
        names = _Names(run)
        self._feeders = [_Feeder(run, name, sink, names, self._ending) for name, sink in sinks.items()]
        for feeder in self._feeders:
            feeder.start()

    @property
    def failed(self) -> list[str]:
        """Names of the sinks that failed, or did not finish in time when this was closed."""
        return [feeder.sink_name for feeder in self._feeders if not feeder.is_well]

    def close(self, wait_s: float = _CLOSE_S) -> None:
        """Forward the rest, and end; sinks that take longer than this, all together, are abandoned."""
        self._ending.set()
        until_s = time.monotonic() + wait_s
        for feeder in self._feeders:
            feeder.join(max(0.0, until_s - time.monotonic()))
            if feeder.is_alive():
                feeder.is_well = False
                _LOGGER.warning("%s did not take the last numbers within %.0f s", feeder.sink_name, wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Feeder(threading.Thread):
    """Reads a run for one sink."""

    def __init__(self, run: Path, name: str, sink: Sink, names: _Names, ending: threading.Event) -> None:
        super().__init__(name=f"shardflow-sinks-{name}", daemon=True)
        self.sink_name, self.is_well = name, True
        self._folder, self._sink = run, sink
        self._names, self._ending = names, ending
        # Opened here rather than in the thread: everything written after this is forwarded.
        self._tail = MetricsTail(run, from_end=True)

    def run(self) -> None:
        try:
            known_as = self._sink.open(
                self._folder, self._names.get(self.sink_name), shareable_settings(self._folder)
            )
            self._names.put(self.sink_name, known_as)
            while not self._ending.wait(_POLL_S):
                self._forward()
            self._forward()
            self._sink.close()
        # SystemExit too: whatever a service does, the run continues.
        except BaseException as error:  # noqa: BLE001
            # Its text may quote addresses and names of accounts.
            _LOGGER.warning("%s failed (%s) and gets no more numbers", self.sink_name, type(error).__name__)
            self.is_well = False

    def _forward(self) -> None:
        records = [record for line in self._tail.read() if (record := record_of(line))]
        if records:
            self._sink.write(records)


class _Names:
    """Names of the run at the services, kept in its folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._known = _read_names(run)

    def get(self, name: str) -> str:
        return self._known.get(name, "")

    def put(self, name: str, known_as: str) -> None:
        with self._lock:
            self._known[name] = known_as
            write_atomic(self._run / _NAMES_FILE, [json.dumps(self._known).encode()], replace=True)


def _read_names(run: Path) -> dict[str, str]:
    try:
        found = json.loads((run / _NAMES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


_STEP: Final = "global_step"
_START_S: Final = 120.0


class WandbSink:
    """Writes to W&B.

    Its library's own variables apply: ``WANDB_MODE`` (by default ``offline``), ``WANDB_PROJECT``
    (``shardflow``), ``WANDB_ENTITY``, ``WANDB_BASE_URL``, ``WANDB_API_KEY``. Whatever it collects by itself
    is off: machine, user, command line, code, console, the state of git.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: Path, name: str, settings: Mapping[str, Scalar]) -> str:
        """Begin or continue a run; see `Sink`."""
        # Read when the library is imported, which otherwise reports its own errors over the network.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        name = name or secrets.token_hex(8)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shardflow"),
            dir=run,
            id=name,
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(
                mode=os.environ.get("WANDB_MODE", "offline"),
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                silent=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                # Processors are busy on a machine that trains, and nothing waits for this thread.
                x_service_wait=_START_S,
            ),
        )
        # A restart repeats steps, which its own count of steps does not allow.
        self._run.define_metric("*", step_metric=_STEP)
        return name

    def write(self, records: Sequence[Record]) -> None:
        """Write numbers; see `Sink`."""
        for record in records:
            self._run.log({_STEP: record.global_step, **record.values})

    def close(self) -> None:
        """End the run, and the process that the library has started."""
        import wandb

        self._run.finish()
        wandb.teardown()


_MOST_METRICS: Final = 1000
_MOST_SETTINGS: Final = 100
"""What its servers take in a request."""
_MOST_LETTERS: Final = 500


class MlflowSink:
    """Writes to MLflow.

    Its library's own variables apply: ``MLFLOW_TRACKING_URI`` (by default the folder ``mlflow`` of the run),
    ``MLFLOW_EXPERIMENT_NAME`` (``shardflow``), ``MLFLOW_TRACKING_TOKEN``.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def open(self, run: Path, name: str, settings: Mapping[str, Scalar]) -> str:
        """Begin or continue a run; see `Sink`."""
        # Read when the library is imported; it reports usage to its makers.
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
        """Write numbers; see `Sink`."""
        from mlflow.entities import Metric

        rows = [
            Metric(name, value, int(1000 * record.time_s), record.global_step)
            for record in records
            for name, value in record.values.items()
        ]
        for start in range(0, len(rows), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=rows[start : start + _MOST_METRICS])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


_ADDRESS = "monitor.prometheus"
_TOKEN_SETTING = "monitor.prometheus_token_file"  # noqa: S105 - its name
_EVERYBODY = "none"
TOKEN_NAME: Final = "scrape.token"  # noqa: S105 - the name of a file
"""File in the run folder with the token of scrapers of this machine, unless a setting names another."""


def check_metrics_address(prometheus: str, token_file: str) -> None:
    """Refuse an address that is invalid, or public without consent; arguments as in `open_outlets`.

    Raises:
        ConfigError: It is one of these.
    """
    if prometheus and not is_loopback(parse_address(prometheus, _ADDRESS)[0]) and not token_file:
        raise ConfigError(
            f"{_ADDRESS} beyond this machine needs {_TOKEN_SETTING}, a file with the token that scrapers "
            f"send; write {_EVERYBODY!r} there to serve everybody, or listen on 127.0.0.1."
        )


def check_outlets(prometheus: str, sinks: Sequence[str], token_file: str = "") -> None:
    """Refuse exporters that cannot work; arguments as in `open_outlets`.

    Raises:
        ConfigError: The address is none, a sink is unknown, a package is missing, or the file holds no token.
    """
    if prometheus:
        check_metrics_address(prometheus, token_file)
        require_prometheus(_ADDRESS)
        _read_token(token_file)
    require_sinks(sinks)


def _read_token(token_file: str) -> str:
    return read_token(token_file, _TOKEN_SETTING) if token_file not in ("", _EVERYBODY) else ""


def _serve(run: Path, prometheus: str, token_file: str) -> MetricsServer:
    # A port of this machine is open to all of its users.
    token = (
        _read_token(token_file) if token_file else kept_token(run / TOKEN_NAME, f"{TOKEN_NAME} of the run")
    )
    return MetricsServer(run, prometheus, asked_by=_ADDRESS, token=token)


@contextmanager
def open_outlets(run: Path, prometheus: str, sinks: Sequence[str], token_file: str = "") -> Iterator[None]:
    """Export the measurements of a run until the block ends; for rank 0.

    Args:
        run: The run folder, in which this start has begun to write.
        prometheus: Where to serve numbers; empty for nowhere.
        sinks: Names of `SINKS`.
        token_file: Holds the token that scrapers must send; ``none`` asks for none. If empty, the address is
            of this machine, and the token is in `TOKEN_NAME` in the run folder, the same at each start.
    """
    with ExitStack() as stack:
        if prometheus:
            try:
                server = stack.enter_context(_serve(run, prometheus, token_file))
            except ConfigError as error:
                _LOGGER.warning("%s The run continues without it.", error.message)
            else:
                where = "" if token_file else f" with the token in {TOKEN_NAME} of the run folder"
                _LOGGER.info("metrics for Prometheus at %s%s", server.url.partition("?")[0], where)
        if sinks:
            stack.enter_context(SinkFollower(run, {name: _sink(name) for name in sinks}))
        yield


def _sink(name: str) -> Sink:
    return WandbSink() if name == "wandb" else MlflowSink()
