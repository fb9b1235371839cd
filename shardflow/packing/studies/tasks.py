"""Records of the tasks of a packing job: what a packing process is asked, and what it answers.

One pair for each kind of task. They cross the process border by `shardflow.packing.engines.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardflow.packing.header_rows import RowPlace
from shardflow.packing.inventory import ScannedFile
from shardflow.packing.linking import ReportPlace
from shardflow.packing.sources.placement import Placement
from shardflow.packing.studies.fragment import StudyOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """An input file to be read."""

    root_index: int
    """Of its input folder."""
    relative_path: str
    num_bytes: int
    reason: str | None
    """Why it cannot be packed; a file with a reason is not opened."""
    placement: Placement | None
    """What the layout says of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanTask:
    """Read the headers of a batch of files."""

    name: str
    """Of the file of header rows to write."""
    files: tuple[InputFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanDone:
    """The batch's files, in the same order."""

    files: tuple[ScannedFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeTask:
    """Read one file, to find out whether a process survives it."""

    file: InputFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeDone:
    """It does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFile:
    """A file of a study."""

    position: int
    """In the study's list of files."""
    row: RowPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyAttachment:
    """An attachment of a study, or the part of one that is the study's."""

    position: int
    row: RowPlace
    items: tuple[int, ...]
    """Records of the file that are the study's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTask:
    """Pack a study into a fragment."""

    sample_key: str
    task_digest: str
    """Of all that the fragment depends on."""
    files: tuple[StudyFile, ...]
    attachments: tuple[StudyAttachment, ...]
    report: ReportPlace | None
    siblings: tuple[RowPlace, ...]
    """Files of the patient's other studies, whose headers name people too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyDone:
    """What became of the study."""

    outcome: StudyOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentName:
    """The fragment of a study, by what it depends on."""

    sample_key: str
    task_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """Assemble a shard from its fragments."""

    name: str
    digest: str
    """Of all that the shard depends on."""
    fragments: tuple[FragmentName, ...]
    """In the order of the tar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDone:
    """Whether the shard was written."""

    missing: tuple[str, ...]
    """Sample keys whose fragment is absent or damaged; if there are any, nothing was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckTask:
    """Check a shard of a former run."""

    name: str
    digest: str
    trusts_sizes: bool
    """Compare sizes alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckDone:
    """Whether the shard exists and is whole."""

    is_whole: bool
