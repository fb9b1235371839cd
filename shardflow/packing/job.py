"""Packing job: headers, plan, studies, shards, manifest.

Data flow: the layout lists the input files; the header pass reduces each to a few numbers and a row in the
private folder; reports and attachments are linked with studies; the plan fixes splits and shards; packing
processes turn studies into fragments and fragments into shards; finally the samples table, the ledger and
the manifest are written. The job may be killed at any moment: the same command resumes it, and produces
identical bytes.

A first version takes all inputs. `append` and `retry` make the next version in the same way, from the
studies that `shardflow.packing.versions.scope` leaves to them. `PackRun` holds what every part of a run
needs, `_Job` decides what is to be made, and `Execution` turns a plan into a version.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from shardflow.errors import ConfigError
from shardflow.format.manifest import Manifest, load, versions
from shardflow.format.reasons import Outcome, outcome_of
from shardflow.format.tables import AttachedTables
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.engines.base import WorkerLimits, WorkerSetup
from shardflow.packing.engines.local import LocalEngine
from shardflow.packing.engines.worker import peak_memory_bytes
from shardflow.packing.handlers import make_setup
from shardflow.packing.inventory import CARRIED, count_failed, count_reasons
from shardflow.packing.linking import link_attachments
from shardflow.packing.people import identify, load_evidence, write_list
from shardflow.packing.plan import (
    PlanBasis,
    PlanRules,
    build_plan,
    check_files,
    check_reports,
    check_same_settings,
    keep_splits,
    load_key,
    note_missing_reports,
    nothing_to_pack,
)
from shardflow.packing.progress import SilentProgress
from shardflow.packing.publish import PackSummary, Settled, Status, forecast, fragment_basis, publish, settle
from shardflow.packing.publish_target import check_publish_target, reading_store
from shardflow.packing.registry import load_attachment_kinds
from shardflow.packing.scan import HeaderPass
from shardflow.packing.scheduling import (
    QuarantineLimitError,
    StudyPass,
    count_studies,
    missing_tasks,
    own_shards,
)
from shardflow.packing.sources.layouts.base import PlacedLayout, open_layout
from shardflow.packing.sources.placement import DiscoveredFile, discover
from shardflow.packing.studies.pictures import write_pictures
from shardflow.packing.studies.report_content import check_languages, reading_basis
from shardflow.packing.tables.joining import attach_labels, attach_table_files, check_table_files
from shardflow.packing.tables.keys import PrivateFolder
from shardflow.packing.versions.base import Base
from shardflow.packing.versions.files import is_unchanged, write_private_ledger
from shardflow.packing.versions.ingest import DocumentPass, DocumentTexts, Ingest, Ingested, clear_crash_log
from shardflow.packing.workspace import CrashLog, locked_workspace
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from shardflow.format import Dataset
    from shardflow.packing.config import InputsConfig, PackConfig
    from shardflow.packing.deid.identity import PublishedPerson
    from shardflow.packing.engines.base import Engine
    from shardflow.packing.inventory import FileTable, StudyTable
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.progress import Progress
    from shardflow.packing.sources.dicomweb.retrieval import Listing
    from shardflow.packing.sources.layouts.base import Layout
    from shardflow.packing.upload import Uploader
    from shardflow.packing.versions.scope import GrowMode
    from shardflow.packing.workspace import ArrayTask, Workspace

_FILE_HEADROOM: Final = 2
"""Bound on file sizes, relative to the decoded size of a study and the target size of a shard."""

PackMode: TypeAlias = Literal["pack", "append", "retry"]
"""``pack`` makes a first version, ``append`` one with new inputs, ``retry`` one with formerly quarantined
studies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRun:
    """Context of a run."""

    config: PackConfig
    mode: PackMode
    layout: Layout
    workspace: Workspace
    progress: Progress
    handlers: str
    """Name of the task handler of the packing processes; see `shardflow.packing.registry`."""
    is_dry_run: bool
    is_merge: bool
    uploader: Uploader | None
    """Uploads finished files; None without an address."""
    started: float = field(default_factory=time.monotonic)

    def open_engine(self) -> Engine:
        """Start the engine of the settings; a context manager.

        Raises:
            ConfigError: Ray is not installed, or a table or kind in the settings is not available.
            ShardflowError: Ray cannot be started or reached.
        """
        config = self.config
        execution = config.execution
        limits = WorkerLimits(
            memory_bytes=execution.memory_bytes,
            task_s=execution.task_timeout_s,
            file_bytes=_FILE_HEADROOM * (config.limits.max_study_bytes + 2 * config.shards.target_bytes),
        )
        worker = WorkerSetup(
            limits=limits,
            handlers=self.handlers,
            setup=make_setup(config, self.workspace),
            log_path=self.workspace.process_log,
        )
        if execution.engine == "local":
            return LocalEngine(execution.resolved_num_processes, worker)
        try:
            from shardflow.packing.engines.ray import RayEngine
        except ImportError:
            raise ConfigError('execution.engine = "ray" needs Ray; install shardflow[ray].') from None
        num_processes = execution.num_processes if execution.ray_address else execution.resolved_num_processes
        return RayEngine(num_processes, worker, address=execution.ray_address)

    def ingest(self, engine: Engine, key: SecretKey, crash_log: CrashLog) -> Ingest:
        """Return the ingestion of the inputs, which uses the packing processes."""
        inputs = self.config.inputs

        def read(files: Sequence[DiscoveredFile], studies: StudyTable) -> FileTable:
            headers = HeaderPass(
                engine=engine,
                files=files,
                layout=self.layout,
                key=key,
                crash_log=crash_log,
                task_timeout_s=self.config.execution.task_timeout_s,
                progress=self.progress,
                num_image_roots=len(inputs.dicom),
                array_task=self.workspace.array_task,
            )
            table = headers.run(studies)
            link_attachments(table, files, key, 3600 * self.config.attachments.window_hours)
            return table

        return Ingest(
            read_headers=read,
            documents=DocumentPass(
                engine=engine,
                key=key,
                crash_log=crash_log,
                task_timeout_s=self.config.execution.task_timeout_s,
                texts=DocumentTexts(self.workspace.documents),
            ),
            inputs=inputs,
            layout=self.layout,
            key=key,
            workspace=self.workspace,
            progress=self.progress,
        )

    def finish_upload(self) -> None:
        """Upload the rest of every version, the manifests last.

        Raises:
            StorageError: An upload failed.
        """
        if self.uploader is not None:
            self.progress.phase("upload", 0)
            self.uploader.finish()

    def seconds(self) -> float:
        """Return the wall time since the start of the run."""
        return time.monotonic() - self.started

    def summary(self, status: Status, manifest: Manifest, engine: Engine, ingested: Ingested) -> PackSummary:
        """Return the summary of a run with a published version."""
        return PackSummary.of_manifest(
            status,
            manifest,
            seconds=self.seconds(),
            peak_memory_bytes=peak_memory(engine),
            num_known_inputs=0 if ingested.scope is None else ingested.scope.num_known,
            identities=ingested.identity_counts,
            notes=ingested.notes,
        )

    def unpublished(self, status: Status, ingested: Ingested, engine: Engine, **facts: Any) -> PackSummary:
        """Return the summary of a run that published nothing."""
        reasons = count_reasons(ingested.files.reason, ingested.reports.reason)
        outcomes = dict.fromkeys(map(str, Outcome), 0)
        for reason, count in reasons.items():
            outcomes[outcome_of(reason)] += count
        return PackSummary(
            status=status,
            inputs={"total": len(ingested.files) + len(ingested.reports), **outcomes},
            reasons=reasons,
            identities=ingested.identity_counts,
            notes=ingested.notes,
            seconds=self.seconds(),
            peak_memory_bytes=peak_memory(engine),
            **facts,
        )


