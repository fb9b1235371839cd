"""HTML page about a dataset: one self-contained file without scripts, clocks or host names.

Its style, ``assets/page.css``, covers light and dark themes, screen and print, and names no file and no
address.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from shardflow.format import Dataset
from shardflow.format.keys import REPORT_COUNTS
from shardflow.format.manifest import manifest_path
from shardflow.viewing.dataset_facts import DatasetFacts
from shardflow.viewing.markup import document, section, table
from shardflow.viewing.page_sections import (
    deidentification,
    findings,
    gallery,
    hounsfield,
    human_size,
    inputs,
    reports,
    shapes,
    splits,
    summarize,
)


def render_page(
    dataset: Dataset,
    facts: DatasetFacts,
    *,
    kept_keywords: Sequence[str],
    max_age_years: int,
    is_inside: bool = False,
) -> str:
    """Write the page about a dataset.

    Args:
        dataset: The dataset.
        facts: From `gather`.
        kept_keywords: DICOM keywords of the technical attributes that packing keeps.
        max_age_years: Age from which on packing names no year.
        is_inside: Whether the page becomes a file of the dataset. The manifest names it then, so the page
            cannot hold the dataset_id, which is the manifest's digest.

    Returns:
        HTML. Equal datasets and facts give equal text.
    """
    has_gallery = facts.thumbnails or facts.num_burned_in
    remedy = "<code>page.num_thumbnails = 0</code>" if is_inside else "<code>--thumbnails 0</code>"
    deid = summarize(
        dataset.manifest,
        num_reports=facts.num_reports,
        kept_keywords=kept_keywords,
        max_age_years=max_age_years,
    )
    parts = [
        _head(dataset, facts, is_inside=is_inside),
        section("Inputs", inputs(dataset, facts)),
        section("De-identification", deidentification(deid)),
        section("Splits", splits(dataset, facts)),
        section("Reports", reports(dataset)) if REPORT_COUNTS in dataset.manifest.extra else "",
        section("What the studies are", shapes(dataset, facts)),
        section("Findings about series", findings(dataset, facts)),
        section("CT values", hounsfield(facts)),
        section("Thumbnails", gallery(facts, remedy=remedy)) if has_gallery else "",
        section("Identity", _identity(dataset, is_inside=is_inside)),
    ]  # fmt: skip
    title = (
        f"Dataset, version {dataset.manifest_version}" if is_inside else f"Dataset {dataset.dataset_id[:12]}"
    )
    style = resources.files(__package__).joinpath("assets", "page.css").read_text(encoding="utf-8")
    policy = "style-src 'unsafe-inline'; img-src data:"
    return document(title, "".join(parts), style=style, policy=policy)


def _head(dataset: Dataset, facts: DatasetFacts, *, is_inside: bool) -> str:
    manifest = dataset.manifest
    num_bytes = sum(file.num_bytes for file in manifest.files() if file != manifest.page)
    numbers = [
        (f"{dataset.samples.num_samples:,}", "samples"),
        (f"{int(dataset.samples.column('num_slices').sum(dtype='int64')):,}", "slices"),
        (f"{len(manifest.shards):,}", "shards"),
        (human_size(num_bytes), "on disk"),
        (f"{manifest.counts.quarantined:,}", "inputs quarantined"),
    ]
    cards = "".join(f"<div class=card><b>{value}</b><span>{name}</span></div>" for value, name in numbers)
    mark = ""
    if facts.num_generated:
        if facts.num_generated == facts.num_described:
            what = "All studies say that they are generated."
        elif facts.num_generated == 1:
            what = "1 study says that it is generated."
        else:
            what = f"{facts.num_generated:,} studies say that they are generated."
        mark = f"<p class=generated>{what}</p>"
    identity = "" if is_inside else f"<p class=id>{dataset.dataset_id}</p>"
    return (
        f"<header><h1>Dataset</h1>{identity}"
        f"<p>version {dataset.manifest_version}, format {dataset.manifest.format_version}</p>{mark}</header>"
        f"<div class=cards>{cards}</div>"
    )


def _identity(dataset: Dataset, *, is_inside: bool) -> str:
    manifest = dataset.manifest
    name = (
        f"the digest of <code>{manifest_path(manifest.manifest_version)}</code>, which names this page"
        if is_inside
        else f"<code>{dataset.dataset_id}</code>"
    )
    rows = [
        ("dataset_id", name),
        ("settings (config_digest)", f"<code>{manifest.config_digest or '-'}</code>"),
        ("pseudonym key (key_id)", f"<code>{escape(manifest.key_id or '-')}</code>"),
        ("ledger head", f"<code>{manifest.ledger.head if manifest.ledger else '-'}</code>"),
        *((escape(name), escape(value)) for name, value in sorted(manifest.created_with.items())),
    ]
    return table(("", ""), rows)
