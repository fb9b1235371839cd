"""Which files there are to check, and what each must be.

Good manifests say so. Where one is damaged, the files that only it named are found by their names, and
judged by what they hold themselves: a flipped bit in a manifest must not hide another one in a shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shardflow.errors import NoListingError
from shardflow.shards.manifest import FileEntry, LedgerEntry, Manifest, ShardEntry, manifest_path
from shardflow.shards.verification.report import WHOLE_FILE, Damage
from shardflow.storage import ByteStore

__all__ = ["ExpectedFile", "ExpectedShard", "FilePlan", "plan_files"]

# Names outside this are not repeated: what lies in the folder by mistake may be named after a patient.
_PLAIN_PATH: Final = re.compile(r"[a-z0-9._/-]+", re.ASCII)
_MAX_NAMED_EXTRAS: Final = 20


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A file, and its size and digest where a good manifest names them."""

    path: str
    num_bytes: int | None = None
    sha256: str | None = None

    @classmethod
    def of(cls, entry: FileEntry) -> ExpectedFile:
        """Take over what a manifest says."""
        return cls(entry.path, entry.num_bytes, entry.sha256)


@dataclass(frozen=True, slots=True)
class ExpectedShard:
    """A tar with its index, and the manifest's entry where there is one."""

    tar: ExpectedFile
    index: ExpectedFile
    entry: ShardEntry | None = None


@dataclass(slots=True)
class FilePlan:
    """The files of a dataset, as they are reported, and the damage that the manifests alone show."""

    manifests: list[str]
    shards: list[ExpectedShard] = field(default_factory=list)
    samples: list[ExpectedFile] = field(default_factory=list)
    ledgers: list[tuple[ExpectedFile, LedgerEntry | None]] = field(default_factory=list)
    lines: list[ExpectedFile] = field(default_factory=list)
    pages: list[ExpectedFile] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def files(self) -> list[str]:
        """The path of every file."""
        shards = [part.path for shard in self.shards for part in (shard.tar, shard.index)]
        tables = [table.path for table in self.samples]
        ledgers = [ledger.path for ledger, _ in self.ledgers]
        others = [file.path for file in (*self.lines, *self.pages)]
        return [*self.manifests, *shards, *tables, *ledgers, *others]


def plan_files(
    store: ByteStore,
    manifests: Mapping[int, Manifest],
    all_versions: list[int],
    without_beside: Callable[[list[str]], list[str]],
) -> FilePlan:
    """List what to check.

    Args:
        store: The dataset.
        manifests: The good manifests by version.
        all_versions: The versions that have a manifest, good or damaged.
        without_beside: Leaves out the files of views and tokens, which are checked by themselves.
    """
    plan = FilePlan([manifest_path(version) for version in all_versions])
    known: dict[str, FileEntry] = {}
    for version, manifest in sorted(manifests.items()):
        before = dict(known)
        for entry in manifest.files():
            if known.setdefault(entry.path, entry) != entry and not plan.damages:
                problem = f"{entry.path} with another digest than in an earlier version"
                plan.damages.append(Damage(manifest_path(version), WHOLE_FILE, problem))
        for shard in manifest.shards:
            if shard.path not in before:
                tar, index = ExpectedFile.of(shard.file), ExpectedFile.of(shard.index)
                plan.shards.append(ExpectedShard(tar, index, shard))
        if manifest.samples.path not in before:
            plan.samples.append(ExpectedFile.of(manifest.samples))
        if manifest.ledger and manifest.ledger.path not in before:
            plan.ledgers.append((ExpectedFile.of(manifest.ledger.file), manifest.ledger))
        if manifest.line_outcomes and manifest.line_outcomes.path not in before:
            plan.lines.append(ExpectedFile.of(manifest.line_outcomes))
        if manifest.page and manifest.page.path not in before:
            plan.pages.append(ExpectedFile.of(manifest.page))
    try:
        named = {*plan.manifests, *known}
        others = without_beside([path for path in store.list("") if path not in named])
    except NoListingError:
        others = []
        plan.notes.append("files that no manifest names were not looked for: the store cannot list")
    if len(manifests) < len(all_versions):
        others = _plan_by_name(plan, others)
    plan.notes += _describe_extras(others)
    return plan


def _plan_by_name(plan: FilePlan, paths: list[str]) -> list[str]:
    """Add the files whose names say what they are; return the others."""
    tars = {path.removesuffix(".tar") for path in paths if path.endswith(".tar")}
    indexes = {path.removesuffix(".idx") for path in paths if path.endswith(".idx")}
    for name in sorted(tars | indexes):
        plan.shards.append(ExpectedShard(ExpectedFile(f"{name}.tar"), ExpectedFile(f"{name}.idx")))
    plan.samples += [ExpectedFile(path) for path in paths if path.endswith(".tbl")]
    plan.ledgers += [(ExpectedFile(path), None) for path in paths if path.endswith(".jsonl")]
    return [path for path in paths if not path.endswith((".tar", ".idx", ".tbl", ".jsonl"))]


def _describe_extras(paths: list[str]) -> list[str]:
    if not paths:
        return []
    plain = [path for path in paths if _PLAIN_PATH.fullmatch(path)]
    notes = [f"{path} is named by no manifest" for path in plain[:_MAX_NAMED_EXTRAS]]
    if len(paths) > len(notes):
        notes.append(f"{len(paths) - len(notes)} more files are named by no manifest")
    return notes