def peak_memory(engine: Engine) -> dict[str, int]:
    """Return the peak resident memory of the job and of any packing process."""
    return {"job": peak_memory_bytes(), "process": engine.peak_memory_bytes}


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Execution of a plan: packs its studies, assembles its shards, publishes the version."""

    run: PackRun
    engine: Engine
    plan: PackPlan
    ingested: Ingested
    key: SecretKey
    crash_log: CrashLog
    base: Base | None = None
    """The previous version; None for a first one."""

    def make(self) -> PackSummary:
        """Pack the plan and publish it; a dry run only returns what it would make.

        Raises:
            ConfigError: There is no sample to publish, or no task to merge.
            StorageError: Something cannot be written; the job can be run again.
            ShardflowError: The packing processes cannot work.
        """
        run, plan, ingested = self.run, self.plan, self.ingested
        if run.is_dry_run:
            run.progress.phase("done", 0)
            memory = peak_memory(self.engine)
            return forecast(plan, ingested, seconds=run.seconds(), peak_memory_bytes=memory)
        if run.config.inputs.reports is not None:
            note_missing_reports(plan, ingested.reports, run.progress)
        study_pass = self._study_pass()
        try:
            if run.is_merge:
                tasks = missing_tasks(plan, run.workspace.num_tasks, study_pass.missing())
                if tasks:
                    return run.unpublished("tasks_missing", ingested, self.engine, missing_tasks=tasks)
            if run.uploader is not None:
                run.uploader.claim(1 if self.base is None else self.base.next_version, plan.digest)
            study_pass.run(count_failed(count_reasons(ingested.files.reason, ingested.reports.reason)))
            if run.workspace.array_task is not None:
                return self._end_task(study_pass)
            settled = settle(run.workspace, plan, ingested.files, ingested.reports)
            study_pass.check_limit(count_failed(settled.reasons))
            if self.base is None:
                _check_samples(settled)
        except QuarantineLimitError:
            study_pass.decide_exceptions()
            if run.workspace.array_task is None:
                self._write_private_ledger()
            return run.unpublished("quarantine_limit", ingested, self.engine)
        if self.base is not None and not settled.shards and is_unchanged(self.base, ingested):
            return leave(run, self.base.manifest, ingested, self.engine)
        self._write_private_ledger(settled.notes)
        former = None if self.base is None else str(self.base.manifest.extra["plan_digest"])
        write_pictures(self.engine, run.workspace, plan.digest, former, ingested.files, settled.notes)
        if run.uploader is not None:
            # The page reads shards, which must not be removed meanwhile.
            run.uploader.wait()
        attached: list[str] = []
        manifest = publish(
            run.workspace,
            run.config.content(),
            plan,
            ingested,
            settled,
            run.progress,
            key_id=self.key.key_id,
            num_threads=run.config.execution.resolved_num_processes,
            base=self.base,
            uploader=run.uploader,
            attach=lambda dataset: attached.extend(self._attach(dataset)),
        )
        run.finish_upload()
        run.workspace.remove_work()
        run.progress.phase("done", 0)
        summary = run.summary("packed", manifest, self.engine, ingested)
        notes = self._carried(manifest, settled.num_samples, attached)
        return replace(summary, notes=(*summary.notes, *notes))

    def _attach(self, dataset: Dataset) -> list[str]:
        """Attach the tables that the layout finds beside the images, and those of the settings."""
        layout, workspace, config = self.run.layout, self.run.workspace, self.run.config
        found = []
        if isinstance(layout, PlacedLayout):
            found += attach_labels(dataset, layout.labels(), self.key, workspace.output, workspace.private)
        private = PrivateFolder(path=workspace.private, key_file=config.key_file)
        found += attach_table_files(dataset, config.tables, private, workspace.output)
        return [table.name for table in found]

    def _carried(self, manifest: Manifest, num_new: int, attached: Collection[str]) -> tuple[str, ...]:
        """Say which tables have no values of the new samples yet, and how they get them."""
        store = LocalStore(self.run.workspace.output)
        carried = sorted({*AttachedTables.newest(store, manifest.dataset_id)} - {*attached})
        if self.base is None or not num_new or not carried:
            return ()
        command = f"shardflow attach DATASET FILE --name {carried[0]} --on KEY --private-dir DIR"
        note = (
            f"{num_new:,} new samples have no values in {', '.join(carried)}; attach files that name them: "
            f"{command} (folds: shardflow folds). Each job attaches those of [[tables]] in its settings."
        )
        return (note,)

    def _end_task(self, study_pass: StudyPass) -> PackSummary:
        """End an array task: its shards are packed, and nothing is published."""
        if self.run.uploader is not None:
            self.run.uploader.wait()
        self.run.progress.phase("done", 0)
        studies = count_studies(self.run.workspace, self.plan, study_pass.shards)
        num_shards = len(study_pass.shards)
        return self.run.unpublished(
            "task_done", self.ingested, self.engine, studies=studies, num_shards=num_shards
        )

    def _write_private_ledger(self, notes: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        run = self.run
        write_private_ledger(
            run.workspace, self.plan.digest, self.ingested, run.config.inputs, self.base, notes or {}
        )

    def _study_pass(self) -> StudyPass:
        run, ingested = self.run, self.ingested
        tables = (ingested.files, ingested.reports)
        num_inputs = sum(int((table.reason != CARRIED).sum()) for table in tables)
        # Most of what was quarantined may be quarantined again, which is no sign of a broken mount.
        max_share = 1.0 if run.mode == "retry" else run.config.policy.max_quarantined_share
        return StudyPass(
            engine=self.engine,
            plan=self.plan,
            files=ingested.files,
            reports=ingested.reports,
            workspace=run.workspace,
            crash_log=self.crash_log,
            basis=fragment_basis(
                run.config.content(),
                reading_basis(run.config.reports, run.config.alignment),
                self.key.key_id,
            ),
            # The small term makes up for binary fractions: 0.05 of 100 inputs are 5.
            max_quarantined=math.floor(max_share * num_inputs + 1e-9),
            task_timeout_s=run.config.execution.task_timeout_s,
            progress=run.progress,
            shards=own_shards(self.plan, run.workspace.array_task),
            trusts_sizes=run.is_merge,
            uploader=run.uploader,
        )


def leave(run: PackRun, finished: Manifest, ingested: Ingested, engine: Engine) -> PackSummary:
    """End a job without anything to do."""
    run.finish_upload()
    if not run.is_dry_run:
        run.workspace.remove_work()
    run.progress.phase("done", 0)
    return run.summary("nothing_new", finished, engine, ingested)


def _check_samples(settled: Settled) -> None:
    """Refuse to publish a dataset without samples."""
    if settled.shards:
        return
    if settled.outcomes["quarantined"]:
        raise QuarantineLimitError
    raise ConfigError(f"the inputs hold no study that can be packed ({settled.reasons}); correct them.")


def pack(
    config: PackConfig,
    progress: Progress | None = None,
    *,
    mode: PackMode = "pack",
    is_dry_run: bool = False,
    array_task: ArrayTask | None = None,
    is_merge: bool = False,
    handlers: str = "studies",
) -> PackSummary:
    """Pack the inputs into a dataset or its next version, or resume an interrupted run.

    Args:
        config: All settings.
        progress: Receives the progress of the job.
        mode: What kind of version to make.
        is_dry_run: Read headers and plan, and return the expected result; nothing is written into the output.
        array_task: Pack the shards of one array task of a first version, and publish nothing.
        is_merge: Publish what array tasks have packed, or return which of them are missing.
        handlers: Name in `shardflow.packing.registry.TASK_HANDLERS`; a ``"module:function"`` is for tests
            that make processes fail on purpose.

    Returns:
        Summary; its ``status`` tells whether a version was published.

    Raises:
        ConfigError: A setting, a folder or the key is wrong, there is nothing to pack, or the output holds
            something that is incompatible with this mode or these settings.
        StorageError: Something cannot be written; the job can be run again.
        ShardflowError: The packing processes cannot work; the job can be run again.
    """
    if (array_task is not None or is_merge) and (mode != "pack" or is_dry_run):
        raise ConfigError("--task and --merge cannot be combined with another mode; leave one of them out.")
    if array_task is not None and is_merge:
        raise ConfigError("--task and --merge cannot be combined; leave one of them out.")
    check_reports(config.inputs.reports, is_required=config.policy.require_report)
    check_table_files(config.tables)
    load_attachment_kinds()  # what cannot be imported is an error here, not in every packing process
    progress = progress or SilentProgress()
    inputs, archive = config.inputs.roots, config.archive()
    if archive is not None:
        inputs += tuple(folder for folder in (config.inputs.archive.folder,) if folder is not None)
        config = replace(config, inputs=replace(config.inputs, dicom=(*config.inputs.dicom, archive.files)))
    layout = open_layout(config.inputs, list(config.splits))
    discovered = [] if archive is not None else _discover(config.inputs, layout, mode)
    with locked_workspace(
        config.output, config.private_dir, inputs, writes_output=not is_dry_run, array_task=array_task
    ) as workspace:
        if archive is not None:
            archive.prepare()
            if array_task is not None or is_merge:
                listing = archive.listed()
            else:
                listing = archive.fetch(progress, asks=mode != "retry")
            discovered = _discover(config.inputs, layout, mode, listing)
        check_publish_target(workspace, config.upload_to)
        uploader = None
        if config.upload_to and not is_dry_run:
            # It brings clients of object stores.
            from shardflow.packing.upload import Uploader

            uploader = Uploader(workspace, config.upload_to, keeps_local=config.keep_local)
        run = PackRun(
            config=config,
            mode=mode,
            layout=layout,
            workspace=workspace,
            progress=progress,
            handlers=handlers,
            is_dry_run=is_dry_run,
            is_merge=is_merge,
            uploader=uploader,
        )
        with uploader or nullcontext():
            return _Job(run).make(discovered)


def _discover(
    inputs: InputsConfig, layout: Layout, mode: PackMode, listing: Listing | None = None
) -> list[DiscoveredFile]:
    """List the files of all input folders, attachments last; a retry recalls its own.

    Args:
        inputs: The settings.
        layout: Lists the files of images.
        mode: Of the job.
        listing: What was fetched into the last folder of images; None if nothing was.
    """
    if mode == "retry":
        return []
    found, first = layout.discover(), len(inputs.dicom)
    if listing is not None:
        fetched = [file for file in found if file.root_index == first - 1]
        found = [file for file in found if file.root_index < first - 1]
        found += listing.select(fetched, first - 1)
    if inputs.attachments:
        # Discovered together, so that overlapping folders are refused.
        found += [file for file in discover(inputs.roots) if file.root_index >= first]
    if not found:
        raise ConfigError(
            "inputs.dicom names empty folders; correct them."
            if listing is None
            else "the archive lists no instance that inputs.archive asks for; correct the filters."
        )
    return found


class _Job:
    """Decides what a run has to make."""

    def __init__(self, run: PackRun) -> None:
        self._run = run
        self._config = run.config
        self._workspace = run.workspace

    def make(self, discovered: Sequence[DiscoveredFile]) -> PackSummary:
        mode, uploader = self._run.mode, self._run.uploader
        store = LocalStore(self._workspace.output)
        finished = load(store) if versions(store) else None
        if self._workspace.array_task is not None and finished is not None:
            raise ConfigError(
                "output holds a finished dataset, which leaves nothing to do for a task; leave --task out."
            )
        if uploader is not None:
            uploader.check_target()
        if mode == "pack":
            return self._first(discovered) if finished is None else self._compare(discovered, finished)
        if finished is None:
            raise ConfigError(
                f"output must hold a dataset for {mode}, got none; resume an interrupted first packing "
                f"without --{mode}."
            )
        return self._next(mode, discovered, finished)

    def _first(self, discovered: Sequence[DiscoveredFile]) -> PackSummary:
        """Make the first version."""
        key = load_key(self._config.key_file, may_create=self._config.identity.key_file is None)
        crash_log = CrashLog(self._workspace.crash_log)
        with self._run.open_engine() as engine:
            ingested = self._ingest_all(engine, discovered, key, crash_log)
            timeout_s = self._config.execution.task_timeout_s
            unread = check_languages(self._config.reports, ingested.reports, engine, timeout_s)
            if unread is not None:
                self._run.progress.note(unread)
            plan = build_plan(self._plan_rules(key), ingested.files, ingested.reports)
            for split in plan.empty_splits:
                self._run.progress.note(f"split {split} gets no study: too few patients, or too few parts")
            work = Execution(
                run=self._run, engine=engine, plan=plan, ingested=ingested, key=key, crash_log=crash_log
            )
            return work.make()

    def _next(self, mode: GrowMode, discovered: Sequence[DiscoveredFile], finished: Manifest) -> PackSummary:
        """Make the next version."""
        run = self._run
        key = SecretKey.load(self._config.key_file)
        check_same_settings(key, self._config.content_digest(), finished)
        base = Base.open(self._workspace, finished)
        crash_log = CrashLog(self._workspace.crash_log)
        if not run.is_dry_run:
            self._workspace.begin(mode)
            if mode == "retry":
                clear_crash_log(base, crash_log, self._workspace)
        with run.open_engine() as engine:
            packed = base.patient_splits()
            ingested = run.ingest(engine, key, crash_log).more(mode, base, discovered)
            ingested = self._identify(ingested, key, packed, base)
            scope, splits = ingested.scope, list(self._config.splits)
            if scope is None:
                return leave(run, finished, ingested, engine)
            num_moved = keep_splits(ingested.files.studies, packed, splits, scope.study_reason)
            if num_moved:
                run.progress.note(
                    f"{num_moved} packed patients are in another split of the layout than in the dataset: "
                    "they stay in their split, and their new studies are SPLIT_CHANGED"
                )
            if scope.is_empty:
                return leave(run, finished, ingested, engine)
            basis = PlanBasis(
                parent=finished.dataset_id, next_shards=base.next_shards, study_reason=scope.study_reason
            )
            plan = build_plan(self._plan_rules(key), ingested.files, ingested.reports, basis)
            work = Execution(
                run=run, engine=engine, plan=plan, ingested=ingested, key=key, crash_log=crash_log, base=base
            )
            return work.make()

    def _compare(self, discovered: Sequence[DiscoveredFile], finished: Manifest) -> PackSummary:
        """Confirm that the finished dataset is of these inputs and settings, or refuse."""
        unfinished = self._workspace.unfinished
        if unfinished is not None:
            raise ConfigError(f"output holds an interrupted {unfinished}; resume it with --{unfinished}.")
        try:
            key = SecretKey.load(self._config.key_file)
            check_same_settings(key, self._config.content_digest(), finished)
            crash_log = CrashLog(self._workspace.crash_log)
            with self._run.open_engine() as engine:
                ingested = self._ingest_all(engine, discovered, key, crash_log)
                plan = build_plan(self._plan_rules(key), ingested.files, ingested.reports)
            if finished.extra.get("plan_digest") != plan.digest:
                raise ConfigError(
                    "output must be new, or hold a dataset of the same inputs, got one of other inputs; add "
                    "--append to add new inputs, or name another output."
                )
            check_files(reading_store(self._workspace.output, self._config.upload_to, finished), finished)
            self._run.finish_upload()
            return self._run.summary("already_packed", finished, engine, ingested)
        finally:
            if not self._run.is_dry_run:
                self._workspace.remove_work()

    def _plan_rules(self, key: SecretKey) -> PlanRules:
        config = self._config
        return PlanRules(
            splits=config.splits,
            shards=config.shards,
            policy=config.policy,
            max_study_bytes=config.limits.max_study_bytes,
            config_digest=config.content_digest(),
            key_id=key.key_id,
        )

    def _ingest_all(
        self,
        engine: Engine,
        discovered: Sequence[DiscoveredFile],
        key: SecretKey,
        crash_log: CrashLog,
    ) -> Ingested:
        ingested = self._run.ingest(engine, key, crash_log).everything(discovered)
        if not len(ingested.files.studies):
            raise nothing_to_pack(ingested.files)
        return self._identify(ingested, key, {})

    def _identify(
        self, ingested: Ingested, key: SecretKey, packed: dict[str, str], base: Base | None = None
    ) -> Ingested:
        """Find patients that are one person, list them privately, and give each person one split.

        Args:
            ingested: The inputs.
            key: The secret key.
            packed: Split of every packed patient; those linked to them are added.
            base: The previous version.

        Raises:
            ConfigError: The settings stop at uncertain links, or official splits tear a person.
        """
        run, deid, files = self._run, self._config.deid, ingested.files
        former: dict[str, PublishedPerson] = {}
        if base is not None:
            digest = str(base.manifest.extra["plan_digest"])
            former = load_evidence(self._workspace.people_ledger(digest), files.studies.evidence)
        identities = identify(
            files,
            key,
            policy=deid.on_uncertain_identity,
            identity_map=deid.identity_map,
            known=None if base is None else (base.known.pixels, base.known.study),
        )
        write_list(identities, files, self._workspace)
        num_uncertain = identities.counts.get("uncertain", 0)
        if num_uncertain and deid.on_uncertain_identity == "stop":
            raise ConfigError(
                f"{num_uncertain} pairs of patient IDs may be one person each; decide them in a copy of "
                "identities.csv in private_dir, and give it as deid.identity_map."
            )
        already = dict(packed)
        identities.keep_packed(packed)
        identities.publish(former, already, packed)
        files.studies.people = identities.published
        identities.join_splits(files.studies, packed)
        for note in (*ingested.notes, *identities.notes(deid.on_uncertain_identity)):
            run.progress.note(note)
        return replace(ingested, identities=identities)
