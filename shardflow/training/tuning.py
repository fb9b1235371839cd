"""Tuner hook of the training loop: rank 0 decides, and all ranks apply it at the same step boundary.

A decision travels as three numbers of rank 0 in the exchange of every step; each rank applies it to its own
loader once the step is done. So no rank is ever ahead of another, and there is no extra message or wait. What
is trained cannot change: micro-batches and their order are the plan's (contract S2), and
``tests/distributed/test_tuning.py`` compares ledgers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

from shardflow.errors import ConfigError, ShardflowError, StorageError, os_reason
from shardflow.fields.types.pixel_field import PixelField
from shardflow.loading import Loader
from shardflow.monitoring.tuner import Change, Tuner, TunerRules
from shardflow.monitoring.tuner_numbers import (
    TUNED_FILE,
    DataFacts,
    LoaderTotals,
    MachineFacts,
    StepNumbers,
    default_settings,
    read_tuned,
    tuned_text,
)
from shardflow.storage import CacheConfig
from shardflow.storage.local import write_atomic
from shardflow.telemetry import Interval, Move, TunableLimit
from shardflow.telemetry.process import available_bytes, num_processors
from shardflow.training.config import DataLoadingConfig, TuneConfig, changed_settings
from shardflow.training.distributed import Ranks
from shardflow.training.hooks import LoopHook, PendingFeed, StepPlace, StepReport, StepReports
from shardflow.training.metrics import MetricsWriter, StepMetrics

_LOGGER = logging.getLogger(__name__)

_SHORT_EPOCH: Final = 16
"""Steps of an epoch so short that its first step is like the others."""

Values = Mapping[str, int | str]


class Tuning(LoopHook):
    """Tuner of a run over its ranks; all ranks make one and call the same methods.

    Args:
        settings: The table ``[tune]``; its mode is not ``off``.
        ranks: The ranks of the run.
        loader: This rank's, before its first micro-batch.
        metrics: Gets the moves, on rank 0.
        run: The run folder, where settings that were found are kept.
        given: Names of settings that the configuration sets, see `given_settings`; they are not defaults.

    Attributes:
        tuner: On rank 0.
        due: Change to make once this step is done.

    Raises:
        ConfigError: ``tune.start_from`` is no file of settings; on every rank.
    """

    def __init__(
        self,
        settings: TuneConfig,
        ranks: Ranks,
        loader: Loader,
        metrics: MetricsWriter | None,
        *,
        run: Path,
        given: Set[str] = frozenset(),
    ) -> None:
        self._tune, self._ranks, self._loader, self._metrics = settings, ranks, loader, metrics
        self._file, self._given = run / TUNED_FILE, given
        self._place: StepPlace | None = None
        self._tunables = loader.tunables
        self._is_on = settings.mode == "on"
        self._num_sent = self._num_done = 0
        self._sent: tuple[int, float] = (0, 0.0)
        self.due: Change | None = None
        self._gil_wait_share = 0.0
        for name, value in self._agreed_start().items():
            self._set(Change(setting=name, value=value))
        own = {name: asdict(limit) for name, limit in self._tunables.limits().items()}
        self._limits = common_limits(
            [{name: _limit(one) for name, one in found.items()} for found in ranks.all_gather_json(own)]
        )
        self._names = sorted(self._limits)
        self.tuner: Tuner | None = None
        if ranks.rank == 0:
            self.tuner = Tuner(
                self._tunables.values(),
                capped(self._limits, self._tunables.values(), settings),
                report=self._report,
                mode="on" if self._is_on else "observe",
                rules=TunerRules(settle_steps=settings.settle_steps),
            )

    def on_step_begin(self, place: StepPlace) -> None:
        """Note the place, for messages."""
        self._place = place

    def fill(self, report: StepReport) -> None:
        """Report the newest decision; only that of rank 0 counts."""
        if self._is_on:
            report.tuner_change = self._num_sent
            report.tuner_setting, report.tuner_value = self._sent

    def on_step_end(self, metrics: StepMetrics, reports: StepReports) -> None:
        """Record rank 0's decision, and pass the step to its tuner."""
        self._take_decision(reports.first)
        self._decide(metrics)

    def on_boundary(self, feed: PendingFeed, *, is_last: bool) -> None:
        """Make the change that is due, if any."""
        if self.due is not None:  # processes may need a while to end
            self._ranks.health.enter(f"{self._place}, changing a setting", self._ranks.timeouts.control_s)
        self.execute(feed, is_last=is_last)

    def _take_decision(self, first: StepReport) -> None:
        """Record rank 0's decision; it is repeated in each exchange until there is a new one."""
        if not self._is_on or int(first.tuner_change) == self._num_done:
            return
        self._num_done = int(first.tuner_change)
        name = self._names[int(first.tuner_setting)]
        limit, number = self._limits[name], int(first.tuner_value)
        self.due = Change(setting=name, value=limit.choices[number] if limit.choices else number)

    def execute(self, feed: PendingFeed, *, is_last: bool = False) -> None:
        """Make the change that is due, if any; call it between two steps.

        Args:
            feed: Of the running epoch.
            is_last: No step is left in the epoch. A change of processes then waits for the next epoch's first
                step: if they fail to start there, the running ones continue.
        """
        if self.due is None or (is_last and not self._is_live(self.due)):
            return
        change, self.due = self.due, None
        self._set(change)
        try:
            feed.apply_pending()
        except Exception as error:  # noqa: BLE001 - processes cannot start for many reasons, a user's among them
            # The loader continues as before; the next windows must not credit a change that was not made.
            _LOGGER.warning("a setting could not be changed: %s", type(error).__name__)
        if self.tuner is not None:
            # The setting may have been clipped or refused.
            self.tuner.values[change.setting] = self._tunables.values()[change.setting]

    def measured(self, interval: Interval) -> None:
        """Record how much of the time the interpreter is held, which only intervals measure."""
        self._gil_wait_share = max((rank.gil_wait_share for rank in interval.ranks), default=0.0)

    def _decide(self, step: StepMetrics) -> None:
        """Pass a step to the tuner, on rank 0, and keep its decision for the next exchange."""
        if self.tuner is None:
            return
        if step.step == 0 and self._loader.num_steps >= _SHORT_EPOCH:
            return  # an epoch's first step waits for threads that have only begun
        numbers = StepNumbers(
            step_s=step.step_s,
            data_wait_s=step.data_wait_s,
            num_samples=step.num_samples,
            num_micro_batches=self._loader.num_micro_batches_per_rank,
            loader=LoaderTotals.of(self._loader.counters.snapshot()),
            gil_wait_share=self._gil_wait_share,
        )
        try:
            change = self.tuner.step(numbers, step.global_step)
        except Exception:
            # A tuner must not end the run that it tunes. The settings stay as they are.
            _LOGGER.exception("the tuner failed and is off for the rest of this start")
            self.tuner = None
            return
        if change is not None:
            limit = self._limits[change.setting]
            value = limit.choices.index(str(change.value)) if limit.choices else int(change.value)
            self._num_sent += 1
            self._sent = (self._names.index(change.setting), float(value))

    def _is_live(self, change: Change) -> bool:
        limit = self._tunables.limits().get(change.setting)
        return limit is None or limit.is_live

    def _set(self, change: Change) -> None:
        """Apply a change; a machine without the memory for it keeps its setting, and trains the same."""
        try:
            self._tunables.set(change.setting, change.value)
        except (ShardflowError, OSError) as error:
            found = error.message if isinstance(error, ShardflowError) else os_reason(error)
            _LOGGER.warning("the tuner's choice is not for this rank: %s", found)

    def _agreed_start(self) -> dict[str, int | str]:
        """Let rank 0 choose, and broadcast its choice, a refusal included."""
        answer: dict[str, Any] = {}
        if self._ranks.rank == 0:
            try:
                answer["settings"] = self._fitting(self._start())
            except ConfigError as error:
                answer["refusal"] = error.message
        answer = self._ranks.broadcast(answer)
        if "refusal" in answer:
            raise ConfigError(answer["refusal"])
        settings: dict[str, int | str] = answer["settings"]
        return settings

    def _start(self) -> dict[str, int | str]:
        """Choose the first settings: found by this run or another one, or the machine's defaults."""
        if self._is_on and self._file.is_file():
            try:
                return read_tuned(self._file)
            except ConfigError as error:
                # The run wrote it, and must continue whatever happened to it.
                _LOGGER.warning("%s The run begins as if it were not there.", error.message)
        if self._tune.start_from is not None:
            try:
                return read_tuned(self._tune.start_from)
            except ConfigError as error:
                raise ConfigError(f"tune.start_from: {error.message}") from None
        return self._defaults() if self._is_on else {}

    def _fitting(self, found: Values) -> dict[str, int | str]:
        """Set, on rank 0, the nearest values that this machine allows; returns them.

        In order, because the limits of each depend on those set before.
        """
        fitting: dict[str, int | str] = {}
        for name, value in found.items():
            limits = capped(self._tunables.limits(), self._tunables.values(), self._tune)
            nearest = _clipped(value, limits[name]) if name in limits else None
            if nearest is None:
                _LOGGER.info("a tuned setting is not for this run and is left out: %s", name)
            elif nearest != self._tunables.values()[name]:
                self._set(Change(setting=name, value=nearest))
                fitting[name] = nearest
        return fitting

    def _defaults(self) -> dict[str, int | str]:
        """Return settings of this machine for those that the configuration does not set."""
        loader = self._loader
        machine = MachineFacts(num_cpus=num_processors(), available_bytes=available_bytes())
        data = DataFacts(
            has_images=any(isinstance(one, PixelField) for one in loader.fields.values()),
            is_remote=any("://" in dataset.store.url for dataset in loader.selection.datasets),
        )
        found = default_settings(machine, loader.world.ranks_per_node, data)
        return {name: value for name, value in found.items() if name not in self._given}

    def _report(self, move: Move) -> None:
        level = logging.DEBUG if move.kind in {"try", "revert"} else logging.INFO
        _LOGGER.log(level, "tuner: %s", move.text)
        if self._metrics is not None:
            self._metrics.write_move(move)
        # Written at once: a run that is stopped before it settles resumes from there.
        if move.kind in {"keep", "settle"} and self._is_on and self.tuner is not None:
            text = tuned_text(configurable(self.tuner.values))
            try:
                write_atomic(self._file, [text.encode()], replace=True)
            except StorageError as error:
                _LOGGER.warning("%s The run continues; its next start searches again.", error.message)


