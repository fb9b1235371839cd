"""Publication of a packed plan: settles the outcome of every input, and writes the version.

`PackSummary` is the result of the job, or, after a dry run, the expected one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from shardflow.errors import ShardflowError
from shardflow.format.codecs import FAST, SLICE_CODEC
from shardflow.format.contents.records import RECORD_TIMES
from shardflow.format.keys import LANGUAGE_WITHOUT_RULES, REPORT_COUNTS
from shardflow.format.manifest import FileEntry, Manifest, ShardEntry
from shardflow.format.samples import FACT_COLUMNS
from shardflow.format.shard_files import package_versions
from shardflow.packing.config import PageConfig, content_digest
from shardflow.packing.deid.pixel_text import SEARCH_VERSION
from shardflow.packing.engines.base import decode
from shardflow.packing.inventory import CARRIED, PACKED, UNDECIDED, count_outcomes, count_reasons, reason_code
from shardflow.packing.studies.assembly import load_record
from shardflow.packing.studies.privacy import cleans_pixels, profile_codes
from shardflow.packing.studies.report_content import UNKNOWN_RULES
from shardflow.packing.studies.tasks import StudyOutcome
from shardflow.packing.versions.base import RowSpool, ShardRows, shard_number
from shardflow.packing.versions.files import NewVersion, ledger_columns, write_version

if TYPE_CHECKING:
    from shardflow.format import Dataset
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.linking import ReportTable
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.progress import Progress
    from shardflow.packing.upload import Uploader
    from shardflow.packing.versions.base import Base
    from shardflow.packing.versions.ingest import Ingested
    from shardflow.packing.workspace import Workspace

# The packages whose versions decide the bytes of a dataset.
_PACKAGES: Final = (
    "blosc2",
    "imagecodecs",
    "numpy",
    "opencv-python-headless",
    "pillow",
    "pydicom",
    "rapidfuzz",
    "shardflow",
)


_PIXEL_TEXT: Final = ("onnxruntime", "rapidocr")


def created_with(deid: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages that decide the bytes.

    Args:
        deid: Settings of de-identification, see `shardflow.packing.settings.DeidConfig.content`.
    """
    return package_versions(_PACKAGES + (_PIXEL_TEXT if "pixel_text" in deid else ()))


def fragment_basis(content: Mapping[str, Any], reading: list[Any], key_id: str) -> str:
    """Return the digest of all that every fragment depends on: settings, versions, key.

    Args:
        content: Settings that decide content, see `shardflow.packing.config.PackConfig.content`.
        reading: See `shardflow.packing.studies.report_content.reading_basis`.
        key_id: Of the secret key.
    """
    settings = [content[name] for name in ("deid", "limits", "on_bad_instance", "variants")]
    # Settings older than these sections keep their fragments.
    settings += [content["volumes"]] if "volumes" in content else []
    settings += [{"slides": content["slides"]}] if "slides" in content else []
    settings += [{"drop_reasons": content["drop_reasons"]}] if "drop_reasons" in content else []
    settings += [{"pixel_text_search": SEARCH_VERSION}] if "pixel_text" in content["deid"] else []
    facts = [created_with(content["deid"]), key_id, content["shards"]["codec"], *settings, reading]
    return hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """Outcomes of a finished plan."""

    shards: tuple[ShardRows, ...]
    outcomes: dict[str, int]
    """Inputs by outcome; they add up to the inputs that the job decides."""
    reasons: dict[str, int]
    """Inputs by reason, for those that are not packed."""
    studies: dict[str, int]
    """Studies by outcome."""
    tallies: dict[str, int]
    """Counts of what de-identification did."""
    languages: dict[str, int]
    """Reports that were read by language; ``english+german`` is a mixed one."""
    num_unread: int
    """Reports with a part in a language without rules."""
    read_by: dict[str, int]
    """Reports that were read by the rules that did."""
    notes: dict[int, dict[str, Any]]
    """What the private ledger alone says about files, by row: names of ``rules`` that hold a file back or
    blank text in it, and the boxes that were ``blanked``."""

    @property
    def num_samples(self) -> int:
        """Number of packed studies."""
        return sum(map(len, self.shards))


