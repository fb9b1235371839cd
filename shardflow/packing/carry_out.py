"""Carry a plan out: pack its studies, assemble its shards, publish the version.

What the plan holds was decided before (`shardflow.packing.job`); from here on only the outcomes of its
studies are open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardflow.errors import ConfigError
from shardflow.packing.dealing import count_studies, missing_tasks, own_shards
from shardflow.packing.forecast import forecast
from shardflow.packing.inventory import CARRIED, count_failed, count_reasons
from shardflow.packing.ledger_file import is_unchanged
from shardflow.packing.preconditions import note_missing_reports
from shardflow.packing.private_ledger import write_private_ledger
from shardflow.packing.publish import Settled, fragment_basis, publish, settle
from shardflow.packing.run import peak_memory
from shardflow.packing.study_pass import QuarantineLimitError, StudyPass

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.base import Base
    from shardflow.packing.engine import Engine
    from shardflow.packing.intake import Intake
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.recorded import RecordedOutcomes
    from shardflow.packing.run import PackRun
    from shardflow.packing.summary import PackSummary
    from shardflow.shards.manifest import Manifest

__all__ = ["CarryOut"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CarryOut:
    """A plan, and all that it takes to make a version of it."""

    run: PackRun
    pool: Engine
    plan: PackPlan
    intake: Intake
    key: SecretKey
    recorded: RecordedOutcomes
    base: Base | None = None
    """The version before; None for a first one."""

    def forecast(self) -> PackSummary:
        """Say what the plan would make, and do nothing."""
        self.run.progress.phase("done", 0)
        seconds = self.run.seconds()
        return forecast(self.plan, self.intake, seconds=seconds, peak_memory_bytes=peak_memory(self.pool))

    def publish(self) -> PackSummary:
        """Pack what is planned and publish it.

        Raises:
            ConfigError: There is no sample to publish, or tasks that were to be merged never ran.
            StorageError: Something cannot be written; the job can be run again.
            ShardflowError: The packing processes cannot work.
        """
        run, plan, intake = self.run, self.plan, self.intake
        note_missing_reports(run.config, plan, intake.reports, run.progress)
        study_pass = self._study_pass()
        try:
            if run.is_merge:
                tasks = missing_tasks(plan, run.place.num_tasks, study_pass.missing())
                if tasks:
                    return run.unpublished("tasks_missing", intake, self.pool, missing_tasks=tasks)
            if run.uploader is not None:
                run.uploader.claim(1 if self.base is None else self.base.next_version, plan.digest)
            study_pass.run(count_failed(count_reasons(intake.files.reason, intake.reports.reason)))
            if run.place.share is not None:
                return self._end_task(study_pass)
            settled = settle(run.place, plan, intake.files, intake.reports)
            study_pass.check_limit(count_failed(settled.reasons))
            if self.base is None:
                _check_samples(settled)
        except QuarantineLimitError:
            study_pass.decide_exceptions()
            if run.place.share is None:
                self._write_private_ledger()
            return run.unpublished("quarantine_limit", intake, self.pool)
        if self.base is not None and not settled.samples and is_unchanged(self.base, intake):
            return self.leave(self.base.manifest)
        self._write_private_ledger()
        if run.uploader is not None:
            # The page reads shards: none of them may leave meanwhile.
            run.uploader.wait()
        manifest = publish(
            run.place,
            run.config,
            plan,
            intake,
            settled,
            run.progress,
            key_id=self.key.key_id,
            base=self.base,
            uploader=run.uploader,
        )
        run.finish_upload()
        run.place.remove_work()
        run.progress.phase("done", 0)
        return run.summary("packed", manifest, self.pool, intake)

    def leave(self, finished: Manifest) -> PackSummary:
        """End a job that has found nothing to do."""
        return leave(self.run, finished, self.intake, self.pool)

    def _end_task(self, study_pass: StudyPass) -> PackSummary:
        """End one task of several: its shards stand, and nothing is published."""
        if self.run.uploader is not None:
            self.run.uploader.wait()
        self.run.progress.phase("done", 0)
        studies = count_studies(self.run.place, self.plan, study_pass.shards)
        num_shards = len(study_pass.shards)
        return self.run.unpublished(
            "task_done", self.intake, self.pool, studies=studies, num_shards=num_shards
        )

    def _write_private_ledger(self) -> None:
        run = self.run
        write_private_ledger(run.place, self.plan.digest, self.intake, run.config.inputs, self.base)

    def _study_pass(self) -> StudyPass:
        run, intake = self.run, self.intake
        tables = (intake.files, intake.reports)
        num_inputs = sum(int((table.reason != CARRIED).sum()) for table in tables)
        # Of what was quarantined before, most may be so again: that is no sign of a broken mount.
        share = 1.0 if run.mode == "retry" else run.config.policy.max_quarantined_share
        uploader = run.uploader
        return StudyPass(
            self.pool,
            self.plan,
            intake.files,
            intake.reports,
            run.place,
            recorded=self.recorded,
            basis=fragment_basis(run.config, self.key.key_id),
            # The small term takes back what binary fractions lose: 0.05 of 100 inputs are 5.
            max_quarantined=math.floor(share * num_inputs + 1e-9),
            task_timeout_s=run.config.execution.task_timeout_s,
            progress=run.progress,
            shards=own_shards(self.plan, run.place.share),
            trusts_sizes=run.is_merge,
            on_shard=None if uploader is None else uploader.add_shard,
            is_sent=None if uploader is None else uploader.has_shard,
        )


def leave(run: PackRun, finished: Manifest, intake: Intake, pool: Engine) -> PackSummary:
    """End a job that has found nothing to do."""
    run.finish_upload()
    if not run.is_dry_run:
        run.place.remove_work()
    run.progress.phase("done", 0)
    return run.summary("nothing_new", finished, pool, intake)


def _check_samples(settled: Settled) -> None:
    """Refuse to publish a dataset without samples."""
    if settled.samples:
        return
    if settled.outcomes["quarantined"]:
        raise QuarantineLimitError
    raise ConfigError(
        f"the inputs must hold a study that can be packed, got none ({settled.reasons}); correct them."
    )
