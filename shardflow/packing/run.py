"""One run of the packing job: its settings and folders, and what it says when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shardflow.packing.attaching import link_attachments
from shardflow.packing.child import peak_memory_bytes
from shardflow.packing.engines import make_engine
from shardflow.packing.header_pass import HeaderPass
from shardflow.packing.inventory import count_reasons
from shardflow.packing.summary import PackSummary, Status
from shardflow.sources.reasons import Outcome, outcome_of

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.config import PackConfig
    from shardflow.packing.engine import Engine
    from shardflow.packing.intake import Intake, ReadHeaders
    from shardflow.packing.inventory import FileTable, StudyTable
    from shardflow.packing.progress import Progress
    from shardflow.packing.recorded import RecordedOutcomes
    from shardflow.packing.upload import Uploader
    from shardflow.packing.workplace import Workplace
    from shardflow.shards.manifest import Manifest
    from shardflow.sources.dicom import DiscoveredFile
    from shardflow.sources.layouts import Layout

__all__ = ["PackMode", "PackRun"]

PackMode: TypeAlias = Literal["pack", "append", "retry"]
"""``pack`` makes a first version; ``append`` one with new inputs; ``retry`` one with quarantined studies that
are good now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRun:
    """What every part of the job needs to know of it."""

    config: PackConfig
    mode: PackMode
    layout: Layout
    place: Workplace
    progress: Progress
    handlers: str
    """What makes the task handler of the packing processes; see `shardflow.packing.registry`."""
    is_dry_run: bool
    is_merge: bool
    uploader: Uploader | None
    """Sends what stands; None where nothing is to be sent."""
    started: float = field(default_factory=time.monotonic)

    def make_pool(self) -> Engine:
        """Make the packing processes; a context manager."""
        return make_engine(self.config, self.place, self.handlers)

    def header_reader(self, pool: Engine, key: SecretKey, recorded: RecordedOutcomes) -> ReadHeaders:
        """Return what reads headers with the packing processes."""
        timeout_s = self.config.execution.task_timeout_s

        def read(files: Sequence[DiscoveredFile], studies: StudyTable) -> FileTable:
            inputs = self.config.inputs
            headers = HeaderPass(
                pool,
                files,
                self.layout,
                key,
                recorded,
                timeout_s,
                self.progress,
                self.place.share,
                len(inputs.dicom),
            )
            table = headers.run(studies)
            link_attachments(table, files, key, 3600 * self.config.attachments.window_hours)
            return table

        return read

    def finish_upload(self) -> None:
        """Send what is not sent yet of every version, the manifests last.

        Raises:
            StorageError: Something could not be sent.
        """
        if self.uploader is not None:
            self.progress.phase("upload", 0)
            self.uploader.finish()

    def seconds(self) -> float:
        """Return the wall time since the run began."""
        return time.monotonic() - self.started

    def summary(self, status: Status, manifest: Manifest, pool: Engine, intake: Intake) -> PackSummary:
        """Sum up a run after which a version stands."""
        return PackSummary.of_manifest(
            status,
            manifest,
            seconds=self.seconds(),
            peak_memory_bytes=peak_memory(pool),
            num_known_inputs=0 if intake.scope is None else intake.scope.num_known,
        )

    def unpublished(self, status: Status, intake: Intake, pool: Engine, **facts: Any) -> PackSummary:
        """Sum up a run that has published nothing."""
        reasons = count_reasons(intake.files.reason, intake.reports.reason)
        outcomes = dict.fromkeys(map(str, Outcome), 0)
        for reason, count in reasons.items():
            outcomes[outcome_of(reason)] += count
        return PackSummary(
            status=status,
            inputs={"total": len(intake.files) + len(intake.reports), **outcomes},
            reasons=reasons,
            seconds=self.seconds(),
            peak_memory_bytes=peak_memory(pool),
            **facts,
        )


def peak_memory(pool: Engine) -> dict[str, int]:
    """Return the most resident memory of the job and of any one packing process."""
    return {"job": peak_memory_bytes(), "process": pool.peak_memory_bytes}