def settle(workspace: Workspace, plan: PackPlan, files: FileTable, reports: ReportTable) -> Settled:
    """Set the outcome of every input from the records of the shards.

    Raises:
        ShardflowError: A shard has no record, or an input no outcome; an internal error.
        StorageError: The rows of the samples cannot be written to the work folder.
    """
    shards: list[ShardRows] = []
    spool = RowSpool(workspace.rows)
    study_reason = plan.study_reason.copy()
    tallies: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    read_by: Counter[str] = Counter()
    num_unread = 0
    notes: dict[int, dict[str, Any]] = {}
    for planned in plan.shards:
        record = load_record(workspace.records, planned.name)
        if record is None:
            raise ShardflowError(f"{planned.name} has no record; this is an internal error.")
        for study in planned.studies:
            outcome = decode(StudyOutcome, record["outcomes"][files.studies.keys[study]])
            files.decide(study, outcome.reason, outcome.instances)
            study_reason[study] = reason_code(outcome.reason)
            tallies.update(outcome.tallies)
            languages.update(["+".join(sorted(outcome.languages))] if outcome.languages else [])
            num_unread += outcome.is_unread
            read_by.update([outcome.read_by] if outcome.read_by else [])
            if outcome.rules:
                rows = files.files_of(study)
                for at, names in outcome.rules.items():
                    notes[int(rows[at])] = {"rules": list(names)}
                for at, boxes in outcome.blanked.items():
                    notes[int(rows[at])]["blanked"] = [list(box) for box in boxes]
        if record["tar"] is not None:
            packed = _spool(spool, record["samples"])
            shards.append(ShardRows(_shard_entry(planned.split, record), spool, packed))
    reports.decide(study_reason)
    outcomes = count_outcomes(files.reason, reports.reason)
    if sum(outcomes.values()) != sum(int((table.reason != CARRIED).sum()) for table in (files, reports)):
        raise ShardflowError("the outcomes do not add up to the inputs; this is an internal error.")
    studies = count_outcomes(study_reason)
    if studies["packed"] != sum(map(len, shards)):
        raise ShardflowError("the packed studies are not the samples; this is an internal error.")
    return Settled(
        shards=tuple(shards),
        outcomes=outcomes,
        reasons=count_reasons(files.reason, reports.reason),
        studies=studies,
        tallies=dict(sorted(tallies.items())),
        languages=dict(sorted(languages.items())),
        num_unread=num_unread,
        read_by=dict(read_by),
        notes=notes,
    )


def publish(
    workspace: Workspace,
    content: Mapping[str, Any],
    plan: PackPlan,
    ingested: Ingested,
    settled: Settled,
    progress: Progress,
    *,
    key_id: str,
    num_threads: int,
    base: Base | None = None,
    uploader: Uploader | None = None,
    attach: Callable[[Dataset], object] | None = None,
) -> Manifest:
    """Write the first version of a dataset, or the one after ``base``.

    Args:
        workspace: The folders.
        content: Settings that decide content, see `shardflow.packing.config.PackConfig.content`.
        plan: The packed plan.
        ingested: Its inputs.
        settled: Their outcomes.
        progress: Receives the phases.
        key_id: Of the secret key.
        num_threads: Number of threads that read for the page.
        base: The previous version.
        uploader: Locates shards that are not in the output folder.
        attach: Writes tables for the version, which is not published yet.

    Raises:
        StorageError: A file cannot be written.
    """
    shards = [*settled.shards]
    extra: dict[str, Any] = {
        "config": content,
        "deidentification": _deidentification(content["deid"], settled, base),
        "plan_digest": plan.digest,
        "variants": content["variants"],
    }
    if base is not None:
        shards += base.shard_rows()
        extra = {**base.extra, **extra, "next_shards": _next_shards(base, settled)}
    if reports := _reports(settled, base):
        extra[REPORT_COUNTS] = reports
    if base is None or RECORD_TIMES in base.extra:  # what it says holds of every sample
        deid = content["deid"]
        extra[RECORD_TIMES] = "none" if deid["dates"] == "remove" else deid.get("times", "second")
    if content["shards"]["codec"] == FAST:
        extra[SLICE_CODEC] = FAST
    new = NewVersion(
        version=1 if base is None else base.next_version,
        parent=None if base is None else base.manifest.dataset_id,
        shards=shards,
        ledger=ledger_columns(ingested, base),
        created_with=created_with(content["deid"]),
        config_digest=content_digest(content),
        key_id=key_id,
        page=PageConfig(**content["page"]),
        num_threads=num_threads,
        extra=extra,
        studies=settled.studies if base is None else None,
    )
    return write_version(workspace, new, progress, uploader, attach=attach)


