"""Write the page for people into the dataset: after all that it tells of, before the manifest names it.

It is made from the finished shards, table and ledger, so it tells what stands there, whoever packed which
study, in this run or in an earlier version. The work is bounded (`shardflow.preview.Bounds`): seconds for a
dataset of any size. The page goes by what a hash of the sample keys chooses, and the keys are made with the
secret key.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from shardflow.deid.allowlist import KEYWORDS, MAX_AGE_YEARS
from shardflow.preview import Bounds, gather, render_page
from shardflow.shards import Dataset
from shardflow.shards.manifest import FileEntry
from shardflow.storage import LocalStore
from shardflow.storage.atomic import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.packing.config import PageConfig
    from shardflow.packing.progress import Progress
    from shardflow.shards.manifest import Manifest
    from shardflow.storage import ByteStore

__all__ = ["add_page", "page_path"]

_MAX_THREADS: Final = 16


def page_path(version: int) -> str:
    """Name the page of a version, from 1.

    Example:
        >>> page_path(1), page_path(2)
        ('report.html', 'report-000002.html')
    """
    return "report.html" if version == 1 else f"report-{version:06d}.html"


def add_page(
    output: Path,
    config: PageConfig,
    manifest: Manifest,
    progress: Progress,
    *,
    num_threads: int,
    store: ByteStore | None = None,
) -> Manifest:
    """Write the page of a dataset whose other files stand, unless the settings leave it out.

    Args:
        output: Folder of the dataset.
        config: Settings of the page.
        manifest: The manifest, not yet written.
        progress: Hears of the phase ``page``.
        num_threads: Threads that read.
        store: Where the dataset is read, if some of it does not lie in its folder.

    Returns:
        The manifest to be written, which names the page.

    Raises:
        FormatError: Bytes of the dataset are not what was written.
        StorageError: The page cannot be written.
    """
    if not config.enabled:
        return manifest
    progress.phase("page", 0)
    dataset = Dataset(store or LocalStore(output), manifest)
    facts = gather(
        dataset,
        num_thumbnails=config.num_thumbnails,
        bounds=Bounds(),
        num_threads=min(num_threads, _MAX_THREADS),
    )
    page = render_page(
        dataset, facts, kept_keywords=KEYWORDS, max_age_years=MAX_AGE_YEARS, is_inside=True
    ).encode("utf-8")
    path = page_path(manifest.manifest_version)
    write_atomic(output / path, [page], replace=True)
    entry = FileEntry(path=path, num_bytes=len(page), sha256=hashlib.sha256(page).hexdigest())
    return manifest.with_page(entry)