def configurable(values: Values) -> dict[str, int | str]:
    """Return the settings without those of loader and cache that a configuration does not have."""
    tables: dict[str, Any] = {"loader": DataLoadingConfig, "cache": CacheConfig}
    known = {f"{table}.{one.name}" for table, kind in tables.items() for one in fields(kind)}
    return {
        name: value for name, value in values.items() if name in known or name.partition(".")[0] not in tables
    }


def given_settings(loader: DataLoadingConfig, cache: CacheConfig) -> set[str]:
    """Return the names of the settings that differ from their default."""
    tables = {"loader": loader, "cache": cache}
    return {f"{table}.{name}" for table, settings in tables.items() for name in changed_settings(settings)}


def capped(limits: Mapping[str, TunableLimit], present: Values, tune: TuneConfig) -> dict[str, TunableLimit]:
    """Return the limits within the caps of the configuration.

    Args:
        limits: Of the machine.
        present: The settings as they are.
        tune: The caps.
    """
    caps = {
        "loader.num_threads": tune.max_threads,
        "cache.read_ahead_threads": tune.max_fetches,
        "store.max_concurrency": tune.max_fetches,
        "loader.prefetch_bytes": tune.max_bytes,
        "cache.read_ahead_bytes": tune.max_bytes,
        "cache.ram_bytes": tune.max_bytes,
        "cache.max_bytes": tune.max_disk_bytes or int(present.get("cache.max_bytes", 0)),
    }
    found = {}
    for name, limit in limits.items():
        cap = caps.get(name, 0)
        most = max(limit.least, min(limit.most, cap)) if cap and not limit.choices else limit.most
        found[name] = replace(limit, most=most)
    return found


def common_limits(by_rank: Sequence[Mapping[str, TunableLimit]]) -> dict[str, TunableLimit]:
    """Return what all ranks can set."""
    found = {}
    for name in sorted(set.intersection(*(set(one) for one in by_rank))):
        limits = [one[name] for one in by_rank]
        least, most = max(one.least for one in limits), min(one.most for one in limits)
        choices = tuple(word for word in limits[0].choices if all(word in one.choices for one in limits))
        if choices or (least <= most and not limits[0].choices):
            is_live = all(one.is_live for one in limits)
            found[name] = TunableLimit(least=least, most=most, choices=choices, is_live=is_live)
    return found


def _limit(value: Mapping[str, Any]) -> TunableLimit:
    """Return a limit that another rank sent."""
    return TunableLimit(**{**value, "choices": tuple(value["choices"])})


def _clipped(value: int | str, limit: TunableLimit) -> int | str | None:
    """Return the nearest value that is allowed; None where there is none."""
    if limit.choices:
        return value if value in limit.choices else None
    return max(limit.least, min(limit.most, value)) if isinstance(value, int) else None