def _deidentification(deid: Mapping[str, Any], settled: Settled, base: Base | None) -> dict[str, Any]:
    """Describe the de-identification of all samples, including those packed before."""
    former = {} if base is None else base.extra.get("deidentification", {})
    counts = Counter(former.get("counts", {}))
    counts.update(settled.tallies)
    codes = profile_codes(
        deid["dates"], has_blackout=cleans_pixels(counts), is_defaced=counts["defaced_slices"] > 0
    )
    return {
        "counts": dict(sorted((name, count) for name, count in counts.items() if count)),
        "dates": "REMOVED" if deid["dates"] == "remove" else "MODIFIED",
        "profile_codes": codes,
        "report_text": deid["report_text"],
    }


def _reports(settled: Settled, base: Base | None) -> dict[str, dict[str, int]]:
    """Count the reports of all samples by language and rules, and those that are not read whole by reason."""
    former: Mapping[str, Any] = {} if base is None else base.extra.get(REPORT_COUNTS, {})
    languages = Counter(former.get("languages", {}))
    languages.update(settled.languages)
    unread = Counter(former.get("unread", {}))
    unread.update({LANGUAGE_WITHOUT_RULES: settled.num_unread} if settled.num_unread else {})
    rules = Counter(former.get("rules", {}))
    # Versions before this count came did not say by what rules they were read.
    rules[UNKNOWN_RULES] += sum(former.get("languages", {}).values()) - sum(rules.values())
    rules.update(settled.read_by)
    counts = {"languages": languages, "rules": +rules, "unread": unread}
    return {name: dict(sorted(one.items())) for name, one in counts.items()} if languages else {}


def _next_shards(base: Base, settled: Settled) -> dict[str, int]:
    numbers = base.next_shards
    for rows in settled.shards:
        shard = rows.shard
        numbers[shard.split] = max(numbers.get(shard.split, 0), shard_number(shard) + 1)
    return numbers


def _spool(spool: RowSpool, samples: Sequence[Mapping[str, Any]]) -> range:
    """Append the samples of a shard's record to the rows of the job."""
    columns: dict[str, Sequence[Any]] = {
        name: [sample["facts"][name] for sample in samples] for name in FACT_COLUMNS
    }
    for name in ("sample_key", "offset_bytes", "num_bytes"):
        columns[name] = [sample[name] for sample in samples]
    columns["row_in_shard"] = range(len(samples))
    return spool.add(columns, [sample["facts"]["modality"] for sample in samples])


def _shard_entry(split: str, record: dict[str, Any]) -> ShardEntry:
    name = record["name"]
    return ShardEntry(
        name=name,
        split=split,
        path=f"shards/{name}.tar",
        num_bytes=record["tar"]["num_bytes"],
        sha256=record["tar"]["sha256"],
        index=FileEntry(path=f"shards/{name}.idx", **record["index"]),
        num_samples=len(record["samples"]),
        num_fields=sum(sample["num_fields"] for sample in record["samples"]),
        num_volumes=record.get("num_volumes", 0),
    )


Status: TypeAlias = Literal[
    "packed", "already_packed", "nothing_new", "planned", "quarantine_limit", "task_done", "tasks_missing"
]

