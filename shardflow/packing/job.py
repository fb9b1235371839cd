"""The packing job: headers, plan, studies, shards, manifest.

The data's way: `discover` lists the input files; the header pass turns each into a few numbers and a row in
the private folder; reports are linked; the plan fixes splits and shards; packing processes turn studies into
fragments and fragments into shards; at last the samples table, the ledger and the manifest are written. Any
moment may be the last: the same command goes on from what stands, and comes to the same bytes.

A first version takes everything. `append` and `retry` make the next version: the same way, for the studies
that `shardflow.packing.scope` leaves to them. This module decides what is to be made; how a plan becomes a
version stands in `shardflow.packing.carry_out`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from shardflow.deid.pseudonyms import SecretKey
from shardflow.errors import ConfigError
from shardflow.packing.base import Base
from shardflow.packing.carry_out import CarryOut, leave
from shardflow.packing.intake import Intake, lift_deaths
from shardflow.packing.kept_splits import keep_splits
from shardflow.packing.plan import PlanBasis, build_plan
from shardflow.packing.preconditions import (
    check_files,
    check_reports,
    check_same_settings,
    load_key,
    nothing_to_pack,
)
from shardflow.packing.progress import SilentProgress
from shardflow.packing.recorded import RecordedOutcomes
from shardflow.packing.run import PackMode, PackRun
from shardflow.packing.sent_to import check_sent_to, reading_store
from shardflow.packing.upload import Uploader
from shardflow.packing.workplace import locked_workplace
from shardflow.shards.manifest import Manifest, load, versions
from shardflow.sources.dicom import DiscoveredFile, discover
from shardflow.sources.layouts import open_layout
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardflow.packing.config import PackConfig
    from shardflow.packing.engine import Engine
    from shardflow.packing.progress import Progress
    from shardflow.packing.scope import GrowMode
    from shardflow.packing.shares import Share
    from shardflow.packing.summary import PackSummary
    from shardflow.sources.layouts import Layout

__all__ = ["PackMode", "pack"]


def pack(
    config: PackConfig,
    progress: Progress | None = None,
    *,
    mode: PackMode = "pack",
    is_dry_run: bool = False,
    share: Share | None = None,
    is_merge: bool = False,
    handlers: str = "studies",
) -> PackSummary:
    """Pack the inputs into a dataset or into its next version, or go on where a former run stopped.

    Args:
        config: All settings.
        progress: Hears where the job is.
        mode: What kind of version to make.
        is_dry_run: Read headers and plan, and say what would be; nothing is written into the output.
        share: Pack the shards of one task, and publish nothing; of a first version alone.
        is_merge: Publish what tasks have packed, or say which of them are missing.
        handlers: Name in `shardflow.packing.registry.TASK_HANDLERS`; a ``"module:function"`` serves tests,
            which make processes fail on purpose.

    Returns:
        What was done; its ``status`` says whether a version was published.

    Raises:
        ConfigError: A setting, a folder or the key is wrong, there is nothing to pack, or the output holds
            something that this mode or these settings do not go with.
        StorageError: Something cannot be written; the job can be run again.
        ShardflowError: The packing processes cannot work; the job can be run again.
    """
    if (share is not None or is_merge) and (mode != "pack" or is_dry_run or (share is not None and is_merge)):
        raise ConfigError("--task and --merge must stand alone, got another mode; leave one of them out.")
    check_reports(config)
    layout = open_layout(config.inputs, list(config.splits))
    discovered = [] if mode == "retry" else _discover(config, layout)
    if not discovered and mode != "retry":
        raise ConfigError("inputs.dicom must hold DICOM files, got empty folders; correct the folders.")
    inputs = config.inputs.roots
    with locked_workplace(
        config.output, config.private_dir, inputs, writes_output=not is_dry_run, share=share
    ) as place:
        check_sent_to(place, config.upload_to)
        uploader = None
        if config.upload_to and not is_dry_run:
            uploader = Uploader(place, config.upload_to, keeps_local=config.keep_local)
        run = PackRun(
            config=config,
            mode=mode,
            layout=layout,
            place=place,
            progress=progress or SilentProgress(),
            handlers=handlers,
            is_dry_run=is_dry_run,
            is_merge=is_merge,
            uploader=uploader,
        )
        with uploader or nullcontext():
            return _Job(run).make(discovered)


def _discover(config: PackConfig, layout: Layout) -> list[DiscoveredFile]:
    """List the files of all input folders; those of attachments come last."""
    found = layout.discover()
    if not config.inputs.attachments:
        return found
    # Asked for together, folders inside one another are refused.
    first = len(config.inputs.dicom)
    return found + [file for file in discover(config.inputs.roots) if file.root_index >= first]


class _Job:
    def __init__(self, run: PackRun) -> None:
        self._run = run
        self._config = run.config
        self._place = run.place

    def make(self, discovered: Sequence[DiscoveredFile]) -> PackSummary:
        mode, uploader = self._run.mode, self._run.uploader
        store = LocalStore(self._place.output)
        finished = load(store) if versions(store) else None
        if self._place.share is not None and finished is not None:
            raise ConfigError(
                "output must hold no finished dataset for --task, got one; the job is done, leave --task out."
            )
        if uploader is not None:
            uploader.check_target()
        if mode == "pack":
            return self._first(discovered) if finished is None else self._compare(discovered, finished)
        if finished is None:
            raise ConfigError(
                f"output must hold a dataset for {mode}, got none; an interrupted first packing goes on "
                f"without --{mode}."
            )
        return self._next(mode, discovered, finished)

    def _first(self, discovered: Sequence[DiscoveredFile]) -> PackSummary:
        """Make the first version."""
        key = load_key(self._config)
        recorded = RecordedOutcomes(self._place.recorded_outcomes)
        with self._run.open_engine() as pool:
            intake = self._take_in_all(pool, discovered, key, recorded)
            plan = build_plan(self._config, key.key_id, intake.files, intake.reports)
            for split in plan.empty_splits:
                self._run.progress.note(
                    f"split {split} gets no study: there are few patients, or its parts are few"
                )
            work = CarryOut(run=self._run, pool=pool, plan=plan, intake=intake, key=key, recorded=recorded)
            return work.forecast() if self._run.is_dry_run else work.publish()

    def _next(self, mode: GrowMode, discovered: Sequence[DiscoveredFile], finished: Manifest) -> PackSummary:
        """Make the next version."""
        run = self._run
        key = SecretKey.load(self._config.key_file)
        check_same_settings(self._config, key, finished)
        base = Base.open(self._place, finished)
        recorded = RecordedOutcomes(self._place.recorded_outcomes)
        if not run.is_dry_run:
            self._place.begin(mode)
            if mode == "retry":
                lift_deaths(base, recorded, self._place)
        with run.open_engine() as pool:
            intake = run.ingest(pool, key, recorded).more(mode, base, discovered)
            scope, splits = intake.scope, list(self._config.splits)
            if scope is None:
                return leave(run, finished, intake, pool)
            num_moved = keep_splits(intake.files.studies, base.patient_splits(), splits, scope.study_reason)
            if num_moved:
                run.progress.note(
                    f"{num_moved} packed patients are in another split of the layout than in the dataset: "
                    "they stay where they are, and their new studies are SPLIT_CHANGED"
                )
            if scope.is_empty:
                return leave(run, finished, intake, pool)
            basis = PlanBasis(
                parent=finished.dataset_id, next_shards=base.next_shards, study_reason=scope.study_reason
            )
            plan = build_plan(self._config, key.key_id, intake.files, intake.reports, basis)
            work = CarryOut(
                run=run, pool=pool, plan=plan, intake=intake, key=key, recorded=recorded, base=base
            )
            return work.forecast() if run.is_dry_run else work.publish()

    def _compare(self, discovered: Sequence[DiscoveredFile], finished: Manifest) -> PackSummary:
        """Say that there is nothing to do, or that this would be another dataset."""
        unfinished = self._place.unfinished
        if unfinished is not None:
            raise ConfigError(
                f"output must hold no unfinished {unfinished}, got one; run it again with --{unfinished}, it "
                "goes on where it was."
            )
        try:
            key = SecretKey.load(self._config.key_file)
            check_same_settings(self._config, key, finished)
            recorded = RecordedOutcomes(self._place.recorded_outcomes)
            with self._run.open_engine() as pool:
                intake = self._take_in_all(pool, discovered, key, recorded)
                plan = build_plan(self._config, key.key_id, intake.files, intake.reports)
            if finished.extra.get("plan_digest") != plan.digest:
                raise ConfigError(
                    "output must be new, or hold a dataset of the same inputs, got one of other inputs; "
                    "add --append to take in what is new, or name another output."
                )
            check_files(reading_store(self._place.output, self._config.upload_to, finished), finished)
            self._run.finish_upload()
            return self._run.summary("already_packed", finished, pool, intake)
        finally:
            if not self._run.is_dry_run:
                self._place.remove_work()

    def _take_in_all(
        self,
        pool: Engine,
        discovered: Sequence[DiscoveredFile],
        key: SecretKey,
        recorded: RecordedOutcomes,
    ) -> Intake:
        intake = self._run.ingest(pool, key, recorded).everything(discovered)
        if not len(intake.files.studies):
            raise nothing_to_pack(intake.files)
        return intake
