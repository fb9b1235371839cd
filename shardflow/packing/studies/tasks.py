"""Task records of a packing job: one request and one answer for each kind of task.

They cross the process border by the codec of `shardflow.packing.engines.base`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardflow.packing.deid.identity import PublishedPerson
from shardflow.packing.header_rows import RowPlace
from shardflow.packing.inventory import ScannedFile
from shardflow.packing.linking import ReportPlace
from shardflow.packing.sources.placement import Placement
from shardflow.packing.sources.reports import ReportDocument


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """An input file to be read."""

    root_index: int
    """Index of its input folder."""
    relative_path: str
    num_bytes: int
    reason: str | None
    """Reason why it cannot be packed; such a file is not opened."""
    placement: Placement | None
    """Facts that the layout knows about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanTask:
    """Read the headers of a batch of files."""

    name: str
    """Name of the file of header rows to write."""
    files: tuple[InputFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanDone:
    """The batch's files, in the same order."""

    files: tuple[ScannedFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeTask:
    """Read one file, to find out whether the process survives."""

    file: InputFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeDone:
    """The process survived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentTask:
    """Read the text of a report in PDF or RTF."""

    document: ReportDocument


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentDone:
    """Text of the report, or the reason why it has none."""

    text: str = ""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguagesTask:
    """Detect the languages of reports."""

    reports: tuple[ReportPlace, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguagesDone:
    """Number of reports by their main language."""

    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFile:
    """A file of a study."""

    position: int
    """Position in the study's list of files."""
    row: RowPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyAttachment:
    """An attachment of a study, or the part of one that belongs to the study."""

    position: int
    row: RowPlace
    items: tuple[int, ...]
    """Records of the file that belong to the study."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTask:
    """Pack a study into a fragment."""

    sample_key: str
    task_digest: str
    """Digest of all that the fragment depends on."""
    files: tuple[StudyFile, ...]
    attachments: tuple[StudyAttachment, ...]
    report: ReportPlace | None
    siblings: tuple[RowPlace, ...]
    """Files of the patient's other studies, whose headers may name the same people."""
    person: PublishedPerson | None = None
    """How the patient appears, if another identifier stands for the person."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOutcome:
    """Outcome of a study and of each of its files."""

    outcome: str
    """``packed``, ``skipped`` or ``quarantined``."""
    reason: str | None = None
    """Code, unless packed."""
    instances: dict[int, str] = field(default_factory=dict)
    """Reason of each file whose outcome differs from the study's, by position in the study's list."""
    tallies: dict[str, int] = field(default_factory=dict)
    """Counts of what de-identification did."""
    languages: tuple[str, ...] = ()
    """Languages of the report, if it was read."""
    read_by: str = ""
    """Rules that read it, as of `shardflow.packing.studies.report_content.rules_of`."""
    is_unread: bool = False
    """Whether a part of the report is in a language without rules."""
    rules: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Names of the rules that hold files back, or blank text in them, by position; for the private ledger
    alone."""
    blanked: dict[int, tuple[tuple[int, int, int, int], ...]] = field(default_factory=dict)
    """Boxes of blanked text by position; likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyDone:
    """Outcome of the study."""

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
    """Digest of all that the shard depends on."""
    fragments: tuple[FragmentName, ...]
    """In the order of the tar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDone:
    """Whether the shard was written."""

    missing: tuple[str, ...]
    """Sample keys whose fragment is missing or damaged; if there are any, nothing was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckTask:
    """Check a shard of an earlier run."""

    name: str
    digest: str
    trusts_sizes: bool
    """Whether to compare only sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckDone:
    """Whether the shard exists and is whole."""

    is_whole: bool