_EXIT_CODES: Final[Mapping[Status, int]] = {"quarantine_limit": 3, "tasks_missing": 4}
"""Exit codes other than 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary:
    """Counts and costs of a job, without anything from an input."""

    status: Status
    """``packed``; ``already_packed`` and ``nothing_new``: there was nothing to do; ``planned``: a dry run,
    with expected numbers; ``quarantine_limit``: nothing was published; ``task_done``: the shards of one
    array task are packed; ``tasks_missing``: some tasks have to run before the merge."""
    inputs: dict[str, int]
    """Files and reports: ``total``, ``packed``, ``skipped``, ``quarantined``; after a stop, those known so
    far."""
    reasons: dict[str, int]
    """Inputs by reason code, for those that are not packed."""
    studies: dict[str, int] = field(default_factory=dict)
    """Studies: ``packed``, ``skipped``, ``quarantined``."""
    dataset_id: str | None = None
    """Digest of the manifest; None where none was published."""
    manifest_version: int | None = None
    """Version of the dataset that ``dataset_id`` is of."""
    num_known_inputs: int = 0
    """Inputs that the previous version already has."""
    identities: dict[str, int] = field(default_factory=dict)
    """Patient IDs that were ``joined`` to persons, ``uncertain`` and ``decided`` pairs of them, persons
    ``in_two_splits`` since an earlier version, ``copied_studies``; zeros are left out."""
    reports: dict[str, dict[str, int]] = field(default_factory=dict)
    """Reports that were read: ``languages`` counts them by language (``english+german`` is a mixed one),
    ``rules`` by the rules that read and aligned them, ``unread`` those that were not read whole, by reason;
    empty without any."""
    splits: dict[str, int] = field(default_factory=dict)
    """Samples by split."""
    missing_tasks: tuple[int, ...] = ()
    """Numbers of the array tasks that have to run before the merge."""
    num_shards: int = 0
    num_slices: int = 0
    num_bytes: int = 0
    """Size of all files of the dataset."""
    notes: tuple[str, ...] = ()
    """What remains to be done, a sentence each: most reports name no study, tables lack the values of new
    samples."""
    seconds: float = 0.0
    """Wall time of this run."""
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    """Peak resident memory of the ``job`` and of any packing ``process``."""

    @classmethod
    def of_manifest(
        cls,
        status: Status,
        manifest: Manifest,
        *,
        seconds: float,
        peak_memory_bytes: dict[str, int],
        num_known_inputs: int = 0,
        identities: Mapping[str, int] | None = None,
        notes: tuple[str, ...] = (),
    ) -> Self:
        """Summarize a published dataset."""
        counts = asdict(manifest.counts)
        extra: Mapping[str, Any] = manifest.extra
        return cls(
            status=status,
            inputs={"total": sum(counts.values()), **counts},
            reasons=dict(extra["reasons"]),
            studies=dict(extra["studies"]),
            dataset_id=manifest.dataset_id,
            manifest_version=manifest.manifest_version,
            num_known_inputs=num_known_inputs,
            identities=dict(identities or {}),
            reports=dict(extra.get(REPORT_COUNTS, {})),
            splits={name: numbers["num_samples"] for name, numbers in manifest.splits.items()},
            num_shards=len(manifest.shards),
            num_slices=extra["num_slices"],
            num_bytes=sum(entry.num_bytes for entry in manifest.files()) + len(manifest.encode()),
            notes=notes,
            seconds=seconds,
            peak_memory_bytes=peak_memory_bytes,
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the job: 0 done, 3 quarantine over its limit, 4 tasks are missing."""
        return _EXIT_CODES.get(self.status, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON; the command's last line."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def forecast(
    plan: PackPlan, ingested: Ingested, *, seconds: float, peak_memory_bytes: dict[str, int]
) -> PackSummary:
    """Summarize a plan; inputs that headers and reports leave undecided count as packed.

    Pixels are not read, so a file that cannot be decoded shows only when it is packed.

    Args:
        plan: The plan.
        ingested: The inputs.
        seconds: Wall time so far.
        peak_memory_bytes: As in the summary.
    """
    files, reports = ingested.files, ingested.reports
    columns = [table.reason.copy() for table in (files, reports)]
    study_reason = plan.study_reason.copy()
    for column in (*columns, study_reason):
        column[column == UNDECIDED] = PACKED
    slices = files.sum_by_study(files.num_slices)
    splits: dict[str, int] = {}
    for shard in plan.shards:
        splits[shard.split] = splits.get(shard.split, 0) + len(shard.studies)
    return PackSummary(
        status="planned",
        inputs={
            "total": sum(int((column != CARRIED).sum()) for column in columns),
            **count_outcomes(*columns),
        },
        reasons=count_reasons(*columns),
        studies=count_outcomes(study_reason),
        splits=dict(sorted(splits.items())),
        num_shards=len(plan.shards),
        num_slices=sum(int(slices[study]) for shard in plan.shards for study in shard.studies),
        num_bytes=sum(shard.estimated_bytes for shard in plan.shards),
        num_known_inputs=0 if ingested.scope is None else ingested.scope.num_known,
        identities=ingested.identity_counts,
        notes=ingested.notes,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
    )
