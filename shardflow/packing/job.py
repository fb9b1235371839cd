"""The packing job: headers, plan, studies, shards, manifest.

The data's way: `discover` lists the input files; the header pass turns each into a few numbers and a row in
the private folder; reports are linked; the plan fixes splits and shards; packing processes turn studies into
fragments and fragments into shards; at last the samples table, the ledger and the manifest are written. Any
moment may be the last: the same command goes on from what stands, and comes to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from typing import TYPE_CHECKING, Final

from shardflow.deid.pseudonyms import SecretKey
from shardflow.errors import ConfigError, FormatError
from shardflow.packing.child import peak_memory_bytes
from shardflow.packing.handlers import HANDLERS, make_setup
from shardflow.packing.header_pass import HeaderPass
from shardflow.packing.inventory import count_reasons
from shardflow.packing.limits import ChildLimits
from shardflow.packing.linking import ReportTable, link_reports
from shardflow.packing.plan import build_plan
from shardflow.packing.pool import ChildPool
from shardflow.packing.private_ledger import write_private_ledger
from shardflow.packing.progress import SilentProgress
from shardflow.packing.publish import Settled, created_with, publish, settle
from shardflow.packing.recorded import RecordedOutcomes
from shardflow.packing.study_pass import QuarantineLimitError, StudyPass
from shardflow.packing.summary import PackSummary, Status
from shardflow.packing.workplace import Workplace, locked_workplace
from shardflow.shards.manifest import Manifest, load, versions
from shardflow.sources.dicom import DiscoveredFile, discover
from shardflow.sources.reasons import Outcome, outcome_of
from shardflow.sources.reports import iter_reports
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from shardflow.packing.config import PackConfig
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.progress import Progress

__all__ = ["pack"]

# A study's own files are bounded by what it decodes to, a shard by its target; both with room for overhead.
_FILE_HEADROOM: Final = 2


def pack(config: PackConfig, progress: Progress | None = None, *, handlers: str = HANDLERS) -> PackSummary:
    """Pack the inputs into a dataset, or go on where a former run stopped.

    Args:
        config: All settings.
        progress: Hears where the job is.
        handlers: ``"module:function"`` that makes the task handler of the packing processes; another one
            serves tests, which make processes fail on purpose.

    Returns:
        What was done; its ``status`` says whether a dataset was published.

    Raises:
        ConfigError: A setting, a folder or the key is wrong, there is nothing to pack, or the output holds a
            dataset of other inputs or settings.
        StorageError: Something cannot be written; the job can be run again.
        ShardflowError: The packing processes cannot work; the job can be run again.
    """
    job = _Job(config, progress or SilentProgress(), handlers)
    files = discover(config.inputs.dicom)
    _check_reports(config)
    if not files:
        raise ConfigError("inputs.dicom must hold DICOM files, got empty folders; correct the folders.")
    with locked_workplace(config) as place:
        return job.run(place, files)


class _Job:
    def __init__(self, config: PackConfig, progress: Progress, handlers: str) -> None:
        self._config = config
        self._progress = progress
        self._handlers = handlers
        self._started = time.monotonic()

    def run(self, place: Workplace, discovered: list[DiscoveredFile]) -> PackSummary:
        store = LocalStore(place.output)
        finished = load(store) if versions(store) else None
        if finished is None:
            return self._pack(place, discovered, _load_key(self._config))
        try:
            key = SecretKey.load(self._config.key_file)
            _check_same_settings(self._config, key, finished)
            return self._compare(place, discovered, key, finished)
        finally:
            place.remove_work()

    def _pack(self, place: Workplace, discovered: list[DiscoveredFile], key: SecretKey) -> PackSummary:
        config = self._config
        recorded = RecordedOutcomes(place.recorded_outcomes)
        with self._make_pool(place) as pool:
            files, reports, plan = self._plan(pool, place, discovered, key, recorded)
            for split in plan.empty_splits:
                self._progress.note(
                    f"split {split} gets no study: there are few patients, or its parts are few"
                )
            self._note_missing_reports(plan, reports)
            study_pass = self._study_pass(pool, plan, files, reports, place, key, recorded)
            try:
                study_pass.run(_num_quarantined(files, reports))
                settled = settle(place, plan, files, reports)
                study_pass.check_limit(settled.outcomes["quarantined"])
                _check_samples(settled)
            except QuarantineLimitError:
                study_pass.decide_exceptions()
                write_private_ledger(place, plan, discovered, config.inputs.dicom, files, reports)
                return self._stopped(files, reports, pool)
        write_private_ledger(place, plan, discovered, config.inputs.dicom, files, reports)
        manifest = publish(place, config, plan, files, reports, settled, self._progress, key_id=key.key_id)
        place.remove_work()
        self._progress.phase("done", 0)
        return self._summary("packed", manifest, pool)

    def _note_missing_reports(self, plan: PackPlan, reports: ReportTable) -> None:
        """Say it while the job can be stopped: a table whose identifiers fit no study is no error."""
        if self._config.inputs.reports is None:
            return
        count = sum(study not in reports.report_of for shard in plan.shards for study in shard.studies)
        if count:
            self._progress.note(
                f"{count} of {plan.num_studies} studies have no report, and are packed without one"
            )

    def _compare(
        self, place: Workplace, discovered: list[DiscoveredFile], key: SecretKey, finished: Manifest
    ) -> PackSummary:
        """Say that there is nothing to do, or that this would be another dataset."""
        recorded = RecordedOutcomes(place.recorded_outcomes)
        with self._make_pool(place) as pool:
            _, _, plan = self._plan(pool, place, discovered, key, recorded)
        if finished.extra.get("plan_digest") != plan.digest:
            raise ConfigError(
                "output must be new, or hold a dataset of the same inputs, got one of other inputs; "
                "name another output."
            )
        for entry in finished.files():
            path = place.output / entry.path
            if not path.is_file() or path.stat().st_size != entry.num_bytes:
                raise FormatError(
                    f"{entry.path} must stand with {entry.num_bytes} bytes, got another file or none; "
                    "run `shardflow verify`, and pack into a new output if it is damaged."
                )
        return self._summary("already_packed", finished, pool)

    def _plan(
        self,
        pool: ChildPool,
        place: Workplace,
        discovered: list[DiscoveredFile],
        key: SecretKey,
        recorded: RecordedOutcomes,
    ) -> tuple[FileTable, ReportTable, PackPlan]:
        timeout_s = self._config.execution.task_timeout_s
        files = HeaderPass(pool, discovered, key, recorded, timeout_s, self._progress).run()
        reports = self._link(files, key, place)
        if not len(files.studies):
            raise _nothing_to_pack(files)
        return files, reports, build_plan(self._config, key.key_id, files, reports)

    def _make_pool(self, place: Workplace) -> ChildPool:
        execution = self._config.execution
        limits = ChildLimits(
            memory_bytes=execution.memory_bytes,
            task_s=execution.task_timeout_s,
            file_bytes=_FILE_HEADROOM
            * (self._config.limits.max_study_bytes + 2 * self._config.shards.target_bytes),
        )
        return ChildPool(
            execution.resolved_num_processes,
            limits,
            handlers=self._handlers,
            setup=make_setup(self._config, place),
            log_path=place.process_log,
        )

    def _link(self, files: FileTable, key: SecretKey, place: Workplace) -> ReportTable:
        inputs = self._config.inputs
        if inputs.reports is None:
            return ReportTable()
        self._progress.phase("reports", 0)
        records = iter_reports(inputs.reports, inputs.reports_format)
        return link_reports(records, files.studies, key, place.reports)

    def _study_pass(
        self,
        pool: ChildPool,
        plan: PackPlan,
        files: FileTable,
        reports: ReportTable,
        place: Workplace,
        key: SecretKey,
        recorded: RecordedOutcomes,
    ) -> StudyPass:
        content = self._config.content()
        basis = json.dumps(
            [
                created_with(),
                key.key_id,
                content["shards"]["codec"],
                content["limits"],
                content["on_bad_instance"],
            ]
        )
        share = self._config.policy.max_quarantined_share
        return StudyPass(
            pool,
            plan,
            files,
            reports,
            place,
            recorded=recorded,
            basis=hashlib.sha256(basis.encode("ascii")).hexdigest(),
            # The small term takes back what binary fractions lose: 0.05 of 100 inputs are 5.
            max_quarantined=math.floor(share * (len(files) + len(reports)) + 1e-9),
            task_timeout_s=self._config.execution.task_timeout_s,
            progress=self._progress,
        )

    def _stopped(self, files: FileTable, reports: ReportTable, pool: ChildPool) -> PackSummary:
        reasons = count_reasons(files.reason, reports.reason)
        outcomes = dict.fromkeys(map(str, Outcome), 0)
        for reason, count in reasons.items():
            outcomes[outcome_of(reason)] += count
        return PackSummary(
            status="quarantine_limit",
            inputs={"total": len(files) + len(reports), **outcomes},
            reasons=reasons,
            seconds=time.monotonic() - self._started,
            peak_memory_bytes=_peak_memory(pool),
        )

    def _summary(self, status: Status, manifest: Manifest, pool: ChildPool) -> PackSummary:
        return PackSummary.of_manifest(
            status,
            manifest,
            seconds=time.monotonic() - self._started,
            peak_memory_bytes=_peak_memory(pool),
        )


def _load_key(config: PackConfig) -> SecretKey:
    """Load the secret key; the first run of a dataset makes one, unless the settings name a file."""
    if config.identity.key_file is None and not config.key_file.exists():
        return SecretKey.create(config.key_file)
    return SecretKey.load(config.key_file)


def _check_same_settings(config: PackConfig, key: SecretKey, finished: Manifest) -> None:
    """Refuse at once what could not be the dataset that stands."""
    for what, stands, asked in (
        ("secret key", finished.key_id, key.key_id),
        ("settings", finished.config_digest, config.content_digest()),
    ):
        if stands != asked:
            raise ConfigError(
                f"output must be new, or hold a dataset of the same {what}, got one of another; "
                "name another output."
            )


def _check_reports(config: PackConfig) -> None:
    reports = config.inputs.reports
    if reports is not None and not reports.exists():
        raise ConfigError("inputs.reports must be an existing file or folder, got none; correct it.")
    if config.policy.require_report and reports is None:
        raise ConfigError(
            "policy.require_report must be false without inputs.reports, got true; name the reports."
        )


def _nothing_to_pack(files: FileTable) -> ConfigError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in count_reasons(files.reason).items())
    return ConfigError(
        f"inputs.dicom must hold DICOM images, got {len(files)} files and none of them ({reasons}); "
        "correct the folders."
    )


def _check_samples(settled: Settled) -> None:
    """Refuse to publish a dataset without samples."""
    if settled.samples:
        return
    if settled.outcomes["quarantined"]:
        raise QuarantineLimitError
    raise ConfigError(
        f"the inputs must hold a study that can be packed, got none ({settled.reasons}); correct them."
    )


def _num_quarantined(files: FileTable, reports: ReportTable) -> int:
    reasons = count_reasons(files.reason, reports.reason)
    return sum(count for reason, count in reasons.items() if outcome_of(reason) is Outcome.QUARANTINED)


def _peak_memory(pool: ChildPool) -> dict[str, int]:
    return {"job": peak_memory_bytes(), "process": pool.peak_memory_bytes}
